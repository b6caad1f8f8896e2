"""What ranks have to do: shared and own blocks, output, reports; against a model that counts every block."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import extend_chain
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.load import BLOCK_UNITS, FleetLoad
from forebay.events.metrics import LoadReported

BLOCK = 4
RANKS: list[HolderKey] = [("v", 0), ("w", 0), ("w", 1)]


def loaded(*ranks: HolderKey) -> FleetLoad:
    load = FleetLoad()
    for worker_id, rank in ranks or RANKS:
        load.add_rank(worker_id, rank, BLOCK)
    return load


def now(load: FleetLoad, key: HolderKey = ("w", 0)) -> tuple[int, float, int]:
    rank = load.rank_load(*key)
    return rank.prefill_tokens, rank.decode_blocks, rank.active_requests


def test_without_reuse_all_blocks_count_and_are_not_shared() -> None:
    load = loaded()
    for name in ("r1", "r2"):
        load.book(name, ("w", 0), prefill_tokens=0, blocks=[1, 2], reuse=False)
    assert now(load) == (0, 4.0, 2)
    assert load.active_depths([1, 2]) == {}
    load.free("r1")
    assert now(load) == (0, 2.0, 1)


def test_output_takes_the_blocks_that_it_begins() -> None:
    load = loaded()
    load.book("r", ("w", 0), prefill_tokens=0, blocks=[1])
    seen = []
    for tokens in (0, 1, BLOCK, BLOCK + 1, 3, 10 * BLOCK):
        load.grow("r", tokens)
        seen.append(now(load)[1])
    assert seen == [1.0, 2.0, 2.0, 3.0, 3.0, 11.0]


def test_own_blocks_fade_with_the_expected_answer_and_shared_ones_do_not() -> None:
    load = loaded()
    load.book("r1", ("w", 0), prefill_tokens=0, blocks=[1, 2, 3], expected_output_tokens=4 * BLOCK)
    load.grow("r1", 2 * BLOCK)
    assert now(load)[1] == (3 + 2) / 2
    load.book("r2", ("w", 0), prefill_tokens=0, blocks=[1, 2])
    assert now(load)[1] == 2 + (1 + 2) / 2
    load.free("r2")
    assert now(load)[1] == (3 + 2) / 2
    load.grow("r1", 5 * BLOCK)
    assert now(load)[1] == 0.0
    load.free("r1")
    assert now(load)[1] == 0.0


def test_a_rank_with_requests_cannot_be_dropped() -> None:
    load = loaded()
    load.book("r", ("w", 0), prefill_tokens=0, blocks=[])
    with pytest.raises(AssertionError):
        load.drop_rank("w", 0)
    load.drop_rank("w", 1)
    assert [(rank.worker_id, rank.rank) for rank in load.ranks()] == RANKS[:2]


def test_a_new_rank_starts_at_the_lowest_computed_total() -> None:
    load = FleetLoad()
    load.add_rank("v", 0, 4)
    load.add_rank("w", 0, 4)
    empty = load.digest()
    for number, (worker, tokens) in enumerate([("v", 7), ("w", 5), ("w", 4)]):
        load.book(str(number), (worker, 0), prefill_tokens=tokens, blocks=[])
        load.free(str(number))
    assert load.digest() != empty
    assert load.add_rank("x", 0, 4).computed_tokens == 7
    assert [rank.computed_tokens for rank in load.ranks()] == [7, 9, 7]
    copy = FleetLoad()
    for rank in load.ranks():
        copy.add_rank(rank.worker_id, rank.rank, 4)
    for chunk in load.snapshot():
        copy.restore(chunk)
    assert copy.digest() == load.digest()
    assert [rank.computed_tokens for rank in copy.ranks()] == [7, 9, 7]
    for rank in load.ranks():
        load.drop_rank(rank.worker_id, rank.rank)
    assert load.digest() == FleetLoad().digest()


def test_the_newest_report_counts() -> None:
    load = loaded()
    empty = load.digest()
    report = LoadReported(worker_id="w", worker_epoch=1, running=1, waiting=2, kv_blocks_used=3, kv_blocks_total=4)
    load.report(report)
    once = load.digest()
    load.report(report)
    assert load.digest() == once != empty
    reported = load.rank_load("w", 0).reported
    assert reported is not None
    assert reported.waiting == 2
    assert load.rank_load("v", 0).reported is None
    copy = restored(load)
    assert copy.digest() == once
    assert copy.rank_load("w", 0).reported == reported
    load.drop_rank("w", 0)
    assert load.digest() == empty


# Against a model that counts every block

PROMPTS = [
    extend_chain(None, [1, 2, 3, 4, 5, 6, 7, 8]),
    extend_chain(None, [1, 2, 3, 40, 50, 60]),
    extend_chain(None, [1, 2, 3, 40, 51]),
    extend_chain(None, [9, 10, 11]),
]


@dataclass
class Model:
    """One request, as simply as possible."""

    key: HolderKey
    tokens: int
    blocks: list[int]
    reuse: bool
    expected: int
    output: int = 0
    alone: list[int] = field(default_factory=list)


def blocks_of(key: HolderKey, requests: list[Model]) -> Fraction:
    total = Fraction(0)
    held: dict[int, list[Model]] = {}
    for one in requests:
        if one.key != key:
            continue
        own = -(-one.output // BLOCK)
        if one.reuse:
            for block in one.blocks:
                held.setdefault(block, []).append(one)
        else:
            own += len(one.blocks)
        total += own * weight(one)
    return total + sum(weight(who[0]) if len(who) == 1 else 1 for who in held.values())


def weight(one: Model) -> Fraction:
    if not one.expected or not one.output:
        return Fraction(1)
    share = max(Fraction(0), 1 - Fraction(one.output, one.expected))
    return Fraction(int(share * BLOCK_UNITS), BLOCK_UNITS)


def depth_of(key: HolderKey, query: list[int], requests: list[Model]) -> int:
    held = {block for one in requests if one.key == key and one.reuse for block in one.blocks}
    depth = 0
    while depth < len(query) and query[depth] in held:
        depth += 1
    return depth


def restored(load: FleetLoad) -> FleetLoad:
    copy = loaded(*((rank.worker_id, rank.rank) for rank in load.ranks()))
    for chunk in load.snapshot():
        copy.restore(chunk)
    return copy


prompts = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 8)).map(lambda drawn: drawn[0][: drawn[1]])
operations = st.tuples(
    st.sampled_from(["book", "book", "book", "first", "grow", "grow", "free"]),
    st.integers(0, 99),
    prompts,
    st.booleans() | st.just(True),
    st.sampled_from([0, 1, 7, 40]),
)


@given(st.lists(operations, max_size=60), prompts)
def test_load_equals_a_count_of_every_block(
    history: list[tuple[str, int, list[int], bool, int]], query: list[int]
) -> None:
    load = loaded()
    plain: dict[str, Model] = {}
    booked_tokens: Counter[HolderKey] = Counter()
    for at, (kind, number, blocks, reuse, expected) in enumerate(history):
        name = list(plain)[number % len(plain)] if plain else ""
        if kind == "book":
            key = RANKS[number % 3]
            plain[f"r{at}"] = Model(key, number, blocks, reuse, expected)
            booked_tokens[key] += number
            load.book(f"r{at}", key, prefill_tokens=number, blocks=blocks, reuse=reuse, expected_output_tokens=expected)
        elif name and kind == "first":
            plain[name].tokens = 0
            load.prefill_done(name)
        elif name and kind == "grow":
            plain[name].output = max(plain[name].output, number)
            load.grow(name, number)
        elif name:
            del plain[name]
            load.free(name)
    requests = list(plain.values())
    for key in RANKS:
        mine = [one for one in requests if one.key == key]
        assert now(load, key) == (sum(one.tokens for one in mine), float(blocks_of(key, requests)), len(mine))
        assert load.rank_load(*key).computed_tokens == booked_tokens[key]
    depths = {key: depth_of(key, query, requests) for key in RANKS}
    assert load.active_depths(query) == {key: depth for key, depth in depths.items() if depth}
    copy = restored(load)
    assert copy.digest() == load.digest()
    assert [now(copy, key) for key in RANKS] == [now(load, key) for key in RANKS]
    assert copy.active_depths(query) == load.active_depths(query)
    assert list(copy.snapshot()) == list(load.snapshot())
    for name in plain:
        load.free(name)
        copy.free(name)
    assert load.digest() == copy.digest() == restored(load).digest()
    assert all(now(one, key) == (0, 0.0, 0) for one in (load, copy) for key in RANKS)


def test_a_prefix_that_others_left_at_many_places_is_one_stretch_again() -> None:
    load = loaded()
    prompt = extend_chain(None, list(range(64)))
    load.book("hot", ("w", 0), prefill_tokens=0, blocks=prompt)
    for at in range(1, 64):
        load.book(f"r{at}", ("v", 0), prefill_tokens=0, blocks=[*prompt[:at], at])
    # Nodes bound the memory of the tree and the work of a query.
    assert load.count_nodes() == 2 * 63 + 1
    for at in range(1, 64):
        load.free(f"r{at}")
    assert load.count_nodes() == 1
    load.free("hot")
    assert load.count_nodes() == 0
