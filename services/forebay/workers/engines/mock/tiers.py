"""KV tiers of one rank of a mock engine: offloads blocks of real bytes, and loads them before a prompt is computed.

Theory of operation. Blocks are offered to the tiers when the batch is published in which device memory has got them, so
a tier never has a block before the modelled engine does. A load goes to memory of its own, because the modelled device
has no bytes. Its blocks are checked, and the output tokens of the request depend on the result: they are wrong if a
tier served a wrong byte. Loads run in real time while the engine computes other requests.

A block consists of one 8-byte word, repeated: the beginning of its key, which contains everything that the KV of a real
engine depends on. The modelled engine has no bytes, so a block is written when it is offered to a tier.

`OffloadManager` decides and moves. This module names blocks, makes their bytes, and checks what each request has
loaded.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from forebay.engine_model.requests import EngineConfig
from forebay.engine_model.steps import Load, Removed, StoreChange, Stored
from forebay.engine_model.timing import StepWork
from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, array_u64
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.events.work import WorkItem
from forebay.kv_tiers.decisions import TierRun, leading_runs
from forebay.workers.engine import CacheChange
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Array

LAYOUT = "forebay-mock-2"  # another number is needed when the bytes of blocks change

OnLoaded = Callable[[WorkItem, int, int], bool]
"""Called with a request, the number of leading blocks that were loaded, and the hash of what the request has seen.

That hash is the hash of the embeddings of its images and videos, and another number if it has loaded a wrong byte.
Returns whether the request still waits for the load.
"""


@dataclass(slots=True)
class _Prompt:
    """A request in flight.

    Attributes:
        media_hash: hash of the embeddings of its images and videos; 0 while a decode worker does not know it.
        wanted: names of the blocks of the newest match.
        runs: where the blocks of the newest match are.
        cached: number of blocks that device memory had at the newest match; -1 before it.
        onboarded: tokens and microseconds of its loads, by tier.
        wrong: 0 if all loaded bytes were right; otherwise a hash of the wrong blocks.
    """

    item: WorkItem
    names: list[BlockName]
    media_hash: int
    wanted: list[BlockName] = field(default_factory=list)
    runs: list[TierRun] = field(default_factory=list)
    cached: int = -1
    load: int = 0
    onboarded: dict[LowerTier, tuple[int, int]] = field(default_factory=dict)
    wrong: int = 0

    @property
    def seen(self) -> int:
        """Hash of the embeddings of all its images and videos; another number if it has loaded a wrong byte."""
        return (self.media_hash + self.wrong) & U64_MASK

    def check(self, name: BlockName, block: "Array") -> None:
        """Check the bytes of a loaded block."""
        if (block.view("<u8") != _word(name)).any():
            self.wrong = xxh3_64_intdigest(block.tobytes(), self.wrong ^ name.sequence_hash)


class KnownBlocks:
    """Names of the blocks that requests in flight have, or that device memory contains, by their sequence hash.

    Args:
        chain: computes the keys of output blocks.
    """

    def __init__(self, chain: KeyChain) -> None:
        self._chain = chain
        self._names: dict[int, BlockName] = {}
        self._uses: Counter[int] = Counter()  # requests in flight with the block, and device memories that contain it
        self._device: set[int] = set()
        self._new: set[int] = set()  # output blocks that have got a hash, and may not be in device memory yet

    def __len__(self) -> int:
        return len(self._names)

    def get(self, block: int) -> BlockName | None:
        return self._names.get(block)

    def begin(self, names: Sequence[BlockName]) -> None:
        """Add the blocks of a prompt. The caller removes them with `end`."""
        for name in names:
            self._use(name)

    def end(self, names: Iterable[BlockName]) -> None:
        """Remove the blocks of a prompt, except those of other prompts and of device memory."""
        for name in names:
            self._drop(name.sequence_hash)

    def name_output(self, parent: int, block: int, token_ids: bytes) -> None:
        """Name an output block that follows a known block, as `OutputBlockNamed` of the engine model."""
        before = self._names.get(parent)
        if before is not None and block not in self._names:
            (key,) = self._chain.extend(before.key, token_ids)
            self._use(BlockName(key, block))
            self._new.add(block)

    def stored(self, blocks: Iterable[int]) -> list[BlockName]:
        """Record that device memory contains blocks. Return the leading ones whose names are known."""
        found: list[BlockName] = []
        is_known = True
        for block in blocks:
            name = self._names.get(block)
            if name is not None and block not in self._device:
                self._device.add(block)
                self._use(name)
            is_known = is_known and name is not None
            if name is not None and is_known:
                found.append(name)
        return found

    def on_device(self, blocks: Iterable[int]) -> list[BlockName]:
        """Return the leading blocks that device memory contains."""
        return [self._names[block] for block in takewhile(self._device.__contains__, blocks)]

    def removed(self, blocks: Iterable[int]) -> list[BlockName]:
        """Record that device memory does not contain blocks any more. Return those whose names are known."""
        found: list[BlockName] = []
        for block in blocks:
            if block in self._device:
                self._device.discard(block)
                found.append(self._names[block])
                self._drop(block)
        return found

    def settle(self) -> None:
        """Forget the new output blocks that are not in device memory. Call this after each batch of changes."""
        for block in self._new:
            self._drop(block)
        self._new.clear()

    def clear(self, *, requests: bool) -> None:
        """Forget the content of device memory, and with `requests` also every block of a request."""
        if requests:
            for kept in (self._names, self._uses, self._device, self._new):
                kept.clear()
        else:
            self.removed(list(self._device))

    def _use(self, name: BlockName) -> None:
        self._names.setdefault(name.sequence_hash, name)
        self._uses[name.sequence_hash] += 1

    def _drop(self, block: int) -> None:
        self._uses[block] -= 1
        if not self._uses[block]:
            del self._names[block], self._uses[block]


class MockTiers:
    """Tiers of one rank of a mock engine.

    Args:
        settings: tiers of a worker. Each rank has a subdirectory of its disk.
        config: sizes and step times of the modelled engine.
        speedup: how many times as fast as the modelled engine the rank runs.
    """

    def __init__(self, settings: TierSettings, config: EngineConfig, rank: int, speedup: float) -> None:
        if settings.disk is not None:
            settings = replace(settings, disk=settings.disk / f"rank-{rank}")
        self._settings = settings
        self._config = config
        self._block_bytes = 0
        self._speedup = speedup
        self._identity: KvIdentity | None = None
        self._opened: OffloadManager | None = None
        self._known: KnownBlocks | None = None
        self._prompts: dict[str, _Prompt] = {}
        self._loads = 0  # number of loads so far
        self._on_loaded: OnLoaded = lambda *_: False

    @property
    def tiers(self) -> OffloadManager:
        """The tiers, after `open`."""
        assert self._opened is not None
        return self._opened

    @property
    def known(self) -> KnownBlocks:
        """Names of blocks, after `open`."""
        assert self._known is not None
        return self._known

    @property
    def request_ids(self) -> Collection[str]:
        """Ids of the requests whose blocks have names."""
        return self._prompts.keys()

    def open(self, spec: WorkerSpec, block_bytes: int, wake: Callable[[], None], on_loaded: OnLoaded) -> None:
        """Open the tiers. This blocks while the content of disk and store is listed.

        Args:
            block_bytes: bytes per block.
            wake: called from any thread when `poll` has something to do.
            on_loaded: called by `poll` when a load has ended.

        Raises:
            EngineError: a tier cannot be opened.
        """
        self._block_bytes = block_bytes
        self._identity = KvIdentity(
            weights=sha256(f"forebay mock engine {spec.model}".encode()).hexdigest(),
            tp_rank=0,
            tp_size=1,
            layout=LAYOUT,
            dtype="uint8",
            block_size=self._config.block_size,
            block_bytes=block_bytes,
            model=spec.model,
        )
        self._known = KnownBlocks(KeyChain(self._identity))
        self._on_loaded = on_loaded
        opened = OffloadManager(self._settings, self._identity, wake=wake, owner=f"worker {spec.worker_id}")
        opened.open()
        self._opened = opened

    def close(self) -> None:
        """End all transfers and close the tiers. This blocks until the transfers have ended."""
        if self._opened is not None:
            self._opened.close()

    def begin(self, item: WorkItem, media_hash: int, adapter: str, cached: int) -> None:
        """Name the blocks of a request, and copy its blocks from disk and store to host memory while it waits.

        Args:
            media_hash: hash of the embeddings of its images and videos; 0 if it is not known.
            adapter: digest of the adapter; empty without one.
            cached: number of leading blocks in device memory.
        """
        assert self._identity is not None
        block_size = self._config.block_size
        chain = KeyChain(self._identity, salt=item.cache_namespace, adapter=adapter)
        media = media_by_block(((one.digest, one.first_token, one.tokens) for one in item.media), block_size)
        keys = chain.extend(None, item.token_ids, media)
        names = [BlockName(*pair) for pair in zip(keys, array_u64(item.sequence_hashes), strict=True)]
        self._prompts[item.request_id] = _Prompt(item, names, media_hash)
        self.known.begin(names)
        self.known.stored(name.sequence_hash for name in names[:cached])
        self.tiers.prefetch(names[: self._reusable(item)], cached, item.store_blocks)

    def match(self, request_id: str, hashes: Sequence[int], first: int) -> int:
        """Return how many blocks after the first `first` are loaded before the prompt is computed.

        This is `TierMatch` of the engine model.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return 0
        names = prompt.names[: self._reusable(prompt.item)]
        for block in hashes[len(names) :]:  # output blocks of a preempted request
            if (name := self.known.get(block)) is None:
                break
            names.append(name)
        prompt.wanted, prompt.cached = names, first
        cached_tokens = first * self._config.block_size
        prompt.runs = self.tiers.match(names, first, cached_tokens, prompt.item.store_blocks)
        return sum(run.blocks for run in prompt.runs)

    def name_output(self, parent: int, block: int, token_ids: bytes) -> None:
        """Name an output block. This is `OutputBlockNamed` of the engine model."""
        self.known.name_output(parent, block, token_ids)

    def poll(self) -> None:
        """Apply the transfers that have ended."""
        self.tiers.poll()

    def load(self, load: Load) -> None:
        """Begin a load that the engine model has requested, because of its newest match."""
        import numpy  # noqa: PLC0415 - an extra

        prompt = self._prompts[load.request_id]
        into: Array = numpy.empty((load.blocks, self._block_bytes), dtype=numpy.uint8)
        self._loads += 1
        prompt.load = self._loads
        names = prompt.wanted
        ended = partial(self._loaded, load, self._loads, names, into)
        views = [memoryview(row) for row in into]
        self.tiers.load(names, load.first_block, leading_runs(prompt.runs, load.blocks), views, ended)

    def learn(self, request_id: str, media_hash: int) -> int:
        """Set the hash of all embeddings of a prompt, which its KV has shown.

        Returns:
            The hash, or another number if the request has loaded a wrong byte.
        """
        prompt = self._prompts[request_id]
        prompt.media_hash = media_hash
        return prompt.seen

    def apply(self, changes: Sequence[CacheChange]) -> None:
        """Offload the blocks that device memory has stored or evicted."""
        for change in changes:
            match change:
                case Stored(tier="device"):
                    self._offer(self.known.stored(change.hashes))
                case Removed(tier="device"):
                    names = self.known.removed(change.hashes)
                    self.tiers.device_evicts(names, partial(self._bytes, names))
        self.known.settle()

    def use(self, request_id: str, cached_tokens: int) -> None:
        """Offer the blocks of a prompt that device memory had before the prompt was computed, and measure the prompt.

        Args:
            cached_tokens: prompt tokens that were not computed.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        block_size = self._config.block_size
        cached = cached_tokens // block_size if prompt.cached < 0 else prompt.cached
        self._offer(self.known.on_device(name.sequence_hash for name in prompt.names[:cached]))
        loaded = {tier: tokens // block_size for tier, (tokens, _) in prompt.onboarded.items()}
        self.tiers.observe_request(len(prompt.names), cached, loaded)
        if prompt.item.kv_pin_s:
            self.tiers.pin(prompt.names, prompt.item.kv_pin_s)
        tokens = len(prompt.item.token_ids) // U32_BYTES - cached_tokens
        if prompt.item.stage != "decode":
            attended = tokens * cached_tokens + tokens * (tokens + 1) // 2
            work = StepWork(tokens, attended, 0, 0, self._config.kv_blocks_total * block_size)
            self.tiers.costs.observe_prefill(tokens, cached_tokens, self._config.timing.step_us(work) / self._speedup)

    def onboarded(self, request_id: str) -> tuple[OnboardedTokens, ...]:
        """Return what was loaded for the prompt of a request, by tier."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return ()
        return tuple(
            OnboardedTokens(tier=tier, tokens=tokens, us=us) for tier, (tokens, us) in prompt.onboarded.items()
        )

    def end(self, request_id: str) -> None:
        """Forget a request that has ended. A load in flight for it has no effect any more."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self.known.end(prompt.names)

    def clear_device(self, *, requests: bool) -> None:
        """Forget the content of device memory, and with `requests` also every request. Tiers keep their blocks."""
        if self._known is not None:
            self._known.clear(requests=requests)
        if requests:
            self._prompts.clear()

    def clear(self) -> None:
        """Remove all blocks of host memory and disk. The shared store keeps its blocks: other workers use them too."""
        self.tiers.clear()

    def changes(self) -> tuple[Sequence[CacheChange], list[StoreChange]]:
        """Return the changes of host memory and disk, and of the shared store, since the previous call."""
        return self.tiers.changes()

    def held(self) -> Sequence[CacheChange]:
        """Return all blocks in host memory and on disk."""
        return self.tiers.content()[0]

    def stored(self) -> list[int]:
        """Return the sequence hashes of the blocks that the shared store has, as far as this rank knows."""
        return [name.sequence_hash for name in self.tiers.resident("store")]

    @property
    def store_name(self) -> str:
        """Name of the shared store; empty without one."""
        return self.tiers.store_name

    def counters(self) -> TierCounters:
        return self.tiers.counters()

    def measured(self) -> TierCosts:
        """Return the measured costs of loads, and of computing a block of a prompt."""
        return self.tiers.costs.measured(self._config.block_size)

    def _reusable(self, item: WorkItem) -> int:
        """Return how many blocks of a prompt need not be computed. Its last token is always computed."""
        return (len(item.token_ids) // U32_BYTES - 1) // self._config.block_size

    def _offer(self, names: Sequence[BlockName]) -> None:
        if names:
            self.tiers.offer(names, partial(self._bytes, names))

    def _bytes(self, names: Sequence[BlockName], at: int) -> memoryview:
        import numpy  # noqa: PLC0415 - an extra

        return numpy.full(self._block_bytes // U64_BYTES, _word(names[at]), dtype="<u8").view(numpy.uint8).data

    def _loaded(self, load: Load, number: int, names: Sequence[BlockName], into: "Array", result: LoadResult) -> None:
        prompt = self._prompts.get(load.request_id)
        if prompt is None or prompt.load != number:
            return  # cancelled, or its cache was cleared and it began another load
        for at in range(result.blocks):
            index = load.first_block + at
            prompt.check(names[index], into[at])
        if self._on_loaded(prompt.item, result.blocks, prompt.seen):
            for part in result.onboarded(self._config.block_size):
                tokens, us = prompt.onboarded.get(part.tier, (0, 0))
                prompt.onboarded[part.tier] = tokens + part.tokens, us + part.us


def _word(name: BlockName) -> int:
    return int.from_bytes(name.key[:U64_BYTES], "little")
