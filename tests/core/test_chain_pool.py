"""`ChainPool` against the plain `BlockPool`: both behave alike, including the order of eviction."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.chain_pool import ChainPool, ChainRun, PrefixMatch
from tests.core.block_pool import BlockPool
from tests.depth import examples

NOTHING = PrefixMatch(0, [])


def chain(*blocks: int) -> "array[int]":
    return array("Q", blocks)


def counts(pool: ChainPool | BlockPool) -> tuple[int, int, int]:
    return pool.used, pool.cached, pool.free


def test_a_warmed_pool_serves_and_evicts_its_content() -> None:
    pool = ChainPool(3)
    pool.warm([7, 8, 9, 10])
    assert (counts(pool), pool.content()) == ((0, 3, 0), frozenset({7, 8, 9}))
    assert pool.find(chain(8, 9, 10), 3).blocks == 2
    assert pool.take(NOTHING, 1) == chain(7)
    with pytest.raises(AssertionError, match="empty"):
        pool.warm([1])
    assert pool.fill(chain(7, 8), 0, 1, None)[0] == [(0, 1)]
    pool.clear()
    assert (counts(pool), pool.content()) == ((0, 0, 3), frozenset())


class Holder:
    """Somebody with a chain, who fills it piece by piece, in both pools."""

    def __init__(self, hashes: "array[int]", anonymous: int) -> None:
        self.hashes = hashes
        self.anonymous = anonymous
        self.held = 0
        self.tail: ChainRun | None = None


# A tree of chains: what branches at a depth has other blocks from there on.
chains = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=7)).map(
    lambda drawn: array(
        "Q", [hash((drawn[0], *drawn[1][:depth])) % (1 << 61) + 1 for depth in range(len(drawn[1]) + 1)]
    )
)
deeds = st.tuples(st.sampled_from(["take", "fill", "fill", "release", "grow"]), chains, st.integers(0, 5))


@examples(3)
@given(st.integers(3, 24), st.lists(chains, max_size=3), st.lists(deeds, max_size=60))
def test_chain_pool_equals_block_pool(
    total: int, warm: list["array[int]"], history: list[tuple[str, "array[int]", int]]
) -> None:
    pool, plain = ChainPool(total), BlockPool(total)
    kept = sorted({block for one in warm for block in one})
    pool.warm(kept)
    plain.warm(kept)
    holders: list[Holder] = []
    for deed, hashes, number in history:
        mine = holders[number % len(holders)] if holders else None
        if deed == "take":
            blocks_max = max(0, len(hashes) - number % 2)
            found = pool.find(hashes, blocks_max)
            assert found.blocks == plain.cached_prefix(hashes, blocks_max)
            extra = len(hashes) - found.blocks
            evicted, expected = pool.take(found, extra), plain.take(hashes[: found.blocks].tolist(), extra)
            assert (None if evicted is None else evicted.tolist()) == expected
            if evicted is not None:
                holders.append(Holder(hashes, extra))
                holders[-1].held = found.blocks
        elif mine is None:
            continue
        elif deed == "fill":
            end = min(len(mine.hashes), mine.held + 1 + number)
            if end > mine.held:
                new, mine.tail = pool.fill(mine.hashes, mine.held, end, mine.tail)
                fresh = [at for at in range(mine.held, end) if plain.fill(mine.hashes[at])]
                assert [at for first, last in new for at in range(first, last)] == fresh
                mine.anonymous -= end - mine.held
                mine.held = end
        elif deed == "grow":
            evicted, expected = pool.take(NOTHING, number), plain.take((), number)
            assert (None if evicted is None else evicted.tolist()) == expected
            if evicted is not None:
                mine.anonymous += number
        else:
            holders.remove(mine)
            pool.release(mine.hashes, mine.held, mine.anonymous)
            plain.release(mine.hashes[: mine.held].tolist(), mine.anonymous)
        assert counts(pool) == counts(plain)
        assert pool.content() == plain.content()


def test_a_chain_whose_middle_is_there_already_fills_around_it() -> None:
    pool = ChainPool(8)
    pool.warm([3])
    hashes = chain(1, 2, 3, 4)
    assert pool.take(pool.find(hashes, 4), 4) == chain()
    assert pool.fill(hashes, 0, 4, None)[0] == [(0, 2), (3, 4)]
    assert counts(pool) == (4, 0, 4)
