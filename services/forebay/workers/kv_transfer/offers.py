"""Offers of a worker: leases, and the generation words that show which blocks are still held.

The word is changed before the blocks are freed. A reader that finds the descriptor's generation in the word after it
has read the blocks has therefore read the offered content: a seqlock with one writer. The order of stores is
guaranteed on x86. Elsewhere the interpreter's locks between the two stores guarantee it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.base import hex_digest, pack_u64
from forebay.workers.kv_transfer.api import FreeReason, Offer, OnFree, Stats
from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, BlockLocation, encode_location, pack_slots
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.descriptor import Slots

_COUNTER_BITS = 31
_RANDOM_BYTES = 4


@dataclass(slots=True)
class HeldOffer:
    """Blocks that wait for their reader."""

    request_id: str
    word: int
    generation: int
    slots: "Slots"
    until_s: float


class KvOffers:
    """Offers of one transport. Use it on the transport's event loop only."""

    def __init__(self, arena: Arena, stats: Stats, lease_s: float, on_free: OnFree) -> None:
        self._arena = arena
        self._stats = stats
        self._lease_s = lease_s
        self._free_callback = on_free
        self._loop = asyncio.get_running_loop()
        # by request; all leases have the same length, so the first one ends first
        self._held: dict[str, HeldOffer] = {}
        self._by_generation: dict[int, HeldOffer] = {}
        self._words = list(range(OFFERS_MAX))
        self._made = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request_id: str, blocks: Sequence[int], *, agent: str, route: bytes, checksum: bool) -> Offer:
        """Hold blocks and return their location. Raises TransferError without holding any."""
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
            blocks=pack_slots(slots),
            word=self._words[-1],
            generation=self._generation(),
            sums=sums,
        )
        descriptor = encode_location(place)
        self._hold(HeldOffer(request_id, place.word, place.generation, slots, self._loop.time() + self._lease_s))
        return Offer(
            descriptor=descriptor,
            checksum=hex_digest(xxh3_64_intdigest(sums)) if checksum else None,
            bytes=len(slots) * self._arena.block_bytes,
        )

    def held(self, generation: int) -> HeldOffer | None:
        """Return the offer with a generation, None if it has ended."""
        return self._by_generation.get(generation)

    def end(self, generation: int, why: FreeReason) -> bool:
        """End the offer with a generation. Return whether there was one."""
        held = self._by_generation.get(generation)
        if held is None:
            return False
        self._end(held, why)
        return True

    def release(self, request_id: str) -> bool:
        """End the offer of a request. Return whether there was one."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._end(held, "released")
        return True

    def close(self) -> None:
        """End all offers."""
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
        self._stats.offered_bytes += len(held.slots) * self._arena.block_bytes
        self._stats.held_offers += 1
        self._stats.held_blocks += len(held.slots)
        if self._timer is None:
            self._timer = self._loop.call_at(held.until_s, self._expire)

    def _end(self, held: HeldOffer, why: FreeReason) -> None:
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

    def _expire(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for held in list(self._held.values()):
            if held.until_s > now_s:
                break
            self._end(held, "expired")
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(next(iter(self._held.values())).until_s, self._expire)
