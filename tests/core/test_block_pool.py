"""The block pool: sharing, eviction order and conservation, through its public methods."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.used, pool.cached, pool.free


def store(pool: BlockPool, *blocks: int) -> None:
    assert pool.take((), len(blocks)) is not None
    for block in blocks:
        pool.fill(block)


def test_released_blocks_stay_cached_and_are_found() -> None:
    pool = BlockPool(4)
    store(pool, 1, 2, 3)
    assert counts(pool) == (3, 0, 1)
    pool.release([1, 2, 3], 0)
    assert counts(pool) == (0, 3, 1)
    assert pool.cached_prefix([1, 2, 9, 3], 4) == 2
    assert pool.cached_prefix([1, 2, 3], 1) == 1
    assert pool.content() == {1, 2, 3}


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    store(pool, 1, 2, 3)
    pool.release([1, 2, 3], 0)
    assert pool.take((), 2) == [3, 2]
    assert pool.content() == {1}


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    store(pool, 1)
    pool.release([1], 0)
    store(pool, 2)
    pool.release([2], 0)
    assert pool.take([1], 0) == []
    pool.release([1], 0)
    assert pool.take((), 2) == [2]


def test_a_prefix_that_is_taken_does_not_count_as_room() -> None:
    pool = BlockPool(2)
    store(pool, 1, 2)
    pool.release([1, 2], 0)
    assert pool.take([1, 2], 1) is None
    assert counts(pool) == (0, 2, 0)
    assert pool.take([1], 1) == [2]


def test_a_shared_block_stays_in_use_until_its_last_reference_goes() -> None:
    pool = BlockPool(2)
    store(pool, 1)
    assert pool.take([1], 0) == []
    pool.release([1], 0)
    assert counts(pool) == (1, 0, 1)
    pool.release([1], 0)
    assert counts(pool) == (0, 1, 1)


def test_filling_with_content_that_is_there_merges_the_two() -> None:
    pool = BlockPool(3)
    assert pool.take((), 2) == []
    assert pool.fill(1)
    assert not pool.fill(1)
    assert counts(pool) == (1, 0, 2)
    pool.release([1], 0)
    pool.release([1], 0)
    assert pool.take((), 1) == []
    assert not pool.fill(1)
    assert counts(pool) == (1, 0, 2)


def test_many_blocks_are_filled_at_once_only_if_all_are_new() -> None:
    pool = BlockPool(8)
    store(pool, 1, 2)
    pool.release([2], 0)
    assert pool.take((), 3) == []
    assert not pool.fill_new([3, 1])
    assert not pool.fill_new([3, 2])
    assert counts(pool) == (4, 1, 3)
    assert pool.fill_new([3, 4])
    assert pool.fill_new([])
    assert pool.content() == {1, 2, 3, 4}
    assert counts(pool) == (4, 1, 3)
    pool.release([3, 4], 1)
    assert counts(pool) == (1, 3, 4)


def test_anonymous_blocks_leave_nothing_behind() -> None:
    pool = BlockPool(2)
    assert pool.take((), 2) == []
    assert pool.take((), 1) is None
    pool.release((), 2)
    assert counts(pool) == (0, 0, 2)


def test_clear_forgets_everything() -> None:
    pool = BlockPool(3)
    store(pool, 1, 2)
    assert pool.take((), 1) == []
    pool.release([2], 0)
    pool.clear()
    assert counts(pool) == (0, 0, 3)
    assert pool.content() == frozenset()


chains = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 2), st.booleans()), max_size=40)


@given(total=st.integers(1, 12), chains=chains)
def test_evictions_and_fills_explain_the_content(total: int, chains: list[tuple[int, int, int, bool]]) -> None:
    pool = BlockPool(total)
    replayed: set[int] = set()
    held: list[tuple[list[int], int]] = []
    for root, length, anonymous, release_oldest in chains:
        hashes = [root * 100 + depth for depth in range(length)]
        prefix = pool.cached_prefix(hashes, length)
        before = counts(pool)
        evicted = pool.take(hashes[:prefix], length - prefix + anonymous)
        if evicted is None:
            assert counts(pool) == before
        else:
            assert replayed.issuperset(evicted)
            replayed.difference_update(evicted)
            for block in hashes[prefix:]:
                assert pool.fill(block) == (block not in replayed)
                replayed.add(block)
            held.append((hashes, anonymous))
        if release_oldest and held:
            pool.release(*held.pop(0))
        assert pool.content() == replayed
        assert sum(counts(pool)) == total
        in_use = {block for hashes, _ in held for block in hashes}
        assert pool.used == len(in_use) + sum(anonymous for _, anonymous in held)


def test_a_warmed_pool_gives_and_evicts_what_it_was_given() -> None:
    pool = BlockPool(3)
    pool.warm([7, 8, 9, 10])
    assert (pool.cached, pool.free, pool.content()) == (3, 0, frozenset({7, 8, 9}))
    assert pool.cached_prefix([8, 9, 10], 3) == 2
    assert pool.take([], 1) == [7]
    with pytest.raises(AssertionError, match="empty"):
        pool.warm([1])
