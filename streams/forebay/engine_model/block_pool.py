"""The KV blocks of one rank with prefix caching: who uses them, and what stays cached behind.

Theory of operation. A block is used (referenced, hashed or anonymous), cached (hashed, nobody uses it) or
free. A full block is known by its sequence hash and shared by reference count; one still being written is
anonymous. Cached blocks are evicted oldest first, and a chain's tail is older than its head, since without
its head a tail is never found. The pool never drops a block that is in use.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`total` blocks, none more. Callers hold references; the pool only counts them."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._anonymous = 0
        self._free = total

    @property
    def used(self) -> int:
        """Blocks that somebody references."""
        return len(self._references) + self._anonymous

    @property
    def cached(self) -> int:
        """Blocks that nobody references but whose content can still be found."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Blocks without content."""
        return self._free

    def content(self) -> frozenset[int]:
        """The sequence hashes that can be found, in use or cached."""
        return frozenset(self._references) | frozenset(self._cached)

    def warm(self, hashes: Sequence[int]) -> None:
        """Start with cached content, the first oldest; what does not fit is left out. The pool must be empty."""
        assert self._free == self.total, "only an empty pool is warmed"
        self._cached.update(dict.fromkeys(hashes[: self.total]))
        self._free -= len(self._cached)
        self._check()

    def cached_prefix(self, hashes: Sequence[int], blocks_max: int) -> int:
        """How many leading hashes can be found, at most `blocks_max`."""
        references = self._references
        cached = self._cached
        found = 0
        for block in hashes[:blocks_max]:
            if block not in references and block not in cached:
                break
            found += 1
        return found

    def take(self, prefix: Sequence[int], anonymous: int) -> list[int] | None:
        """Reference every block of `prefix`, all of which can be found, and `anonymous` new ones.

        Returns the hashes evicted for that, in order, or None and takes nothing when there is no room.
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
        """One anonymous block is full and known as `block` from now on; its reference goes with it.

        True when that content is new; False when it was there already and the two became one.
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

    def fill_new(self, blocks: Sequence[int]) -> bool:
        """As `fill` with each of different blocks, if all their content is new; otherwise nothing is done."""
        if not (self._references.keys().isdisjoint(blocks) and self._cached.keys().isdisjoint(blocks)):
            return False
        assert len(blocks) <= self._anonymous
        self._references.update(dict.fromkeys(blocks, 1))
        self._anonymous -= len(blocks)
        self._check()
        return True

    def release(self, hashes: Sequence[int], anonymous: int) -> None:
        """Give back one reference of each of a chain's blocks, head first, and anonymous ones.

        Hashed blocks that nobody else uses stay cached; anonymous ones become free.
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
        """Forget everything, references too."""
        self._references.clear()
        self._cached.clear()
        self._anonymous = 0
        self._free = self.total

    def _check(self) -> None:
        assert self._free >= 0
        assert len(self._references) + self._anonymous + len(self._cached) + self._free == self.total
