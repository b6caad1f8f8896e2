"""Block pool that counts single blocks: the oracle of `ChainPool` in tests.

A block is used (referenced), cached (hashed, unreferenced) or free. A full block is identified by its sequence hash and
shared by reference count. A block that is still being written is anonymous. Cached blocks are evicted oldest first; the
tail of a chain counts as older than its head, because a tail cannot be found without its head. Used blocks are never
evicted.
"""

from collections import OrderedDict
from collections.abc import Sequence


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
        """Reference every block of `prefix`, all of which must be present, and `anonymous` new blocks.

        Returns:
            The evicted hashes, in order of eviction; None, without any change, if there is no room.
        """
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
        """Name one full anonymous block `block`; its reference moves to that hash.

        Returns:
            Whether the content is new; False if it was present and the two blocks were merged.
        """
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
        """Release one reference of each block of a chain, given head first, and `anonymous` anonymous blocks.

        Hashed blocks without references stay cached; anonymous blocks become free.
        """
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
