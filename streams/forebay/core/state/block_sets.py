"""Which holders have which blocks, and how deep each holder's share of a prompt goes.

Theory of operation. A holder is a bit. A query is a list of sequence hashes, a prompt's blocks from the
first on; a holder's depth is how many of them it has without a hole. Blocks are kept in runs: a few blocks
that arrived one after the other and have the same holders, found through a dict from block to run. Where a
query goes on as a run does, one comparison answers for the whole run. A run says nothing about which blocks
imply which, so the walk is exact on any history; a history without order only makes the runs short.
All runs stand in one ring, so that a cursor can go through them, bit by bit, while they change.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

from forebay.events.base import U64_MASK

RUN_BLOCKS_MAX = 32  # bounds the work of splitting a run; longer ones would hardly speed up the walk


class Run:
    """Blocks that follow each other and have the same holders; every block is in one run."""

    __slots__ = ("after", "before", "blocks", "mask")
    before: "Run"
    after: "Run"

    def __init__(self, blocks: "array[int]", mask: int) -> None:
        self.blocks = blocks
        self.mask = mask


class Cursor:
    """A place in the ring of runs, kept right by `BlockSets` whatever becomes of the runs."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run


class BlockSets:
    """Sets of blocks, one per bit. `counts` and `sums` are per bit: how many blocks, and their sum mod 2**64."""

    __slots__ = ("_cursors", "_root", "_runs", "_sweep", "counts", "sums")

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._root = Run(array("Q"), 0)
        self._root.before = self._root.after = self._root
        self._cursors: list[Cursor] = []
        self._sweep: Cursor | None = None
        self.counts: dict[int, int] = {}
        self.sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Distinct blocks that somebody has, or had when it was retired since the last sweep."""
        return len(self._runs)

    def add(self, bit: int, blocks: Iterable[int], parent: int | None = None) -> int:
        """Give `blocks` to the holder `bit`; how many it did not have yet. Arrays ("Q") are the fastest.

        `parent` is the block before them, where it is known: it only helps to keep runs long.
        """
        rest = packed(blocks)
        get = self._runs.get
        at, end = 0, len(rest)
        added = total = 0
        while at < end:
            block = rest[at]
            run = get(block)
            if run is None and end == 1:
                # A rank that decodes says it block by block: most events are of one.
                self._append(bit, block, parent)
                added, total = 1, block
                break
            if run is None:
                listed, count = self._add_new(bit, rest[at : at + RUN_BLOCKS_MAX], parent)
            else:
                begin, count = _stretch(rest, at, run.blocks)
                listed = [] if run.mask & bit else self._give(run, begin, count, bit, parent)
            if listed:
                added += len(listed)
                total += sum(listed)
            at += count
            if at < end:
                parent = rest[at - 1]
        self.counts[bit] = self.counts.get(bit, 0) + added
        self.sums[bit] = (self.sums.get(bit, 0) + total) & U64_MASK
        return added

    def remove(self, bit: int, blocks: Iterable[int]) -> int:
        """Take `blocks` from the holder `bit`; how many it had. Arrays ("Q") are the fastest."""
        rest = packed(blocks)
        get = self._runs.get
        at, end = 0, len(rest)
        removed = total = 0
        while at < end:
            block = rest[at]
            run = get(block)
            if run is None or not run.mask & bit:
                at += 1
                continue
            theirs = run.blocks
            if theirs[-1] == block:  # caches let go of the last block first
                count = _ending(rest, at, theirs)
                begin = len(theirs) - count
            else:
                begin, count = _stretch(rest, at, theirs)
            removed += count
            total += self._take(run, begin, count, bit)
            at += count
        self.counts[bit] = self.counts.get(bit, 0) - removed
        self.sums[bit] = (self.sums.get(bit, 0) - total) & U64_MASK
        return removed

    def has(self, bit: int, block: int) -> bool:
        """Whether the holder has this one block."""
        run = self._runs.get(block)
        return run is not None and bool(run.mask & bit)

    def drops(self, query: Sequence[int], among: int, start: int = 0) -> list[tuple[int, int]]:
        """Where the holders in `among` leave the query, walked from `start` on.

        Returns (depth, mask) pairs, depths rising, every holder once. Arrays ("Q") are the fastest queries.
        """
        get = self._runs.get
        found: list[tuple[int, int]] = []
        asked = packed(query)
        alive = among
        at, end = start, len(asked)
        while alive and at < end:
            run = get(asked[at])
            if run is None:
                break
            kept = alive & run.mask
            if kept != alive:
                found.append((at, alive ^ kept))
                alive = kept
            blocks = run.blocks
            after = at + len(blocks)
            if after == at + 1 or asked[at:after] == blocks:
                at = after
                continue
            at += _stretch(asked, at, blocks)[1]  # the query enters the run late or leaves it early
        if alive:
            found.append((at, alive))
        return found

    def cursor(self) -> Cursor:
        """A cursor before the first run. What nobody touches while it goes, it sees at least once.

        Give it back with `release`: each one makes changes a little slower.
        """
        cursor = Cursor(self._root.after)
        self._cursors.append(cursor)
        return cursor

    def next_run(self, cursor: Cursor) -> Run | None:
        """The run at the cursor, which moves on; None at the end. Not to be changed."""
        run = cursor.run
        if run is self._root:
            return None
        cursor.run = run.after
        return run

    def release(self, cursor: Cursor) -> None:
        """The cursor is not used any more."""
        self._cursors.remove(cursor)

    def retire(self, bit: int) -> None:
        """Forget the holder's counts; its bit stays in the masks until `sweep` and must not be asked for."""
        self.counts.pop(bit, None)
        self.sums.pop(bit, None)

    def begin_sweep(self) -> None:
        """From here on `sweep` goes through all runs once."""
        assert self._sweep is None, "one sweep at a time"
        self._sweep = self.cursor()

    def sweep(self, bits: int, steps: int) -> int:
        """Go on taking retired bits out of the masks; a run is a step, and so is each block that goes.

        Returns the steps left over, 0 if it did not come to the end. The bits must be the same from begin to end.
        """
        cursor = self._sweep
        if cursor is None:
            return steps
        while steps > 0:
            run = self.next_run(cursor)
            if run is None:
                self.release(cursor)
                self._sweep = None
                return steps
            steps -= 1
            if run.mask & bits:
                run.mask &= ~bits
                if not run.mask:
                    steps -= len(run.blocks)
                    self._forget(run, 0, len(run.blocks))
        return 0

    def _add_new(self, bit: int, blocks: "array[int]", parent: int | None) -> tuple[list[int], int]:
        """Add blocks of which nobody has the first, a run at most; those added, and how many that answers for."""
        runs = self._runs
        listed = blocks.tolist()
        count = len(listed)
        joined = self._joinable(parent, bit, count)
        run = joined or Run(blocks, bit)
        known = len(runs)
        # One look at the dict both finds and places a block. Mostly all of them are new, and different.
        owners = list(map(runs.setdefault, listed, repeat(run)))
        if len(runs) - known != count:
            for block, owner in zip(listed, owners, strict=True):
                if owner is run and (joined is None or block not in joined.blocks):
                    runs.pop(block, None)
            count = next((at for at, block in enumerate(listed) if block in runs), count)
            listed = list(dict.fromkeys(listed[:count]))
            self._add_new(bit, array("Q", listed), parent)
            return listed, count
        if joined is not None:
            run.blocks += blocks
        else:
            self._link_new(run)
        return listed, count

    def _append(self, bit: int, block: int, parent: int | None) -> None:
        """Add one block, which nobody has."""
        run = self._joinable(parent, bit, 1)
        if run is None:
            run = Run(array("Q", (block,)), bit)
            self._link_new(run)
        else:
            run.blocks.append(block)
        self._runs[block] = run

    def _give(self, run: Run, begin: int, count: int, bit: int, parent: int | None) -> list[int]:
        """Give a stretch of a run to another holder; returns its blocks."""
        if count < len(run.blocks):
            run = self._cut(run, begin, count)
        run.mask |= bit
        blocks = run.blocks
        joined = self._joinable(parent, run.mask, count)
        if joined is not None and joined is not run:
            # The others' blocks may be new to a cursor that has seen the joined run.
            if self._cursors:
                self._unlink(joined)
                self._link(joined, self._root.before)
            self._unlink(run)
            joined.blocks += blocks
            self._runs.update(dict.fromkeys(blocks, joined))
        return blocks.tolist()

    def _take(self, run: Run, begin: int, count: int, bit: int) -> int:
        """Take a stretch of a run from one of its holders; returns the sum of its blocks."""
        if run.mask == bit:
            return self._forget(run, begin, begin + count)
        cut = count < len(run.blocks)
        if cut:
            run = self._cut(run, begin, count)
        blocks = run.blocks
        listed = blocks.tolist()
        run.mask ^= bit
        after = run.after
        if cut and after.mask == run.mask and len(after.blocks) + count <= RUN_BLOCKS_MAX:
            # One holder lets go of a run from its end on: the others keep what it left in one piece.
            after.blocks = blocks + after.blocks
            self._runs.update(dict.fromkeys(listed, after))
            self._unlink(run)
        return sum(listed)

    def _forget(self, run: Run, begin: int, end: int) -> int:
        """Nobody has these blocks of a run any more; returns their sum."""
        runs, blocks = self._runs, run.blocks
        listed = blocks[begin:end].tolist()
        for block in listed:
            del runs[block]
        if not begin and end == len(blocks):
            self._unlink(run)
        else:
            if begin and end < len(blocks):
                self._place(Run(blocks[end:], run.mask), run)
                end = len(blocks)
            del blocks[begin:end]
        return sum(listed)

    def _cut(self, run: Run, begin: int, count: int) -> Run:
        """A run of its own for a part of a run, next to what is left of that in the ring."""
        blocks = run.blocks
        after = begin + count
        cut = Run(blocks[begin:after], run.mask)
        if begin:
            self._place(cut, run)
            run.blocks = blocks[:begin]
            if after < len(blocks):
                self._place(Run(blocks[after:], run.mask), cut)
        else:
            self._place(cut, run.before)
            run.blocks = blocks[after:]
            for cursor in self._cursors:
                if cursor.run is run:
                    cursor.run = cut
        return cut

    def _joinable(self, parent: int | None, mask: int, count: int) -> Run | None:
        """The parent's run, if `count` blocks with these holders may go on with it."""
        run = None if parent is None else self._runs.get(parent)
        if run is None or run.mask != mask or len(run.blocks) + count > RUN_BLOCKS_MAX or run.blocks[-1] != parent:
            return None
        return run

    def _place(self, run: Run, before: Run) -> None:
        self._link(run, before)
        self._runs.update(dict.fromkeys(run.blocks, run))

    def _link_new(self, run: Run) -> None:
        # Nobody had the blocks before: cursors need not see them, and come to an end although more is stored.
        self._link(run, self._root if self._cursors else self._root.before)

    def _link(self, run: Run, before: Run) -> None:
        after = before.after
        run.before, run.after = before, after
        before.after = after.before = run

    def _unlink(self, run: Run) -> None:
        for cursor in self._cursors:
            if cursor.run is run:
                cursor.run = run.after
        before, after = run.before, run.after
        before.after, after.before = after, before


def _stretch(asked: "array[int]", at: int, blocks: "array[int]") -> tuple[int, int]:
    """Where in `blocks` is `asked[at]`, and for how many blocks both go on alike."""
    begin = 0 if blocks[0] == asked[at] else blocks.index(asked[at])
    theirs = asked[at : at + len(blocks) - begin]
    ours = blocks[begin : begin + len(theirs)]
    if ours == theirs:
        return begin, len(ours)
    return begin, next(number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)


def _ending(asked: "array[int]", at: int, blocks: "array[int]") -> int:
    """How many of the last of `blocks`, the last first, are asked for from `at` on; one at least."""
    theirs = asked[at : at + len(blocks)]
    count = len(theirs)
    if count > 1:
        theirs.reverse()
        if theirs != blocks[-count:]:
            pairs = zip(reversed(theirs), reversed(blocks), strict=False)
            return next(number for number, (one, other) in enumerate(pairs) if one != other)
    return count


def packed(blocks: Iterable[int]) -> "array[int]":
    """Blocks as an array ("Q"): itself, if it is one. Raises OverflowError for what is no u64."""
    return blocks if type(blocks) is array else array("Q", blocks)


def bits_of(mask: int) -> list[int]:
    """The single bits of a mask, lowest first."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits
