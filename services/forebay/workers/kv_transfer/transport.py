"""Common part of all transports, and the function that opens one.

Theory of operation. A fetch validates the descriptor, waits for the limiter and reads. With checksums, it then verifies
every block and reads wrong ones again. The holder is notified at the end. One deadline covers everything.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.base import unpack_u64
from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import (
    BUCKETS_S,
    FetchedKv,
    FreeReason,
    Kind,
    KvTransport,
    Offer,
    OnFree,
    Stats,
)
from forebay.workers.kv_transfer.carrier import Carrier
from forebay.workers.kv_transfer.descriptor import BlockLocation, decode_location, slots_of
from forebay.workers.kv_transfer.gate import FetchLimiter
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.nixl_carrier import NixlCarrier
from forebay.workers.kv_transfer.offers import KvOffers
from forebay.workers.kv_transfer.tcp import TcpCarrier

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

LEASE_S = 30.0  # a reader comes within a second or is lost; held blocks are missing in the cache
FETCH_S = 10.0  # a transfer takes milliseconds; the first one also connects
LOOPBACK = "127.0.0.1"
RETRIES_MAX = 2  # of blocks with a wrong checksum


class Transport:
    """Implementation of `KvTransport`, created by `open_transport`."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        arena: Arena,
        *,
        on_free: OnFree,
        lease_s: float,
        fetch_s: float,
        at: str,
    ) -> None:
        self.kind: Kind = kind
        self.name = name
        self.lease_s = lease_s
        self.memory = arena
        self.stats = Stats()
        self._fetch_s = fetch_s
        self._free_callback = on_free
        self._offers = KvOffers(arena, self.stats, lease_s, self._on_free)
        self._gate = FetchLimiter(self.stats)
        self._carrier: Carrier = (
            NixlCarrier(name, arena, self.stats, self._offers.end, at)
            if kind == "nixl"
            else TcpCarrier(arena, self._offers, at or LOOPBACK)
        )
        self._deadlines: set[asyncio.Timeout] = set()  # of fetches in progress
        self._nothing_fetched = asyncio.Event()
        self._nothing_fetched.set()
        self._closed = False

    async def start(self) -> None:
        """Start to offer and fetch."""
        await self._carrier.start()

    def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Offer:
        """Offer blocks to one reader."""
        if self._closed:
            raise _closed()
        offer = self._offers.add(request_id, blocks, agent=self.name, route=self._carrier.route, checksum=checksum)
        self._carrier.holding(len(self._offers))
        return offer

    def release(self, request_id: str) -> bool:
        """End the offer of a request."""
        return self._offers.release(request_id)

    async def fetch(self, offered: Prefilled | Encoded, first: int, into: Sequence[int]) -> FetchedKv:
        """Fetch blocks that another worker holds."""
        began_s = runtime.monotonic_s()
        place: BlockLocation | None = None
        try:
            if self._closed:
                raise _closed()
            place = decode_location(offered, self.kind, self.memory.block_bytes)
            retries = await self._within_deadline(place, first, self._checked(place, first, into))
        except TransferError as error:
            self.stats.failed[error.reason] = self.stats.failed.get(error.reason, 0) + 1
            raise
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        us = int((runtime.monotonic_s() - began_s) * 1e6)
        size = len(into) * self.memory.block_bytes
        self.stats.fetched += 1
        self.stats.blocks += len(into)
        self.stats.bytes += size
        self.stats.read_us += us
        bucket = bisect_left(BUCKETS_S, us / 1e6)
        self.stats.took[bucket] = self.stats.took.get(bucket, 0) + 1
        return FetchedKv(bytes=size, blocks=len(into), us=us, retries=retries)

    def drop(self, offered: Prefilled | Encoded) -> None:
        """Notify a holder that nobody will fetch its blocks."""
        if self._closed:
            return
        try:
            place = decode_location(offered, self.kind, self.memory.block_bytes)
        except TransferError:
            return
        self._carrier.notify(place, fetched=False)

    async def close(self) -> None:
        """End all fetches and offers."""
        if self._closed:
            return
        self._closed = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        await self._nothing_fetched.wait()
        self._offers.close()
        await self._carrier.close()

    def _checked(self, place: BlockLocation, first: int, into: Sequence[int]) -> "Numbers":
        if not 0 <= first <= place.count or len(into) != place.count - first:
            raise TransferError(
                f"{place.agent} offers {place.count} blocks; those from {first} on do not fit into {len(into)} slots",
                "refused",
            )
        numbers = self.memory.numbers(into)
        if not self.memory.distinct(numbers):
            raise TransferError("got the same slot for two blocks", "refused")
        return numbers

    async def _within_deadline(self, place: BlockLocation, first: int, into: "Numbers") -> int:
        try:
            async with asyncio.timeout(self._fetch_s) as deadline:
                self._deadlines.add(deadline)
                self._nothing_fetched.clear()
                try:
                    return await self._in_turn(place, first, into)
                finally:
                    self._deadlines.discard(deadline)
                    if not self._deadlines:
                        self._nothing_fetched.set()
        except TimeoutError as error:
            if self._closed:
                raise _closed() from error
            self._carrier.unanswered(place)
            text = f"the blocks of {place.agent} did not arrive within {self._fetch_s:g} s"
            raise TransferError(text, "deadline") from error

    async def _in_turn(self, place: BlockLocation, first: int, into: "Numbers") -> int:
        size = len(into) * self.memory.block_bytes
        await self._gate.enter(size)
        try:
            return await self._read(place, first, into)
        finally:
            self._gate.leave(size)

    async def _read(self, place: BlockLocation, first: int, into: "Numbers") -> int:
        if not len(into):
            self._carrier.notify(place, fetched=True)
            return 0
        theirs = slots_of(place)[first:]
        if not place.sums:
            await self._carrier.read(place, theirs, into, notify=True)
            return 0
        sums = unpack_u64(place.sums)[first:]
        for retry in range(RETRIES_MAX + 1):
            await self._carrier.read(place, theirs, into, notify=False)
            wrong = await runtime.offload(self._wrong, self.memory.slots_of(into), sums)
            if not wrong:
                self._carrier.notify(place, fetched=True)
                return retry
            self.stats.corrupt += len(wrong)
            self.stats.retries += retry < RETRIES_MAX
            theirs, into, sums = theirs[wrong], into[wrong], [sums[number] for number in wrong]
        raise TransferError(
            f"{len(into)} blocks of {place.agent} still have wrong checksums after {RETRIES_MAX} retries",
            "corrupt",
        )

    def _wrong(self, slots: "Slots", sums: Sequence[int]) -> list[int]:
        found = [xxh3_64_intdigest(self.memory.row(slot).data) for slot in slots.tolist()]
        return [number for number, (ours, theirs) in enumerate(zip(found, sums, strict=True)) if ours != theirs]

    def _on_free(self, request_id: str, why: FreeReason) -> None:
        self._carrier.holding(len(self._offers))
        self._free_callback(request_id, why)


def _closed() -> TransferError:
    return TransferError("the transport is closed", "closed")


async def open_transport(
    kind: Kind,
    *,
    name: str,
    block_bytes: int,
    blocks: int,
    on_free: OnFree,
    lease_s: float = LEASE_S,
    fetch_s: float = FETCH_S,
    at: str = "",
) -> KvTransport:
    """Return a transport for one worker epoch, ready to offer and fetch.

    Args:
        kind: `nixl`, or `tcp`, which is only used when selected here.
        name: `agent_name(worker_id, worker_epoch)`; offers of other epochs of the worker are refused.
        block_bytes: bytes per block over all layers; the same for all workers of a pool.
        blocks: number of slots.
        on_free: called on the event loop with the request whose blocks are free again, and the reason.
        lease_s: duration of an offer in seconds.
        fetch_s: timeout of a fetch in seconds, including time in the queue.
        at: for `tcp` the address to listen on and advertise, loopback if empty. For `nixl` the network interface,
            chosen by NIXL if empty.

    Raises:
        EngineError: NIXL cannot be imported or started, or the sizes are invalid.
        OSError: `tcp` cannot listen at the address.
    """
    transport = Transport(
        kind,
        name,
        Arena(blocks, block_bytes),
        on_free=on_free,
        lease_s=lease_s,
        fetch_s=fetch_s,
        at=at,
    )
    await transport.start()
    return transport
