"""KV of the mock engine as real bytes: written by the prefill worker, transferred, read by the decode worker.

Theory of operation. A block consists of one 8-byte word, repeated: the hash of all tokens up to its end, xor a hash of
the media. Blocks with equal words share a slot (the memory of one block). The decode worker knows the token hashes, so
it can compute the media hash from each block. If any byte is wrong, it gets another number. The output tokens are
derived from this number, so they show a wrong byte.

Slots are in use as long as the engine model keeps the blocks, so there are normally enough of them. Requests with equal
text and different images share blocks in the engine model, but not slots. If there are too few slots, a request fails.
There is one transport and one `MockKv` per worker epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, mm_hashes
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64, pack_u64
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import FetchedKv, FreeReason, Kind, OnFree, Stats
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name
from forebay.workers.kv_transfer.transport import LEASE_S, KvTransport, open_transport

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Array

NOW = frozenset(("in_flight", "in_flight_bytes", "waiting", "held_offers", "held_blocks", "quarantined_blocks"))
BYTES_PER_TOKEN = 256  # a block of 64 tokens has 16 KiB; real models need 100 times as much


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """Settings of a mock engine's KV transfers.

    Attributes:
        transport: transport of the bytes, `nixl` or `tcp`.
        bytes_per_token: bytes of KV per token. The bytes of a block must be a multiple of eight.
        lease_s: seconds for which the prefill worker keeps KV that nobody fetches.
        at: listening address for `tcp`, or network interface for `nixl`; see `open_transport`.
    """

    transport: Kind = "nixl"
    bytes_per_token: int = BYTES_PER_TOKEN
    checksum: bool = False
    lease_s: float = LEASE_S
    at: str = ""

    def layout(self, block_size: int) -> KvLayout:
        """Return the KV layout for blocks of `block_size` tokens.

        Raises:
            EngineError: the bytes of a block are not a multiple of eight.
        """
        block_bytes = self.bytes_per_token * block_size
        if block_bytes < U64_BYTES or block_bytes % U64_BYTES:
            raise EngineError(
                f"{self.bytes_per_token} bytes of KV per token are {block_bytes} per block of {block_size} tokens;"
                f" expected a multiple of {U64_BYTES} per block; change the bytes per token or the block size"
            )
        return KvLayout(connector=self.transport, dtype="uint8", block_bytes=block_bytes, layers=1)


class Slots:
    """Allocates the slots of a KV memory. A slot is the memory of one block.

    Each block of the mock engine is one 64-bit number, its word, repeated. Blocks with equal words share a slot.
    """

    def __init__(self, memory: Arena) -> None:
        self._memory = memory
        # Taken from and returned to the end, so that memory that is already mapped is reused first.
        self._free = list(range(memory.blocks - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    @property
    def used(self) -> int:
        return self._memory.blocks - len(self._free)

    @property
    def held(self) -> list[int]:
        """Slots with content, in the order in which they were written."""
        return list(self._slot_of.values())

    def take(self, count: int) -> list[int]:
        """Allocate `count` slots for fetched blocks. The caller frees them with `free`.

        Raises:
            TransferError: too few slots are free.
        """
        if count > len(self._free):
            raise TransferError(
                f"{count} slots are needed, but only {len(self._free)} of {self._memory.blocks} are free"
            )
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """Free slots that were allocated by `take`."""
        self._free += slots

    def hold(self, words: Sequence[int]) -> list[int]:
        """Return the slot of each word, and count its use. The caller ends the use with `let_go`.

        A word that no slot contains is written to a free slot.

        Raises:
            TransferError: too few slots are free.
        """
        new = [word for word in dict.fromkeys(words) if word not in self._slot_of]
        for word, slot in zip(new, self.take(len(new)), strict=True):
            self._slot_of[word] = slot
            self._holders[word] = 0
            self._memory.view(slot).view("<u8")[:] = word
        for word in words:
            self._holders[word] += 1
        return [self._slot_of[word] for word in words]

    def let_go(self, words: Sequence[int]) -> None:
        """End one use of the slot of each word. A slot without uses becomes free."""
        for word in words:
            self._holders[word] -= 1
            if not self._holders[word]:
                del self._holders[word]
                self._free.append(self._slot_of.pop(word))


class MockKv:
    """Keeps KV for other workers and fetches KV from them, during one worker epoch. Use it on one event loop.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, settings: KvSettings, model: str, worker_id: str, worker_epoch: int, block_size: int) -> None:
        self._settings = settings
        self._model = model
        self._worker_id = worker_id
        self._worker_epoch = worker_epoch
        self._block_size = block_size
        self._block_bytes = settings.layout(block_size).block_bytes
        self._words: dict[str, list[int]] = {}
        self._transport: KvTransport | None = None
        self._slots: Slots | None = None
        self._free_callback: OnFree | None = None

    async def open(self, blocks: int, on_free: OnFree) -> None:
        """Allocate memory and open the transport.

        Args:
            on_free: called with the id of a request whose blocks are no longer kept.

        Raises:
            EngineError: the sizes or the address are invalid, or NIXL fails.
            OSError: the listening address cannot be used.
        """
        self._free_callback = on_free
        self._transport = await open_transport(
            self._settings.transport,
            name=agent_name(self._worker_id, self._worker_epoch),
            block_bytes=self._block_bytes,
            blocks=blocks,
            on_free=self._on_free,
            lease_s=self._settings.lease_s,
            at=self._settings.at,
        )
        self._slots = Slots(self._transport.memory)

    @property
    def transport(self) -> KvTransport:
        """The transport, after `open`."""
        assert self._transport is not None
        return self._transport

    @property
    def slots(self) -> Slots:
        """The slots of the transport's memory, after `open`."""
        assert self._slots is not None
        return self._slots

    @property
    def kept(self) -> int:
        """Number of requests whose KV is kept for other workers."""
        return len(self._words)

    def offer(self, item: WorkItem, seen: int) -> Prefilled:
        """Write the KV of a prompt, keep it for another worker, and return its descriptor.

        Args:
            seen: hash of the prompt's media.

        Raises:
            TransferError: the KV cannot be kept, for example because too few slots are free. Nothing is kept then.
        """
        words = [name ^ seen for name in block_names(item, self._block_size)]
        slots = self.slots.hold(words)
        try:
            offer = self.transport.offer(item.request_id, slots, checksum=self._settings.checksum)
        except TransferError:
            self.slots.let_go(words)
            raise
        self._words[item.request_id] = words
        return Prefilled(
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            model=self._model,
            connector=self._settings.transport,
            descriptor=offer.descriptor,
            tokens=len(item.token_ids) // U32_BYTES,
            lease_us=round(self._settings.lease_s * 1e6),
            bytes=offer.bytes,
            checksum=offer.checksum,
        )

    def release(self, request_id: str) -> bool:
        """Free the KV that is kept for a request. Return False if none was kept."""
        return self.transport.release(request_id)

    async def fetch(self, item: WorkItem, first: int) -> tuple[int, FetchedKv]:
        """Fetch the KV of a prompt from the prefill worker that keeps it.

        Args:
            first: index of the first block to fetch; the blocks before it are in the cache already.

        Returns:
            The hash of the prompt's images and videos, computed from the fetched blocks, and the result of the fetch.

        Raises:
            TransferError: the KV cannot be fetched. The prefill worker is notified that it is not needed.
        """
        prefilled, names = item.prefilled, block_names(item, self._block_size)
        assert prefilled is not None, "engines refuse such items"
        try:
            self._check(item, prefilled)
            slots = self.slots.take(len(names) - first)
            try:
                fetched = await self.transport.fetch(prefilled, first, slots)
                return seen_in([self.transport.memory.view(slot) for slot in slots], names[first:]), fetched
            finally:
                self.slots.free(slots)
        except BaseException:  # also after a cancellation
            self.drop(prefilled)
            raise

    def drop(self, prefilled: Prefilled) -> None:
        """Notify the prefill worker that this worker will not fetch its KV."""
        self.transport.drop(prefilled)

    async def close(self) -> None:
        """Free all KV and end all transfers, without a call of `on_free`."""
        self._free_callback = None
        if self._transport is not None:
            await self._transport.close()

    def _on_free(self, request_id: str, why: FreeReason) -> None:
        self.slots.let_go(self._words.pop(request_id))
        if self._free_callback is not None:
            self._free_callback(request_id, why)

    def _check(self, item: WorkItem, prefilled: Prefilled) -> None:
        tokens = len(item.token_ids) // U32_BYTES
        if prefilled.model != self._model or prefilled.tokens != tokens:
            raise TransferError(
                f"the KV of {prefilled.worker_id} has {prefilled.tokens} tokens of the model {prefilled.model},"
                f" but the prompt has {tokens} tokens for the model {self._model}"
            )


def block_names(item: WorkItem, block_size: int) -> list[int]:
    """Return one hash per block of a prompt, including a last block that is not full."""
    names = list(array_u64(item.sequence_hashes))
    tail = item.token_ids[len(names) * block_size * U32_BYTES :]
    if tail:
        beside = pack_u64(mm_hashes(item.media, block_size).get(len(names), ()))
        before = names[-1] if names else hash_seed(item.lora_name, item.cache_namespace)
        names.append(xxh3_64_intdigest(tail + beside, before))
    return names


def seen_in(blocks: Sequence["Array"], names: Sequence[int]) -> int:
    """Return the hash of images and videos that fetched blocks contain; another number if any byte is wrong.

    Args:
        blocks: bytes of each block.
        names: hash of each block, from `block_names`.
    """
    media_hashes = []
    for block, name in zip(blocks, names, strict=True):
        words = block.view("<u8")
        uniform = bool((words == words[0]).all())
        media_hashes.append(int(words[0]) ^ name if uniform else xxh3_64_intdigest(block.tobytes(), name))
    return media_hashes[0] if len(set(media_hashes)) == 1 else xxh3_64_intdigest(pack_u64(media_hashes))


def summed(past: Stats, current: Stats) -> Stats:
    """Return statistics whose counters are the sums of both arguments, and whose gauges are those of `current`."""
    total = Stats()
    for name in Stats.__struct_fields__:
        before, now = getattr(past, name), getattr(current, name)
        if isinstance(now, dict):
            now = {key: before.get(key, 0) + now.get(key, 0) for key in before | now}
        elif name not in NOW:
            now += before
        setattr(total, name, now)
    return total
