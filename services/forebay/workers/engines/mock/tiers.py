"""KV tiers of one rank of a mock engine: offloads blocks of real bytes, and loads them before a prompt is computed.

Theory of operation. Blocks are offered to the tiers when the batch is published in which device memory has got them, so
a tier never has a block before the modelled engine does. The modelled device has no bytes, so a block is written when
it is offered, and a load goes to memory of its own. A block consists of its sequence hash, repeated. Every loaded block
is checked, and a wrong byte ends the engine. `OffloadManager` decides and moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from forebay.engine_model.requests import EngineConfig
from forebay.engine_model.steps import Load, Removed, Stored
from forebay.engine_model.timing import StepWork
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.events.work import WorkItem
from forebay.kv_tiers.decisions import TierRun, leading_runs
from forebay.workers.engine import CacheChange, EngineError
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Array

LAYOUT = "forebay-mock-3"  # another number is needed when the bytes or the keys of blocks change
KEY_WORDS = 4


@dataclass(slots=True)
class TieredPrompt:
    """The blocks of a request in flight.

    Attributes:
        wanted: names of the blocks of the newest match, which include output blocks of a preempted request.
        runs: where the blocks of the newest match are.
        cached: number of blocks that device memory had at the newest match; -1 before it.
        loaded: tokens and microseconds of its loads, by tier.
    """

    item: WorkItem
    names: list[BlockName]
    wanted: list[BlockName] = field(default_factory=list)
    runs: list[TierRun] = field(default_factory=list)
    cached: int = -1
    load: Load | None = None
    loaded: dict[LowerTier, tuple[int, int]] = field(default_factory=dict)

    @property
    def onboarded(self) -> tuple[OnboardedTokens, ...]:
        return tuple(OnboardedTokens(tier=tier, tokens=tokens, us=us) for tier, (tokens, us) in self.loaded.items())


class MockTiers:
    """Tiers of one rank of a mock engine. Each rank has a subdirectory of the worker's disk.

    `wake` is called from any thread when `manager.poll` has something to do.
    """

    def __init__(
        self,
        settings: TierSettings,
        config: EngineConfig,
        spec: WorkerSpec,
        block_bytes: int,
        rank: int,
        speedup: float,
        wake: Callable[[], None],
    ) -> None:
        if settings.disk is not None:
            settings = replace(settings, disk=settings.disk / f"rank-{rank}")
        self._config = config
        self._block_bytes = block_bytes
        self._speedup = speedup
        identity = KvIdentity(
            weights=sha256(f"forebay mock engine {spec.model}".encode()).hexdigest(),
            tp_rank=0,
            tp_size=1,
            layout=LAYOUT,
            dtype="uint8",
            block_size=config.block_size,
            block_bytes=block_bytes,
            model=spec.model,
        )
        self.manager = OffloadManager(settings, identity, wake=wake, owner=f"worker {spec.worker_id}")

    def begin(self, item: WorkItem, cached: int) -> TieredPrompt:
        """Copy the blocks of a request, after the `cached` ones, from disk and store to host memory while it waits."""
        names = _names(array_u64(item.sequence_hashes))
        # The last token of a prompt is always computed.
        reusable = (len(item.token_ids) // U32_BYTES - 1) // self._config.block_size
        self.manager.prefetch(names[:reusable], cached, item.store_blocks)
        return TieredPrompt(item, names)

    def match(self, prompt: TieredPrompt, hashes: Sequence[int], first: int) -> int:
        """Return how many blocks after the first `first` are loaded before the prompt is computed, as `TierMatch`."""
        prompt.wanted = prompt.names + _names(hashes[len(prompt.names) :])
        prompt.cached = first
        cached_tokens = first * self._config.block_size
        prompt.runs = self.manager.match(prompt.wanted, first, cached_tokens, prompt.item.store_blocks)
        return sum(run.blocks for run in prompt.runs)

    def load(self, prompt: TieredPrompt, load: Load, done: Callable[[int], bool]) -> None:
        """Begin a load that the engine model has requested, because of its newest match.

        `done` is called with the number of leading blocks that were loaded, unless the request has begun another load
        by then. It returns whether the request still waits for them.
        """
        import numpy  # noqa: PLC0415 - an extra

        names = prompt.wanted[load.first_block : load.first_block + load.blocks]
        into: Array = numpy.empty((load.blocks, self._block_bytes), dtype=numpy.uint8)
        prompt.load = load

        def ended(result: LoadResult) -> None:
            for name, block in zip(names[: result.blocks], into, strict=False):
                if (block.view("<u8") != name.sequence_hash).any():
                    raise EngineError(f"a KV tier returned wrong bytes for the block {name.sequence_hash:016x}")
            if prompt.load is load and done(result.blocks):
                for part in result.onboarded(self._config.block_size):
                    tokens, us = prompt.loaded.get(part.tier, (0, 0))
                    prompt.loaded[part.tier] = tokens + part.tokens, us + part.us

        runs = leading_runs(prompt.runs, load.blocks)
        self.manager.load(prompt.wanted, load.first_block, runs, [memoryview(row) for row in into], ended)

    def offload(self, changes: Sequence[CacheChange]) -> None:
        for change in changes:
            match change:
                case Stored(tier="device"):
                    self._offer(_names(change.hashes))
                case Removed(tier="device"):
                    names = _names(change.hashes)
                    self.manager.device_evicts(names, partial(self._bytes, names))

    def use(self, prompt: TieredPrompt, cached_tokens: int) -> None:
        """Offer the blocks of a prompt that device memory had before it was computed, and measure the prompt."""
        block_size, item = self._config.block_size, prompt.item
        cached = cached_tokens // block_size if prompt.cached < 0 else prompt.cached
        self._offer(prompt.names[:cached])
        loaded = {tier: tokens // block_size for tier, (tokens, _) in prompt.loaded.items()}
        self.manager.observe_request(len(prompt.names), cached, loaded)
        if item.kv_pin_s:
            self.manager.pin(prompt.names, item.kv_pin_s)
        tokens = len(item.token_ids) // U32_BYTES - cached_tokens
        if item.stage != "decode":
            attended = tokens * cached_tokens + tokens * (tokens + 1) // 2
            work = StepWork(tokens, attended, 0, 0, self._config.kv_blocks_total * block_size)
            self.manager.costs.observe_prefill(tokens, cached_tokens, self._config.timing.step_us(work) / self._speedup)

    def measured(self) -> TierCosts:
        return self.manager.costs.measured(self._config.block_size)

    def _offer(self, names: Sequence[BlockName]) -> None:
        if names:
            self.manager.offer(names, partial(self._bytes, names))

    def _bytes(self, names: Sequence[BlockName], at: int) -> memoryview:
        import numpy  # noqa: PLC0415 - an extra

        words = numpy.full(self._block_bytes // U64_BYTES, names[at].sequence_hash, dtype="<u8")
        return words.view(numpy.uint8).data


def _names(hashes: Sequence[int]) -> list[BlockName]:
    """Return the names of blocks. The sequence hash covers the prefix, its images, the adapter and the salt."""
    return [BlockName(block.to_bytes(U64_BYTES, "little") * KEY_WORDS, block) for block in hashes]
