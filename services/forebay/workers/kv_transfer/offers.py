"""The offers of a holder: their leases, and the generation words that show whether the blocks are still kept.

Theory of operation. Each offer has a generation word in memory that readers can read. The holder changes the word
before it frees the blocks. A reader first reads the blocks and then the word. If the word has the generation of the
descriptor, the reader has read the offered content: a seqlock with one writer. The order of the stores is guaranteed on
x86. Elsewhere the interpreter's locks between the two stores guarantee it.
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
    """An offer that has not ended. Its generation word, number `word`, has the value `generation`.

    The lease ends at `until_s`, in seconds of the event loop's clock.
    """

    request_id: str
    word: int
    generation: int
    slots: "Slots"
    until_s: float


class KvOffers:
    """The offers of one transport. Use it on the transport's event loop only."""

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
            blocks=pack_slots(slots),
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
        held = self._by_generation.get(generation)
        if held is None:
            return False
        self._end(held, why)
        return True

    def release(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        if held is None:
            return False
        self._end(held, "released")
        return True

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
