"""Transfer of embeddings between workers by NIXL: offered, read once, acknowledged, freed.

Theory of operation. A holder has one arena, registered once, so that metadata known to others stays valid. An offer is
a piece of the arena, kept until the reader's notification or the end of its lease. A reader copies it with one READ.
NIXL has no timeout: a READ from an unresponsive holder stays "in progress" and may still write. The memory of such a
read is therefore never reused, and nothing more is read from that agent. Agents are named `worker@epoch`, so offers of
an earlier epoch cannot be confused with later ones. There is no progress thread, which would spin. Holders must
therefore call `poll` more often than the timeout of their readers.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import Name, hex_digest
from forebay.events.codec import MALFORMED
from forebay.events.media import DESCRIPTOR_BYTES_MAX, Encoded
from forebay.workers.kv_transfer.nixl_agent import TransferError, open_agent, remote_name

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

ARENA_BYTES = 256 << 20  # per encode worker: thousands of images of a thousand tokens; untouched memory uses no RAM
LEASE_S = 60.0  # a reader that has not come by then was lost, or the request was routed elsewhere
READ_S = 10.0  # a read takes milliseconds; the first one also connects
READ_BYTES_MAX = 256 << 20  # limit of the memory that a descriptor can make a reader allocate
READERS_MAX = 256  # known agents; the least recently used one is removed
POLL_S = 0.001
DTYPES = frozenset({"float32", "float16", "uint8"})  # numpy has no bfloat16


class _ArrayLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the descriptor of an `Encoded`, in plain numbers, because NIXL's own format is a pickle."""

    agent: Name
    metadata: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=1, le=READ_BYTES_MAX)]
    offer: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


@dataclass(slots=True, order=True)
class _Offer:
    start: int
    size: int
    number: int
    until_s: float


class EmbeddingOffers:
    """Embeddings in this worker's memory that wait for readers. Not thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        arena_bytes: int = ARENA_BYTES,
        lease_s: float = LEASE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        import numpy  # noqa: PLC0415 - an extra

        self._name = name
        self._lease_s = lease_s
        self._now_s = now_s
        self._agent = open_agent(name)
        self._arena = numpy.empty(arena_bytes, dtype=numpy.uint8)
        self._address: int = self._arena.ctypes.data
        self._registered = self._agent.register_memory([(self._address, arena_bytes, 0, "")], mem_type="DRAM")
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._offers: list[_Offer] = []  # by offset
        self._numbers = count()
        self.expired = 0

    @property
    def waiting(self) -> int:
        """Number of offers that were not fetched yet."""
        return len(self._offers)

    def offer(self, array: "Array") -> Encoded:
        """Keep a copy of an array until it is fetched or its lease ends, and return its descriptor.

        Raises TransferError when the array is empty or has an unsupported dtype, or when there is no room.
        """
        import numpy  # noqa: PLC0415 - an extra

        dtype = array.dtype.name
        if not array.nbytes or dtype not in DTYPES:
            raise TransferError(f"cannot offer {array.nbytes} bytes of dtype {dtype}")
        self.poll()
        raw = numpy.ascontiguousarray(array).view(numpy.uint8).reshape(-1)
        start = self._room(raw.nbytes)
        self._arena[start : start + raw.nbytes] = raw
        number = next(self._numbers)
        insort(self._offers, _Offer(start, raw.nbytes, number, self._now_s() + self._lease_s))
        place = _ArrayLocation(
            agent=self._name, metadata=self._metadata, address=self._address + start, bytes=raw.nbytes, offer=number
        )
        checksum = hex_digest(xxh3_64_intdigest(raw.data))
        return Encoded(
            descriptor=msgspec.msgpack.encode(place), shape=tuple(array.shape), dtype=dtype, checksum=checksum
        )

    def poll(self) -> None:
        """Free offers that were fetched or whose lease has ended."""
        done = {int(note) for notes in self._agent.get_new_notifs().values() for note in notes if note.isdigit()}
        now_s = self._now_s()
        self.expired += sum(one.number not in done and one.until_s <= now_s for one in self._offers)
        self._offers = [one for one in self._offers if one.number not in done and one.until_s > now_s]

    def close(self) -> None:
        """Free all offers; later reads of them fail."""
        self._offers.clear()
        self._agent.deregister_memory(self._registered)

    def _room(self, size: int) -> int:
        """Return the offset of the first sufficient gap."""
        start = 0
        for one in self._offers:
            if one.start - start >= size:
                return start
            start = one.start + one.size
        if self._arena.nbytes - start < size:
            raise TransferError(
                f"no room for {size} bytes of embeddings: {self.waiting} offers wait in {self._arena.nbytes} bytes"
            )
        return start


class Reader:
    """Fetches embeddings. Calls NIXL on a thread of its own, because connecting may block."""

    def __init__(self, name: str, *, read_s: float = READ_S) -> None:
        self._name = name
        self._read_s = read_s
        self._agent: Any = None  # created by the first read
        self._thread = ThreadPoolExecutor(1, "nixl")
        self._known: dict[str, bytes] = {}  # metadata by agent, least recently used first
        self._silent: set[str] = set()
        self._kept: list[_Reading] = []  # an unresponsive holder may still write to their memory
        self._tasks: set[asyncio.Task[Array]] = set()
        self._closed = False

    async def read(self, encoded: Encoded) -> "Array":
        """Return the offered array. Raises TransferError when it cannot be read or differs from the offer."""
        # A cancelled caller does not wait, but memory that is being written to must stay allocated.
        task = asyncio.create_task(self._read(encoded))
        self._tasks.add(task)
        task.add_done_callback(self._read_is_over)
        return await asyncio.shield(task)

    async def _read(self, encoded: Encoded) -> "Array":
        place = _decode_location(encoded)
        loop = asyncio.get_running_loop()
        reading = _Reading(place)
        try:
            async with asyncio.timeout(self._read_s):
                done = await loop.run_in_executor(self._thread, self._begin, reading)
                while not done:
                    await asyncio.sleep(POLL_S)
                    done = await loop.run_in_executor(self._thread, self._guarded, reading, reading.poll)
        except TimeoutError as error:
            raise TransferError(f"{place.agent} did not reply within {self._read_s:g} s") from error
        finally:
            # Calls run in order, so this follows a `begin` that nobody awaits any more.
            self._thread.submit(self._end, reading)
        return _checked(encoded, reading.local)

    def _read_is_over(self, task: "asyncio.Task[Array]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # avoids a warning about an unretrieved exception if the caller is gone
        self._end_thread()

    def close(self) -> None:
        """Start no more reads. Reads in progress run to their end, because their memory is being written to."""
        self._closed = True
        self._end_thread()

    def _end_thread(self) -> None:
        if self._closed and not self._tasks:
            self._thread.shutdown(wait=False)

    def _begin(self, reading: "_Reading") -> bool:
        place = reading.place
        self._agent = self._agent or open_agent(self._name)
        if place.agent in self._silent:
            raise TransferError(f"{place.agent} did not reply to an earlier read and is not read from any more")
        known = self._known.pop(place.agent, None)
        if known is not None and known != place.metadata:
            raise TransferError(f"two agents have the name {place.agent}")
        if known is None:
            self._guarded(reading, lambda: self._learn(place))
        self._known[place.agent] = place.metadata
        return bool(self._guarded(reading, lambda: reading.begin(self._agent)))

    def _learn(self, place: _ArrayLocation) -> None:
        if len(self._known) >= READERS_MAX:
            oldest = next(iter(self._known))
            self._forget(oldest)
        owner = remote_name(self._agent.add_remote_agent(place.metadata))
        if owner != place.agent:
            self._agent.remove_remote_agent(owner)
            raise TransferError(f"the metadata of {place.agent} belongs to {owner}")

    def _guarded(self, reading: "_Reading", act: Callable[[], Any]) -> Any:
        """Run a NIXL call and convert its exceptions to TransferError. The next read then loads the metadata again."""
        try:
            return act()
        except TransferError:
            raise
        except Exception as error:  # the bindings' own classes, which have no common base class to import lazily
            self._forget(reading.place.agent)
            raise TransferError(f"NIXL cannot read from {reading.place.agent}: {error}") from error

    def _forget(self, agent: str) -> None:
        self._known.pop(agent, None)
        self._agent.remove_remote_agent(agent)

    def _end(self, reading: "_Reading") -> None:
        if reading.end():
            self._silent.add(reading.place.agent)
            self._kept.append(reading)


class _Reading:
    """READ into its own memory."""

    def __init__(self, place: _ArrayLocation) -> None:
        import numpy  # noqa: PLC0415 - an extra

        self.place = place
        self.local = numpy.empty(place.bytes, dtype=numpy.uint8)
        self._agent: Any = None
        self._registered: Any = None
        self._handle: Any = None
        self._in_progress = False

    def begin(self, agent: Any) -> bool:
        """Start. Return whether it is already done."""
        self._agent, place = agent, self.place
        address = self.local.ctypes.data
        self._registered = agent.register_memory([(address, place.bytes, 0, "")], mem_type="DRAM")
        here = agent.get_xfer_descs([(address, place.bytes, 0)], mem_type="DRAM")
        there = agent.get_xfer_descs([(place.address, place.bytes, 0)], mem_type="DRAM")
        self._handle = agent.initialize_xfer("READ", here, there, place.agent, b"%d" % place.offer)
        return self._is_done(agent.transfer(self._handle))

    def poll(self) -> bool:
        """Return whether it is done."""
        return self._is_done(self._agent.check_xfer_state(self._handle))

    def end(self) -> bool:
        """Release its handles. Return whether the holder may still write, so that its memory must be kept."""
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
        if self._registered is not None and not self._in_progress:
            self._agent.deregister_memory(self._registered)
        return self._in_progress

    def _is_done(self, state: str) -> bool:
        self._in_progress = state == "PROC"
        if state == "ERR":
            raise TransferError(f"the read from {self.place.agent} failed")
        return state == "DONE"


def _decode_location(encoded: Encoded) -> _ArrayLocation:
    try:
        place = msgspec.msgpack.decode(encoded.descriptor, type=_ArrayLocation)
    except MALFORMED as error:
        raise TransferError(f"cannot decode the descriptor: {error}") from error
    import numpy  # noqa: PLC0415 - an extra

    if encoded.dtype not in DTYPES:
        raise TransferError(f"unsupported dtype {encoded.dtype}")
    size = numpy.dtype(encoded.dtype).itemsize
    for extent in encoded.shape:
        size *= extent
    if size != place.bytes:
        raise TransferError(
            f"an array of {' x '.join(map(str, encoded.shape))} {encoded.dtype} does not have {place.bytes} bytes"
        )
    return place


def _checked(encoded: Encoded, raw: "Array") -> "Array":
    found = hex_digest(xxh3_64_intdigest(raw.data))
    if found != encoded.checksum:
        raise TransferError(
            f"got checksum {found}, expected {encoded.checksum}: the embeddings were freed before they were read"
        )
    return raw.view(encoded.dtype).reshape(encoded.shape)
