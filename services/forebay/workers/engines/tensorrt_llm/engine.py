"""TensorRT-LLM behind a worker: `LLM` with its PyTorch backend. Written against its source code and never run.

Theory of operation. The adapter polls KV events and statistics, less often while there are none. TensorRT-LLM can
neither send lost KV events again nor clear its cache. If events of a rank were lost, the adapter reports the rank as
empty, and skips blocks whose preceding block it does not know. A reset drops the requests and keeps the cache, whose
content `held` returns.

A KV descriptor contains the fields that the constructor of TensorRT-LLM's `DisaggregatedParams` takes. Only log
probabilities are converted. The fields include the first output token: the prefill worker generated it, and the decode
worker does not compute it again.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec

from forebay import runtime
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.tokens import TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed, EngineError, one_line
from forebay.workers.engines.kv_descriptor import Unfetchable, decoded
from forebay.workers.engines.loras import LoraAdapter, Loras
from forebay.workers.engines.model_engine import CANARY_TOKENS, GeneratedResponse, ModelEngine, start_errors
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.tensorrt_llm.requests import (
    CACHE,
    context_tokens,
    engine_arguments,
    engine_priority,
    guided_arguments,
    is_refusal,
    sampling_arguments,
    step_stats,
)
from forebay.workers.engines.vllm.requests import token_logprobs
from forebay.workers.kv_events.engine_events import KvEventError
from forebay.workers.kv_events.resident import KvTracker, ResidentBlocks, TrackerResult
from forebay.workers.kv_events.tensorrt_llm_wire import TensorRtLlmReader
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

TYPES: Mapping[str, Sequence[str]] = {  # of TensorRT-LLM's API, by module
    "tensorrt_llm": ("LLM", "SamplingParams"),
    "tensorrt_llm.executor.request": ("LoRARequest",),
    "tensorrt_llm.executor.result": ("Logprob",),
    "tensorrt_llm.llmapi": ("DisaggregatedParams",),
    "tensorrt_llm.sampling_params": ("GuidedDecodingParams",),
    "tensorrt_llm.scheduling_params": ("SchedulingParams",),
}
POLL_TIMEOUT_S = 0.01  # time for which the engine waits for events in one call
POLL_EVERY_S = (0.005, 0.1)  # pause after an event, and maximum pause without events
BACK_OFF = 1.5
SHUTDOWN_S = 20.0
CONNECTOR = "tensorrt-llm"
LEASE_S = 60.0  # TensorRT-LLM's default timeout of a transfer
PREFILL_SAMPLING: Mapping[str, Any] = {"max_tokens": 1}  # other parameters apply: it generates the first output token
LOGPROBS = "first_gen_log_probs"
REQUEST_ID = "disagg_request_id"
REQUEST_IDS = 1 << 40, 1 << 63  # below are TensorRT-LLM's local ids
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class _PolledCache:
    def __init__(self, block_size: int) -> None:
        self.resident = ResidentBlocks(block_size, counts_copies=False)
        self.tracker = KvTracker(self.resident)
        self.counts: Counter[str] = Counter()

    def totals(self) -> Mapping[str, int]:
        return self.counts + self.resident.counts


class TensorRtLlmEngine(ModelEngine):
    """Adapter of one `LLM` of TensorRT-LLM. Its ranks are data-parallel attention ranks."""

    NAME = "TensorRT-LLM"
    METRICS = ("trtllm_",)
    LORA_ARGUMENT = "lora_config"
    EXPERIMENTAL = "it was written against the source code of TensorRT-LLM and never run"
    ABORT_WITHIN_S = LEASE_S  # an abort during a transfer can leak KV or hang the engine

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._llm: Any = None
        self._types: Any = None  # the `TYPES`
        self._building: asyncio.Future[Any] | None = None
        self._reader: TensorRtLlmReader | None = None
        self._polled: dict[int, _PolledCache] = {}
        self._loras = Loras(keeps_numbers=True)  # the engine caches blocks by number, forebay by name
        self._log_step: Callable[[dict[str, Any]], None] | None = None
        self._log_request: Callable[[dict[str, Any]], None] | None = None

    async def _launch(self, spec: WorkerSpec) -> None:
        settings = self._settings
        if settings.role == "encode":
            raise EngineError("the TensorRT-LLM engine supports text only, so it cannot have the role encode")
        arguments = engine_arguments(settings, kv_events=spec.kv_events)
        self._building = asyncio.get_running_loop().run_in_executor(None, _build, arguments)
        # A cancelled start continues in its thread; `stop` ends it.
        self._types, self._llm = await asyncio.shield(self._building)
        self._tasks = ("generate",)
        self._tokenizer = self._llm.tokenizer
        self._context_tokens = self._llm.args.max_seq_len or await runtime.offload(context_tokens, settings.model)
        self._ranks = {rank: RankBuffer(rank, 1) for rank in spec.ranks}  # resized after the first prompt
        cache = arguments[CACHE]
        self._has_kv_events = bool(cache.get("event_buffer_max_size") and cache["enable_block_reuse"])
        self._find_metrics()

    async def _sized(self, spec: WorkerSpec) -> WorkerSpec:
        block_size, kv_blocks = await self._cache_sizes()
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        if self._has_kv_events:
            self._reader = TensorRtLlmReader(block_size)
            self._polled = {rank: _PolledCache(block_size) for rank in spec.ranks}
            self._caches = dict(self._polled)
        return msgspec.structs.replace(
            spec,
            block_size=block_size,
            kv_blocks_total=kv_blocks,
            max_num_seqs=self._llm.args.max_batch_size,
            max_num_batched_tokens=self._llm.args.max_num_tokens,
        )

    async def _cache_sizes(self) -> tuple[int, int]:
        """Return tokens per block and blocks per rank. Older releases and some caches report them only with a step."""
        if capacity := await asyncio.to_thread(getattr(self._llm, "get_kv_cache_capacity", dict)):
            return capacity["tokensPerBlock"], capacity["maxNumBlocks"]
        async for step in self._llm.get_stats_async(timeout=2):
            stats = step_stats(step)
            if stats is not None and stats.kv_cache_stats.tokens_per_block:
                return stats.kv_cache_stats.tokens_per_block, stats.kv_cache_stats.max_num_blocks
        raise EngineError("TensorRT-LLM does not report the size of its KV cache")

    def _find_metrics(self) -> None:
        """Find the engine's own collector, which counts each step and response. Its names differ between releases."""
        try:
            collector = import_module("tensorrt_llm.metrics").MetricsCollector(
                {"model_name": self._settings.model_name, "engine_type": "trtllm"}
            )
        except (ImportError, AttributeError):
            return
        self._log_step = getattr(collector, "log_iteration_stats", None)
        per_request = getattr(collector, "log_request_metrics_dict", None)
        self._log_request = per_request or getattr(collector, "log_metrics_dict", None)

    def _is_dead(self) -> bool:
        if self._llm is None:
            return True
        check = getattr(self._llm, "_check_health", None)
        if check is not None:
            return not check()
        executor = self._llm._executor  # in older releases; it ends when one of its processes has died
        return executor is None or bool(executor.is_shutdown())

    async def _run_canary(self, rank: int) -> None:
        prompt = [0] * min(CANARY_TOKENS, self._context_tokens - 1, self._llm.args.max_num_tokens)
        options = self._rank_options(rank)
        params = self._sampling_params(CANARY_SAMPLING)
        await self._llm.generate_async(inputs=prompt, sampling_params=params, streaming=False, **options).aresult()

    def _rank_options(self, rank: int) -> dict[str, Any]:
        """Return the arguments that select a rank; none for a single rank, because older releases reject them."""
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

    def _on_stats(self, raw: Any) -> None:
        stats = step_stats(raw)
        if stats is None:
            return
        rank = self._rank_at(stats.rank)
        if rank is not None and self._requests:  # after the last response, statistics are of an earlier step
            rank.report(stats.running, stats.waiting, stats.usage)
            self._wake.set()
        if self._log_step is not None:
            self._log_step(raw)

    def _on_event(self, raw: Any) -> None:
        assert self._reader is not None
        try:
            event = self._reader.read(raw)
        except KvEventError as error:
            # The number and the rank of the invalid event may be unknown; the next event of that rank shows the gap.
            logger.warning("skipped an invalid KV event of TensorRT-LLM: %s", error)
            for cache in self._polled.values():
                cache.counts["undecodable"] += 1
            return
        rank = event.rank + self._settings.dp_start_rank
        if (found := self._polled.get(rank)) is None:
            return
        found.counts["live"] += 1
        found.counts += event.batch.skipped
        if event.missed:
            found.counts["lost"] += 1
            self._apply(rank, found.tracker.missed(event.missed))
        self._apply(rank, found.tracker.batch(event.batch))

    def _apply(self, rank: int, result: TrackerResult) -> None:
        if result.lost:
            logger.warning("rank %s: KV events were lost, so its cache is reported as empty: %s", rank, result.lost)
        if result.changes:
            self._on_changes(rank, result.changes)

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=False)

    async def _shut_down(self) -> None:
        if self._building is None:
            return
        try:
            _, llm = await asyncio.shield(self._building)
        except Exception:  # noqa: BLE001 - `start` has raised it
            logger.info("TensorRT-LLM was not started, so there is nothing to stop")
            return
        self._llm = self._building = None
        async with asyncio.timeout(SHUTDOWN_S):
            await asyncio.to_thread(llm.shutdown)

    def _request_options(self, item: WorkItem) -> dict[str, Any]:
        options = self._rank_options(item.rank)
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
            message = f"a worker with the role {self._settings.role} keeps no KV for other workers"
            raise AttemptFailed(501, "not_supported", message)
        sampling = msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING)
        # Unique among all workers, because both engines identify the request by it. Older releases have no such field.
        least, end = REQUEST_IDS
        has_id = hasattr(self._types.DisaggregatedParams, REQUEST_ID)
        request = {REQUEST_ID: least + secrets.randbelow(end - least)} if has_id else {}
        output = self._llm.generate_async(
            inputs=prompt,
            sampling_params=self._sampling_params(sampling),
            streaming=False,
            disaggregated_params=self._types.DisaggregatedParams(request_type="context_only", **request),
            **self._request_options(item),
        )
        try:
            result = await output.aresult()
        except BaseException:
            output.abort()
            raise
        self._log(output)
        (one,) = result.outputs
        if one.finish_reason == "stop":
            raise Unfetchable("the response ends with its first token; only a worker that also decodes can serve it")
        packed, cached = descriptor(one.disaggregated_params), getattr(result, "cached_tokens", 0) or 0
        self._offer(item, rank, CONNECTOR, packed, LEASE_S, cached)

    def _transfer(self, item: WorkItem, prompt_tokens: int) -> tuple[Any, float]:
        fields = transfer_fields(item.prefilled, self._settings.model_name, prompt_tokens, self._types.Logprob)
        try:
            return self._types.DisaggregatedParams(**fields), LEASE_S
        except TypeError as error:  # another release has other fields
            raise Unfetchable(one_line(error)) from error

    def _fetch_failure(self, error: Exception) -> str | None:
        if isinstance(error, Unfetchable):
            return str(error)
        if is_refusal(error) or self._is_dead():
            return None
        return f"TensorRT-LLM could not continue from the KV: {one_line(error)}"

    async def _generate(self, prompt: list[int], response: GeneratedResponse, transfer: Any) -> None:
        item, top = response.item, response.item.sampling.logprobs
        options = self._request_options(item)
        if transfer is not None:
            options["disaggregated_params"] = transfer
        output = self._llm.generate_async(
            inputs=prompt, sampling_params=self._sampling_params(item.sampling), streaming=True, **options
        )
        reason = None
        try:
            async for result in output:
                (one,) = result.outputs
                token_ids = one.token_ids[response.tokens :]  # each result contains all tokens so far
                logprobs: tuple[TokenLogprob, ...] = ()
                if token_ids and top is not None:
                    places = one.logprobs[response.tokens : response.tokens + len(token_ids)]
                    logprobs = token_logprobs(token_ids, places, top)
                response.add(token_ids, getattr(result, "cached_tokens", 0) or 0, logprobs)
                reason = one.finish_reason or reason
                self._wake.set()
        except BaseException:
            output.abort()
            raise
        self._log(output)
        self._end_response(response, reason or "unknown")

    def _log(self, output: Any) -> None:
        metrics: Mapping[str, Any] | None = getattr(output, "metrics_dict", None)
        if self._log_request is not None and metrics:
            self._log_request(dict(metrics))

    def _request_error(self, error: Exception) -> AttemptFailed | None:
        if self._is_dead():
            return None
        if is_refusal(error):
            return AttemptFailed(400, "invalid_request", one_line(error))
        return AttemptFailed(500, "engine_error", f"TensorRT-LLM failed: {one_line(error)}")

    def _has_lora(self) -> bool:
        return self._llm.args.lora_config is not None

    async def _add_lora(self, adapter: LoraAdapter) -> None:
        """Do nothing, because TensorRT-LLM loads an adapter with its first request and drops unused adapters itself."""


def descriptor(params: Any) -> bytes:
    """Return the KV descriptor of a computed prompt.

    Raises Unfetchable if TensorRT-LLM returned none, or an invalid one.
    """
    if not dataclasses.is_dataclass(params) or isinstance(params, type):
        raise Unfetchable("TensorRT-LLM returned no disaggregated_params")
    fields = _init_fields(params)
    try:
        if places := fields.get(LOGPROBS):
            fields[LOGPROBS] = [
                [(token_id, one["logprob"], one.get("rank")) for token_id, one in place.items()]
                if isinstance(place, dict)
                else [(first, place, None)]  # TensorRT-LLM's simple format is the number of the token alone
                for first, place in zip(fields["first_gen_tokens"], places, strict=True)
            ]
        return msgspec.msgpack.encode(fields, enc_hook=dict)  # a Pydantic model is a sequence of pairs
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unfetchable(f"cannot encode the disaggregated_params of TensorRT-LLM: {error}") from error


def _init_fields(value: Any) -> Any:
    """Convert dataclasses to dictionaries, without unset fields and fields that constructors do not take."""
    if dataclasses.is_dataclass(value):
        found = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        return {name: _init_fields(one) for name, one in found.items() if one is not None}
    if isinstance(value, dict):
        return {name: _init_fields(one) for name, one in value.items()}
    return [_init_fields(one) for one in value] if isinstance(value, list | tuple) else value


def transfer_fields(
    prefilled: Prefilled | None, model: str, prompt_tokens: int, logprob: Callable[[float, int | None], Any]
) -> dict[str, Any]:
    """Return the fields of the decode worker's `DisaggregatedParams`.

    Raises Unfetchable if there is no descriptor, it cannot be decoded, or it is for another model or prompt length.
    """

    def decode(packed: bytes) -> dict[str, Any]:
        fields = msgspec.msgpack.decode(packed, type=dict[str, Any])
        if places := msgspec.convert(fields.get(LOGPROBS, []), list[list[tuple[int, float, int | None]]]):
            fields[LOGPROBS] = [{token_id: logprob(value, rank) for token_id, value, rank in place} for place in places]
        return fields | {"request_type": "generation_only"}

    return decoded(prefilled, CONNECTOR, model, prompt_tokens, decode)


async def _poll(read: Callable[..., AsyncIterator[Any]], handle: Callable[[Any], None]) -> None:
    """Call `read` for ever, and pass its results to `handle`. Pauses between calls grow while it returns nothing."""
    least, most = POLL_EVERY_S
    pause = least
    while True:
        found = False
        async for one in read(timeout=POLL_TIMEOUT_S):
            found = True
            handle(one)
        pause = least if found else min(most, pause * BACK_OFF)
        await asyncio.sleep(pause)


def _build(arguments: dict[str, Any]) -> tuple[Any, Any]:
    try:
        types = SimpleNamespace(
            **{name: getattr(import_module(module), name) for module, names in TYPES.items() for name in names}
        )
    except Exception as error:  # a build for another machine may raise anything
        raise EngineError(f"cannot import TensorRT-LLM: {one_line(error)}") from error
    with start_errors("TensorRT-LLM"):
        return types, types.LLM(**arguments)
