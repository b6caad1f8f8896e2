"""Transport of blocks between workers by NIXL.

Theory of operation. A fetch validates the descriptor, waits for the limiter and passes a read to the NIXL thread. If
the offer has checksums, the fetch verifies each block, and reads blocks with a wrong checksum again. At the end it
notifies the holder. One time limit covers all of this. The slots of an abandoned read are quarantined until NIXL has
ended it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.base import unpack_u64
from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import FetchedKv, FreeReason, Numbers, Offer, OnFree, Stats
from forebay.workers.kv_transfer.descriptor import BlockLocation, Slots, decode_location, slots_of
from forebay.workers.kv_transfer.memory import Arena, KvOffers
from forebay.workers.kv_transfer.nixl_agent import TransferError, load_nixl
from forebay.workers.kv_transfer.nixl_thread import DROPPED, FETCHED, NixlThread, Read

FETCHES_MAX = 16  # more fetches would share one thread and memory bus, and each would end later
BYTES_MAX = 1 << 30  # a larger fetch runs alone
WAITING_MAX = 4096  # far more than can end within the deadline


class FetchLimiter:
    """Limits the concurrent fetches of one transport. Fetches above the limits wait in the order of their arrival.

    Use it on one event loop only. A fetch of more than `bytes_max` runs alone.
    """

    def __init__(self, stats: Stats, *, fetches_max: int = FETCHES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._stats = stats
        self._fetches_max = fetches_max
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, size: int) -> None:
        """Wait until a fetch of `size` bytes may run; it ends with `leave`.

        Raises TransferError (`full`) if too many wait.
        """
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._take(size)

    def leave(self, size: int) -> None:
        self._stats.in_flight -= 1
        self._stats.in_flight_bytes -= size
        self._admit()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise TransferError(f"{WAITING_MAX} fetches are already waiting", "full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        self._stats.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted while it was being cancelled
                self.leave(size)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._stats.waiting -= 1
                self._admit()
            raise

    def _fits(self, size: int) -> bool:
        stats = self._stats
        alone = not stats.in_flight
        return alone or (stats.in_flight < self._fetches_max and stats.in_flight_bytes + size <= self._bytes_max)

    def _take(self, size: int) -> None:
        self._stats.in_flight += 1
        self._stats.in_flight_bytes += size

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, size = self._waiting.popleft()
            self._stats.waiting -= 1
            if not turn.cancelled():  # otherwise it is admitted and not resumed yet
                self._take(size)
                turn.set_result(None)


LEASE_S = 30.0  # a reader fetches within a second or is lost; offered blocks are not available to the cache
FETCH_S = 10.0  # a transfer takes milliseconds; the first one also connects
RETRIES_MAX = 2  # additional reads of blocks with a wrong checksum

_WHYS: dict[str, FreeReason] = {FETCHED.decode(): "fetched", DROPPED.decode(): "released"}
_NOTE_CHARS_MAX = 20  # length of a notification: a letter, and a 63-bit number in decimal


class _Reading:
    """A read in progress. `kept` are the quarantined slots of an abandoned read; None if it was not abandoned."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.over = asyncio.get_running_loop().create_future()
        self.ended = False
        self.kept: Slots | None = None


class KvTransport:
    """Transport that offers blocks of this worker and fetches blocks of other workers.

    `open_transport` creates and starts it. All methods are called on the event loop of that call.

    Attributes:
        lease_s: seconds after which an offer ends that nobody fetched; `Prefilled.lease_us` must not be longer.
        fetch_s: timeout in seconds of later fetches.
    """

    def __init__(
        self, name: str, arena: Arena, *, on_free: OnFree, lease_s: float, fetch_s: float, interface: str
    ) -> None:
        self.name = name
        self.lease_s = lease_s
        self.memory = arena
        self.stats = Stats()
        self.fetch_s = fetch_s
        self._free_callback = on_free
        self._offers = KvOffers(arena, self.stats, self._on_free)
        self._gate = FetchLimiter(self.stats)
        self._loop = asyncio.get_running_loop()
        self.thread = NixlThread(name, arena, self._note, interface)
        self._deadlines: set[asyncio.Timeout] = set()  # time limits of fetches in progress
        self._nothing_fetched = asyncio.Event()
        self._nothing_fetched.set()
        self._closed = False

    def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Offer:
        """Offer blocks, in the order of the prompt, to one reader for at most `lease_s` seconds.

        The caller must not write to the blocks until the transport calls `on_free(request_id, why)`. It does that once
        per offer, and never within this call. A block may be in several offers. For checksums, all blocks are hashed
        before this call returns.

        Raises:
            TransferError: there are no blocks, too many for a descriptor or an invalid one; there are too many offers
                or already one for this request; or the transport is closed.
        """
        if self._closed:
            raise _closed()
        metadata = self.thread.metadata
        offer = self._offers.add(
            request_id, blocks, lease_s=self.lease_s, agent=self.name, route=metadata, checksum=checksum
        )
        self._poll_for_readers()
        return offer

    def release(self, request_id: str) -> bool:
        """End the offer of a request now, and return whether there was one. A fetch of it in progress fails."""
        return self._offers.release(request_id)

    async def fetch(self, offered: Prefilled | Encoded, first: int, into: Sequence[int]) -> FetchedKv:
        """Read offered blocks into blocks of this worker, and notify the holder.

        Fetches run in the order of the calls. The time limit of `fetch_s` seconds includes the time in the queue. When
        the fetch has ended, successfully or not, the transport no longer writes to the blocks `into`.

        Args:
            first: index of the first offered block to read. If it is the number of offered blocks, nothing is read and
                the holder is only notified.
            into: blocks of this worker that receive the content, one per block to read.

        Raises:
            TransferError: the fetch failed, for `reason`. The content of `into` is invalid. The holder may still keep
                the blocks, so fetch again, call `drop`, or let the lease of the offer end.
        """
        began_s = runtime.monotonic_s()
        place: BlockLocation | None = None
        try:
            if self._closed:
                raise _closed()
            place = decode_location(offered, self.memory.block_bytes)
            retries = await self._within_deadline(place, first, self._checked(place, first, into))
        except TransferError as error:
            self.stats.failed[error.reason] = self.stats.failed.get(error.reason, 0) + 1
            raise
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        us = int((runtime.monotonic_s() - began_s) * 1e6)
        fetch = FetchedKv(bytes=len(into) * self.memory.block_bytes, blocks=len(into), us=us, retries=retries)
        self.stats.add_fetch(fetch)
        return fetch

    def drop(self, offered: Prefilled | Encoded) -> None:
        """Notify a holder that this worker will not fetch its blocks, in the background and without retries.

        An invalid descriptor is ignored.
        """
        if self._closed:
            return
        try:
            place = decode_location(offered, self.memory.block_bytes)
        except TransferError:
            return
        self.thread.notify(place, DROPPED)

    async def close(self) -> None:
        """Let fetches in flight fail with reason `closed`, and end all offers. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(self._loop.time())
        await self._nothing_fetched.wait()
        self._offers.close()
        await asyncio.to_thread(self.thread.stop)  # keeps memory to which transfers may still write

    def _checked(self, place: BlockLocation, first: int, into: Sequence[int]) -> Numbers:
        if not 0 <= first <= place.count or len(into) != place.count - first:
            raise TransferError(
                f"{place.agent} offers {place.count} blocks; to read from block {first} on,"
                f" {len(into)} target blocks are the wrong number",
                "refused",
            )
        numbers = self.memory.numbers(into)
        if not self.memory.distinct(numbers):
            raise TransferError("got the same slot for two blocks", "refused")
        return numbers

    async def _within_deadline(self, place: BlockLocation, first: int, into: Numbers) -> int:
        try:
            async with asyncio.timeout(self.fetch_s) as deadline:
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
            self.thread.silence(place.agent)
            text = f"the blocks of {place.agent} did not arrive within {self.fetch_s:g} s"
            raise TransferError(text, "deadline") from error

    async def _in_turn(self, place: BlockLocation, first: int, into: Numbers) -> int:
        size = len(into) * self.memory.block_bytes
        await self._gate.enter(size)
        try:
            return await self._read(place, first, into)
        finally:
            self._gate.leave(size)

    async def _read(self, place: BlockLocation, first: int, into: Numbers) -> int:
        if not len(into):
            self.thread.notify(place, FETCHED)
            return 0
        theirs = slots_of(place)[first:]
        if not place.sums:
            await self._read_once(place, theirs, into, notify=True)
            return 0
        sums = unpack_u64(place.sums)[first:]
        for retry in range(RETRIES_MAX + 1):
            await self._read_once(place, theirs, into, notify=False)
            wrong = await runtime.offload(self._wrong, self.memory.slots_of(into), sums)
            if not wrong:
                self.thread.notify(place, FETCHED)
                return retry
            self.stats.corrupt += len(wrong)
            self.stats.retries += retry < RETRIES_MAX
            theirs, into, sums = theirs[wrong], into[wrong], [sums[number] for number in wrong]
        raise TransferError(
            f"{len(into)} blocks of {place.agent} still have wrong checksums after {RETRIES_MAX} retries", "corrupt"
        )

    async def _read_once(self, place: BlockLocation, theirs: Slots, into: Numbers, *, notify: bool) -> None:
        """Read the blocks, then the generation word, which shows whether the holder kept the blocks.

        If the caller cancels this coroutine during the read, the slots of the blocks are quarantined.
        """
        self.memory.reserve(len(into))
        reading = _Reading(Read(place, theirs, self.memory.slots_of(into), notify=notify))
        try:
            self.thread.read(reading.read, lambda error: self._call(lambda: self._over(reading, error)))
            await reading.over
        except asyncio.CancelledError:
            if not reading.ended:
                reading.read.abandoned = True
                reading.kept = self.memory.quarantine(into)
                self.stats.quarantined_blocks += len(into)
            raise
        finally:
            self.memory.unreserve(len(into))

    def _wrong(self, slots: Slots, sums: Sequence[int]) -> list[int]:
        found = [xxh3_64_intdigest(self.memory.row(slot).data) for slot in slots.tolist()]
        return [number for number, (ours, theirs) in enumerate(zip(found, sums, strict=True)) if ours != theirs]

    def _on_free(self, request_id: str, why: FreeReason) -> None:
        self._poll_for_readers()
        self._free_callback(request_id, why)

    def _poll_for_readers(self) -> None:
        """Make the NIXL thread poll more often while this worker has offers, because readers depend on it."""
        if self.thread.holding != bool(len(self._offers)):
            self.thread.holding = bool(len(self._offers))
            self.thread.wake()

    def _over(self, reading: _Reading, error: TransferError | None) -> None:
        reading.ended = True
        if reading.kept is not None:
            self.memory.restore_spares(reading.kept)
            self.stats.quarantined_blocks -= len(reading.kept)
        elif not reading.over.done():
            if error is None:
                reading.over.set_result(None)
            else:
                reading.over.set_exception(error)

    def _note(self, text: str) -> None:
        why, number = _WHYS.get(text[:1]), text[1:_NOTE_CHARS_MAX]
        if why is not None and number.isascii() and number.isdigit():
            self._call(lambda: self._offers.end(int(number), why))

    def _call(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing awaits the result
            self._loop.call_soon_threadsafe(act)


def _closed() -> TransferError:
    return TransferError("the transport is closed", "closed")


async def open_transport(
    *,
    name: str,
    block_bytes: int,
    blocks: int,
    on_free: OnFree,
    lease_s: float = LEASE_S,
    fetch_s: float = FETCH_S,
    interface: str = "",
) -> KvTransport:
    """Return a new transport, ready to offer and fetch blocks.

    Args:
        block_bytes: bytes per block over all layers; the same for all workers of a pool.
        on_free: called on the event loop when an offer has ended, with the request id and the reason.

    Raises:
        EngineError: NIXL cannot be imported or started, or the sizes are invalid.
    """
    await asyncio.to_thread(load_nixl, "KV transfers")
    transport = KvTransport(
        name, Arena(blocks, block_bytes), on_free=on_free, lease_s=lease_s, fetch_s=fetch_s, interface=interface
    )
    try:
        await asyncio.to_thread(transport.thread.start)
    except Exception as error:  # NIXL raises its own classes
        raise EngineError(f"cannot start NIXL: {error}") from error
    return transport
