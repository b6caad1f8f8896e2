"""One rank of a mock engine: its model in real time, KV that it keeps for others or fetches from them, and KV tiers.

Theory of operation. Each step of the model takes virtual time. The rank keeps one deadline in real time, and moves it
by the scaled duration of each step. It publishes a step when the deadline has come, so a sleep that ends late shortens
the next one. Steps much shorter than the timer resolution are published together. KV that the rank computes for another
worker is offered when its batch is published. KV from another worker is fetched in real time while other requests run,
and so is KV from tiers loaded.

Blocks are offered to the tiers when the batch is published in which device memory has got them, so a tier never has a
block before the modelled engine does. The modelled device has no bytes, so a block is written when it is offered, and a
load goes to memory of its own. A block consists of its sequence hash, repeated. Every loaded block is checked, and a
wrong byte ends the engine. `OffloadManager` decides and moves.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Literal

import msgspec
import numpy as np

from forebay import runtime
from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.engine_model.model import (
    Computed,
    EngineConfig,
    EngineModel,
    EngineRequest,
    EngineStage,
    EngineStep,
    Finished,
    FirstTokenStep,
    QueueFull,
    RequestMalformed,
    RequestRefused,
    RequestTooLarge,
)
from forebay.engine_model.steps import Load, StoreChange, Stored
from forebay.engine_model.timing import StepWork
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64, pack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import LowerTier
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.kv_tiers.decisions import TierRun, leading_runs
from forebay.workers.engine import (
    CacheChange,
    Cleared,
    EngineBatch,
    EngineError,
    Failed,
    NotFetched,
    PromptPrefilled,
    Publish,
)
from forebay.workers.engines.mock.kv import MockKv
from forebay.workers.engines.mock.outputs import Extra, OutputScripts, extend, merged, token_seed
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult
from forebay.workers.kv_transfer.api import Array, FetchedKv
from forebay.workers.kv_transfer.nixl_agent import TransferError

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
        names = prompt.wanted[load.first_block : load.first_block + load.blocks]
        into: Array = np.empty((load.blocks, self._block_bytes), dtype=np.uint8)
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
            if isinstance(change, Stored) and change.tier == "device":
                self._offer(_names(change.hashes))

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

    def _offer(self, names: Sequence[BlockName]) -> None:
        if names:
            self.manager.offer(names, partial(self._bytes, names))

    def _bytes(self, names: Sequence[BlockName], at: int) -> memoryview:
        words = np.full(self._block_bytes // U64_BYTES, names[at].sequence_hash, dtype="<u8")
        return words.view(np.uint8).data


def _names(hashes: Sequence[int]) -> list[BlockName]:
    """Return the names of blocks. The sequence hash covers the prefix, its images, the adapter and the salt."""
    return [BlockName(block.to_bytes(U64_BYTES, "little") * KEY_WORDS, block) for block in hashes]


US_PER_S = 1_000_000
QUANTUM_US = 1_000  # minimum real time per batch: the timer resolution of an event loop
BATCH_TOKENS_MAX = 4_096  # other tasks run after a few milliseconds at any speedup
LAG_S_MAX = 0.1  # maximum backlog: a machine that is slower than this does not run faster later to catch up

RequestState = Literal["runs", "prefill", "kept", "to_fetch", "fetching", "fetched"]
REJECTIONS: dict[type[RequestRefused], tuple[int, str]] = {
    RequestTooLarge: (400, "context_length_exceeded"),
    RequestMalformed: (400, "invalid_request"),
    QueueFull: (503, "engine_overloaded"),
}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """A request in flight, or one whose KV is kept for another worker. Without tiers, `prompt` is None.

    `seen` is the hash of its images and videos, on which its output depends. `task` fetches its KV.
    """

    item: WorkItem
    seen: int
    state: RequestState
    prompt: TieredPrompt | None = None
    task: asyncio.Task[None] | None = None
    fetched: FetchedKv | None = None


class MockRank:
    """One rank of a mock engine. See `MockEngine` for the arguments.

    `has_tiers` tells whether `open_tiers` will be called. `kv` is None while KV transfers are unavailable; `tiers` is
    None for none, and before `open_tiers`.
    """

    def __init__(
        self, number: int, config: EngineConfig, speedup: float, scripts: OutputScripts | None, *, has_tiers: bool
    ) -> None:
        self.model = EngineModel(config, self._match if has_tiers else None)
        self.kv: MockKv | None = None
        self.tiers: MockTiers | None = None
        self._number = number
        self._speedup = speedup
        self._span_us = max(1, round(QUANTUM_US * speedup))
        self._scripts = scripts
        self._requests: dict[str, _Request] = {}
        self._extras: dict[str, Extra] = {}  # requests whose output is more than tokens of the model
        self._wake = asyncio.Event()
        self._failed: list[Failed] = []
        self._not_fetched: list[NotFetched] = []
        self._changes: list[CacheChange] = []
        self._store_changes: list[StoreChange] = []
        self._published = self.model.load()
        self._generation = 0  # number of resets: batches from before a reset are not published
        self._clears = 0  # number of times that device memory was cleared
        self._fault: Exception | None = None  # why the tiers have failed
        self._held: frozenset[str] = frozenset()

    def requests(self) -> dict[str, RequestState]:
        return {request_id: request.state for request_id, request in self._requests.items()}

    async def open_tiers(self, settings: TierSettings, spec: WorkerSpec, block_bytes: int) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._poll_tiers)

        tiers = MockTiers(settings, self.model.config, spec, block_bytes, self._number, self._speedup, wake)
        await runtime.offload(tiers.manager.open)
        self.tiers = tiers

    def submit(self, item: WorkItem, seen: int = 0) -> None:
        """Queue an item. `seen` is the hash of its embeddings. For fetched KV it is read from the KV."""
        block_size = self.model.config.block_size
        last = len(item.token_ids) // U32_BYTES // block_size
        media = mm_hashes(item.media, block_size)
        seed = hash_seed(item.lora_name, item.cache_namespace)
        script = None if self._scripts is None else self._scripts.script(item)
        max_tokens = item.sampling.max_tokens
        output = [] if script is None else script.token_ids[:max_tokens]
        is_ended = script is not None and script.is_whole and len(script.token_ids) <= max_tokens
        is_empty = item.task == "embed" or (is_ended and not output)
        if is_ended or is_empty:
            max_tokens = max(1, len(output))  # the model generates at least one token
        stage: EngineStage = item.stage if item.stage in ("prefill", "decode") else "aggregated"
        request = EngineRequest(
            request_id=item.request_id,
            attempt=item.attempt,
            token_ids=item.token_ids,
            sequence_hashes=item.sequence_hashes,
            token_seed=token_seed(item, seen),
            max_tokens=max_tokens,
            output=pack_u32(output),
            first_position=item.output_tokens,
            hash_seed=seed,
            tail_mm_hashes=tuple(media.get(last, ())),
            stage=stage,
        )
        if stage == "decode" and item.prefilled is None:
            self.refuse(item, 500, "nothing_to_fetch", "the request has no KV descriptor")
            return
        try:
            # The model's pool requires hash chains, but the log may contain anything.
            if item.sequence_hashes != sequence_hashes(item.token_ids, block_size, seed, media):
                raise RequestMalformed("the block hashes do not match the prompt")
            self.model.submit(request)
        except RequestRefused as refusal:
            self.refuse(item, *REJECTIONS[type(refusal)], str(refusal))
            return
        state: dict[EngineStage, RequestState] = {"prefill": "prefill", "decode": "to_fetch", "aggregated": "runs"}
        mine = self._requests[item.request_id] = _Request(item, seen, state[stage])
        if stage != "prefill" and (item.sampling.logprobs is not None or is_ended or is_empty):
            self._extras[item.request_id] = Extra(item, is_ended, is_empty)
        if self.tiers is not None:
            mine.prompt = self.tiers.begin(item, self.model.pool.find(array_u64(item.sequence_hashes), last).blocks)
        self._wake.set()

    def refuse(self, item: WorkItem, status: int, code: str, message: str) -> None:
        error = ResponseError(status=status, code=code, message=message)
        self._failed.append(Failed(item.request_id, item.attempt, error))
        self._wake.set()

    def hold(self, reason: Literal["paused", "asleep"], *, is_held: bool) -> None:
        """Compute nothing while any reason holds the rank."""
        self._held = (self._held | {reason}) if is_held else (self._held - {reason})
        self._wake.set()

    def held_in_tiers(self) -> Sequence[CacheChange]:
        """Return the blocks in host memory and on disk. Changes so far are part of them, and are not reported."""
        if self.tiers is None:
            return ()
        _, store_changes = self.tiers.manager.changes()
        self._store_changes += store_changes
        return self.tiers.manager.content()[0]

    def clear(self, *, keep_tiers: bool = False) -> None:
        """Clear device memory and, unless `keep_tiers`, host memory and disk. The shared store keeps its blocks.

        Running requests are computed again. For requests whose KV is being fetched, the rank reports NotFetched.
        """
        for request_id, request in list(self._requests.items()):
            if request.state == "fetching":
                self._fail_fetch(request.item, "the cache was cleared during the fetch")
            elif request.state == "kept":
                self._release(request_id)
        self.model.clear_cache()
        self._clears += 1
        self._changes.append(Cleared())
        if self.tiers is not None:
            if not keep_tiers:
                self.tiers.manager.clear()
            self._changes += self.held_in_tiers()
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        self._release(request_id)
        request = self._requests.pop(request_id, None)
        self._extras.pop(request_id, None)
        if request is not None and request.task is not None:
            request.task.cancel()
        if self.model.cancel(request_id):
            self._wake.set()

    def freed(self, request_id: str) -> None:
        """Allow the model to evict the blocks of a request, because its KV is no longer kept for another worker."""
        if self.model.release(request_id):
            del self._requests[request_id]
            self._wake.set()

    def reset(self) -> list[asyncio.Task[None]]:
        """Drop all requests, the cache and all kept KV. Return the cancelled fetches, whose tasks are still ending."""
        self._generation += 1
        fetching = [request.task for request in self._requests.values() if request.task is not None]
        for task in fetching:
            task.cancel()
        self.model.reset()
        self._requests.clear()
        self._extras.clear()
        for reported in (self._failed, self._not_fetched, self._changes):
            reported.clear()
        self._published = self.model.load()
        return fetching

    async def run(self, publish: Publish) -> None:
        """Run the model in real time, and publish batches of its events, until cancelled."""
        due = runtime.monotonic_s()
        while True:
            if self._fault is not None:
                raise self._fault
            generation, clears = self._generation, self._clears
            batch, steps = self._collect()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                due = runtime.monotonic_s()
                continue
            now = runtime.monotonic_s()
            span_us = sum(step.duration_us for step in steps)
            due = max(due, now - LAG_S_MAX) + span_us / (self._speedup * US_PER_S)
            await asyncio.sleep(max(0.0, due - now))
            if generation == self._generation:
                self._published = batch.load
                computed = [one for step in steps for one in step.computed]
                publish(self._with_prefilled(batch, computed) if computed else batch)
                self._end(batch, computed, is_current=clears == self._clears)

    def _collect(self) -> tuple[EngineBatch | None, list[EngineStep]]:
        """Run steps for about `QUANTUM_US`. Return the batch of their events, None if it is empty, and the steps."""
        cache_changes, self._changes = self._changes, []
        store_changes, self._store_changes = self._store_changes, []
        if self.tiers is not None:
            of_tiers, of_store = self.tiers.manager.changes()
            cache_changes += of_tiers
            store_changes += of_store
        steps = [] if self._held else list(self._steps())
        failed, self._failed = self._failed, []
        not_fetched, self._not_fetched = self._not_fetched, []
        load = self.model.load()
        if not (steps or failed or not_fetched or cache_changes or store_changes) and load == self._published:
            return None, []
        batch = EngineBatch(
            rank=self._number,
            load=load,
            cache_changes=cache_changes + [change for step in steps for change in step.cache_changes],
            emitted=steps[0].emitted if len(steps) == 1 else merged(steps),
            first_tokens=[self._with_source(first) for step in steps for first in step.first_tokens],
            finished=[end for step in steps for end in step.finished],
            failed=failed,
            not_fetched=not_fetched,
            store_changes=store_changes,
            tier_costs=None if self.tiers is None else self.tiers.manager.costs.measured(self.model.config.block_size),
        )
        return extend(batch, self._extras, self.model.config.vocabulary or ()), steps

    def _steps(self) -> Iterator[EngineStep]:
        span_us = tokens = 0
        while span_us < self._span_us and tokens < BATCH_TOKENS_MAX:
            if self.kv is not None:
                for fetch in self.model.fetches():
                    request = self._requests[fetch.request_id]
                    request.state = "fetching"
                    request.task = asyncio.create_task(self._fetch(self.kv, request, fetch.first_block))
            step = self.model.step(self._span_us - span_us)
            self._begin_loads()
            if step is None:
                return
            span_us += step.duration_us
            tokens += len(step.emitted) * step.iterations
            yield step

    def _with_source(self, first: FirstTokenStep) -> FirstTokenStep:
        """Return a first token with the KV that was fetched or loaded for it."""
        request = self._requests[first.request_id]
        if request.prompt is not None and request.prompt.onboarded:
            first = msgspec.structs.replace(first, onboarded=request.prompt.onboarded)
        if request.fetched is not None:
            request.state, fetched = "runs", request.fetched
            first = msgspec.structs.replace(first, transferred_bytes=fetched.bytes, transfer_us=fetched.us)
        return first

    def _with_prefilled(self, batch: EngineBatch, computed: list[Computed]) -> EngineBatch:
        """Return the batch with the prompts computed for other workers. A prompt whose KV cannot be kept has failed."""
        prefilled: list[PromptPrefilled] = []
        failed = list(batch.failed)
        for one in computed:
            request = self._current(one)
            if request is None or self.kv is None:
                continue
            try:
                kept = self.kv.offer(request.item, request.seen)
            except TransferError as error:
                self.freed(one.request_id)
                refused = ResponseError(status=503, code="kv_not_kept", message=f"cannot keep its KV: {error}")
                failed.append(Failed(one.request_id, one.attempt, refused))
                continue
            request.state = "kept"
            onboarded = () if request.prompt is None else request.prompt.onboarded
            prefilled.append(PromptPrefilled(one.request_id, one.attempt, kept, one.cached_tokens, onboarded))
        return msgspec.structs.replace(batch, prefilled=prefilled, failed=failed)

    def _end(self, batch: EngineBatch, computed: list[Computed], *, is_current: bool) -> None:
        """Offload the blocks of a batch that was published, and forget the requests that have ended.

        `is_current` tells whether device memory was not cleared since the steps of the batch.
        """
        if self.tiers is not None and is_current:
            self.tiers.offload(batch.cache_changes)
            for first in chain[FirstTokenStep | Computed](batch.first_tokens, computed):
                request = self._current(first)
                if request is not None and request.prompt is not None:
                    self.tiers.use(request.prompt, first.cached_tokens)
        for end in batch.finished:
            if self._current(end) is not None:
                del self._requests[end.request_id]

    def _current(self, event: FirstTokenStep | Computed | Finished) -> _Request | None:
        """Return the request of an event; None if it was cancelled since, also if another attempt has begun."""
        request = self._requests.get(event.request_id)
        return request if request is not None and request.item.attempt == event.attempt else None

    def _match(self, request_id: str, hashes: Sequence[int], first: int) -> int:
        prompt = self._requests[request_id].prompt
        return 0 if self.tiers is None or prompt is None else self.tiers.match(prompt, hashes, first)

    def _begin_loads(self) -> None:
        for load in self.model.loads():
            request = self._requests[load.request_id]
            assert self.tiers is not None
            assert request.prompt is not None

            def done(blocks: int, mine: _Request = request) -> bool:
                is_waiting = self._requests.get(mine.item.request_id) is mine
                return is_waiting and self.model.loaded(mine.item.request_id, blocks)

            self.tiers.load(request.prompt, load, done)

    def _poll_tiers(self) -> None:
        assert self.tiers is not None
        try:
            self.tiers.manager.poll()
        except Exception as error:  # noqa: BLE001 - nothing awaits this call, so `run` raises the error
            self._fault = error
        self._wake.set()

    async def _fetch(self, kv: MockKv, request: _Request, first: int) -> None:
        try:
            seen, request.fetched = await kv.fetch(request.item, first)
        except Exception as error:
            # Nothing awaits this task, so an unreported failure would leave the request without an end.
            known = isinstance(error, TransferError)
            item = request.item
            logger.warning(
                "cannot fetch the KV of %s: %s", item.request_id, error, exc_info=not known, extra=item.log_extra
            )
            request.task = None
            self._fail_fetch(request.item, str(error) or type(error).__name__)
            return
        request.task, request.state = None, "fetched"
        self.model.fetched(request.item.request_id, token_seed(request.item, seen))
        self._wake.set()

    def _fail_fetch(self, item: WorkItem, error: str) -> None:
        self.cancel(item.request_id)
        self._not_fetched.append(NotFetched(item.request_id, item.attempt, error))
        self._wake.set()

    def _release(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.state == "kept" and self.kv is not None:
            self.kv.release(request_id)
