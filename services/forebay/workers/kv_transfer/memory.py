"""Memory of a worker's KV blocks: one mapping, registered with NIXL, with two slots per block.

Theory of operation. A slot is the memory of one block. Half of the slots are spare. If a read is abandoned, for example
at a timeout, NIXL may still write to its slots. These slots are therefore quarantined until the transfer is known to be
over, and spare slots replace them. Callers of `view` notice only that the content of a block has changed.

The slots are followed by one generation word per possible offer, which readers read, and by one word per possible read,
into which the generation word of the holder is read.
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
READS_MAX = 256  # concurrent reads, including abandoned ones
PAGE_BYTES = 4096


def words_offset(slots: int, block_bytes: int) -> int:
    """Return the byte offset of the generation words from the first slot. They begin on a new memory page."""
    return -(-slots * block_bytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Memory for the KV blocks of a worker. Slots that were never written to use no RAM.

    `words` are the generation words of this worker's offers; those of other workers are read into `scratch`. Raises
    EngineError if the sizes are invalid, or the memory cannot be mapped.
    """

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
        """Return the writable bytes of a block. Raises IndexError for an invalid block number."""
        if block < 0:
            raise IndexError(f"block {block} does not exist")
        row: Array = self._rows[self._slot_of[block]]
        return row

    def row(self, slot: int) -> "Array":
        """Return the bytes of a slot. Unlike `view`, the argument is the number of a slot, not of a block."""
        row: Array = self._rows[slot]
        return row

    def numbers(self, blocks: Sequence[int]) -> "Numbers":
        """Return block numbers as an array. Raises TransferError with reason `refused` for an invalid block number."""
        import numpy  # noqa: PLC0415 - an extra

        packed = array("q", blocks)  # twice as fast as numpy with lists
        numbers: Numbers = numpy.frombuffer(packed, dtype=numpy.int64) if packed else numpy.empty(0, dtype=numpy.int64)
        if packed and (int(numbers.min()) < 0 or int(numbers.max()) >= self.blocks):
            raise TransferError(f"invalid block number: this worker has blocks 0 to {self.blocks - 1}", "refused")
        return numbers

    def distinct(self, numbers: "Numbers") -> bool:
        import numpy  # noqa: PLC0415 - an extra

        places = numpy.arange(len(numbers), dtype=numpy.int32)
        self._marks[numbers] = places
        return bool((self._marks[numbers] == places).all())

    def slots_of(self, numbers: "Numbers") -> "Slots":
        slots: Slots = self._slot_of[numbers]
        return slots

    def reserve(self, count: int) -> None:
        """Reserve spare slots in case slots must be quarantined. Raises TransferError (`full`) if too few are left."""
        if len(self._spare) - self._promised < count:
            kept = self.blocks - len(self._spare)
            raise TransferError(
                f"{kept} blocks are quarantined for transfers that do not end: no spare slots are left", "full"
            )
        self._promised += count

    def unreserve(self, count: int) -> None:
        self._promised -= count

    def quarantine(self, numbers: "Numbers") -> "Slots":
        """Replace the slots of these blocks by reserved spare slots. Return the old ones, for `restore_spares`."""
        kept = self.slots_of(numbers)
        self._slot_of[numbers] = [self._spare.pop() for _ in range(len(numbers))]
        return kept

    def restore_spares(self, slots: "Slots") -> None:
        """Make quarantined slots spare again, because nothing writes to them any more."""
        self._spare += slots.tolist()
