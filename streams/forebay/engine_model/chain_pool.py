"""The KV blocks of one rank as `BlockPool` keeps them, for callers whose hashes are chains: at a cost for each run.

Theory of operation. A sequence hash names its block and all before it, so who has a block has the blocks before it,
and blocks that follow each other mostly come, stay and go together. They are kept in runs: blocks that the same
callers reference, found by the first of them. Referencing a part of a run cuts it. Of a run that nobody references
the last block is the oldest, and runs become idle from a chain's end on: the order of eviction is that of `BlockPool`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, count
from operator import ne
from typing import NamedTuple


class Run:
    """Blocks that follow each other and have the same references; `Run`s are compared by what they are."""

    __slots__ = ("blocks", "references")

    def __init__(self, blocks: "array[int]", references: int) -> None:
        self.blocks = blocks
        self.references = references


class Found(NamedTuple):
    """Leading blocks of a chain: how many, and of which runs how many each. Good until the pool changes."""

    blocks: int
    path: list[tuple[Run, int]]


class ChainPool:
    """`total` blocks, none more. Chains are arrays ("Q") of sequence hashes; the pool keeps none of them."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._runs: dict[int, Run] = {}  # by their first blocks
        self._idle: OrderedDict[Run, None] = OrderedDict()  # those that nobody references, oldest first
        self._referenced = 0
        self._cached = 0
        self._anonymous = 0
        self._free = total

    @property
    def used(self) -> int:
        """Blocks that somebody references."""
        return self._referenced + self._anonymous

    @property
    def cached(self) -> int:
        """Blocks that nobody references but whose content can still be found."""
        return self._cached

    @property
    def free(self) -> int:
        """Blocks without content."""
        return self._free

    def content(self) -> frozenset[int]:
        """The sequence hashes that can be found, in use or cached."""
        return frozenset(block for run in self._runs.values() for block in run.blocks)

    def warm(self, hashes: Sequence[int]) -> None:
        """Start with cached content, the first oldest; what does not fit is left out. The pool must be empty."""
        assert self._free == self.total, "only an empty pool is warmed"
        for block in dict.fromkeys(hashes[: self.total]):
            run = self._runs[block] = Run(array("Q", (block,)), 0)
            self._idle[run] = None
        self._cached = len(self._runs)
        self._free -= self._cached

    def find(self, hashes: "array[int]", blocks_max: int) -> Found:
        """The leading blocks of a chain that can be found, at most `blocks_max`."""
        path: list[tuple[Run, int]] = []
        at, end = 0, min(blocks_max, len(hashes))
        while at < end:
            run = self._runs.get(hashes[at])
            if run is None:
                break
            size = min(_common(run.blocks, hashes, at), end - at)
            path.append((run, size))
            at += size
        return Found(at, path)

    def take(self, found: Found, anonymous: int) -> "array[int] | None":
        """Reference blocks as `find` just found them, and `anonymous` new ones.

        Returns the hashes evicted for that, in order, or None and takes nothing when there is no room.
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

    def fill(self, hashes: "array[int]", begin: int, end: int, tail: Run | None) -> tuple[list[tuple[int, int]], Run]:
        """Anonymous blocks of a chain whose first `begin` blocks the caller references are full: its next, up to `end`.

        Their references go with them; where content was there already, two blocks become one. `tail` is the run that
        the caller has referenced last, which may grow. Returns the stretches of `hashes` that are new, and the last
        run.
        """
        assert begin < end, "something is full"
        runs = self._runs
        self._anonymous -= end - begin
        new: list[tuple[int, int]] = []
        at = begin
        rest = hashes[begin:end]
        # Whoever has a block has those before it: one that is there already is the first of a run.
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
        assert tail is not None, "something was full"
        self._check()
        return new, tail

    def release(self, hashes: "array[int]", held: int, anonymous: int) -> None:
        """Give back one reference of each of a chain's first `held` blocks, and anonymous ones.

        Hashed blocks that nobody else uses stay cached; anonymous ones become free.
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
        """Forget everything, references too."""
        self._runs.clear()
        self._idle.clear()
        self._referenced = self._cached = self._anonymous = 0
        self._free = self.total

    def _refer(self, run: Run, size: int) -> Run:
        """Reference the first `size` blocks of a run; the run that they are."""
        if size < len(run.blocks):
            # The part behind stays the run: whoever referenced that last still does, and it may be idle in its place.
            upper = Run(run.blocks[:size], run.references)
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

    def _store(self, blocks: "array[int]", tail: Run | None) -> Run:
        """Blocks that nobody had follow `tail`, which goes on with them if nobody else references it."""
        self._referenced += len(blocks)
        if tail is not None and tail.references == 1:
            tail.blocks += blocks
            return tail
        run = self._runs[blocks[0]] = Run(blocks, 1)
        return run

    def _evict(self, blocks: int) -> "array[int]":
        """Let go of the oldest blocks that nobody references, so many of them; returns them, oldest first."""
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
    """How many of `blocks` the chain has from `at` on."""
    part = hashes[at : at + len(blocks)]
    if part == blocks:
        return len(blocks)
    return next(compress(count(), map(ne, blocks, part)), len(part))
