"""vLLM behind a worker: `AsyncLLM` in this process, its engine core in a child process.

Theory of operation. KV events arrive on a separate socket, mostly less than a millisecond before the responses. vLLM
reports a cleared cache only with its next step; the base class reports it at once. If the engine core dies, or does not
respond to a health request, `run` ends.
"""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.engine_model.model import Finished
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import OnboardedTokens
from forebay.events.requests import Sampling
from forebay.events.tokens import TokenLogprob
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed, EngineError, EngineRefused, one_line
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.model_engine import DROPS_WEIGHTS, REASONS, GeneratedResponse, ModelEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import VllmCore, device_type, engine_arguments, require_nixl, side_channel
from forebay.workers.engines.vllm.media import engine_prompt
from forebay.workers.engines.vllm.offloading import offloading_connector, offloads_itself, store_name
from forebay.workers.engines.vllm.requests import engine_priority, prompt_of, token_logprobs
from forebay.workers.engines.vllm.tiers.configuration import CONNECTOR, RequestHints, TierConfig, connector
from forebay.workers.engines.vllm.tiers.rank import TierReport
from forebay.workers.engines.vllm.transfer import PREFILL, PREFILL_SAMPLING, KvTransfers
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.zmq_feed import KvFeed, KvSource
from forebay.workers.kv_events.zmq_wire import VllmDecoder
from forebay.workers.kv_tiers.identity import default_cache, weights_digest
from forebay.workers.kv_tiers.metrics import TierCounters, tier_metrics
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_transfer.embeddings import Array
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

TIER_ERROR = "tier-error"  # file in the directory of sockets, with the reason why the tiers cannot start
CANARY_TOKENS = 64  # on some CPUs a shorter first prompt runs other code and does not warm up the engine
CANARY_ID = "forebay-canary"
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0)
CLEAR_ATTEMPTS = 20
CLEAR_EVERY_S = 0.5  # blocks that another worker is reading cannot be dropped
LOAD_FAILED = "error"  # vLLM's finish reason of a request whose KV it could not load


class VllmEngine(ModelEngine):
    """Adapter of one vLLM engine. Its ranks are data-parallel replicas. NIXL transfers KV for prefill and decode."""

    NAME = "vLLM"
    METRICS = ("vllm:", "lmcache:")  # LMCache registers metrics, too, if vLLM uses it
    LORA_ARGUMENT = "enable_lora"
    TAKES_MEDIA = True

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.core = VllmCore()
        self.llm: Any = None
        self._calls: Any = None  # module `forebay.workers.engines.vllm.calls`, which imports vLLM
        self._scheduling_policy = "fcfs"
        self._is_traced = False
        self._transfers = KvTransfers(settings.model_name, self._kept)
        self._layout: KvLayout | None = None
        self._store_name = settings.kv_store_name
        self._weights = cache(partial(weights_digest, settings.model, default_cache()))
        self._has_own_tiers = False  # forebay's connector keeps KV in the tiers
        self._tier_counters: defaultdict[int, TierCounters] = defaultdict(TierCounters)
        self._onboarded: dict[str, tuple[OnboardedTokens, ...]] = {}  # by request, until its first token

    async def _launch(self, spec: WorkerSpec) -> None:
        settings = self._settings
        require_nixl(settings)
        sockets = self._make_sockets()
        tiers = None if settings.tiers is None else await self._tier_connector(settings.tiers, spec, sockets)
        arguments = engine_arguments(settings, kv_events=spec.kv_events, sockets=sockets, tiers=tiers)
        environment = side_channel(settings)
        try:
            self.llm = await self.core.start(
                arguments, lambda _, index: VllmStepStats(index, self._on_step, self._on_tiers), environment
            )
        except EngineError:
            if (cause := sockets / TIER_ERROR).exists():
                raise EngineError(cause.read_text()) from None
            raise
        self._calls = import_module("forebay.workers.engines.vllm.calls")
        config = self.llm.vllm_config
        if settings.tiers is not None and settings.tiers.store:
            if self._has_own_tiers:
                self._store_name = (await self.llm.collective_rpc("forebay_store_name"))[0]
            else:
                self._store_name = store_name(settings.tiers.store, config)
        self._scheduling_policy = config.scheduler_config.policy
        self._context_tokens = config.model_config.max_model_len
        self._tokenizer = None if config.model_config.skip_tokenizer_init else self.llm.get_tokenizer()
        self._is_traced = await self.llm.is_tracing_enabled()
        tasks = await self.llm.get_supported_tasks()
        self._tasks = tuple(task for task in ("generate", "embed") if task in tasks)
        if not self._tasks:
            raise EngineError(
                f"the model {settings.model} supports {', '.join(tasks)}; forebay serves generate and embed"
            )
        kv_blocks = config.cache_config.num_gpu_blocks // settings.dp_size - 1
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        if config.cache_config.enable_prefix_caching:
            self._caches = {
                spec.ranks[index]: KvFeed(
                    spec.ranks[index],
                    KvSource(source.endpoint, source.replay_endpoint, source.topic),
                    VllmDecoder(has_store=bool(self._store_name)),
                    ResidentBlocks(config.cache_config.block_size, counts_copies=True),
                )
                for index, source in self.llm.get_kv_event_sources().items()
            }
        self._layout = await self._transfers.start(self.llm, spec.worker_id)

    async def _tier_connector(self, tiers: TierSettings, spec: WorkerSpec, sockets: Path) -> dict[str, Any]:
        settings = self._settings
        if "kv_transfer_config" in settings.arguments:
            raise EngineError("KV tiers cannot be combined with kv_transfer_config in --engine-args")
        if offloads_itself(await runtime.offload(device_type)):
            return offloading_connector(tiers)
        self._has_own_tiers = True
        # Otherwise, on a CPU, vLLM's scheduler and worker run in different processes, and cannot share the tiers.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        weights = await runtime.offload(weights_digest, settings.model, default_cache())
        return connector(TierConfig(tiers, weights, settings.dp_start_rank, spec.worker_id, sockets / TIER_ERROR))

    async def _sized(self, spec: WorkerSpec) -> WorkerSpec:
        config = self.llm.vllm_config
        return msgspec.structs.replace(
            spec,
            block_size=config.cache_config.block_size,
            kv_blocks_total=config.cache_config.num_gpu_blocks // self._settings.dp_size - 1,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            kv_layout=self._layout,
            kv_store=self._store_name,
            max_loras=config.lora_config.max_loras if config.lora_config else 0,
        )

    async def _shut_down(self) -> None:
        await self.core.stop()
        self.llm = None

    def _on_step(self, engine_index: int, running: int, waiting: int, usage: float) -> None:
        if (rank := self._rank_at(engine_index)) is not None:
            rank.report(running, waiting, usage)
            self._wake.set()

    def _on_tiers(self, engine_index: int, encoded: bytes) -> None:
        report = TierReport.decode(encoded)
        self._onboarded.update({name: one for name, one in report.onboarded.items() if name in self._requests})
        if (rank := self._rank_at(engine_index)) is not None:
            rank.tier_costs = report.costs
            self._tier_counters[rank.rank] = report.counters

    def _is_dead(self) -> bool:
        return self.llm is None or self.llm.errored

    async def _run_canary(self, rank: int) -> None:
        # Without transfer parameters, prefill and decode workers respond to it alone.
        prompt = prompt_of([0] * min(CANARY_TOKENS, self._context_tokens - 1))
        if "generate" in self._tasks:
            params = self._calls.sampling_params(CANARY_SAMPLING)
            outputs = self.llm.generate(prompt, params, CANARY_ID, data_parallel_rank=self._index(rank))
        else:
            outputs = self.llm.encode(prompt, self._calls.pooling_params(), CANARY_ID)
        async for _ in outputs:
            pass

    def submit_embedded(self, item: WorkItem, embeddings: Array) -> None:
        """Start a request with embeddings: one row per placeholder token, in the order of `item.media`."""
        self._begin(item, partial(self._run_request, embeddings=embeddings))

    def _on_request_end(self, request_id: str, task: "asyncio.Task[None]") -> None:
        super()._on_request_end(request_id, task)
        self._onboarded.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """Cancel a request. vLLM frees its blocks with its next step, and KV kept for another worker a little later."""
        super().cancel(request_id)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Shorten the lease of the KV that is kept for a request. A reader can still renew it to fetch the KV."""
        if (releasing := self._transfers.release(request_id)) is not None:
            self._notify(releasing)

    def drop(self, prefilled: Prefilled) -> None:
        self._notify(self._transfers.drop(prefilled))

    def _notify(self, notification: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(notification, name="vllm release")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _idle(self) -> None:
        if not self._kept:  # with kept KV, vLLM continues to step and reports the load itself
            super()._idle()

    async def command(self, command: Command) -> tuple[str, ...]:
        """Execute a command, and return the names of the loaded adapters. `clear_kv_blocks` also clears own tiers.

        Raises EngineRefused if vLLM does not support the command, or cannot execute it now.
        """
        if command.action == "clear_kv_blocks" and self._has_own_tiers:
            await self._call("collective_rpc", "forebay_clear_tiers")
        return await super().command(command)

    def collectors(self) -> Sequence[Collector]:
        if not self._has_own_tiers:
            return super().collectors()
        tiers = {rank: partial(self._tier_counters.__getitem__, rank) for rank in self._ranks}
        return (*super().collectors(), tier_metrics(self._worker_id, tiers))

    async def _clear_in_background(self) -> None:
        # Blocks that other workers may be reading stay until their leases end.
        await self._clear(CLEAR_ATTEMPTS + int(self._kept.left_s / CLEAR_EVERY_S))

    async def _clear(self, attempts: int = CLEAR_ATTEMPTS) -> None:
        """Clear the prefix cache; requests in flight are computed again.

        Raises EngineRefused if it cannot be cleared.
        """
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        reason = ""
        for _ in range(attempts):
            before = self._clears()
            try:
                if await self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                    self._report_cleared(before)
                    return
                reason = "vLLM did not drop all blocks"
            except Exception as error:
                if self.llm.errored:
                    raise EngineRefused("the engine died") from error
                reason = one_line(error)
            await asyncio.sleep(CLEAR_EVERY_S)
        raise EngineRefused(f"cannot clear the prefix cache: {reason}")

    async def _run_request(
        self, item: WorkItem, prompt: Any, rank: RankBuffer, embeddings: Array | None = None
    ) -> None:
        if item.task == "generate":
            try:
                prompt = await engine_prompt(self.llm, item, embeddings, self._weights)
            except TransferError as error:
                rank.not_fetched(item, str(error))  # so that another encode worker is tried
                return
        await super()._run_request(item, prompt, rank)

    def _request_error(self, error: Exception) -> AttemptFailed | None:
        if isinstance(error, self._calls.EngineDeadError):
            return None
        if not isinstance(error, self._calls.VLLMError | ValueError):
            # The request fails, because on other workers it would probably fail in the same way.
            message = "vLLM raised an unexpected error, so one request ends with an error; the worker continues"
            logger.error(message, exc_info=error)
        converted: AttemptFailed = self._calls.request_error(error)
        return converted

    def _outputs(self, item: WorkItem, prompt: Any, params: Any) -> AsyncIterator[Any]:
        outputs: AsyncIterator[Any] = self.llm.generate(
            prompt,
            params,
            item.request_id,
            lora_request=self._lora_request(item.lora_name),
            priority=engine_priority(item.priority, self._scheduling_policy),
            data_parallel_rank=self._index(item.rank),
            trace_headers=self._trace_headers(item),
        )
        return outputs

    def _trace_headers(self, item: WorkItem) -> dict[str, str] | None:
        return {"traceparent": item.traceparent} if self._is_traced and item.traceparent else None

    async def _prefill(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        sampling = msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING)
        began_s = time.monotonic()
        params = self._calls.sampling_params(sampling, PREFILL, self._hints(item))
        last = [output async for output in self._outputs(item, prompt, params)][-1]
        if (transfer_params := last.kv_transfer_params) is None:
            if (reason := last.outputs[0].finish_reason) in REASONS:
                message = "vLLM keeps no KV for other workers: start this worker with --role prefill"
                raise AttemptFailed(501, "not_supported", message)
            self._finish(item, rank, reason, (0, 0, 0))
            return
        # vLLM's core uses this clock too, because it runs on this machine.
        computed_s = getattr(last.metrics, "last_token_ts", None) or began_s
        prefilled = self._transfers.offer(item, transfer_params, time.monotonic() - computed_s)
        onboarded = self._onboarded.pop(item.request_id, ())
        rank.prefilled(item, prefilled, last.num_cached_tokens or 0, onboarded)

    def _hints(self, item: WorkItem) -> RequestHints | None:
        if not self._has_own_tiers:
            return None
        return RequestHints(item.request_id, item.store_blocks, item.kv_pin_s)

    def _transfer(self, item: WorkItem, prompt_tokens: int) -> tuple[dict[str, Any], float]:
        return self._transfers.fetch_params(item.prefilled, prompt_tokens)

    def _fetch_failure(self, error: Exception) -> str | None:
        if isinstance(error, TimeoutError):
            # The holder may have overwritten the blocks before they were read, and they may be in the cache by now.
            self._clearing.soon()
        return super()._fetch_failure(error)

    async def _generate(self, prompt: Any, response: GeneratedResponse, transfer: dict[str, Any] | None) -> None:
        item = response.item
        params = self._calls.sampling_params(item.sampling, transfer, self._hints(item))
        top = item.sampling.logprobs
        async for output in self._outputs(item, prompt, params):
            (one,) = output.outputs
            logprobs: tuple[TokenLogprob, ...] = ()
            if top is not None and one.token_ids:
                logprobs = token_logprobs(one.token_ids, one.logprobs, top)
            onboarded = self._onboarded.pop(item.request_id, ())
            response.add(one.token_ids, output.num_cached_tokens or 0, logprobs, onboarded)
            if output.finished:
                if transfer is not None and not response.tokens and one.finish_reason == LOAD_FAILED:
                    raise Unfetchable("vLLM could not load the KV; see its log for the cause")
                self._end_response(response, one.finish_reason)
            self._wake.set()

    async def _embed(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        outputs = self.llm.encode(
            prompt_of(prompt, item.cache_namespace),
            self._calls.pooling_params(),
            item.request_id,
            lora_request=self._lora_request(item.lora_name),
            priority=engine_priority(item.priority, self._scheduling_policy),
            trace_headers=self._trace_headers(item),
        )
        async for output in outputs:
            rank.embedded(item, output.outputs.data.float().cpu().numpy().astype("<f4").tobytes())
            tokens = (len(prompt), 0, output.num_cached_tokens or 0)
            rank.finished(Finished(item.request_id, item.attempt, "stop", *tokens))

    def _lora_request(self, name: str) -> Any:
        return self._calls.lora_request(self._loras.loaded[name]) if name else None

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await getattr(self.llm, name)(*arguments, **named)
        except Exception as error:
            raise EngineRefused(one_line(error)) from error

    def _has_lora(self) -> bool:
        return bool(self.llm.vllm_config.lora_config)

    async def _add_lora(self, adapter: LoraAdapter) -> None:
        await self._call("add_lora", self._calls.lora_request(adapter))

    async def _remove_lora(self, adapter: LoraAdapter) -> None:
        await self._call("remove_lora", adapter.number)

    async def _pause(self) -> None:
        await self._call("pause_generation", mode="keep", clear_cache=False)

    async def _resume(self) -> None:
        await self._call("resume_generation")

    async def _sleep(self, level: int) -> None:
        before = self._clears()
        await self._call("sleep", level, mode="wait")
        self._report_cleared(before)
        self._slept_level = max(self._slept_level, level)

    async def _wake_up(self) -> None:
        if self._slept_level == DROPS_WEIGHTS:
            await self._call("wake_up", ["weights"])
            await self._call("collective_rpc", "reload_weights")
        await self._call("wake_up")
        self._slept_level = 0


class VllmStepStats:
    """Receives the statistics of one rank from vLLM. It has the methods of vLLM's `StatLoggerBase`.

    It is no subclass, because vLLM may not be installed. For each step it calls `report` with the index of the rank in
    the engine, the numbers of running and waiting requests, and the share of KV blocks in use. It calls `report_tiers`
    with the index and an encoded `TierReport`.
    """

    def __init__(
        self,
        engine_index: int,
        report: Callable[[int, int, int, float], None],
        report_tiers: Callable[[int, bytes], None],
    ) -> None:
        self._engine_index = engine_index
        self._report = report
        self._report_tiers = report_tiers

    def record(self, scheduler_stats: Any, _iteration_stats: Any, **_others: Any) -> None:
        """Report the load after a step. Some outputs of vLLM have no statistics and are ignored."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._report(self._engine_index, scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)
            connectors = scheduler_stats.kv_connector_stats or {}
            if (encoded := connectors.get(CONNECTOR, connectors).get("report")) is not None:
                self._report_tiers(self._engine_index, encoded)

    def log_engine_initialized(self) -> None:
        """Do nothing, because the worker itself logs its start."""

    def log(self) -> None:
        """Do nothing, because the worker reports loads on the log."""

    def record_sleep_state(self, _is_awake: int, _level: int) -> None:
        """Do nothing, because the worker itself knows whether the engine sleeps."""
