"""Small parts of the state: assumed caches, sessions and remembered ids that expire, placements, parts of a TTFT."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.state import holder_bits, recent_ids
from forebay.core.state import predicted_cache as approximate
from forebay.core.state.groups import Groups
from forebay.core.state.predicted_cache import RoutedIndex
from forebay.core.state.recent_ids import RecentIds
from forebay.core.state.sessions import Binding, SessionAffinity
from forebay.core.ttft_parts import PARTS, TimeByPart
from forebay.events.base import array_u64, pack_u64
from forebay.events.groups import GroupPlaced
from forebay.events.snapshots import Remembered, RoutedBlocks
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
    *[adds] * 3,
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


def test_adding_blocks_to_an_unknown_rank_fails() -> None:
    index = RoutedIndex()
    index.drop_holder("a", 0)
    chunk = RoutedBlocks(worker_id="a", rank=0, due_us=1, predicted=False, sequence_hashes=pack_u64([1]))
    with pytest.raises(KeyError):
        index.add("a", 0, [1], 10, NO_BOUND)
    with pytest.raises(KeyError):
        index.restore(chunk)
    assert index.depths([1]) == {}


# Sessions, against a plain dict


A = Binding("a", 1, 0)
B = Binding("b", 2, 1)


def restored_sessions(affinity: SessionAffinity, sessions_max: int = 1 << 20) -> SessionAffinity:
    copy = SessionAffinity(sessions_max)
    for chunk in affinity.snapshot():
        copy.restore(chunk)
    return copy


MAX = 4
operations = st.tuples(
    st.sampled_from(["bind", "bind", "bind", "bind", "wait", "lose"]),
    st.integers(0, 6),
    st.sampled_from([A, A._replace(rank=1), B]),
    st.integers(1, 30),
)


@given(st.lists(operations, max_size=80))
def test_sessions_equal_a_plain_dict(history: list[tuple[str, int, Binding, int]]) -> None:
    affinity, plain = SessionAffinity(MAX), dict[tuple[str, str], tuple[Binding, int]]()
    now_us = 0
    for number, (kind, name, binding, us) in enumerate(history):
        if number == len(history) // 2:
            affinity = restored_sessions(affinity, MAX)
        now_us += us * 128 if kind == "wait" else 0
        affinity.expire(now_us)
        plain = {session: bound for session, bound in plain.items() if bound[1] > now_us}
        if kind == "bind":
            # Ends of sessions that could be pushed out differ: of equal ones their hashes decide.
            session, due_us = (f"p{name % 2}", f"s{name}"), now_us + us * 128 + number
            full = session not in plain and len(plain) == MAX
            if full:
                del plain[min(plain, key=lambda one: plain[one][1])]
            plain[session] = (binding, due_us)
            assert affinity.bind(*session, binding, due_us) is full
        elif kind == "lose":
            affinity.drop_worker(binding.worker_id)
            plain = {one: bound for one, bound in plain.items() if bound[0].worker_id != binding.worker_id}
        for at in range(7):
            found = plain.get((f"p{at % 2}", f"s{at}"))
            assert affinity.find(f"p{at % 2}", f"s{at}") == (found[0] if found else None)
        assert len(affinity) == len(plain)
    copy = restored_sessions(affinity)
    assert copy.digest() == affinity.digest()
    assert list(copy.snapshot()) == list(affinity.snapshot())
    copy.expire(1 << 62)
    assert (len(copy), copy.digest()) == (0, 0)


def test_evicted_blocks_do_not_reappear() -> None:
    affinity = SessionAffinity()
    affinity.bind("p", "old", B, 10_000)
    for number in range(500):
        affinity.bind("p", f"s{number}", A, 1_000 + number)
        affinity.drop_worker("a")
    affinity.expire(9_999)
    assert affinity.find("p", "old") == B
    affinity.expire(10_000)
    assert len(affinity) == 0


# Ids that are remembered for a while, against a plain dict


U64 = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.one_of(st.tuples(U64, U64, st.integers(0, 5)), st.integers(0, 20)), max_size=60))
def test_any_history_is_that_of_a_dict_and_restores(history: list[tuple[int, int, int] | int]) -> None:
    ids, plain = RecentIds(), dict[int, tuple[int, int]]()
    due_us = now_us = 0
    for one in history:
        if isinstance(one, tuple):
            id_hash, content, later_us = one
            due_us += later_us
            if id_hash not in plain:
                ids.add(id_hash, content, due_us)
                plain[id_hash] = (content, due_us)
        else:
            now_us += one
            ids.forget(now_us)
            plain = {known: what for known, what in plain.items() if what[1] > now_us}
        assert {known: ids.get(known) for known in plain} == {known: content for known, (content, _) in plain.items()}
        assert (len(ids), ids.next_due_us()) == (len(plain), min((due for _, due in plain.values()), default=None))
    copy, fresh = RecentIds(), RecentIds()
    for chunk in ids.snapshot():
        copy.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(chunk), type=Remembered))
    for known, (content, when_us) in plain.items():
        fresh.add(known, content, when_us)
    assert copy.digest() == ids.digest() == fresh.digest()
    assert list(copy.snapshot()) == list(ids.snapshot())
    copy.forget(due_us)
    assert (len(copy), copy.digest(), list(copy.snapshot())) == (0, 0, [])


def test_memory_of_forgotten_ids_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_ids, "FORGOTTEN_MAX", 10)
    ids = RecentIds()
    for number in range(30):
        ids.add(number, 7, number)
        ids.forget(number - 10)
    (chunk,) = ids.snapshot()
    assert len(chunk.ids) == 8 * len(ids) == 8 * 10
    assert (ids.get(29), ids.get(0)) == (7, None)


# Placements of groups


def folded(*placed: tuple[str, int]) -> Groups:
    groups = Groups()
    for group, partition in placed:
        groups.apply(GroupPlaced(group=group, partition=partition))
    return groups


def test_the_first_placement_stands_and_no_partition_has_two_groups() -> None:
    groups = folded(("a", 0), ("b", 2), ("a", 1), ("c", 2), ("a", 0), ("d", 1))
    assert groups.partitions == {"a": 0, "b": 2, "d": 1}
    assert [groups.group_in(partition) for partition in range(4)] == ["a", "d", "b", None]
    assert groups.ignored == {"placed_elsewhere": 1, "partition_taken": 1}


def test_the_lowest_free_partition() -> None:
    groups = folded(("a", 0), ("b", 2))
    assert groups.lowest_free(4) == 1
    assert folded(("a", 0), ("b", 1)).lowest_free(2) is None


def test_a_group_without_a_partition_is_refused_until_one_is_freed() -> None:
    groups = folded(("a", 0), ("b", 1))
    refusal = groups.refusal("c", 2)
    assert refusal is not None and "belong to other models: a, b;" in refusal
    assert groups.refusal("a", 2) is None, "it has a partition"
    groups.remove("unknown")
    groups.remove("a")
    assert groups.refusal("c", 2) is None
    assert groups.lowest_free(2) == 0


# The parts of a time to first token


PHASES = st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 1_000)), max_size=12)


@given(PHASES, st.integers(0, 1_000), st.integers(0, 2_000))
def test_times_by_part_add_up_to_the_times_by_phase(
    steps: list[tuple[Phase, int]], last_us: int, transfer_us: int
) -> None:
    times, now_us = TimeByPart(5), 5
    by_phase, here_us = dict.fromkeys(Phase, 0), 0
    for phase, passed_us in steps:
        by_phase[times.phase] += passed_us
        now_us += passed_us
        here_us = here_us + passed_us if phase is times.phase else 0
        times.enter(phase, now_us)
    by_phase[times.phase] += last_us
    parts = times.until(now_us + last_us, transfer_us)
    moved_us = parts.pop("transfer", 0)
    assert moved_us == min(transfer_us, here_us + last_us), "no longer than the phase that it was in"
    parts[PARTS[times.phase]] += moved_us
    expected = {part: sum(us for phase, us in by_phase.items() if PARTS[phase] == part) for part in parts}
    assert parts == expected
    assert sum(parts.values()) == now_us + last_us - 5, "nothing is left out"


def test_disagg_the_end_of_the_last_prefill_is_kept() -> None:
    times = TimeByPart(0)
    assert times.prefilled_us is None
    times.enter(Phase.REMOTE_PREFILL, 10)
    times.enter(Phase.REMOTE_PREFILL, 15)  # by another worker
    times.enter(Phase.TRANSFER, 40)
    assert times.prefilled_us == 40
    times.enter(Phase.REMOTE_PREFILL, 50)
    times.enter(Phase.WAITING, 70)
    times.enter(Phase.TRANSFER, 75)
    assert times.prefilled_us == 70
    assert times.until(100, 5) == {"queue": 10, "prefill": 50, "wait": 5, "decode": 30, "transfer": 5}
