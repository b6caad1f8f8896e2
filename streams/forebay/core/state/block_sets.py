"""Sets of KV blocks, one set per holder, and the lookup of how many leading blocks of a prompt each holder has.

A holder is a worker rank, represented by one bit of an integer mask. A query is a list of sequence hashes: the blocks
of a prompt from the first on. The match length of a holder is the number of leading blocks of the query that the holder
has without a gap.

Blocks are stored in runs. A run is a few blocks that arrived one after the other and have the same holders. A dict maps
each block to its run. If the query continues as the run does, one comparison covers the whole run. The blocks of a run
need not follow each other in any prompt, so the lookup is exact for any history. If blocks arrive in random order, the
runs are only shorter.

All runs are linked in one ring, so a cursor can traverse them in small steps while they change.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

from forebay.events.base import U64_MASK

RUN_BLOCKS_MAX = 32  # bounds the work of splitting a run; longer runs would hardly speed up lookups


class BlockRun:
    """Consecutive blocks with the same holders. Every block is in exactly one run."""

    __slots__ = ("after", "before", "blocks", "mask")
    before: "BlockRun"
    after: "BlockRun"

    def __init__(self, blocks: "array[int]", mask: int) -> None:
        self.blocks = blocks
        self.mask = mask


class Cursor:
    """Position of a traversal in the ring of runs. `BlockSets` updates it when runs are split, joined or removed."""

    __slots__ = ("run",)

    def __init__(self, run: BlockRun) -> None:
        self.run = run


class BlockSets:
    """The KV blocks that each holder has. A holder is identified by an integer with one bit set.

    `sums` has the sum of the block hashes modulo 2**64, by holder bit. It is part of the digest of an index.
    """

    __slots__ = ("_cursors", "_root", "_runs", "_sweep", "counts", "sums")

    def __init__(self) -> None:
        self._runs: dict[int, BlockRun] = {}
        self._root = BlockRun(array("Q"), 0)
        self._root.before = self._root.after = self._root
        self._cursors: list[Cursor] = []
        self._sweep: Cursor | None = None
        self.counts: dict[int, int] = {}
        self.sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks, including those of retired bits that `sweep` has not reached yet."""
        return len(self._runs)

    def add(self, bit: int, blocks: Iterable[int], parent: int | None = None) -> int:
        """Add blocks to the set of the holder `bit`, and return how many of them it did not have before.

        Arrays of type "Q" are the fastest input. `parent` is the sequence hash of the block before `blocks` in the
        prompt, if known. It only helps to keep runs long.
        """
        rest = as_block_array(blocks)
        get = self._runs.get
        at, end = 0, len(rest)
        added = total = 0
        while at < end:
            block = rest[at]
            run = get(block)
            if run is None and end == 1:
                # A rank that decodes announces block by block, so most events hold one block.
                self._append(bit, block, parent)
                added, total = 1, block
                break
            if run is None:
                listed, count = self._add_new(bit, rest[at : at + RUN_BLOCKS_MAX], parent)
            else:
                begin, count = _match_run(rest, at, run.blocks)
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
        """Remove those of `blocks` that the holder `bit` has, and return how many. Arrays of type "Q" are fastest."""
        rest = as_block_array(blocks)
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
            if theirs[-1] == block:  # caches evict the last block of a sequence first
                count = _match_reversed_suffix(rest, at, theirs)
                begin = len(theirs) - count
            else:
                begin, count = _match_run(rest, at, theirs)
            removed += count
            total += self._take(run, begin, count, bit)
            at += count
        self.counts[bit] = self.counts.get(bit, 0) - removed
        self.sums[bit] = (self.sums.get(bit, 0) - total) & U64_MASK
        return removed

    def has(self, bit: int, block: int) -> bool:
        run = self._runs.get(block)
        return run is not None and bool(run.mask & bit)

    def match_depths(self, query: Sequence[int], among: int, start: int = 0) -> list[tuple[int, int]]:
        """Return the match lengths of the holders, each with the mask of the holders that have it, by rising length.

        Every holder in `among` is in exactly one of these masks. `query` has the sequence hashes of the prompt from the
        first block on; arrays of type "Q" are the fastest input. The caller knows that the first `start` blocks match.
        """
        get = self._runs.get
        found: list[tuple[int, int]] = []
        query = as_block_array(query)
        alive = among
        at, end = start, len(query)
        while alive and at < end:
            run = get(query[at])
            if run is None:
                break
            kept = alive & run.mask
            if kept != alive:
                found.append((at, alive ^ kept))
                alive = kept
            blocks = run.blocks
            after = at + len(blocks)
            if after == at + 1 or query[at:after] == blocks:
                at = after
                continue
            at += _match_run(query, at, blocks)[1]  # the query enters the run after its start or leaves before its end
        if alive:
            found.append((at, alive))
        return found

    def cursor(self) -> Cursor:
        """Return a cursor before the first run. Call `release` when the traversal is done.

        If a block does not change during the traversal, the cursor visits it at least once. Every open cursor slows
        down changes a little.
        """
        cursor = Cursor(self._root.after)
        self._cursors.append(cursor)
        return cursor

    def next_run(self, cursor: Cursor) -> BlockRun | None:
        """Return the run at the cursor, and advance the cursor; None at the end. The caller must not change the run."""
        run = cursor.run
        if run is self._root:
            return None
        cursor.run = run.after
        return run

    def release(self, cursor: Cursor) -> None:
        self._cursors.remove(cursor)

    def retire(self, bit: int) -> None:
        """Drop the counts of the holder `bit`, because its blocks are no longer valid.

        This takes constant time: the bit stays in the stored masks until `sweep` clears it. Until then the caller must
        not look it up.
        """
        self.counts.pop(bit, None)
        self.sums.pop(bit, None)

    def begin_sweep(self) -> None:
        """Start to clear retired bits from all stored masks. `sweep` does the work in steps."""
        assert self._sweep is None, "one sweep at a time"
        self._sweep = self.cursor()

    def sweep(self, bits: int, steps: int) -> int:
        """Clear the retired `bits`, the same in every call of a sweep. Return the steps left over; 0 if not finished.

        A run counts as one step, and so does each block that is removed.
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
        """Add up to one run of blocks whose first is unknown. Return the added blocks and the input length covered."""
        runs = self._runs
        listed = blocks.tolist()
        count = len(listed)
        joined = self._joinable(parent, bit, count)
        run = joined or BlockRun(blocks, bit)
        known = len(runs)
        # `setdefault` looks up and stores each block in one operation. Usually all blocks are new and distinct.
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
        run = self._joinable(parent, bit, 1)
        if run is None:
            run = BlockRun(array("Q", (block,)), bit)
            self._link_new(run)
        else:
            run.blocks.append(block)
        self._runs[block] = run

    def _give(self, run: BlockRun, begin: int, count: int, bit: int, parent: int | None) -> list[int]:
        """Add a holder to a part of a run; return the blocks of that part."""
        if count < len(run.blocks):
            run = self._cut(run, begin, count)
        run.mask |= bit
        blocks = run.blocks
        joined = self._joinable(parent, run.mask, count)
        if joined is not None and joined is not run:
            # A cursor that has passed the joined run may not have seen these blocks yet.
            if self._cursors:
                self._unlink(joined)
                self._link(joined, self._root.before)
            self._unlink(run)
            joined.blocks += blocks
            self._runs.update(dict.fromkeys(blocks, joined))
        return blocks.tolist()

    def _take(self, run: BlockRun, begin: int, count: int, bit: int) -> int:
        """Remove one of the holders from a part of a run; return the sum of the blocks of that part."""
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
            # The holder evicts a run from its end on. Keep what the other holders have in one run.
            after.blocks = blocks + after.blocks
            self._runs.update(dict.fromkeys(listed, after))
            self._unlink(run)
        return sum(listed)

    def _forget(self, run: BlockRun, begin: int, end: int) -> int:
        runs, blocks = self._runs, run.blocks
        listed = blocks[begin:end].tolist()
        for block in listed:
            del runs[block]
        if not begin and end == len(blocks):
            self._unlink(run)
        else:
            if begin and end < len(blocks):
                self._place(BlockRun(blocks[end:], run.mask), run)
                end = len(blocks)
            del blocks[begin:end]
        return sum(listed)

    def _cut(self, run: BlockRun, begin: int, count: int) -> BlockRun:
        """Split a part off a run, and link it next to the remainder."""
        blocks = run.blocks
        after = begin + count
        cut = BlockRun(blocks[begin:after], run.mask)
        if begin:
            self._place(cut, run)
            run.blocks = blocks[:begin]
            if after < len(blocks):
                self._place(BlockRun(blocks[after:], run.mask), cut)
        else:
            self._place(cut, run.before)
            run.blocks = blocks[after:]
            for cursor in self._cursors:
                if cursor.run is run:
                    cursor.run = cut
        return cut

    def _joinable(self, parent: int | None, mask: int, count: int) -> BlockRun | None:
        """Return the parent's run, if `count` blocks with these holders can be appended to it."""
        run = None if parent is None else self._runs.get(parent)
        if run is None or run.mask != mask or len(run.blocks) + count > RUN_BLOCKS_MAX or run.blocks[-1] != parent:
            return None
        return run

    def _place(self, run: BlockRun, before: BlockRun) -> None:
        self._link(run, before)
        self._runs.update(dict.fromkeys(run.blocks, run))

    def _link_new(self, run: BlockRun) -> None:
        # The blocks are new, so cursors may skip them. Link them behind open cursors, or a traversal might never end.
        self._link(run, self._root if self._cursors else self._root.before)

    def _link(self, run: BlockRun, before: BlockRun) -> None:
        after = before.after
        run.before, run.after = before, after
        before.after = after.before = run

    def _unlink(self, run: BlockRun) -> None:
        for cursor in self._cursors:
            if cursor.run is run:
                cursor.run = run.after
        before, after = run.before, run.after
        before.after, after.before = after, before


def _match_run(query: "array[int]", at: int, blocks: "array[int]") -> tuple[int, int]:
    """Return where the block `query[at]` is in `blocks`, and for how many blocks both sequences agree from there."""
    begin = 0 if blocks[0] == query[at] else blocks.index(query[at])
    theirs = query[at : at + len(blocks) - begin]
    ours = blocks[begin : begin + len(theirs)]
    if ours == theirs:
        return begin, len(ours)
    return begin, next(number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)


def _match_reversed_suffix(query: "array[int]", at: int, blocks: "array[int]") -> int:
    """Return how many blocks from the end of `blocks`, in reverse order, the query has from `at` on; at least one."""
    theirs = query[at : at + len(blocks)]
    count = len(theirs)
    if count > 1:
        theirs.reverse()
        if theirs != blocks[-count:]:
            pairs = zip(reversed(theirs), reversed(blocks), strict=False)
            return next(number for number, (one, other) in enumerate(pairs) if one != other)
    return count


def as_block_array(blocks: Iterable[int]) -> "array[int]":
    """Return an array of type "Q" as it is, other blocks as a new one. Raises OverflowError if one is not a u64."""
    return blocks if type(blocks) is array else array("Q", blocks)


def split_bits(mask: int) -> list[int]:
    """Return the bits that are set in `mask` as integers with one bit set, lowest first."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits
