"""Sets of blocks against plain sets, on orderly histories and on any: runs are cut and joined, answers stay exact."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.block_sets import RUN_BLOCKS_MAX, BlockSets, split_bits
from tests.depth import examples


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """Blocks in order, or against it, more than a run may have, with holes; or anything, with repetitions."""
    if draw(st.integers(0, 3)):
        start = draw(st.integers(1, 250))
        holes = draw(st.sets(st.integers(1, 300), max_size=4))
        blocks = [block for block in range(start, min(301, start + draw(st.integers(1, 100)))) if block not in holes]
        return blocks[:: draw(st.sampled_from([1, 1, -1]))]
    return draw(st.lists(st.integers(1, 300), max_size=20))


changes = st.tuples(st.integers(0, 4), st.booleans(), stretches(), st.none() | st.integers(1, 300))


def blocks_of(sets: BlockSets, bit: int) -> list[int]:
    """What a cursor sees of one holder."""
    cursor = sets.cursor()
    seen: list[int] = []
    while (run := sets.next_run(cursor)) is not None:
        seen += run.blocks if run.mask & bit else []
    sets.release(cursor)
    return sorted(seen)


@examples(2)
@given(st.lists(changes, max_size=25), stretches())
def test_block_sets_equal_plain_sets(operations: list[Any], query: list[int]) -> None:
    sets = BlockSets()
    plain: list[set[int]] = [set() for _ in range(5)]
    for holder, stores, blocks, parent in operations:
        if stores:
            assert sets.add(1 << holder, blocks, parent) == len(set(blocks) - plain[holder])
            plain[holder].update(blocks)
        else:
            assert sets.remove(1 << holder, blocks) == len(set(blocks) & plain[holder])
            plain[holder].difference_update(blocks)
    for holder, held in enumerate(plain):
        assert blocks_of(sets, 1 << holder) == sorted(held)
        assert sets.counts.get(1 << holder, 0) == len(held)
        assert sets.sums.get(1 << holder, 0) == sum(held)
        assert all(sets.has(1 << holder, block) == (block in held) for block in range(1, 301))
    assert len(sets) == len(set().union(*plain))
    for blocks_looked_up in (query, list(range(1, 301))):
        depths = {
            bit: depth for depth, mask in sets.match_depths(blocks_looked_up, 0b11111) for bit in split_bits(mask)
        }
        for holder, held in enumerate(plain):
            expected = next(
                (at for at, block in enumerate(blocks_looked_up) if block not in held), len(blocks_looked_up)
            )
            assert depths[1 << holder] == expected


def runs_of(sets: BlockSets) -> list[list[int]]:
    """The runs, in the order of the ring."""
    cursor = sets.cursor()
    runs: list[list[int]] = []
    while (run := sets.next_run(cursor)) is not None:
        runs.append(run.blocks.tolist())
    sets.release(cursor)
    return runs


def test_blocks_that_arrive_one_by_one_form_runs() -> None:
    sets = BlockSets()
    for block in range(1, 71):
        sets.add(1, [block], block - 1 or None)
    runs = [list(range(1, 33)), list(range(33, 65)), list(range(65, 71))]
    assert runs_of(sets) == runs
    for block in range(1, 71):
        sets.add(2, [block], block - 1 or None)
    assert sorted(runs_of(sets)) == runs


def test_retired_bits_are_swept_incrementally() -> None:
    sets = BlockSets()
    for number in range(6):
        sets.add(1 << (number % 2), range(number * RUN_BLOCKS_MAX, (number + 1) * RUN_BLOCKS_MAX))
    sets.retire(1)
    sets.begin_sweep()
    sizes = []
    while not sets.sweep(1, 1):
        sizes.append(len(sets))
    assert sizes == [size * RUN_BLOCKS_MAX for size in (5, 5, 4, 4, 3, 3)]
    assert sets.sweep(1, 7) == 7
    assert blocks_of(sets, 2) == [*range(32, 64), *range(96, 128), *range(160, 192)]


def test_blocks_evicted_by_one_of_two_holders_stay_one_run() -> None:
    sets = BlockSets()
    for bit in (1, 2):
        sets.add(bit, range(1, 31))
    for block in range(30, 10, -1):
        sets.remove(1, [block])
    assert runs_of(sets) == [list(range(1, 11)), list(range(11, 31))]


def test_a_cursor_sees_blocks_that_join_a_run_it_has_passed() -> None:
    sets = BlockSets()
    sets.add(1, [1, 2, 3, 4])
    sets.add(2, [1, 2])
    cursor = sets.cursor()
    first = sets.next_run(cursor)
    assert first is not None
    assert first.blocks.tolist() == [1, 2]
    sets.add(2, [3, 4], parent=2)
    joined = sets.next_run(cursor)
    assert joined is not None
    assert joined.blocks.tolist() == [1, 2, 3, 4]
    assert sets.next_run(cursor) is None


def test_cursors_stay_where_they_are_when_another_run_loses_its_head() -> None:
    sets = BlockSets()
    sets.add(1, range(1, 6))
    sets.add(1, range(11, 16))
    ahead, behind = sets.cursor(), sets.cursor()
    first = sets.next_run(ahead)
    assert first is not None
    for start in (1, 11):
        sets.add(2, [start, start + 1])
    seen: list[int] = []
    for cursor in (ahead, behind):
        while (run := sets.next_run(cursor)) is not None:
            seen += run.blocks
    assert set(range(1, 6)) <= set(seen)
    assert set(range(11, 16)) <= set(seen)
