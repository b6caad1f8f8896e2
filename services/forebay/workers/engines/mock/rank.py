"""One rank of a mock engine: its model in real time, and KV that it keeps for others or fetches from them.

Theory of operation. Each step of the model takes virtual time. The rank keeps one deadline in real time, and moves it
by the scaled duration of each step. It publishes a step when the deadline has come, so a sleep that ends late shortens
the next one. Steps much shorter than the timer resolution are published together. KV that the rank computes for another
worker is offered when its batch is published. KV from another worker is fetched in real time while other requests run,
and so is KV from tiers loaded.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

import msgspec

from forebay import runtime
from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.engine_model.model import (
    Computed,
    EngineConfig,
    EngineModel,
    EngineRequest,
    EngineStage,
    EngineStep,
    Fetch,
    Finished,
    FirstTokenStep,
    QueueFull,
    RequestMalformed,
    RequestRefused,
    RequestTooLarge,
)
from forebay.engine_model.steps import StoreChange
from forebay.events.base import U32_BYTES, array_u64, pack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import (
    CacheChange,
    Cleared,
    EngineBatch,
    Failed,
    NotFetched,
    PromptPrefilled,
    Publish,
)
from forebay.workers.engines.mock.kv import MockKv
from forebay.workers.engines.mock.outputs import ExtraOutputs, merged, token_seed
from forebay.workers.engines.mock.scripts import OutputScripts
from forebay.workers.engines.mock.tiers import MockTiers
from forebay.workers.kv_transfer.api import FetchedKv
from forebay.workers.kv_transfer.nixl_agent import TransferError

US_PER_S = 1_000_000
QUANTUM_US = 1_000  # minimum real time per batch: the timer resolution of an event loop
BATCH_TOKENS_MAX = 4_096  # other tasks run after a few milliseconds at any speedup
LAG_S_MAX = 0.1  # maximum backlog: a machine that is slower than this does not run faster later to catch up

RequestState = Literal["output", "prefill", "kept", "to_fetch", "fetching", "fetched", "tiers"]
"""State of a request besides the engine model.

`tiers` means that its blocks have names for tiers.
"""

logger = logging.getLogger(__name__)


class MockRank:
    """One rank of a mock engine.

    Args:
        config: sizes and step times of the modelled engine.
        speedup: how many times as fast as the modelled engine the rank runs.
        scripts: writes structured output, tool calls and reasoning; None generates only words.
        tiers: KV tiers of the rank; None for none. `open_tiers` opens them.

    Attributes:
        kv: KV that is transferred; None while KV transfers are unavailable.
        tiers: KV tiers of the rank; None for none.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        speedup: float,
        scripts: OutputScripts | None = None,
        tiers: MockTiers | None = None,
    ) -> None:
        self.model = EngineModel(config) if tiers is None else EngineModel(config, tiers.match, tiers.name_output)
        self.kv: MockKv | None = None
        self.tiers = tiers
        self._number = number
        self._speedup = speedup
        self._span_us = max(1, round(QUANTUM_US * speedup))
        self._wake = asyncio.Event()
        self._failed: list[Failed] = []
        self._not_fetched: list[NotFetched] = []
        self._scripts = scripts
        self._outputs = ExtraOutputs(config.vocabulary or ())
        self._published = self.model.load()
        self._generation = 0  # number of resets: batches from before a reset are not published
        self._clears = 0  # number of times that device memory was cleared
        self._changes: list[CacheChange] = []
        self._store_changes: list[StoreChange] = []
        self._fault: Exception | None = None  # why the tiers have failed
        self._paused = self._asleep = False
        self._prompts: dict[str, tuple[WorkItem, int]] = {}  # prompts to compute for other workers
        self._kept: set[str] = set()
        self._to_fetch: dict[str, WorkItem] = {}  # requests whose KV is being fetched
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._fetched: dict[str, FetchedKv] = {}  # fetched KV until the first token

    def requests(self) -> dict[str, RequestState]:
        """Return the state of each request that transfers KV or has extra outputs; `model` has the other requests."""
        found: tuple[tuple[RequestState, Iterable[str]], ...] = (
            ("output", self._outputs.request_ids),
            ("prefill", self._prompts),
            ("kept", self._kept),
            ("to_fetch", self._to_fetch),
            ("fetching", self._fetching),
            ("fetched", self._fetched),
            ("tiers", () if self.tiers is None else self.tiers.request_ids),
        )
        return {request_id: state for state, ids in found for request_id in ids}

    async def open_tiers(self, spec: WorkerSpec, block_bytes: int) -> None:
        """Open the KV tiers, if the rank has any. Raises EngineError if a tier cannot be opened."""
        if self.tiers is not None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                loop.call_soon_threadsafe(self._poll_tiers)

            await runtime.offload(self.tiers.open, spec, block_bytes, wake, self._loaded)

    def submit(self, item: WorkItem, media_hash: int = 0, adapter: str = "") -> None:
        """Queue an item.

        Args:
            media_hash: hash of the embeddings of the item's images and videos, on which the output tokens depend. For
                fetched KV it is read from the KV.
            adapter: digest of the adapter of the item; empty without one.
        """
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
            token_seed=token_seed(item, media_hash),
            max_tokens=max_tokens,
            output=pack_u32(output),
            first_position=item.output_tokens,
            hash_seed=seed,
            tail_mm_hashes=tuple(media.get(last, ())),
            stage=stage,
        )
        if stage == "decode" and item.prefilled is None:
            message = "the request has no KV descriptor"
            self.refuse(item, ResponseError(status=500, code="nothing_to_fetch", message=message))
            return
        try:
            # The model's pool requires hash chains, but the log may contain anything.
            if item.sequence_hashes != sequence_hashes(item.token_ids, block_size, seed, media):
                raise RequestMalformed("the block hashes do not match the prompt")
            self.model.submit(request)
        except RequestRefused as refusal:
            self.refuse(item, _rejection(refusal))
            return
        if stage == "prefill":
            self._prompts[item.request_id] = item, media_hash
        else:
            self._outputs.begin(item, is_ended=is_ended, is_empty=is_empty)
        if stage == "decode":
            self._to_fetch[item.request_id] = item
        if self.tiers is not None:
            cached = self.model.pool.find(array_u64(item.sequence_hashes), last).blocks
            self.tiers.begin(item, media_hash, adapter, cached)
        self._wake.set()

    def refuse(self, item: WorkItem, error: ResponseError) -> None:
        """Report an item as failed with this error, without running it."""
        self._failed.append(Failed(item.request_id, item.attempt, error))
        self._wake.set()

    def fail_fetch(self, item: WorkItem, error: str) -> None:
        """Report that the KV of an item cannot be fetched, with the reason."""
        self._not_fetched.append(NotFetched(item.request_id, item.attempt, error))
        self._wake.set()

    def hold(self, *, paused: bool | None = None, asleep: bool | None = None) -> None:
        """Change whether the rank is paused or asleep; None leaves a state unchanged. It computes nothing in either."""
        self._paused = self._paused if paused is None else paused
        self._asleep = self._asleep if asleep is None else asleep
        self._wake.set()

    def held_in_tiers(self) -> Sequence[CacheChange]:
        """Return the blocks in host memory and on disk. Changes so far are part of them, and are not reported."""
        if self.tiers is None:
            return ()
        _, store_changes = self.tiers.changes()
        self._store_changes += store_changes
        return self.tiers.held()

    def clear(self, *, keep_tiers: bool = False) -> None:
        """Clear the KV cache of the rank.

        Running requests are computed again. For requests whose KV is being fetched, the rank reports NotFetched.

        Args:
            keep_tiers: whether host memory and disk keep their blocks. The shared store always does.
        """
        for request_id in list(self._fetching):
            item = self._to_fetch[request_id]
            self.cancel(request_id)
            self.fail_fetch(item, "the cache was cleared during the fetch")
        self.model.clear_cache()
        for request_id in list(self._kept):
            self._release(request_id)
        self._clears += 1
        self._changes.append(Cleared())
        if self.tiers is not None:
            self.tiers.clear_device(requests=False)
            if not keep_tiers:
                self.tiers.clear()
            self._changes += self.held_in_tiers()
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, and free the KV that is kept for it."""
        self._release(request_id)
        self._forget(request_id)
        task = self._fetching.pop(request_id, None)
        if task is not None:
            task.cancel()
        if self.model.cancel(request_id):
            self._wake.set()

    def freed(self, request_id: str) -> None:
        """Allow the model to evict the blocks of a request, because its KV is no longer kept for another worker."""
        self._kept.discard(request_id)
        if self.model.release(request_id):
            self._wake.set()

    def reset(self) -> list[asyncio.Task[None]]:
        """Drop all requests, the cache and all kept KV. Return the cancelled fetches, whose tasks are still ending."""
        self._generation += 1
        fetching = list(self._fetching.values())
        for task in fetching:
            task.cancel()
        self.model.reset()
        for kept in (self._prompts, self._to_fetch, self._fetching, self._fetched):
            kept.clear()
        self._kept.clear()
        if self.tiers is not None:
            self.tiers.clear_device(requests=True)
        self._outputs.clear()
        self._failed.clear()
        self._not_fetched.clear()
        self._changes.clear()
        self._published = self.model.load()
        return fetching

    async def run(self, publish: Publish) -> None:
        """Run the model in real time, and publish batches of its events, until cancelled."""
        due = runtime.monotonic_s()
        while True:
            if self._fault is not None:
                raise self._fault
            generation = self._generation
            clears = self._clears
            batch, computed, span_us = self._collect()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                due = runtime.monotonic_s()
                continue
            now = runtime.monotonic_s()
            due = max(due, now - LAG_S_MAX) + span_us / (self._speedup * US_PER_S)
            await asyncio.sleep(max(0.0, due - now))
            if generation == self._generation:
                self._published = batch.load
                publish(self._with_prefilled(batch, computed) if computed else batch)
                if self.tiers is not None:
                    self._offload(self.tiers, batch, computed, is_current=clears == self._clears)

    def _collect(self) -> tuple[EngineBatch | None, list[Computed], int]:
        """Run steps for about `QUANTUM_US`.

        Returns:
            Batch of the steps, None if it is empty; prompts computed for other workers; duration of the steps in us.
        """
        steps: list[EngineStep] = []
        span_us = tokens = 0
        cache_changes, self._changes = self._changes, []
        store_changes, self._store_changes = self._store_changes, []
        if self.tiers is not None:
            of_tiers, of_store = self.tiers.changes()
            cache_changes += of_tiers
            store_changes += of_store
        held = self._paused or self._asleep
        while not held and span_us < self._span_us and tokens < BATCH_TOKENS_MAX:
            if self.kv is not None:
                self._fetch_all(self.model.fetches())
            step = self.model.step(self._span_us - span_us)
            if self.tiers is not None:
                for requested in self.model.loads():
                    self.tiers.load(requested)
            if step is None:
                break
            steps.append(step)
            span_us += step.duration_us
            tokens += len(step.emitted) * step.iterations
        failed, self._failed = self._failed, []
        not_fetched, self._not_fetched = self._not_fetched, []
        load = self.model.load()
        if not (steps or failed or not_fetched or cache_changes or store_changes) and load == self._published:
            return None, [], 0
        batch = EngineBatch(
            rank=self._number,
            load=load,
            cache_changes=cache_changes,
            failed=failed,
            not_fetched=not_fetched,
            store_changes=store_changes,
            tier_costs=None if self.tiers is None else self.tiers.measured(),
        )
        return (
            self._outputs.extend(self._with_outputs(batch, steps)),
            [one for step in steps for one in step.computed],
            span_us,
        )

    def _with_outputs(self, batch: EngineBatch, steps: list[EngineStep]) -> EngineBatch:
        if not steps:
            return batch
        cache_changes = list(batch.cache_changes)
        first_tokens: list[FirstTokenStep] = []
        finished: list[Finished] = []
        for step in steps:
            cache_changes += step.cache_changes
            first_tokens += step.first_tokens
            finished += step.finished
        return msgspec.structs.replace(
            batch,
            cache_changes=cache_changes,
            emitted=steps[0].emitted if len(steps) == 1 else merged(steps),
            first_tokens=[self._with_source(first) for first in first_tokens],
            finished=finished,
        )

    def _with_source(self, first: FirstTokenStep) -> FirstTokenStep:
        """Return a first token with the KV that was fetched or loaded for it."""
        if self.tiers is not None and (onboarded := self.tiers.onboarded(first.request_id)):
            first = msgspec.structs.replace(first, onboarded=onboarded)
        fetched = self._fetched.pop(first.request_id, None)
        if fetched is None:
            return first
        return msgspec.structs.replace(first, transferred_bytes=fetched.bytes, transfer_us=fetched.us)

    def _with_prefilled(self, batch: EngineBatch, computed: list[Computed]) -> EngineBatch:
        """Return the batch with the prompts computed for other workers. A prompt whose KV cannot be kept has failed."""
        prefilled: list[PromptPrefilled] = []
        failed = list(batch.failed)
        for one in computed:
            item, seen = self._prompts.get(one.request_id, (None, 0))
            if item is None or item.attempt != one.attempt or self.kv is None:
                continue  # cancelled in the meantime
            del self._prompts[one.request_id]
            try:
                kept = self.kv.offer(item, seen)
            except TransferError as error:
                self.model.release(one.request_id)
                refused = ResponseError(status=503, code="kv_not_kept", message=f"cannot keep its KV: {error}")
                failed.append(Failed(one.request_id, one.attempt, refused))
                continue
            self._kept.add(one.request_id)
            onboarded = () if self.tiers is None else self.tiers.onboarded(one.request_id)
            prefilled.append(PromptPrefilled(one.request_id, one.attempt, kept, one.cached_tokens, onboarded))
        return msgspec.structs.replace(batch, prefilled=prefilled, failed=failed)

    def _offload(self, tiers: MockTiers, batch: EngineBatch, computed: list[Computed], *, is_current: bool) -> None:
        """Offload the blocks of a batch that was published, and forget the requests that have ended.

        Args:
            computed: prompts that were computed for other workers.
            is_current: whether device memory was not cleared since the steps of the batch.
        """
        if is_current:
            tiers.apply(batch.cache_changes)
            for first in chain[FirstTokenStep | Computed](batch.first_tokens, computed):
                tiers.use(first.request_id, first.cached_tokens)
        for end in chain[Finished | Computed](batch.finished, computed):
            tiers.end(end.request_id)

    def _poll_tiers(self) -> None:
        assert self.tiers is not None
        try:
            self.tiers.poll()
        except Exception as error:  # noqa: BLE001 - nothing awaits this call, so `run` raises the error
            self._fault = error
        self._wake.set()

    def _loaded(self, item: WorkItem, blocks: int, seen: int) -> bool:
        """Continue a request whose blocks were loaded. Return False if it does not wait for them any more."""
        if not self.model.loaded(item.request_id, blocks, token_seed(item, seen)):
            return False
        if item.request_id in self._prompts:
            self._prompts[item.request_id] = item, seen
        return True

    def _fetch_all(self, fetches: list[Fetch]) -> None:
        assert self.kv is not None
        for fetch in fetches:
            item = self._to_fetch[fetch.request_id]
            fetching = self._fetch(self.kv, item, fetch.first_block)
            self._fetching[fetch.request_id] = asyncio.get_running_loop().create_task(fetching)

    async def _fetch(self, kv: MockKv, item: WorkItem, first: int) -> None:
        request_id = item.request_id
        try:
            seen, fetched = await kv.fetch(item, first)
        except Exception as error:
            # Nothing awaits this task, so an unreported failure would leave the request without an end.
            known = isinstance(error, TransferError)
            logger.warning("cannot fetch the KV of %s: %s", request_id, error, exc_info=not known)
            del self._fetching[request_id]
            self.cancel(request_id)
            self.fail_fetch(item, str(error) or type(error).__name__)
            return
        del self._fetching[request_id], self._to_fetch[request_id]
        self._fetched[request_id] = fetched
        if self.tiers is not None:
            seen = self.tiers.learn(request_id, seen)
        self.model.fetched(request_id, token_seed(item, seen))
        self._wake.set()

    def _release(self, request_id: str) -> None:
        if request_id in self._kept and self.kv is not None:
            self.kv.release(request_id)

    def _forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        self._to_fetch.pop(request_id, None)
        self._fetched.pop(request_id, None)
        self._outputs.end(request_id)
        if self.tiers is not None:
            self.tiers.end(request_id)


def _rejection(refusal: RequestRefused) -> ResponseError:
    match refusal:
        case RequestTooLarge():
            return ResponseError(status=400, code="context_length_exceeded", message=str(refusal))
        case RequestMalformed():
            return ResponseError(status=400, code="invalid_request", message=str(refusal))
        case QueueFull():
            return ResponseError(status=503, code="engine_overloaded", message=str(refusal))
        case _:
            raise AssertionError(f"unknown kind of rejection: {refusal!r}")
