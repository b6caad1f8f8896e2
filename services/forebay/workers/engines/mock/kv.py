"""The KV of a mock engine as bytes: written where a prompt is computed, moved for real, read where it is answered.

Theory of operation. A block's bytes are one 8-byte word over and over: the block's name, which is a hash of all tokens
up to its end, xor what the model was shown beside text. Equal words share a slot. Who fetches knows the names, so each
block gives that xor back; a byte that is wrong gives another number, and the answer is made from it. Slots are held as
long as the engine's model holds the blocks, so there are enough; with images beside equal text there may be too few,
and a request fails. There is one transport, and one of these, for each epoch of a worker.
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
from forebay.workers.kv_transfer.api import Fetched, GivenBack, Kind, KvMemory, KvTransport, OnGivenBack, Stats
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name
from forebay.workers.kv_transfer.transport import LEASE_S, open_transport

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Array

NOW = frozenset(("in_flight", "in_flight_bytes", "waiting", "held_offers", "held_blocks", "quarantined_blocks"))
BYTES_PER_TOKEN = 256  # a block of 64 tokens is 16 KiB; real models have 100 times as much


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """How a mock engine's KV travels.

    Attributes:
        transport: what moves it; `tcp` is the plain path.
        bytes_per_token: its size; a block's must be a multiple of eight bytes.
        checksum: whether it is sent with one, and that checked.
        lease_s: how long it is kept for a reader that does not come.
        at: the address at which others fetch it by `tcp`, or the network interface for `nixl`; see `open_transport`.
    """

    transport: Kind = "nixl"
    bytes_per_token: int = BYTES_PER_TOKEN
    checksum: bool = False
    lease_s: float = LEASE_S
    at: str = ""

    def layout(self, block_size: int) -> KvLayout:
        """How blocks of so many tokens lie. Raises EngineError for sizes that cannot be."""
        block_bytes = self.bytes_per_token * block_size
        if block_bytes < U64_BYTES or block_bytes % U64_BYTES:
            raise EngineError(
                f"{self.bytes_per_token} bytes of KV a token are {block_bytes} a block of {block_size} tokens: "
                f"that must be a multiple of {U64_BYTES}"
            )
        return KvLayout(connector=self.transport, dtype="uint8", block_bytes=block_bytes, layers=1)


class Slots:
    """The slots of one memory, by what is written in them."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        # Taken from the end, and put back there: memory that was touched is used again first.
        self._free = list(range(memory.blocks - 1, -1, -1))
        self._slot_of: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    @property
    def used(self) -> int:
        """How many are not free."""
        return self._memory.blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Slots to fetch into; `free` them. Raises TransferError when there are too few."""
        if count > len(self._free):
            raise TransferError(f"{count} slots are needed and {len(self._free)} of {self._memory.blocks} are free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """What `take` gave is not needed any more."""
        self._free += slots

    def hold(self, words: Sequence[int]) -> list[int]:
        """Slots with these words in them, written if they are in none; `let_go` of them. Raises TransferError."""
        new = [word for word in dict.fromkeys(words) if word not in self._slot_of]
        for word, slot in zip(new, self.take(len(new)), strict=True):
            self._slot_of[word] = slot
            self._holders[word] = 0
            self._memory.view(slot).view("<u8")[:] = word
        for word in words:
            self._holders[word] += 1
        return [self._slot_of[word] for word in words]

    def let_go(self, words: Sequence[int]) -> None:
        """One who held these does not any more."""
        for word in words:
            self._holders[word] -= 1
            if not self._holders[word]:
                del self._holders[word]
                self._free.append(self._slot_of.pop(word))


class MockKv:
    """What one epoch of a worker keeps for others, and fetches from them. On one event loop.

    `on_given_back` is told which request's blocks are kept no longer.
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
        self._on_given_back: OnGivenBack | None = None

    async def open(self, blocks: int, on_given_back: OnGivenBack) -> None:
        """Have memory for so many blocks, and a way to others. Raises EngineError, OSError."""
        self._on_given_back = on_given_back
        self._transport = await open_transport(
            self._settings.transport,
            name=agent_name(self._worker_id, self._worker_epoch),
            block_bytes=self._block_bytes,
            blocks=blocks,
            on_given_back=self._given_back,
            lease_s=self._settings.lease_s,
            at=self._settings.at,
        )
        self._slots = Slots(self._transport.memory)

    @property
    def transport(self) -> KvTransport:
        """What moves it, once that is open."""
        assert self._transport is not None
        return self._transport

    @property
    def slots(self) -> Slots:
        """Where it lies, once that is open."""
        assert self._slots is not None
        return self._slots

    @property
    def kept(self) -> int:
        """Of how many requests KV is kept."""
        return len(self._words)

    def offer(self, item: WorkItem, seen: int) -> Prefilled:
        """Write the KV of a prompt and keep it. Raises TransferError; nothing is kept then."""
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
        """Nobody will fetch what is kept for a request; whether anything was."""
        return self.transport.release(request_id)

    async def fetch(self, item: WorkItem, first: int) -> tuple[int, Fetched]:
        """Fetch the blocks of a prompt from number `first` on: what the model was shown beside text, as they have it.

        Raises TransferError. Who keeps them is told that they are not wanted, unless they came.
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
        except BaseException:  # cancelled, too
            self.drop(prefilled)
            raise

    def drop(self, prefilled: Prefilled) -> None:
        """Tell who keeps it that nobody will fetch."""
        self.transport.drop(prefilled)

    async def close(self) -> None:
        """Keep nothing, fetch nothing; nobody is told any more."""
        self._on_given_back = None
        if self._transport is not None:
            await self._transport.close()

    def _given_back(self, request_id: str, why: GivenBack) -> None:
        self.slots.let_go(self._words.pop(request_id))
        if self._on_given_back is not None:
            self._on_given_back(request_id, why)

    def _check(self, item: WorkItem, prefilled: Prefilled) -> None:
        tokens = len(item.token_ids) // U32_BYTES
        if prefilled.model != self._model or prefilled.tokens != tokens:
            raise TransferError(
                f"{prefilled.worker_id} keeps {prefilled.tokens} tokens for {prefilled.model}; "
                f"this is a prompt of {tokens} for {self._model}"
            )


def block_names(item: WorkItem, block_size: int) -> list[int]:
    """A name for each block of a prompt, the last one, perhaps not full, included."""
    names = list(array_u64(item.sequence_hashes))
    tail = item.token_ids[len(names) * block_size * U32_BYTES :]
    if tail:
        beside = pack_u64(mm_hashes(item.media, block_size).get(len(names), ()))
        before = names[-1] if names else hash_seed(item.lora_name, item.cache_namespace)
        names.append(xxh3_64_intdigest(tail + beside, before))
    return names


def seen_in(blocks: Sequence["Array"], names: Sequence[int]) -> int:
    """What the model was shown beside text, as the bytes of blocks say it; some other number if any byte is wrong."""
    told = []
    for block, name in zip(blocks, names, strict=True):
        words = block.view("<u8")
        uniform = bool((words == words[0]).all())
        told.append(int(words[0]) ^ name if uniform else xxh3_64_intdigest(block.tobytes(), name))
    return told[0] if len(set(told)) == 1 else xxh3_64_intdigest(pack_u64(told))


def summed(past: Stats, current: Stats) -> Stats:
    """What both counted; what is so at the moment is so of the current one alone."""
    total = Stats()
    for name in Stats.__struct_fields__:
        before, now = getattr(past, name), getattr(current, name)
        if isinstance(now, dict):
            now = {key: before.get(key, 0) + now.get(key, 0) for key in before | now}
        elif name not in NOW:
            now += before
        setattr(total, name, now)
    return total
