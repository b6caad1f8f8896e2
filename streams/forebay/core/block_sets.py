"""Which holders have which blocks: one dict from sequence hash to a bitmask of holders.

Theory of operation. A holder is a bit. A query is a list of sequence hashes, a prompt's blocks from the
first on; a holder's depth is how many of them it has without a hole. The walk goes over strides of the
query with C-level calls and looks at single blocks only in strides where the holders change, so it is
exact on any history: nothing is assumed about which blocks imply which.
"""

from collections.abc import Iterable, Sequence

from forebay.events.base import U64_MASK

WALK_STRIDE = 64  # blocks looked up at once: a miss in the first wastes at most that many look-ups


class BlockSets:
    """Sets of blocks, one per bit. `counts` and `sums` are per bit: how many blocks, and their sum mod 2**64."""

    __slots__ = ("_masks", "counts", "sums")

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Distinct blocks that somebody has."""
        return len(self._masks)

    def add(self, bit: int, blocks: Iterable[int]) -> int:
        """Give `blocks` to the holder `bit`; how many it did not have yet."""
        masks = self._masks
        get = masks.get
        added = summed = 0
        last = merged = 0
        for block in blocks:
            mask = get(block, 0)
            if mask & bit:
                continue
            if mask != last or not merged:
                # Neighbours mostly have the same holders, and equal masks should be one object: less
                # memory, and the walk compares a stride by identity.
                last, merged = mask, mask | bit
            masks[block] = merged
            added += 1
            summed += block
        self.counts[bit] = self.counts.get(bit, 0) + added
        self.sums[bit] = (self.sums.get(bit, 0) + summed) & U64_MASK
        return added

    def remove(self, bit: int, blocks: Iterable[int]) -> int:
        """Take `blocks` from the holder `bit`; how many it had."""
        masks = self._masks
        get = masks.get
        removed = summed = 0
        last = rest = 0
        for block in blocks:
            mask = get(block, 0)
            if not mask & bit:
                continue
            if mask != last:
                last, rest = mask, mask ^ bit
            if rest:
                masks[block] = rest
            else:
                del masks[block]
            removed += 1
            summed += block
        self.counts[bit] = self.counts.get(bit, 0) - removed
        self.sums[bit] = (self.sums.get(bit, 0) - summed) & U64_MASK
        return removed

    def has(self, bit: int, block: int) -> bool:
        """Whether the holder has this one block."""
        return bool(self._masks.get(block, 0) & bit)

    def drops(self, query: Sequence[int], among: int) -> list[tuple[int, int]]:
        """Where the holders in `among` leave the query: (depth, mask), depths rising, every holder once."""
        get = self._masks.get
        found: list[tuple[int, int]] = []
        alive = among
        for start in range(0, len(query), WALK_STRIDE):
            if not alive:
                return found
            masks = list(map(get, query[start : start + WALK_STRIDE]))
            first = masks[0]
            if first is not None and masks.count(first) == len(masks):
                kept = alive & first
                if kept != alive:
                    found.append((start, alive ^ kept))
                    alive = kept
                continue
            for at, mask in enumerate(masks, start):
                kept = alive & mask if mask else 0
                if kept != alive:
                    found.append((at, alive ^ kept))
                    alive = kept
                    if not alive:
                        return found
        if alive:
            found.append((len(query), alive))
        return found

    def blocks_of(self, bit: int) -> list[int]:
        """All blocks of one holder, ascending. A walk over everything: for snapshots and questions."""
        return sorted(block for block, mask in self._masks.items() if mask & bit)

    def retire(self, bit: int) -> None:
        """Forget the holder's counts; its bit stays in the masks until `sweep` and must not be asked for."""
        self.counts.pop(bit, None)
        self.sums.pop(bit, None)

    def sweep(self, bits: int) -> None:
        """Take retired bits out of every mask. A walk over everything, done rarely."""
        self._masks = {block: mask & ~bits for block, mask in self._masks.items() if mask & ~bits}


def bits_of(mask: int) -> list[int]:
    """The single bits of a mask, lowest first."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits
