"""TensorRT-LLM behind a worker: `LLM` with its PyTorch backend. Made after its source; it was never run.

Theory of operation. KV events and statistics are polled, more seldom while there are none. Events that are missed
cannot be had again, and TensorRT-LLM has no call that empties its cache: a rank whose events were lost is said to be
empty, and from then on what goes on from a block that nobody knows of is left out. So the index may know less than is
there, never more. A reset drops the requests; the cache stays, and `held` says what is in it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.async_engine import CANARY_TOKENS, AsyncEngine
from forebay.workers.engines.kv_descriptor import Unfetchable, offered
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.metrics import PrefixedMetrics
from forebay.workers.engines.model_directory import check_model, one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.tensorrt_llm.requests import (
    CACHE,
    engine_arguments,
    engine_priority,
    guided_arguments,
    is_refusal,
    sampling_arguments,
    step_stats,
)
from forebay.workers.engines.tensorrt_llm.transfer import (
    CONNECTOR,
    LEASE_S,
    PREFILL_SAMPLING,
    descriptor,
    transfer_fields,
)
from forebay.workers.engines.vllm.requests import token_logprobs
from forebay.workers.kv_events.engine_events import KvEventError
from forebay.workers.kv_events.metrics import KvEventMetrics
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.tensorrt_llm_wire import TensorRtLlmReader
from forebay.workers.kv_events.tracker import KvTracker, TrackerResult
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 0.01  # that the engine waits for something to tell
POLL_EVERY_S = (0.005, 0.1)  # after something was told, and at most, after a while without
BACK_OFF = 1.5
SHUTDOWN_S = 20.0
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class _Begun:
    """Whether an answer has begun; from then on it has all the time that it takes."""

    def __init__(self) -> None:
        self.said = False
        self.limit: asyncio.Timeout | None = None

    def now(self) -> None:
        self.said = True
        if self.limit is not None:
            self.limit.reschedule(None)


class TensorRtLlmEngine(AsyncEngine):
    """One `LLM`; its ranks are attention data parallel ranks."""

    NAME = "TensorRT-LLM"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._llm: Any = None
        self._types: Any = None  # the module `tensorrt_llm`'s API
        self._building: asyncio.Future[Any] | None = None
        self._reader: TensorRtLlmReader | None = None
        self._trackers: dict[int, KvTracker] = {}
        self._counts: dict[int, Counter[str]] = {}
        self._adapters: dict[str, LoraAdapter] = {}  # all that ever were
        self._worker_id = ""
        self._kept: dict[str, float] = {}  # prompts for others, until when
        self._log_step: Callable[[dict[str, Any]], None] | None = None
        self._log_request: Callable[[dict[str, Any]], None] | None = None

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Build the engine and answer a first prompt on each rank."""
        settings = self._settings
        if settings.role == "encode":
            raise EngineError("the TensorRT-LLM adapter is for text: it makes no encode worker")
        await asyncio.to_thread(check_model, settings)
        self._worker_id = spec.worker_id
        arguments = engine_arguments(settings, kv_events=spec.kv_events)
        self._building = asyncio.get_running_loop().run_in_executor(None, _build, arguments)
        # A cancelled start goes on in its thread; `stop` ends it.
        self._types, self._llm = await asyncio.shield(self._building)
        self._tasks = ("generate",)
        self._context_tokens = self._llm.args.max_seq_len or 1 << 31
        self._ranks = {rank: RankBuffer(rank, 1) for rank in spec.ranks}
        for name, directory in settings.loras.items():
            self._add_lora(name, str(directory))
        await self._warm_up()
        block_size, kv_blocks = await self._cache_sizes()
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        cache = arguments[CACHE]
        if cache.get("event_buffer_max_size") and cache["enable_block_reuse"]:
            self._reader = TensorRtLlmReader(block_size)
            self._counts = {rank: Counter() for rank in spec.ranks}
            self._trackers = {rank: KvTracker(ResidentBlocks(block_size, counts_copies=False)) for rank in spec.ranks}
        self._find_metrics()
        return msgspec.structs.replace(
            spec,
            block_size=block_size,
            kv_blocks_total=kv_blocks,
            max_num_seqs=self._llm.args.max_batch_size,
            max_num_batched_tokens=self._llm.args.max_num_tokens,
            tasks=self._tasks,
            loras=tuple(self._loras.loaded),
            kv_events=bool(self._trackers),
        )

    async def _cache_sizes(self) -> tuple[int, int]:
        """Tokens a block, and blocks a rank; older releases tell them only with a step."""
        if hasattr(self._llm, "get_kv_cache_capacity"):
            told = await asyncio.to_thread(self._llm.get_kv_cache_capacity)
            return told["tokensPerBlock"], told["maxNumBlocks"]
        async for step in self._llm.get_stats_async(timeout=2):
            stats = step_stats(step)
            if stats is not None and stats.kv_cache_stats.tokens_per_block:
                return stats.kv_cache_stats.tokens_per_block, stats.kv_cache_stats.max_num_blocks
        raise EngineError("TensorRT-LLM does not say how large its KV cache is")

    def _find_metrics(self) -> None:
        """Its own collector, which wants to be told of each step and each answer; names differ between releases."""
        try:
            made = import_module("tensorrt_llm.metrics").MetricsCollector(
                {"model_name": self._settings.model_name, "engine_type": "trtllm"}
            )
        except (ImportError, AttributeError):
            return
        self._log_step = getattr(made, "log_iteration_stats", None)
        self._log_request = getattr(made, "log_request_metrics_dict", None) or getattr(made, "log_metrics_dict", None)

    def _is_dead(self) -> bool:
        """By its own word where it has one; else by its executor, which ends when a process of it died."""
        if self._llm is None:
            return True
        check = getattr(self._llm, "_check_health", None)
        if check is not None:
            return not check()
        executor = self._llm._executor
        return executor is None or bool(executor.is_shutdown())

    async def _ask_canary(self, rank: int) -> None:
        prompt = [0] * min(CANARY_TOKENS, self._context_tokens - 1, self._llm.args.max_num_tokens)
        options = self._options(rank)
        params = self._sampling_params(CANARY_SAMPLING)
        await self._llm.generate_async(inputs=prompt, sampling_params=params, streaming=False, **options).aresult()

    def _options(self, rank: int) -> dict[str, Any]:
        """What names the rank; older releases know no other arguments than those that are needed."""
        if self._settings.dp_size == 1:
            return {}
        params = self._types.SchedulingParams(attention_dp_rank=self._index(rank), attention_dp_relax=False)
        return {"scheduling_params": params}

    def _sampling_params(self, sampling: Sampling) -> Any:
        arguments = sampling_arguments(sampling)
        if sampling.structured is not None:
            guided = guided_arguments(sampling.structured)
            arguments["guided_decoding"] = self._types.GuidedDecodingParams(**guided)
        return self._types.SamplingParams(**arguments)

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        followers = [_poll(self._llm.get_stats_async, self._on_stats)]
        if self._reader is not None:
            followers.append(_poll(self._llm.get_kv_cache_events_async, self._on_event))
        return followers

    def _on_stats(self, told: Any) -> None:
        stats = step_stats(told)
        if stats is None:
            return
        rank = self._ranks.get(stats.rank + self._settings.dp_start_rank)
        if rank is not None and self._requests:  # what comes after the last answer is of an earlier step
            rank.report(stats.running, stats.waiting, stats.usage)
            self._wake.set()
        if self._log_step is not None:
            self._log_step(told)

    def _on_event(self, event: Any) -> None:
        assert self._reader is not None
        start = self._settings.dp_start_rank
        try:
            told = self._reader.read(event)
        except KvEventError as error:
            # Its number, or rank, may not be known: the next of that rank shows the gap.
            logger.warning("KV events of TensorRT-LLM: %s", error)
            for counts in self._counts.values():
                counts["undecodable"] += 1
            return
        rank = told.rank + start
        tracker = self._trackers.get(rank)
        if tracker is None:
            return
        self._counts[rank]["live"] += 1
        self._counts[rank] += told.batch.skipped
        if told.missed:
            self._counts[rank]["lost"] += 1
            self._apply(rank, tracker.missed(told.missed))
        self._apply(rank, tracker.batch(told.batch))

    def _apply(self, rank: int, outcome: TrackerResult) -> None:
        if outcome.lost:
            logger.warning("rank %s: KV events are lost, so its cache is said to be empty: %s", rank, outcome.lost)
        if outcome.changes:
            self._on_changes(rank, outcome.changes)

    def held(self, rank: int) -> Sequence[int]:
        """The blocks of a rank, as far as TensorRT-LLM has told; what is told here comes in no batch."""
        tracker = self._trackers.get(rank)
        if tracker is None:
            return ()
        self._ranks[rank].discard_changes()
        return tracker.resident.held()

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=False)

    async def stop(self) -> None:
        """End every request, and TensorRT-LLM."""
        await self._end_tasks()
        if self._building is None:
            return
        try:
            _, llm = await asyncio.shield(self._building)
        except Exception:  # noqa: BLE001 - `start` has told it
            logger.info("TensorRT-LLM was not built, so there is nothing to stop")
            return
        self._llm = self._building = None
        async with asyncio.timeout(SHUTDOWN_S):
            await asyncio.to_thread(llm.shutdown)

    async def _answer(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        if item.stage == "prefill":
            await self._prefill(item, prompt, rank)
            return
        options = self._request_options(item)
        if item.stage == "decode":
            try:
                fields = transfer_fields(item.prefilled, self._settings.model_name, len(prompt), self._types.Logprob)
                options["disaggregated_params"] = self._types.DisaggregatedParams(**fields)
            except (Unfetchable, TypeError) as error:  # of another release, whose fields are others
                rank.not_fetched(item, one_line(error))
                return
        begun = _Begun()
        try:
            async with asyncio.timeout(LEASE_S if item.stage == "decode" else None) as lease:
                begun.limit = lease
                await self._generate(item, prompt, rank, options, begun)
        except Exception as error:
            if item.stage != "decode" or begun.said or is_refusal(error) or self._is_dead():
                raise
            rank.not_fetched(item, f"TensorRT-LLM could not go on from its KV: {one_line(error)}")

    def _request_options(self, item: WorkItem) -> dict[str, Any]:
        options = self._options(item.rank)
        if item.lora_name:
            adapter = self._loras.loaded[item.lora_name]
            options["lora_request"] = self._types.LoRARequest(adapter.name, adapter.number, adapter.directory)
        if item.cache_namespace:
            options["cache_salt"] = item.cache_namespace
        if item.priority:
            options["priority"] = engine_priority(item.priority)
        return options

    async def _prefill(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        if self._settings.role != "prefill":
            message = f"a worker of the role {self._settings.role} keeps no KV for others"
            rank.failed(item, ResponseError(status=501, code="not_supported", message=message))
            return
        sampling = msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING)
        asked = self._types.DisaggregatedParams(request_type="context_only")
        answer = self._llm.generate_async(
            inputs=prompt,
            sampling_params=self._sampling_params(sampling),
            streaming=False,
            disaggregated_params=asked,
            **self._request_options(item),
        )
        try:
            result = await answer.aresult()
        except BaseException:
            answer.abort()
            raise
        self._log(answer)
        (one,) = result.outputs
        try:
            if one.finish_reason == "stop":
                raise Unfetchable("its first token ends the answer: whoever has the prompt whole says so")
            packed = descriptor(one.disaggregated_params)
            prefilled = offered(
                item,
                self._worker_id,
                self._settings.model_name,
                CONNECTOR,
                packed,
                tokens=len(prompt),
                lease_s=LEASE_S,
            )
        except Unfetchable as error:
            rank.failed(item, ResponseError(status=500, code="engine_error", message=str(error)))
            return
        self._kept[item.request_id] = time.monotonic() + LEASE_S
        rank.prefilled(item, prefilled, getattr(result, "cached_tokens", 0) or 0)

    def release(self, request_id: str) -> None:
        """TensorRT-LLM has no call for that: it gives up a transfer by its own time."""
        self._kept.pop(request_id, None)

    def drop(self, prefilled: Prefilled) -> None:
        """Nobody can be told."""

    def kept(self) -> int:
        """Those that nobody may have fetched yet: none when no block is in use."""
        now_s = time.monotonic()
        if not self._requests and not any(rank.load.kv_blocks_used for rank in self._ranks.values()):
            self._kept.clear()
        self._kept = {request_id: until_s for request_id, until_s in self._kept.items() if until_s > now_s}
        return len(self._kept)

    async def _generate(
        self, item: WorkItem, prompt: list[int], rank: RankBuffer, options: dict[str, Any], begun: "_Begun"
    ) -> None:
        sampling = item.sampling
        answer = self._llm.generate_async(
            inputs=prompt, sampling_params=self._sampling_params(sampling), streaming=True, **options
        )
        said = cached = 0
        why = None
        try:
            async for result in answer:
                (one,) = result.outputs
                token_ids = one.token_ids[said:]  # they come with all before them
                if token_ids:
                    if not said:
                        begun.now()
                        cached = getattr(result, "cached_tokens", 0) or 0
                        rank.began(item, cached)
                    logprobs: tuple[TokenLogprob, ...] = ()
                    if sampling.logprobs is not None:
                        places = one.logprobs[said : said + len(token_ids)]
                        logprobs = token_logprobs(token_ids, places, sampling.logprobs)
                    rank.add_tokens(item, said, token_ids, logprobs)
                    said += len(token_ids)
                why = one.finish_reason or why
                self._wake.set()
        except BaseException:
            answer.abort()
            raise
        self._log(answer)
        self._finish(item, rank, why or "for no reason", (len(prompt), said, cached))

    def _log(self, answer: Any) -> None:
        metrics: Mapping[str, Any] | None = getattr(answer, "metrics_dict", None)
        if self._log_request is not None and metrics:
            self._log_request(dict(metrics))

    def _answer_error(self, error: Exception) -> ResponseError | None:
        if self._is_dead():
            return None
        if is_refusal(error):
            return ResponseError(status=400, code="invalid_request", message=one_line(error))
        return ResponseError(status=500, code="engine_error", message=f"TensorRT-LLM failed: {one_line(error)}")

    async def command(self, command: Command) -> tuple[str, ...]:
        """Adapters come and go with the requests that name them; TensorRT-LLM has no call for the rest."""
        async with self._commands:
            match command.action:
                case "load_lora":
                    self._load_lora(command.lora_name, command.lora_path)
                case "unload_lora":
                    with self._loras.removing(command.lora_name):
                        pass  # it goes with its last request
                case "list_loras":
                    pass
                case "clear_kv_blocks":
                    raise EngineRefused("TensorRT-LLM has no call that empties its KV cache")
                case "sleep" | "wake_up" | "pause" | "resume" as action:
                    raise EngineRefused(f"TensorRT-LLM has no call for {action} outside its Ray orchestrator")
            return tuple(self._loras.loaded)

    def _add_lora(self, name: str, directory: str) -> None:
        try:
            self._load_lora(name, directory)
        except EngineRefused as refusal:
            raise EngineError(f"the adapter {name} cannot be loaded: {refusal}") from None

    def _load_lora(self, name: str, directory: str) -> None:
        """Blocks are cached by an adapter's number, and known to us by its name: a name keeps its number for good."""
        if self._llm.args.lora_config is None:
            raise EngineRefused("TensorRT-LLM was started without LoRA: give it the argument lora_config")
        before = self._adapters.get(name)
        if before is not None and before.directory != directory:
            raise EngineRefused(f"the adapter {name} was loaded from {before.directory}: use another name")
        if (offered := self._loras.offered(name, directory)) is not None:
            adapter = self._adapters.setdefault(name, offered)
            self._loras.add(adapter)

    def collectors(self) -> Sequence[Collector]:
        """Those of TensorRT-LLM, and what was odd in its KV events."""
        totals = {rank: _totals(self._counts[rank], tracker) for rank, tracker in self._trackers.items()}
        return (PrefixedMetrics("trtllm_"), KvEventMetrics(self._worker_id, totals))


def _totals(counts: Counter[str], tracker: KvTracker) -> Callable[[], Mapping[str, int]]:
    return lambda: counts + tracker.resident.counts


async def _poll(ask: Callable[..., AsyncIterator[Any]], tell: Callable[[Any], None]) -> None:
    """Ask for ever, after a pause that grows while nothing comes."""
    least, most = POLL_EVERY_S
    pause = least
    while True:
        some = False
        async for one in ask(timeout=POLL_TIMEOUT_S):
            some = True
            tell(one)
        pause = least if some else min(most, pause * BACK_OFF)
        await asyncio.sleep(pause)


def _build(arguments: dict[str, Any]) -> tuple[Any, Any]:
    try:
        types = import_module("forebay.workers.engines.tensorrt_llm.types")
    except Exception as error:  # a build that does not fit this machine fails by anything
        raise EngineError(f"TensorRT-LLM cannot be imported: {one_line(error)}") from error
    try:
        return types, types.LLM(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(f"TensorRT-LLM does not take these arguments: {one_line(error)}") from error
    except Exception as error:
        raise EngineError(f"TensorRT-LLM died at its start, its log says why: {one_line(error)}") from error
