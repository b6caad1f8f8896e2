"""What was routed counts as cached until its time, against a plain dict of due times."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state import holder_bits
from forebay.core.state import predicted_cache as approximate
from forebay.core.state.predicted_cache import RoutedIndex
from forebay.events.base import array_u64, pack_u64
from forebay.events.snapshots import RoutedBlocks
from tests.depth import examples

KEYS = (("a", 0), ("a", 1), ("b", 0))
NEVER_US = 1 << 62
NO_BOUND = 1 << 40


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Mostly the first blocks of one of two sequences; sometimes anything, with repetitions."""
    if draw(st.integers(0, 3)):
        start = draw(st.sampled_from([1, 101]))
        return list(range(start, start + draw(st.integers(0, 50))))
    return draw(st.lists(st.integers(1, 30), max_size=10))


adds = st.tuples(
    st.sampled_from(["add", "computed"]),
    st.sampled_from(KEYS),
    prompts(),
    st.integers(1, 30),
    st.sampled_from([5, 40, NO_BOUND]),
)
steps = st.one_of(
    adds,
    adds,
    adds,
    st.tuples(st.just("withdraw"), st.sampled_from(KEYS), prompts()),
    st.tuples(st.just("rejoin"), st.sampled_from(KEYS)),
    st.tuples(st.just("wait"), st.integers(0, 6)),
)


class Plain:
    """A due time for each (holder, block), and which comes first of those due at one time."""

    def __init__(self) -> None:
        self.now_us = 0
        self.number = 0
        self.due: dict[tuple[tuple[str, int], int], tuple[int, int, int]] = {}
        self.computed: set[tuple[tuple[str, int], int]] = set()

    def do(self, step: tuple[Any, ...]) -> None:
        if step[0] == "rejoin":
            self.due = {pair: due for pair, due in self.due.items() if pair[0] != step[1]}
        elif step[0] == "wait":
            self.now_us += step[1]
            self.due = {pair: due for pair, due in self.due.items() if due[0] > self.now_us}
        elif step[0] == "withdraw":
            for block in step[2]:
                if (step[1], block) not in self.computed:
                    self.due.pop((step[1], block), None)
        else:
            kind, key, blocks, ttl_us, blocks_max = step
            self.number += 1
            is_computed = kind == "computed"
            for at, block in enumerate(dict.fromkeys(blocks)):
                due_us = self.now_us + ttl_us
                was_computed = (key, block) in self.computed
                is_longer = self.due.get((key, block), (0, 0, 0))[0] < due_us
                if is_computed > was_computed or (is_computed == was_computed and is_longer):
                    self.due[key, block] = (due_us, self.number, -at)
                    if is_computed:
                        self.computed.add((key, block))
            if len(self.due) > blocks_max:
                soonest = sorted(self.due, key=lambda pair: self.due[pair])
                for pair in soonest[: len(self.due) - blocks_max]:
                    del self.due[pair]
        self.computed &= self.due.keys()

    def depths(self, query: list[int]) -> dict[tuple[str, int], int]:
        found = {
            key: next((at for at, block in enumerate(query) if (key, block) not in self.due), len(query))
            for key in KEYS
        }
        return {key: depth for key, depth in found.items() if depth}


def do(index: RoutedIndex, step: tuple[Any, ...], now_us: int) -> None:
    if step[0] == "rejoin":
        index.drop_holder(*step[1])
        index.add_holder(*step[1])
    elif step[0] == "wait":
        index.expire(now_us)
    elif step[0] == "withdraw":
        index.withdraw(step[1][0], step[1][1], step[2])
    else:
        kind, key, blocks, ttl_us, blocks_max = step
        index.add(key[0], key[1], blocks, now_us + ttl_us, blocks_max, computed=kind == "computed")


def admitted() -> RoutedIndex:
    index = RoutedIndex()
    for key in KEYS:
        index.add_holder(*key)
    return index


def restored(index: RoutedIndex) -> RoutedIndex:
    other = admitted()
    for chunk in index.snapshot(predicted=True):
        assert chunk.predicted
        other.restore(chunk)
    return other


def check(index: RoutedIndex, plain: Plain, queries: list[list[int]]) -> None:
    assert len(index) == len(plain.due)
    assert {key: index.blocks_held(*key) for key in KEYS} == {
        key: sum(key == pair[0] for pair in plain.due) for key in KEYS
    }
    for query in queries:
        assert index.depths(query) == plain.depths(query)
    actual = {
        ((chunk.worker_id, chunk.rank), block): chunk.due_us
        for chunk in index.snapshot(predicted=False)
        for block in array_u64(chunk.sequence_hashes)
    }
    assert actual == {pair: due[0] for pair, due in plain.due.items()}


@examples(2)
@given(st.lists(steps, max_size=30), st.lists(steps, max_size=15), prompts())
def test_equals_a_dict_of_due_times_also_after_a_restore(before: list[Any], after: list[Any], query: list[int]) -> None:
    queries = [query, list(range(1, 51)), list(range(101, 151)), []]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "EMPTY_BATCHES_MAX", 2)
        patch.setattr(approximate, "CHUNK_HASHES_MAX", 7)
        patch.setattr(holder_bits, "RETIRED_BITS_MAX", 2)
        patch.setattr(holder_bits, "SWEEP_STEPS", 3)
        index, plain = admitted(), Plain()
        for step in before:
            plain.do(step)
            do(index, step, plain.now_us)
        check(index, plain, queries)
        other = restored(index)
        for step in (("wait", 0), *after):
            assert other.digest() == index.digest()
            plain.do(step)
            for each in (index, other):
                do(each, step, plain.now_us)
        check(index, plain, queries)
        check(other, plain, queries)
        do(other, ("wait",), NEVER_US)
        assert len(other) == 0
        assert other.digest() == admitted().digest()


def test_the_bound_evicts_earliest_due_blocks_and_prompt_tails_first() -> None:
    index = admitted()
    index.add("a", 0, range(1, 51), 30, 100)
    index.add("b", 0, range(1, 51), 20, 100)
    assert len(index) == 100
    index.add("a", 1, [7, 8], 90, 100)
    assert len(index) == 100
    assert index.depths(range(1, 51)) == {("a", 0): 50, ("b", 0): 48}
    assert index.depths([7]) == {("a", 0): 1, ("a", 1): 1, ("b", 0): 1}
    index.add("a", 1, [9], 90, 50)
    assert index.depths(range(1, 51)) == {("a", 0): 47}
    assert len(index) == 50


def test_adding_blocks_to_an_unknown_rank_fails() -> None:
    index = RoutedIndex()
    index.drop_holder("a", 0)
    chunk = RoutedBlocks(worker_id="a", rank=0, due_us=1, predicted=False, sequence_hashes=pack_u64([1]))
    with pytest.raises(KeyError):
        index.add("a", 0, [1], 10, NO_BOUND)
    with pytest.raises(KeyError):
        index.restore(chunk)
    assert index.depths([1]) == {}
