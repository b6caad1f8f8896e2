"""KV of the mock engine as real bytes: written by the prefill worker, transferred, read by the decode worker.

Theory of operation. A block consists of one 8-byte word, repeated: the hash of all tokens up to its end, xor a hash of
the media. Blocks with equal words share a slot (the memory of one block). The decode worker knows the token hashes, so
it can compute the media hash from each block. If any byte is wrong, it gets another number. The output tokens are
derived from this number, so they show a wrong byte.

Slots are in use as long as the engine model keeps the blocks, so there are normally enough of them. Requests with equal
text and different images share blocks in the engine model, but not slots. If there are too few slots, a request fails.
Without NIXL there are no bytes: see `ModelledKv`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import ClassVar, Literal
from weakref import WeakValueDictionary

from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, mm_hashes
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64, pack_u64, unpack_u64
from forebay.events.fleet import WorkerSpec
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import Array, FetchedKv, FreeReason, Stats
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name
from forebay.workers.kv_transfer.transport import LEASE_S, KvTransport, open_transport

BYTES_PER_US = 64_000  # of modelled transfers: 64 GB/s, as in Dynamo's mocker
OnEnd = Callable[[str], None]
BYTES_PER_TOKEN = 256  # a block of 64 tokens has 16 KiB; real models need 100 times as much


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """Settings of a mock engine's KV transfers. The bytes of a block must be a multiple of eight.

    Attributes:
        connector: `nixl`, or `modelled` for transfers that take modelled time and have no bytes.
        lease_s: seconds for which the prefill worker keeps KV that nobody fetches.
        interface: network interface of NIXL; if empty, UCX selects one.
        speedup: how many times as fast as modelled the modelled transfers are.
    """

    connector: Literal["nixl", "modelled"] = "nixl"
    bytes_per_token: int = BYTES_PER_TOKEN
    checksum: bool = False
    lease_s: float = LEASE_S
    interface: str = ""
    speedup: float = 1.0

    def layout(self, block_size: int) -> KvLayout:
        """Return the KV layout. Raises EngineError if the bytes of a block are not a multiple of eight."""
        block_bytes = self.bytes_per_token * block_size
        if block_bytes < U64_BYTES or block_bytes % U64_BYTES:
            raise EngineError(
                f"{self.bytes_per_token} bytes of KV per token are {block_bytes} per block of {block_size} tokens;"
                f" expected a multiple of {U64_BYTES} per block; change the bytes per token or the block size"
            )
        return KvLayout(connector=self.connector, dtype="uint8", block_bytes=block_bytes, layers=1)


class Slots:
    """Allocates the slots of a KV memory. A slot is the memory of one block, and blocks with equal words share it."""

    def __init__(self, memory: Arena) -> None:
        self._memory = memory
        # Taken from and returned to the end, so that memory that is already mapped is reused first.
        self._free = list(range(memory.blocks - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._uses: Counter[int] = Counter()  # by word

    @property
    def used(self) -> int:
        return self._memory.blocks - len(self._free)

    @property
    def held(self) -> list[int]:
        """Slots with content, in the order in which they were written."""
        return list(self._slot_of.values())

    def take(self, count: int) -> list[int]:
        """Allocate `count` slots for fetched blocks. Raises TransferError if too few are free."""
        if count > len(self._free):
            raise TransferError(
                f"{count} slots are needed, but only {len(self._free)} of {self._memory.blocks} are free"
            )
        return [self._free.pop() for _ in range(count)]

    def free(self, slots: Sequence[int]) -> None:
        self._free += slots

    def hold(self, words: Sequence[int]) -> list[int]:
        """Return the slot of each word until `let_go`. A word that no slot contains is written to a free slot.

        Raises TransferError if too few slots are free.
        """
        new = [word for word in dict.fromkeys(words) if word not in self._slot_of]
        for word, slot in zip(new, self.take(len(new)), strict=True):
            self._slot_of[word] = slot
            self._memory.view(slot).view("<u8")[:] = word
        self._uses.update(words)
        return [self._slot_of[word] for word in words]

    def let_go(self, words: Sequence[int]) -> None:
        """End one use of the slot of each word. A slot without uses becomes free."""
        self._uses.subtract(words)
        for word in words:
            if not self._uses[word]:
                del self._uses[word]
                self._free.append(self._slot_of.pop(word))


class MockKv:
    """Keeps KV for other workers and fetches KV from them over NIXL. Use it on one event loop.

    `on_free` is called with the id of a request whose blocks are no longer kept. `open` sets `transport` and `slots`.
    """

    transport: KvTransport
    slots: Slots

    def __init__(self, settings: KvSettings, spec: WorkerSpec, block_size: int, on_free: OnEnd) -> None:
        self._settings = settings
        self._model = spec.model
        self._worker_id = spec.worker_id
        self._agent = agent_name(spec.worker_id)
        self._block_size = block_size
        self._block_bytes = settings.layout(block_size).block_bytes
        self._on_end = on_free
        self._words: dict[str, list[int]] = {}

    async def open(self, blocks: int) -> None:
        """Allocate memory and open the transport. Raises EngineError if the sizes are invalid, or NIXL fails."""
        self.transport = await open_transport(
            name=self._agent,
            block_bytes=self._block_bytes,
            blocks=blocks,
            on_free=self._on_free,
            lease_s=self._settings.lease_s,
            interface=self._settings.interface,
        )
        self.slots = Slots(self.transport.memory)

    @property
    def stats(self) -> Stats:
        return self.transport.stats

    @property
    def kept(self) -> int:
        return len(self._words)

    def offer(self, item: WorkItem, seen: int) -> Prefilled:
        """Write the KV of a prompt, keep it for another worker, and return its descriptor.

        `seen` is the hash of its media. Raises TransferError if the KV cannot be kept, for example because too few
        slots are free. Nothing is kept then.
        """
        words = [name ^ seen for name in block_names(item, self._block_size)]
        slots = self.slots.hold(words)
        try:
            offer = self.transport.offer(item.request_id, slots, checksum=self._settings.checksum)
        except TransferError:
            self.slots.let_go(words)
            raise
        self._words[item.request_id] = words
        return self._prefilled(item, offer.descriptor, offer.bytes, offer.checksum)

    def release(self, request_id: str) -> None:
        self.transport.release(request_id)

    async def fetch(self, item: WorkItem, first: int) -> tuple[int, FetchedKv]:
        """Fetch the KV of a prompt, from block `first` on, from the prefill worker that keeps it.

        Return the hash of the prompt's images and videos, computed from the fetched blocks, and the result of the
        fetch. Raises TransferError if the KV cannot be fetched. The prefill worker is notified that it is not needed.
        """
        prefilled = item.prefilled
        assert prefilled is not None, "engines refuse such items"
        tokens = len(item.token_ids) // U32_BYTES
        try:
            if prefilled.model != self._model or prefilled.tokens != tokens:
                raise TransferError(
                    f"the KV of {prefilled.worker_id} has {prefilled.tokens} tokens of the model {prefilled.model},"
                    f" but the prompt has {tokens} tokens for the model {self._model}"
                )
            return await self._fetch(item, prefilled, first)
        except BaseException:  # also after a cancellation
            self.drop(prefilled)
            raise

    def drop(self, prefilled: Prefilled) -> None:
        self.transport.drop(prefilled)

    def release_all(self) -> None:
        for request_id in list(self._words):
            self.release(request_id)

    async def close(self) -> None:
        await self.transport.close()

    async def _fetch(self, item: WorkItem, prefilled: Prefilled, first: int) -> tuple[int, FetchedKv]:
        names = block_names(item, self._block_size)[first:]
        slots = self.slots.take(len(names))
        try:
            fetched = await self.transport.fetch(prefilled, first, slots)
            return seen_in([self.transport.memory.view(slot) for slot in slots], names), fetched
        finally:
            self.slots.free(slots)

    def _on_free(self, request_id: str, _: FreeReason) -> None:
        self.slots.let_go(self._words.pop(request_id))
        self._on_end(request_id)

    def _prefilled(self, item: WorkItem, descriptor: bytes, size: int, checksum: str | None = None) -> Prefilled:
        return Prefilled(
            worker_id=self._worker_id,
            worker_epoch=item.worker_epoch,
            model=self._model,
            connector=self._settings.connector,
            descriptor=descriptor,
            tokens=len(item.token_ids) // U32_BYTES,
            lease_us=round(self._settings.lease_s * 1e6),
            bytes=size,
            checksum=checksum,
        )


class ModelledKv(MockKv):
    """KV without bytes, whose transfers take modelled time: for mock engines without NIXL.

    Its descriptor has the hash of the prompt's media, the number of the offer, and the name of the holder. Workers of
    one process notify each other when KV was fetched. A prefill worker of another process keeps its KV until the lease
    ends.
    """

    _opened: ClassVar[WeakValueDictionary[str, "ModelledKv"]] = WeakValueDictionary()

    async def open(self, blocks: int) -> None:
        self._stats = Stats()
        self._leases: dict[str, tuple[asyncio.TimerHandle, Prefilled]] = {}
        self._opened[self._agent] = self

    @property
    def stats(self) -> Stats:
        held = sum(prefilled.bytes for _, prefilled in self._leases.values())
        self._stats.held_offers, self._stats.held_blocks = len(self._leases), held // self._block_bytes
        return self._stats

    @property
    def kept(self) -> int:
        return len(self._leases)

    def offer(self, item: WorkItem, seen: int) -> Prefilled:
        descriptor = pack_u64([seen, self._stats.offered]) + self._agent.encode()
        prefilled = self._prefilled(item, descriptor, self._bytes(item))
        expire = partial(self._end, item.request_id, "expired")
        lease = asyncio.get_running_loop().call_later(self._settings.lease_s, expire)
        self._leases[item.request_id] = lease, prefilled
        self._stats.offered += 1
        return prefilled

    def release(self, request_id: str) -> None:
        self._end(request_id, "released")

    def drop(self, prefilled: Prefilled) -> None:
        """Do nothing, because the descriptor names no request: the owner releases the KV, or its lease ends."""

    def release_all(self) -> None:
        for request_id in list(self._leases):
            self.release(request_id)

    async def close(self) -> None:
        self.release_all()

    async def _fetch(self, item: WorkItem, prefilled: Prefilled, first: int) -> tuple[int, FetchedKv]:
        if prefilled.connector != self._settings.connector:
            raise TransferError(f"{prefilled.worker_id} transfers KV by {prefilled.connector}, not by modelled time")
        size = self._bytes(item, first)
        us = ceil(size / BYTES_PER_US / self._settings.speedup)
        await asyncio.sleep(us / 1e6)
        holder = self._opened.get(prefilled.descriptor[2 * U64_BYTES :].decode(errors="replace"))
        if holder is not None and not holder._end(item.request_id, "fetched", prefilled.descriptor):
            self._stats.failed["expired"] = self._stats.failed.get("expired", 0) + 1
            raise TransferError(f"{prefilled.worker_id} no longer keeps this KV", "expired")
        (seen,) = unpack_u64(prefilled.descriptor[:U64_BYTES])
        fetch = FetchedKv(bytes=size, blocks=size // self._block_bytes, us=us)
        self._stats.add_fetch(fetch)
        return seen, fetch

    def _bytes(self, item: WorkItem, first: int = 0) -> int:
        return (len(block_names(item, self._block_size)) - first) * self._block_bytes

    def _end(self, request_id: str, why: FreeReason, offered: bytes | None = None) -> bool:
        """End the offer of a request. Return False if there is none, or it is of another attempt than `offered`."""
        if request_id not in self._leases:
            return False
        lease, prefilled = self._leases[request_id]
        if offered not in (None, prefilled.descriptor):
            return False
        del self._leases[request_id]
        lease.cancel()
        self._stats.freed[why] = self._stats.freed.get(why, 0) + 1
        self._on_end(request_id)
        return True


def block_names(item: WorkItem, block_size: int) -> list[int]:
    """Return one hash per block of a prompt, including a last block that is not full."""
    names = list(array_u64(item.sequence_hashes))
    tail = item.token_ids[len(names) * block_size * U32_BYTES :]
    if tail:
        beside = pack_u64(mm_hashes(item.media, block_size).get(len(names), ()))
        before = names[-1] if names else hash_seed(item.lora_name, item.cache_namespace)
        names.append(xxh3_64_intdigest(tail + beside, before))
    return names


def seen_in(blocks: Sequence[Array], names: Sequence[int]) -> int:
    """Return the hash of images and videos that fetched blocks contain; another number if any byte is wrong.

    `names` are the hashes from `block_names`.
    """
    media_hashes = []
    for block, name in zip(blocks, names, strict=True):
        words = block.view("<u8")
        uniform = bool((words == words[0]).all())
        media_hashes.append(int(words[0]) ^ name if uniform else xxh3_64_intdigest(block.tobytes(), name))
    return media_hashes[0] if len(set(media_hashes)) == 1 else xxh3_64_intdigest(pack_u64(media_hashes))
