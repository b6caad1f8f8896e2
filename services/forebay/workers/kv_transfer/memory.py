"""Memory of a worker's KV blocks: one registered mapping with a spare slot for each block.

Theory of operation. An abandoned transfer may still be written to. Its slots are therefore quarantined and replaced by
spare slots until the transfer is known to be over. Readers of `view` notice only that the content changed. The slots
are followed by the generation words, one per possible offer, and by words that receive generations of other workers.
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
READS_MAX = 256  # at once, including abandoned ones
PAGE_BYTES = 4096


def words_offset(slots: int, block_bytes: int) -> int:
    """Return the byte offset of the generation words from the first slot; they have pages of their own."""
    return -(-slots * block_bytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Slots for `blocks` blocks of `block_bytes` each; untouched ones use no RAM. Raises EngineError."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        import numpy  # noqa: PLC0415 - an extra

        if blocks < 1 or block_bytes < 1 or 2 * blocks > SLOTS_MAX:
            raise EngineError(
                f"{blocks} KV blocks of {block_bytes} bytes: expected 1 to {SLOTS_MAX // 2} blocks of 1 byte or more"
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
            raise EngineError(
                f"cannot map memory for {self.slots} KV blocks of {block_bytes} bytes: {error}"
            ) from error
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
        """Return the writable bytes of a block's slot. Raises IndexError for an invalid block."""
        if block < 0:
            raise IndexError(f"block {block} does not exist")
        row: Array = self._rows[self._slot_of[block]]
        return row

    def row(self, slot: int) -> "Array":
        """Return the bytes of a slot by slot number, including spare slots."""
        row: Array = self._rows[slot]
        return row

    def numbers(self, blocks: Sequence[int]) -> "Numbers":
        """Return block numbers as an array. Raises TransferError (`refused`) for invalid blocks."""
        import numpy  # noqa: PLC0415 - an extra

        packed = array("q", blocks)  # twice as fast as numpy with lists
        numbers: Numbers = numpy.frombuffer(packed, dtype=numpy.int64) if packed else numpy.empty(0, dtype=numpy.int64)
        if packed and (int(numbers.min()) < 0 or int(numbers.max()) >= self.blocks):
            raise TransferError(f"invalid block number: this worker has blocks 0 to {self.blocks - 1}", "refused")
        return numbers

    def distinct(self, numbers: "Numbers") -> bool:
        """Return whether all blocks differ."""
        import numpy  # noqa: PLC0415 - an extra

        places = numpy.arange(len(numbers), dtype=numpy.int32)
        self._marks[numbers] = places
        return bool((self._marks[numbers] == places).all())

    def slots_of(self, numbers: "Numbers") -> "Slots":
        """Return the slots that currently back the blocks."""
        slots: Slots = self._slot_of[numbers]
        return slots

    def reserve(self, count: int) -> None:
        """Reserve spare slots for a transfer. Raises TransferError (`full`)."""
        if len(self._spare) - self._promised < count:
            kept = self.blocks - len(self._spare)
            raise TransferError(
                f"{kept} blocks are quarantined for transfers that do not end: no spare slots are left", "full"
            )
        self._promised += count

    def unreserve(self, count: int) -> None:
        """Cancel a reservation that is not needed any more."""
        self._promised -= count

    def quarantine(self, numbers: "Numbers") -> "Slots":
        """Back the blocks by reserved spare slots. Return their previous slots, now owned by the caller."""
        kept = self.slots_of(numbers)
        self._slot_of[numbers] = [self._spare.pop() for _ in range(len(numbers))]
        return kept

    def restore_spares(self, slots: "Slots") -> None:
        """Make quarantined slots that nobody writes to any more spare again."""
        self._spare += slots.tolist()
