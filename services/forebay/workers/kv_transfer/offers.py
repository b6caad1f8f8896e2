"""What a worker holds for readers: leases, and the generation words that say what is still held.

A word is changed before its blocks are given back. Whoever read blocks and, after them, finds the word as the
descriptor says, has read what was offered: a seqlock with one writer. The order of stores is that of x86; elsewhere
the interpreter's own locks, taken between the two, keep it.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay.events.base import hex_digest, pack_u64
from forebay.workers.kv_transfer.api import GivenBack, Offer, OnGivenBack, Stats
from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, Place, encode_place, pack_slots
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.descriptor import Slots

_COUNTER_BITS = 31
_RANDOM_BITS = 32


@dataclass(slots=True)
class Held:
    """Blocks that wait for their reader."""

    request_id: str
    word: int
    generation: int
    slots: "Slots"
    until_s: float


class Offers:
    """The offers of one transport. On its event loop only."""

    def __init__(self, arena: Arena, stats: Stats, lease_s: float, on_given_back: OnGivenBack) -> None:
        self._arena = arena
        self._stats = stats
        self._lease_s = lease_s
        self._on_given_back = on_given_back
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, Held] = {}  # by request; all leases are as long, so the first ends first
        self._by_generation: dict[int, Held] = {}
        self._words = list(range(OFFERS_MAX))
        self._made = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request_id: str, blocks: Sequence[int], *, agent: str, route: bytes, checksum: bool) -> Offer:
        """Hold blocks from now on, and say where. Raises TransferError; nothing is held then."""
        if request_id in self._held:
            raise TransferError(f"blocks of {request_id} are offered already", "refused")
        if not len(blocks):
            raise TransferError(f"{request_id} has no blocks to offer", "refused")
        if not self._words:
            raise TransferError(f"{OFFERS_MAX} offers wait for readers already", "full")
        slots = self._arena.slots_of(self._arena.numbers(blocks))
        sums = pack_u64(xxh3_64_intdigest(self._arena.row(slot).data) for slot in slots.tolist()) if checksum else b""
        place = Place(
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
        descriptor = encode_place(place)
        self._hold(Held(request_id, place.word, place.generation, slots, self._loop.time() + self._lease_s))
        return Offer(
            descriptor=descriptor,
            checksum=hex_digest(xxh3_64_intdigest(sums)) if checksum else None,
            bytes=len(slots) * self._arena.block_bytes,
        )

    def held(self, generation: int) -> Held | None:
        """What is held under a generation, if it still is."""
        return self._by_generation.get(generation)

    def end(self, generation: int, why: GivenBack) -> bool:
        """Give back what is held under a generation; whether anything was."""
        held = self._by_generation.get(generation)
        if held is None:
            return False
        self._end(held, why)
        return True

    def release(self, request_id: str) -> bool:
        """Give back what is held for a request; whether anything was."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._end(held, "released")
        return True

    def close(self) -> None:
        """Give back everything."""
        for held in list(self._held.values()):
            self._end(held, "released")

    def _generation(self) -> int:
        # The counter lets none come twice in a life; chance lets nobody tell the next one, nor an earlier life's.
        self._made += 1
        return (secrets.randbits(_RANDOM_BITS) << _COUNTER_BITS) | (self._made & ((1 << _COUNTER_BITS) - 1))

    def _hold(self, held: Held) -> None:
        self._words.pop()
        self._arena.words[held.word] = held.generation
        self._held[held.request_id] = self._by_generation[held.generation] = held
        self._stats.offered += 1
        self._stats.offered_bytes += len(held.slots) * self._arena.block_bytes
        self._stats.held_offers += 1
        self._stats.held_blocks += len(held.slots)
        if self._timer is None:
            self._timer = self._loop.call_at(held.until_s, self._expire)

    def _end(self, held: Held, why: GivenBack) -> None:
        self._arena.words[held.word] = 0
        del self._held[held.request_id], self._by_generation[held.generation]
        self._words.append(held.word)
        self._stats.held_offers -= 1
        self._stats.held_blocks -= len(held.slots)
        self._stats.given_back[why] = self._stats.given_back.get(why, 0) + 1
        if not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_given_back(held.request_id, why)

    def _expire(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for held in list(self._held.values()):
            if held.until_s > now_s:
                break
            self._end(held, "expired")
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(next(iter(self._held.values())).until_s, self._expire)
