"""`ChainPool` against a pool that counts single blocks, including the order of eviction.

A block is used (referenced), cached (hashed, unreferenced) or free. A full block is identified by its sequence hash and
shared by reference count. A block that is still being written is anonymous. Cached blocks are evicted oldest first; the
tail of a chain counts as older than its head, because a tail cannot be found without its head.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.chain_pool import ChainPool, ChainRun, PrefixMatch
from tests.depth import examples


class BlockPool:
    """Pool of `total` blocks. The callers hold the references; the pool counts them."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._anonymous = 0
        self._free = total

    @property
    def used(self) -> int:
        return len(self._references) + self._anonymous

    @property
    def cached(self) -> int:
        """Number of unreferenced blocks whose content can still be found."""
        return len(self._cached)

    @property
    def free(self) -> int:
        return self._free

    def content(self) -> frozenset[int]:
        """Return the sequence hashes of all used and cached blocks."""
        return frozenset(self._references) | frozenset(self._cached)

    def warm(self, hashes: Sequence[int]) -> None:
        """Fill an empty pool with cached blocks, oldest first; blocks beyond `total` are dropped."""
        assert self._free == self.total, "only an empty pool is warmed"
        self._cached.update(dict.fromkeys(hashes[: self.total]))
        self._free -= len(self._cached)
        self._check()

    def cached_prefix(self, hashes: Sequence[int], blocks_max: int) -> int:
        """Return the number of leading hashes that are used or cached, at most `blocks_max`."""
        references = self._references
        cached = self._cached
        found = 0
        for block in hashes[:blocks_max]:
            if block not in references and block not in cached:
                break
            found += 1
        return found

    def take(self, prefix: Sequence[int], anonymous: int) -> list[int] | None:
        """Reference the blocks of `prefix`, and `anonymous` new ones. Return the evicted ones, None without room."""
        references = self._references
        cached = self._cached
        revived = [block for block in prefix if block in cached]
        shortage = anonymous - self._free
        if shortage > len(cached) - len(revived):
            return None
        for block in revived:
            del cached[block]
        for block in prefix:
            references[block] = references.get(block, 0) + 1
        evicted = [cached.popitem(last=False)[0] for _ in range(shortage)]
        self._free += len(evicted) - anonymous
        self._anonymous += anonymous
        self._check()
        return evicted

    def fill(self, block: int) -> bool:
        """Name one full anonymous block. Return whether its content is new; otherwise both blocks are merged."""
        assert self._anonymous > 0
        self._anonymous -= 1
        count = self._references.get(block, 0)
        self._references[block] = count + 1
        if count:
            self._free += 1
        elif block in self._cached:
            count = 1
            del self._cached[block]
            self._free += 1
        self._check()
        return count == 0

    def release(self, hashes: Sequence[int], anonymous: int) -> None:
        """Release one reference of each block of a chain, given head first, and `anonymous` anonymous blocks."""
        assert 0 <= anonymous <= self._anonymous
        references = self._references
        for block in reversed(hashes):
            count = references[block]
            if count > 1:
                references[block] = count - 1
            else:
                del references[block]
                self._cached[block] = None
        self._anonymous -= anonymous
        self._free += anonymous
        self._check()

    def clear(self) -> None:
        self._references.clear()
        self._cached.clear()
        self._anonymous = 0
        self._free = self.total

    def _check(self) -> None:
        assert self._free >= 0
        assert len(self._references) + self._anonymous + len(self._cached) + self._free == self.total


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
