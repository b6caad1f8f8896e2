"""Transfer of embeddings between workers, by the NIXL transport that also moves KV.

Theory of operation. The holder copies an array into blocks of `BLOCK_BYTES` in its own memory (its arena), and offers
the blocks with checksums. The reader fetches the blocks into its arena and copies them to a new array. The transport
implements leases, time limits, quarantine of memory and generation checks in the same way as for KV.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.events.media import Encoded
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import FreeReason, Stats
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.transport import FETCH_S, FetchLimiter, KvTransport, open_transport

Array = np.ndarray[Any, np.dtype[Any]]

ARENA_BYTES = 256 << 20  # per worker: thousands of images of a thousand tokens; untouched memory uses no RAM
BLOCK_BYTES = 64 << 10  # a descriptor has room for the blocks of the whole arena
LEASE_S = 60.0  # if no reader has fetched by then, it was lost, or the request was routed elsewhere
DTYPES = frozenset({"float32", "float16", "uint8"})  # numpy has no bfloat16

_closing: set[asyncio.Task[None]] = set()  # keeps the tasks alive


class EmbeddingTransfer:
    """Offers embeddings of one worker epoch to readers, or reads embeddings of other workers.

    Use it on one event loop. The NIXL agent starts at the first use. `fetch_s` limits a read, and the preceding wait
    for free memory in the arena.
    """

    def __init__(
        self, name: str, *, arena_bytes: int = ARENA_BYTES, lease_s: float = LEASE_S, fetch_s: float = FETCH_S
    ) -> None:
        self._name = name
        self._lease_s = lease_s
        self._fetch_s = fetch_s
        self._free = list(range(arena_bytes // BLOCK_BYTES - 1, -1, -1))
        self._blocks = len(self._free)
        self._offered: dict[str, list[int]] = {}
        self._offers = 0
        self._limiter = FetchLimiter(Stats(), bytes_max=arena_bytes)
        self._opening: asyncio.Task[KvTransport] | None = None

    @property
    def waiting(self) -> int:
        return len(self._offered)

    async def offer(self, array: Array) -> Encoded:
        """Keep a copy of an array until it is fetched or its lease ends, and return its descriptor.

        Raises TransferError if the array is empty or has an unsupported dtype, or the arena has no room for it.
        """
        dtype = array.dtype.name
        if not array.nbytes or dtype not in DTYPES:
            raise TransferError(f"cannot offer {array.nbytes} bytes of dtype {dtype}")
        transport = await self._transport()
        blocks = self._take(array.nbytes)
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        for part, block in _parts(raw, blocks):
            transport.memory.view(block)[: len(part)] = part
        self._offers += 1
        number = str(self._offers)
        try:
            offer = transport.offer(number, blocks, checksum=True)
        except TransferError:
            self._free += blocks
            raise
        self._offered[number] = blocks
        assert offer.checksum is not None
        return Encoded(descriptor=offer.descriptor, shape=array.shape, dtype=dtype, checksum=offer.checksum)

    async def read(self, encoded: Encoded) -> Array:
        """Return a copy of an array that another worker offers.

        Raises TransferError if that fails or a checksum is wrong.
        """
        array = np.empty(_size(encoded), dtype=np.uint8)
        transport = await self._transport()
        reserved = _block_count(len(array)) * BLOCK_BYTES
        await self._wait_for_room(reserved)
        try:
            blocks = self._take(len(array))
            try:
                await transport.fetch(encoded, 0, blocks)
                for part, block in _parts(array, blocks):
                    part[:] = transport.memory.view(block)[: len(part)]
            except asyncio.CancelledError:
                transport.drop(encoded)
                raise
            finally:
                self._free += blocks
        finally:
            self._limiter.leave(reserved)
        return array.view(encoded.dtype).reshape(encoded.shape)

    def close(self) -> None:
        """End all offers and let reads in flight fail, in the background."""
        if self._opening is not None:
            task = asyncio.create_task(_close(self._opening))
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    async def _transport(self) -> KvTransport:
        """Return the open transport. Raises EngineError if NIXL is missing or does not start."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            opening = open_transport(
                name=self._name,
                block_bytes=BLOCK_BYTES,
                blocks=self._blocks,
                on_free=self._on_free,
                lease_s=self._lease_s,
                fetch_s=self._fetch_s,
            )
            self._opening = asyncio.create_task(opening)
        return await asyncio.shield(self._opening)  # if one caller is cancelled, others still wait for it

    async def _wait_for_room(self, size: int) -> None:
        try:
            async with asyncio.timeout(self._fetch_s):
                await self._limiter.enter(size)
        except TimeoutError as error:
            raise TransferError(
                f"no memory for this read became free within {self._fetch_s:g} s", "deadline"
            ) from error

    def _take(self, size: int) -> list[int]:
        """Return free blocks for `size` bytes. Raises TransferError (`full`)."""
        count = _block_count(size)
        if count > len(self._free):
            total = self._blocks * BLOCK_BYTES
            text = f"no room for {size} bytes of embeddings: {self.waiting} offers wait in {total} bytes"
            raise TransferError(text, "full")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def _on_free(self, number: str, _: FreeReason) -> None:
        self._free += self._offered.pop(number)


async def _close(opening: "asyncio.Task[KvTransport]") -> None:
    try:
        transport = await opening
    except EngineError:
        return  # reads and offers have raised it
    await transport.close()


def _block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _parts(raw: Array, blocks: Sequence[int]) -> list[tuple[Array, int]]:
    return [(raw[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], block) for at, block in enumerate(blocks)]


def _size(encoded: Encoded) -> int:
    """Return the size of an array in bytes. Raises TransferError for an unsupported dtype or a size above the limit."""
    if encoded.dtype not in DTYPES:
        raise TransferError(f"unsupported dtype {encoded.dtype}", "refused")
    size = np.dtype(encoded.dtype).itemsize
    for extent in encoded.shape:
        size *= extent
    if not 0 < size <= ARENA_BYTES:
        shape = " x ".join(map(str, encoded.shape))
        raise TransferError(
            f"an array of {shape} {encoded.dtype} has {size} bytes; expected 1 to {ARENA_BYTES}", "refused"
        )
    return size
