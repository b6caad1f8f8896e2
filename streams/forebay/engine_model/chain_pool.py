"""KV blocks of one engine rank, with the prefix cache. The work of an operation grows with the number of runs.

A sequence hash identifies its block and all blocks before it. So a caller that uses a block also uses all blocks before
it, and consecutive blocks are mostly added, kept and removed together. They are stored in runs: consecutive blocks with
the same number of references, found by their first block. If a caller references a part of a run, the run is split. Of
the blocks in a run without references, the last block is evicted first. Runs lose their references from the end of a
chain on. So the eviction order is the same as if every block were stored on its own, as in `BlockPool` of the tests.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, count
from operator import ne
from typing import NamedTuple


class ChainRun:
    """Consecutive blocks with the same number of references. Two runs are never equal."""

    __slots__ = ("blocks", "references")

    def __init__(self, blocks: "array[int]", references: int) -> None:
        self.blocks = blocks
        self.references = references


class PrefixMatch(NamedTuple):
    """Leading blocks of a chain that are in the pool. It is valid until the pool changes."""

    blocks: int
    # Runs that contain them, in order, each with the number of its blocks that match, from its start.
    path: list[tuple[ChainRun, int]]


class ChainPool:
    """Pool of exactly `total` KV blocks.

    A block is in use if sequences have references to it. Otherwise it is cached if its content can still be found, or
    free. A block in use that is not full has no hash yet: it is anonymous. A chain is an array of type "Q" with the
    sequence hashes of consecutive blocks from the first block of a prompt on. The pool does not keep the arrays that it
    gets.
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
        self._warmed = False

    @property
    def used(self) -> int:
        """Number of blocks that sequences use, including blocks that are not full yet."""
        return self._referenced + self._anonymous

    @property
    def cached(self) -> int:
        """Number of blocks that no sequence uses, but whose content can still be found."""
        return self._cached

    @property
    def free(self) -> int:
        """Number of blocks that no sequence uses and that have no content."""
        return self._free

    def content(self) -> frozenset[int]:
        """Return the sequence hashes of all blocks whose content can be found, in use or cached."""
        return frozenset(block for run in self._runs.values() for block in run.blocks)

    def warm(self, hashes: Sequence[int]) -> None:
        """Fill an empty pool with cached blocks, oldest first; hashes beyond the size of the pool are ignored."""
        assert self._free == self.total, "only an empty pool is warmed"
        self._warmed = True
        for block in dict.fromkeys(hashes[: self.total]):
            run = self._runs[block] = ChainRun(array("Q", (block,)), 0)
            self._idle[run] = None
        self._cached = len(self._runs)
        self._free -= self._cached

    def find(self, hashes: "array[int]", blocks_max: int) -> PrefixMatch:
        """Return the leading blocks of the chain `hashes` that are in the pool, at most `blocks_max`."""
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
        """Add a reference of a sequence to blocks that `find` has just returned, and to `anonymous` new blocks.

        Return the hashes of evicted blocks, in order. None if there is no room; then nothing has changed.
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
        """Set the hashes of a sequence's anonymous blocks [`begin`, `end`), which are now full.

        The sequence keeps its references. If the pool already has a block with the same hash, the two blocks become
        one. Return the ranges of `hashes` that the pool did not have, and the run with the last full block.

        Args:
            tail: run with the last block that already has a hash, if the sequence filled it; it may be extended.
                Otherwise None.
        """
        assert begin < end, "at least one block is full"
        runs = self._runs
        self._anonymous -= end - begin
        new: list[tuple[int, int]] = []
        at = begin
        rest = hashes[begin:end]
        # A caller that has a block has all blocks before it, so a block that is in the pool starts a run. The blocks
        # before it are in the pool, too, because they are evicted after it, unless the pool was warmed.
        if hashes[begin] in runs or (self._warmed and not runs.keys().isdisjoint(rest)):
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
        """Drop a sequence's references to the first `held` blocks of its chain and to `anonymous` anonymous blocks.

        Blocks of the chain that no other sequence uses stay cached. Anonymous blocks become free.
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
    part = hashes[at : at + len(blocks)]
    if part == blocks:
        return len(blocks)
    return next(compress(count(), map(ne, blocks, part)), len(part))
