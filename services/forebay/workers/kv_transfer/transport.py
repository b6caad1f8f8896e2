"""Opens the transport that a worker was told to use, and is what all of them have in common.

Theory of operation. A fetch passes the descriptor's checks, waits at the gate, reads, and, where there are checksums,
looks at every block and reads again what is not as it was offered. The holder is told once all is well. One deadline
goes around everything.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay.events.base import unpack_u64
from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import BUCKETS_S, Fetched, GivenBack, Kind, KvTransport, Offer, OnGivenBack, Stats
from forebay.workers.kv_transfer.carrier import Carrier
from forebay.workers.kv_transfer.descriptor import Place, place_of, slots_of
from forebay.workers.kv_transfer.gate import Gate
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.nixl_carrier import NixlCarrier
from forebay.workers.kv_transfer.offers import Offers
from forebay.workers.kv_transfer.tcp import TcpCarrier

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

LEASE_S = 30.0  # a reader comes within a second or was lost; blocks held for nobody are missing in the cache
FETCH_S = 10.0  # a transfer takes milliseconds, its first one a connection
LOOPBACK = "127.0.0.1"
RETRIES_MAX = 2  # of blocks whose checksum is wrong


class Transport:
    """See `KvTransport`. Made by `open_transport`."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        arena: Arena,
        *,
        on_given_back: OnGivenBack,
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
        self._on_given_back = on_given_back
        self._offers = Offers(arena, self.stats, lease_s, self._given_back)
        self._gate = Gate(self.stats)
        self._carrier: Carrier = (
            NixlCarrier(name, arena, self.stats, self._offers.end, at)
            if kind == "nixl"
            else TcpCarrier(arena, self._offers, at or LOOPBACK)
        )
        self._deadlines: set[asyncio.Timeout] = set()  # of what is being fetched
        self._nothing_fetched = asyncio.Event()
        self._nothing_fetched.set()
        self._closed = False

    async def start(self) -> None:
        """Be ready to offer and to fetch."""
        await self._carrier.start()

    def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Offer:
        """Hold blocks for one reader."""
        if self._closed:
            raise _closed()
        offer = self._offers.add(request_id, blocks, agent=self.name, route=self._carrier.route, checksum=checksum)
        self._carrier.holding(len(self._offers))
        return offer

    def release(self, request_id: str) -> bool:
        """Give back what is held for a request."""
        return self._offers.release(request_id)

    async def fetch(self, prefilled: Prefilled, first: int, into: Sequence[int]) -> Fetched:
        """Read blocks that another holds."""
        began_s = time.monotonic()
        place: Place | None = None
        try:
            if self._closed:
                raise _closed()
            place = place_of(prefilled, self.kind, self.memory.block_bytes)
            retries = await self._within_deadline(place, first, self._checked(place, first, into))
        except TransferError as error:
            self.stats.failed[error.reason] = self.stats.failed.get(error.reason, 0) + 1
            raise
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        us = int((time.monotonic() - began_s) * 1e6)
        size = len(into) * self.memory.block_bytes
        self.stats.fetched += 1
        self.stats.blocks += len(into)
        self.stats.bytes += size
        self.stats.read_us += us
        bucket = bisect_left(BUCKETS_S, us / 1e6)
        self.stats.took[bucket] = self.stats.took.get(bucket, 0) + 1
        return Fetched(bytes=size, blocks=len(into), us=us, retries=retries)

    def drop(self, prefilled: Prefilled) -> None:
        """Tell a holder that nobody will fetch."""
        if self._closed:
            return
        try:
            place = place_of(prefilled, self.kind, self.memory.block_bytes)
        except TransferError:
            return
        self._carrier.tell(place, fetched=False)

    async def close(self) -> None:
        """End everything."""
        if self._closed:
            return
        self._closed = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        await self._nothing_fetched.wait()
        self._offers.close()
        await self._carrier.close()

    def _checked(self, place: Place, first: int, into: Sequence[int]) -> "Numbers":
        if not 0 <= first <= place.count or len(into) != place.count - first:
            raise TransferError(
                f"{place.agent} offers {place.count} blocks; those from {first} on do not go into {len(into)}",
                "refused",
            )
        numbers = self.memory.numbers(into)
        if not self.memory.distinct(numbers):
            raise TransferError("two blocks cannot be fetched into one", "refused")
        return numbers

    async def _within_deadline(self, place: Place, first: int, into: "Numbers") -> int:
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
            text = f"the blocks of {place.agent} did not come in {self._fetch_s:g} s"
            raise TransferError(text, "deadline") from error

    async def _in_turn(self, place: Place, first: int, into: "Numbers") -> int:
        size = len(into) * self.memory.block_bytes
        await self._gate.enter(size)
        try:
            return await self._read(place, first, into)
        finally:
            self._gate.leave(size)

    async def _read(self, place: Place, first: int, into: "Numbers") -> int:
        if not len(into):
            self._carrier.tell(place, fetched=True)
            return 0
        theirs = slots_of(place)[first:]
        if not place.sums:
            await self._carrier.read(place, theirs, into, tell=True)
            return 0
        sums = unpack_u64(place.sums)[first:]
        for retry in range(RETRIES_MAX + 1):
            await self._carrier.read(place, theirs, into, tell=False)
            wrong = await asyncio.to_thread(self._wrong, self.memory.slots_of(into), sums)
            if not wrong:
                self._carrier.tell(place, fetched=True)
                return retry
            self.stats.corrupt += len(wrong)
            self.stats.retries += retry < RETRIES_MAX
            theirs, into, sums = theirs[wrong], into[wrong], [sums[number] for number in wrong]
        raise TransferError(
            f"{len(into)} blocks of {place.agent} have other checksums than those offered, after {RETRIES_MAX} retries",
            "corrupt",
        )

    def _wrong(self, slots: "Slots", sums: Sequence[int]) -> list[int]:
        found = [xxh3_64_intdigest(self.memory.row(slot).data) for slot in slots.tolist()]
        return [number for number, (ours, theirs) in enumerate(zip(found, sums, strict=True)) if ours != theirs]

    def _given_back(self, request_id: str, why: GivenBack) -> None:
        self._carrier.holding(len(self._offers))
        self._on_given_back(request_id, why)


def _closed() -> TransferError:
    return TransferError("the transport is closed", "closed")


async def open_transport(
    kind: Kind,
    *,
    name: str,
    block_bytes: int,
    blocks: int,
    on_given_back: OnGivenBack,
    lease_s: float = LEASE_S,
    fetch_s: float = FETCH_S,
    at: str = "",
) -> KvTransport:
    """The transport of one life of a worker, ready to offer and to fetch.

    Args:
        kind: `nixl`, or `tcp`, the plain path, which is never chosen but by being named here.
        name: `agent_name(worker_id, worker_epoch)`; what other lives of the worker offered is refused by it.
        block_bytes: bytes of a block, over all layers; the same for all workers of a pool.
        blocks: how many slots.
        on_given_back: told on the event loop which request's blocks are free again, and why.
        lease_s: how long an offer is held.
        fetch_s: how long a fetch may take, waiting for others included.
        at: for `tcp` the address where it listens, which others are told to connect to: loopback if empty. For `nixl`
            the network interface that it is to use: its own choice if empty.

    Raises:
        EngineError: NIXL cannot be imported or does not start, or the sizes are none.
        OSError: `tcp` cannot listen there.
    """
    transport = Transport(
        kind,
        name,
        Arena(blocks, block_bytes),
        on_given_back=on_given_back,
        lease_s=lease_s,
        fetch_s=fetch_s,
        at=at,
    )
    await transport.start()
    return transport
