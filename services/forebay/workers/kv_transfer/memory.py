"""The memory of a worker's KV blocks: one mapping, registered once, with as many spare slots as there are blocks.

Theory of operation. A transfer that was given up may still be written to, so the slots it was for are taken out and
spare ones stand in for them until it is known to be over: whoever fetches never sees that, but for the contents. Behind
the slots lie the generation words, one for each offer there may be, and words that a reader reads others' into.
"""

import mmap
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, SLOTS_MAX
from forebay.workers.kv_transfer.nixl_agent import TransferError

if TYPE_CHECKING:
    import numpy as np

    from forebay.workers.kv_transfer.api import Array, Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

WORD_BYTES = 8
READS_MAX = 256  # at once, those that were given up included
PAGE_BYTES = 4096


def words_offset(slots: int, block_bytes: int) -> int:
    """Where the generation words begin, in bytes from the first slot: on a page of their own."""
    return -(-slots * block_bytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Slots for `blocks` blocks of `block_bytes` each; untouched ones cost nothing. Raises EngineError."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        import numpy  # noqa: PLC0415 - an extra

        if blocks < 1 or block_bytes < 1 or 2 * blocks > SLOTS_MAX:
            raise EngineError(
                f"{blocks} KV blocks of {block_bytes} bytes: there must be 1 to {SLOTS_MAX // 2}, of at least one byte"
            )
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.slots = 2 * blocks
        start = words_offset(self.slots, block_bytes)
        self.bytes = start + WORD_BYTES * (OFFERS_MAX + READS_MAX)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapped = mmap.mmap(-1, self.bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(f"{self.slots} KV blocks of {block_bytes} bytes cannot be mapped: {error}") from error
        memory = numpy.frombuffer(mapped, dtype=numpy.uint8)
        self.address: int = memory.ctypes.data
        self._rows = memory[: self.slots * block_bytes].reshape(self.slots, block_bytes)
        self.words: np.ndarray[Any, np.dtype[np.uint64]] = memory[start:].view(numpy.uint64)[:OFFERS_MAX]
        self.scratch: np.ndarray[Any, np.dtype[np.uint64]] = memory[start:].view(numpy.uint64)[OFFERS_MAX:]
        self._slot_of = numpy.arange(blocks, dtype=numpy.int32)
        self._spare = list(range(blocks, self.slots))
        self._marks = numpy.zeros(blocks, dtype=numpy.int32)
        self._promised = 0

    def view(self, block: int) -> "Array":
        """The bytes of a block's slot, writable. Raises IndexError for a block that is none."""
        if block < 0:
            raise IndexError(f"there is no block {block}")
        row: Array = self._rows[self._slot_of[block]]
        return row

    def row(self, slot: int) -> "Array":
        """The bytes of a slot by its own number, spare ones included."""
        row: Array = self._rows[slot]
        return row

    def numbers(self, blocks: Sequence[int]) -> "Numbers":
        """Block numbers as an array. Raises TransferError (`refused`) for blocks that are none."""
        import numpy  # noqa: PLC0415 - an extra

        packed = array("q", blocks)  # twice as fast as numpy is with lists
        numbers: Numbers = numpy.frombuffer(packed, dtype=numpy.int64) if packed else numpy.empty(0, dtype=numpy.int64)
        if packed and (int(numbers.min()) < 0 or int(numbers.max()) >= self.blocks):
            raise TransferError(f"there are blocks 0 to {self.blocks - 1} here, and others were named", "refused")
        return numbers

    def distinct(self, numbers: "Numbers") -> bool:
        """Whether no block is named twice."""
        import numpy  # noqa: PLC0415 - an extra

        places = numpy.arange(len(numbers), dtype=numpy.int32)
        self._marks[numbers] = places
        return bool((self._marks[numbers] == places).all())

    def slots_of(self, numbers: "Numbers") -> "Slots":
        """The slots that stand for blocks at the moment."""
        slots: Slots = self._slot_of[numbers]
        return slots

    def promise(self, count: int) -> None:
        """Keep as many spare slots ready as a transfer may come to need. Raises TransferError (`full`)."""
        if len(self._spare) - self._promised < count:
            kept = self.blocks - len(self._spare)
            raise TransferError(f"{kept} blocks are kept for transfers that do not end: there is no room", "full")
        self._promised += count

    def unpromise(self, count: int) -> None:
        """What was promised was not needed, or was taken."""
        self._promised -= count

    def set_apart(self, numbers: "Numbers") -> "Slots":
        """Let spare slots, promised before, stand for blocks; those that did until now are the caller's."""
        kept = self.slots_of(numbers)
        self._slot_of[numbers] = [self._spare.pop() for _ in range(len(numbers))]
        return kept

    def give_back(self, slots: "Slots") -> None:
        """Slots that were set apart, and that nobody writes to any more, are spare ones."""
        self._spare += slots.tolist()
