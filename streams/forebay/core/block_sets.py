"""Which holders have which blocks, and how deep each holder's share of a prompt goes.

Theory of operation. A holder is a bit. A query is a list of sequence hashes, a prompt's blocks from the
first on; a holder's depth is how many of them it has without a hole. Blocks are kept in runs: a few blocks
that arrived one after the other and have the same holders, found through a dict from block to run. Where a
query goes on as a run does, one comparison answers for the whole run. A run says nothing about which blocks
imply which, so the walk is exact on any history; a history without order only makes the runs short.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, islice

from forebay.events.base import U64_MASK

RUN_BLOCKS_MAX = 32  # bounds the work of splitting a run; longer ones would hardly speed up the walk


class _Run:
    """Blocks that follow each other and have the same holders; every block is in one run."""

    __slots__ = ("blocks", "mask")

    def __init__(self, blocks: list[int], mask: int) -> None:
        self.blocks = blocks
        self.mask = mask


class BlockSets:
    """Sets of blocks, one per bit. `counts` and `sums` are per bit: how many blocks, and their sum mod 2**64."""

    __slots__ = ("_runs", "counts", "sums")

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self.counts: dict[int, int] = {}
        self.sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Distinct blocks that somebody has, or had when it was retired since the last sweep."""
        return len(self._runs)

    def add(self, bit: int, blocks: Iterable[int], parent: int | None = None) -> int:
        """Give `blocks` to the holder `bit`; how many it did not have yet.

        `parent` is the block before them, where it is known: it only helps to keep runs long.
        """
        rest = list(blocks)
        new: list[int] = []
        at = 0
        for run in self._known(rest):
            at += len(run.blocks)
            if not run.mask & bit:
                run.mask |= bit
                new += run.blocks
        if at:
            parent = rest[at - 1]
            del rest[:at]
        if rest:
            # Usually nobody has any of what is left.
            if self._runs.keys().isdisjoint(rest) and len(set(rest)) == len(rest):
                self._append(parent, rest, bit)
            else:
                rest = self._add_mixed(bit, rest, parent)
            new += rest
        self.counts[bit] = self.counts.get(bit, 0) + len(new)
        self.sums[bit] = (self.sums.get(bit, 0) + sum(new)) & U64_MASK
        return len(new)

    def remove(self, bit: int, blocks: Iterable[int]) -> int:
        """Take `blocks` from the holder `bit`; how many it had."""
        runs = self._runs
        rest = list(blocks)
        wanted = set(rest)
        removed: list[int] = []
        for run in dict.fromkeys(map(runs.get, rest)):
            if run is None or not run.mask & bit:
                continue
            whole = len(wanted) >= len(run.blocks) and wanted.issuperset(run.blocks)
            for piece in [run.blocks] if whole else self._split(run, wanted):
                removed += piece
                if run.mask != bit:
                    self._place(_Run(piece, run.mask ^ bit))
                else:
                    for block in piece:
                        del runs[block]
        self.counts[bit] = self.counts.get(bit, 0) - len(removed)
        self.sums[bit] = (self.sums.get(bit, 0) - sum(removed)) & U64_MASK
        return len(removed)

    def has(self, bit: int, block: int) -> bool:
        """Whether the holder has this one block."""
        run = self._runs.get(block)
        return run is not None and bool(run.mask & bit)

    def drops(self, query: Sequence[int], among: int, start: int = 0) -> list[tuple[int, int]]:
        """Where the holders in `among` leave the query, walked from `start` on.

        Returns (depth, mask) pairs, depths rising, every holder once. Lists are the fastest queries.
        """
        get = self._runs.get
        found: list[tuple[int, int]] = []
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
            if query[at:after] == blocks:
                at = after
                continue
            # The query enters the run late or leaves it early.
            for block in islice(blocks, blocks.index(query[at]), None):
                if at == end or query[at] != block:
                    break
                at += 1
        if alive:
            found.append((at, alive))
        return found

    def blocks_of(self, bit: int) -> list[int]:
        """All blocks of one holder, ascending. A walk over everything: for snapshots and questions."""
        return sorted(chain.from_iterable(run.blocks for run in self._each_run() if run.mask & bit))

    def retire(self, bit: int) -> None:
        """Forget the holder's counts; its bit stays in the masks until `sweep` and must not be asked for."""
        self.counts.pop(bit, None)
        self.sums.pop(bit, None)

    def sweep(self, bits: int) -> None:
        """Take retired bits out of every mask. A walk over everything, done rarely."""
        for run in self._each_run():
            run.mask &= ~bits
        self._runs = {block: run for block, run in self._runs.items() if run.mask}

    def _each_run(self) -> Iterator[_Run]:
        return (run for block, run in self._runs.items() if run.blocks[0] == block)

    def _known(self, blocks: list[int]) -> list[_Run]:
        """The whole runs that `blocks` begins with."""
        get = self._runs.get
        known: list[_Run] = []
        at, end = 0, len(blocks)
        while at < end:
            run = get(blocks[at])
            if run is None:
                break
            after = at + len(run.blocks)
            if blocks[at:after] != run.blocks:
                break
            known.append(run)
            at = after
        return known

    def _add_mixed(self, bit: int, blocks: list[int], parent: int | None) -> list[int]:
        """Add blocks that partly have holders; returns those that `bit` did not have."""
        get = self._runs.get
        masks: dict[int, int] = {}
        touched: dict[_Run, None] = {}
        for block in blocks:
            run = get(block)
            if run is None:
                masks[block] = bit
            elif not run.mask & bit:
                masks[block] = run.mask | bit
                touched[run] = None
        for run in touched:
            self._split(run, masks)
        new = list(masks)
        at = 0
        while at < len(new):
            start, mask = at, masks[new[at]]
            while at < len(new) and masks[new[at]] == mask:
                at += 1
            self._append(parent, new[start:at], mask)
            parent = new[at - 1]
        return new

    def _append(self, parent: int | None, blocks: list[int], mask: int) -> None:
        """Place blocks that are in no run: in the parent's run if they fit there, else in runs of their own."""
        run = None if parent is None else self._runs.get(parent)
        if (
            run is not None
            and run.mask == mask
            and len(run.blocks) + len(blocks) <= RUN_BLOCKS_MAX
            and run.blocks[-1] == parent
        ):
            run.blocks += blocks
            self._runs.update(dict.fromkeys(blocks, run))
            return
        for start in range(0, len(blocks), RUN_BLOCKS_MAX):
            self._place(_Run(blocks[start : start + RUN_BLOCKS_MAX], mask))

    def _place(self, run: _Run) -> None:
        self._runs.update(dict.fromkeys(run.blocks, run))

    def _split(self, run: _Run, out: Container[int]) -> list[list[int]]:
        """Cut a run at the blocks in `out`; returns those pieces, which are then in no run but still listed."""
        kept: list[list[int]] = []
        taken: list[list[int]] = []
        last: list[list[int]] | None = None
        for block in run.blocks:
            side = taken if block in out else kept
            if side is last:
                side[-1].append(block)
            else:
                side.append([block])
                last = side
        if kept:
            run.blocks = kept[0]
            for piece in kept[1:]:
                self._place(_Run(piece, run.mask))
        return taken


def bits_of(mask: int) -> list[int]:
    """The single bits of a mask, lowest first."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits
