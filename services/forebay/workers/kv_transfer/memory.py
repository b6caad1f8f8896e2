"""Memory of a worker's KV blocks: one mapping, registered with NIXL, with two slots per block.

Theory of operation. A slot is the memory of one block. Half of the slots are spare. If a read is abandoned, for example
at a timeout, NIXL may still write to its slots. These slots are therefore quarantined until the transfer is known to be
over, and spare slots replace them. Callers of `view` notice only that the content of a block has changed.

The slots are followed by one generation word per possible offer, which readers read, and by one word per possible read,
into which the generation word of the holder is read.
"""

import asyncio
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.base import hex_digest, pack_u32, pack_u64
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import Array, FreeReason, Numbers, Offer, OnFree, Stats
from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, SLOTS_MAX, BlockLocation, Slots, encode_location
from forebay.workers.kv_transfer.nixl_agent import TransferError

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
        memory = np.frombuffer(mapped, dtype=np.uint8)
        self.address: int = memory.ctypes.data
        self._rows = memory[: self.slots * block_bytes].reshape(self.slots, block_bytes)
        self.words: np.ndarray[Any, np.dtype[np.uint64]] = memory[start:].view(np.uint64)[:OFFERS_MAX]
        self.scratch: np.ndarray[Any, np.dtype[np.uint64]] = memory[start:].view(np.uint64)[OFFERS_MAX:]
        self._slot_of = np.arange(blocks, dtype=np.int32)
        self._spare = list(range(blocks, self.slots))
        self._marks = np.zeros(blocks, dtype=np.int32)
        self._promised = 0

    def view(self, block: int) -> Array:
        """Return the writable bytes of a block. Raises IndexError for an invalid block number."""
        if block < 0:
            raise IndexError(f"block {block} does not exist")
        row: Array = self._rows[self._slot_of[block]]
        return row

    def row(self, slot: int) -> Array:
        """Return the bytes of a slot. Unlike `view`, the argument is the number of a slot, not of a block."""
        row: Array = self._rows[slot]
        return row

    def numbers(self, blocks: Sequence[int]) -> Numbers:
        """Return block numbers as an array. Raises TransferError with reason `refused` for an invalid block number."""
        packed = array("q", blocks)  # twice as fast as numpy with lists
        numbers: Numbers = np.frombuffer(packed, dtype=np.int64) if packed else np.empty(0, dtype=np.int64)
        if packed and (int(numbers.min()) < 0 or int(numbers.max()) >= self.blocks):
            raise TransferError(f"invalid block number: this worker has blocks 0 to {self.blocks - 1}", "refused")
        return numbers

    def distinct(self, numbers: Numbers) -> bool:
        places = np.arange(len(numbers), dtype=np.int32)
        self._marks[numbers] = places
        return bool((self._marks[numbers] == places).all())

    def slots_of(self, numbers: Numbers) -> Slots:
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

    def quarantine(self, numbers: Numbers) -> Slots:
        """Replace the slots of these blocks by reserved spare slots. Return the old ones, for `restore_spares`."""
        kept = self.slots_of(numbers)
        self._slot_of[numbers] = [self._spare.pop() for _ in range(len(numbers))]
        return kept

    def restore_spares(self, slots: Slots) -> None:
        """Make quarantined slots spare again, because nothing writes to them any more."""
        self._spare += slots.tolist()


_COUNTER_BITS = 31
_RANDOM_BYTES = 4


@dataclass(slots=True)
class HeldOffer:
    """An offer that has not ended. Its generation word, number `word`, has the value `generation`.

    The lease ends at `until_s`, in seconds of the event loop's clock.
    """

    request_id: str
    word: int
    generation: int
    slots: Slots
    until_s: float


class KvOffers:
    """The offers of one transport. Use it on the transport's event loop only.

    Each offer has a generation word in memory that readers can read. The holder changes the word before it frees the
    blocks. A reader first reads the blocks and then the word. If the word has the generation of the descriptor, the
    reader has read the offered content: a seqlock with one writer. The order of the stores is guaranteed on x86.
    Elsewhere the interpreter's locks between the two stores guarantee it.
    """

    def __init__(self, arena: Arena, stats: Stats, on_free: OnFree) -> None:
        self._arena = arena
        self._stats = stats
        self._free_callback = on_free
        self._loop = asyncio.get_running_loop()
        # By request id, in the order in which they began. All leases have the same length, so the first one ends first.
        self._held: dict[str, HeldOffer] = {}
        self._by_generation: dict[int, HeldOffer] = {}
        self._words = list(range(OFFERS_MAX))
        self._made = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, request_id: str, blocks: Sequence[int], *, lease_s: float, agent: str, route: bytes, checksum: bool
    ) -> Offer:
        """Begin an offer of blocks in the order of the prompt, and return their location.

        `lease_s` must be the same for all offers in progress. Raises TransferError if the blocks cannot be offered;
        nothing has changed then.
        """
        if request_id in self._held:
            raise TransferError(f"blocks of {request_id} are already offered", "refused")
        if not len(blocks):
            raise TransferError(f"{request_id} has no blocks to offer", "refused")
        if not self._words:
            raise TransferError(f"{OFFERS_MAX} offers are already waiting for readers", "full")
        slots = self._arena.slots_of(self._arena.numbers(blocks))
        sums = pack_u64(xxh3_64_intdigest(self._arena.row(slot).data) for slot in slots.tolist()) if checksum else b""
        place = BlockLocation(
            agent=agent,
            route=route,
            address=self._arena.address,
            slots=self._arena.slots,
            block_bytes=self._arena.block_bytes,
            blocks=pack_u32(slots.tolist()),
            word=self._words[-1],
            generation=self._generation(),
            sums=sums,
        )
        descriptor = encode_location(place)
        self._hold(HeldOffer(request_id, place.word, place.generation, slots, self._loop.time() + lease_s))
        return Offer(
            descriptor=descriptor,
            checksum=hex_digest(xxh3_64_intdigest(sums)) if checksum else None,
            bytes=len(slots) * self._arena.block_bytes,
        )

    def end(self, generation: int, why: FreeReason) -> bool:
        return self._end(self._by_generation.get(generation), why)

    def release(self, request_id: str) -> bool:
        return self._end(self._held.get(request_id), "released")

    def close(self) -> None:
        for held in list(self._held.values()):
            self._end(held, "released")

    def _generation(self) -> int:
        # The counter prevents repetition within a process; random bits prevent guesses and repetition after a restart.
        self._made += 1
        return (runtime.random_int(_RANDOM_BYTES) << _COUNTER_BITS) | (self._made & ((1 << _COUNTER_BITS) - 1))

    def _hold(self, held: HeldOffer) -> None:
        self._words.pop()
        self._arena.words[held.word] = held.generation
        self._held[held.request_id] = self._by_generation[held.generation] = held
        self._stats.offered += 1
        self._stats.held_offers += 1
        self._stats.held_blocks += len(held.slots)
        if self._timer is None:
            self._timer = self._loop.call_at(held.until_s, self._expire)

    def _end(self, held: HeldOffer | None, why: FreeReason) -> bool:
        if held is None:
            return False
        self._arena.words[held.word] = 0
        del self._held[held.request_id], self._by_generation[held.generation]
        self._words.append(held.word)
        self._stats.held_offers -= 1
        self._stats.held_blocks -= len(held.slots)
        self._stats.freed[why] = self._stats.freed.get(why, 0) + 1
        if not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free_callback(held.request_id, why)
        return True

    def _expire(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for held in list(self._held.values()):
            if held.until_s > now_s:
                break
            self._end(held, "expired")
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(next(iter(self._held.values())).until_s, self._expire)
