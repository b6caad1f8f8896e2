"""KV blocks of one rank, as in `BlockPool`, for callers whose hashes form chains; the cost is per run, not per block.

A sequence hash identifies its block and all blocks before it. So a caller that has a block has all blocks before it,
and consecutive blocks are mostly added, kept and removed together. They are stored in runs: consecutive blocks with the
same references, found by their first block. Referencing a part of a run splits it. In a run without references the last
block is the oldest, and runs lose their references from the end of a chain on. The eviction order is therefore that of
`BlockPool`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, count
from operator import ne
from typing import NamedTuple


class ChainRun:
    """Consecutive blocks with the same references; compared by identity."""

    __slots__ = ("blocks", "references")

    def __init__(self, blocks: "array[int]", references: int) -> None:
        self.blocks = blocks
        self.references = references


class PrefixMatch(NamedTuple):
    """Leading blocks of a chain that are in the pool; valid until the pool changes.

    Attributes:
        blocks: number of blocks.
        path: runs that contain them, each with the number of blocks from its start.
    """

    blocks: int
    path: list[tuple[ChainRun, int]]


class ChainPool:
    """Pool of exactly `total` blocks.

    Chains are arrays of type "Q" of sequence hashes; the pool keeps no caller's array.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._runs: dict[int, ChainRun] = {}  # by first block
        self._idle: OrderedDict[ChainRun, None] = OrderedDict()  # runs without references, oldest first
        self._referenced = 0
        self._cached = 0
        self._anonymous = 0
        self._free = total

    @property
    def used(self) -> int:
        """Number of blocks that are referenced."""
        return self._referenced + self._anonymous

    @property
    def cached(self) -> int:
        """Number of blocks that are not referenced but whose content can still be found."""
        return self._cached

    @property
    def free(self) -> int:
        """Number of blocks without content."""
        return self._free

    def content(self) -> frozenset[int]:
        """Return the sequence hashes that can be found, used or cached."""
        return frozenset(block for run in self._runs.values() for block in run.blocks)

    def warm(self, hashes: Sequence[int]) -> None:
        """Fill an empty pool with cached content, oldest first; content that does not fit is dropped."""
        assert self._free == self.total, "only an empty pool is warmed"
        for block in dict.fromkeys(hashes[: self.total]):
            run = self._runs[block] = ChainRun(array("Q", (block,)), 0)
            self._idle[run] = None
        self._cached = len(self._runs)
        self._free -= self._cached

    def find(self, hashes: "array[int]", blocks_max: int) -> PrefixMatch:
        """Return the leading blocks of a chain that are in the pool, at most `blocks_max`."""
        path: list[tuple[ChainRun, int]] = []
        at, end = 0, min(blocks_max, len(hashes))
        while at < end:
            run = self._runs.get(hashes[at])
            if run is None:
                break
            size = min(_common(run.blocks, hashes, at), end - at)
            path.append((run, size))
            at += size
        return PrefixMatch(at, path)

    def take(self, found: PrefixMatch, anonymous: int) -> "array[int] | None":
        """Reference blocks that `find` just returned, and `anonymous` new blocks.

        Returns:
            The hashes evicted to make room, in order. None without any change if there is no room.
        """
        revived = sum([size for run, size in found.path if not run.references]) if found.path else 0
        shortage = anonymous - self._free
        if shortage > self._cached - revived:
            return None
        for run, size in found.path:
            self._refer(run, size)
        evicted = self._evict(shortage) if shortage > 0 else array("Q")
        self._free += len(evicted) - anonymous
        self._anonymous += anonymous
        self._check()
        return evicted

    def fill(
        self, hashes: "array[int]", begin: int, end: int, tail: ChainRun | None
    ) -> tuple[list[tuple[int, int]], ChainRun]:
        """Give identities to anonymous blocks of a chain that are now full; their references are kept.

        Where content was in the pool already, two blocks become one.

        Args:
            hashes: sequence hashes of the chain.
            begin: number of leading blocks that the caller references already.
            end: number of leading blocks that are full.
            tail: run that the caller referenced last; it may be extended.

        Returns:
            The ranges of `hashes` whose content is new, and the last run.
        """
        assert begin < end, "at least one block is full"
        runs = self._runs
        self._anonymous -= end - begin
        new: list[tuple[int, int]] = []
        at = begin
        rest = hashes[begin:end]
        # A caller that has a block has all blocks before it, so a block that is in the pool starts a run.
        if not runs.keys().isdisjoint(rest):
            while at < end:
                run = runs.get(hashes[at])
                if run is None:
                    at += 1
                    continue
                if begin < at:
                    self._store(hashes[begin:at], tail)
                    new.append((begin, at))
                size = min(_common(run.blocks, hashes, at), end - at)
                tail = self._refer(run, size)
                self._free += size
                begin = at = at + size
            rest = hashes[begin:end]
        if rest:
            tail = self._store(rest, tail)
            new.append((begin, end))
        assert tail is not None, "at least one block was full"
        self._check()
        return new, tail

    def release(self, hashes: "array[int]", held: int, anonymous: int) -> None:
        """Return one reference of each of the first `held` blocks of a chain, and `anonymous` anonymous blocks.

        Hashed blocks without another reference stay cached; anonymous blocks become free.
        """
        path = []
        at = idle = 0
        while at < held:
            run = self._runs[hashes[at]]
            path.append(run)
            at += len(run.blocks)
        assert at == held, "runs are referenced as a whole"
        for run in reversed(path):
            run.references -= 1
            if not run.references:
                self._idle[run] = None
                idle += len(run.blocks)
        self._referenced -= idle
        self._cached += idle
        self._anonymous -= anonymous
        self._free += anonymous
        self._check()

    def clear(self) -> None:
        """Drop all content and all references."""
        self._runs.clear()
        self._idle.clear()
        self._referenced = self._cached = self._anonymous = 0
        self._free = self.total

    def _refer(self, run: ChainRun, size: int) -> ChainRun:
        """Reference the first `size` blocks of a run; return the run that consists of them."""
        if size < len(run.blocks):
            # The second part keeps the run object, because its referrers and its place in the idle order stay valid.
            upper = ChainRun(run.blocks[:size], run.references)
            del run.blocks[:size]
            self._runs[upper.blocks[0]] = upper
            self._runs[run.blocks[0]] = run
            run = upper
        elif not run.references:
            del self._idle[run]
        if not run.references:
            self._cached -= size
            self._referenced += size
        run.references += 1
        return run

    def _store(self, blocks: "array[int]", tail: ChainRun | None) -> ChainRun:
        """Store new blocks after `tail`, extending `tail` if nothing else references it."""
        self._referenced += len(blocks)
        if tail is not None and tail.references == 1:
            tail.blocks += blocks
            return tail
        run = self._runs[blocks[0]] = ChainRun(blocks, 1)
        return run

    def _evict(self, blocks: int) -> "array[int]":
        """Evict the `blocks` oldest blocks without references; return them, oldest first."""
        evicted = array("Q")
        self._cached -= blocks
        while blocks:
            run = next(iter(self._idle))
            keep = len(run.blocks) - blocks
            if keep > 0:
                gone = run.blocks[keep:]
                del run.blocks[keep:]
            else:
                gone = run.blocks
                del self._idle[run]
                del self._runs[gone[0]]
            gone.reverse()
            evicted += gone
            blocks -= len(gone)
        return evicted

    def _check(self) -> None:
        assert self._free >= 0 <= self._anonymous
        assert self._referenced + self._anonymous + self._cached + self._free == self.total


def _common(blocks: "array[int]", hashes: "array[int]", at: int) -> int:
    """Return how many of `blocks` the chain has from `at` on."""
    part = hashes[at : at + len(blocks)]
    if part == blocks:
        return len(blocks)
    return next(compress(count(), map(ne, blocks, part)), len(part))
