"""vLLM behind a worker: `AsyncLLM` in this process, its engine core in a child process.

Theory of operation. A task a request takes vLLM's answer as it comes; what all of them got in one turn of the event
loop is one batch. KV events come over a socket of their own, so they are not ordered with answers: mostly they are
earlier, by less than a millisecond. vLLM tells that its cache was emptied only with its next step, so what we emptied
is told at once, and of the cache nothing more until vLLM has said so, too: an index may know less than is there, never
more. A core that died ends `run`; so does one that leaves a health request unanswered.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.registry import Collector

from forebay.engine_model.model import Finished
from forebay.events.base import U32_BYTES
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.async_engine import REASONS, AsyncEngine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.metrics import PrefixedMetrics
from forebay.workers.engines.model_directory import check_model, one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import VllmCore, engine_arguments, require_nixl, side_channel
from forebay.workers.engines.vllm.media import engine_prompt
from forebay.workers.engines.vllm.metrics import PREFIXES, VllmStepStats
from forebay.workers.engines.vllm.requests import engine_priority, prompt_of, token_logprobs
from forebay.workers.engines.vllm.transfer import PREFILL, PREFILL_SAMPLING, KvTransfers
from forebay.workers.kv_events.metrics import KvEventMetrics
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.vllm_wire import VllmDecoder
from forebay.workers.kv_events.zmq_feed import KvFeed, KvSource
from forebay.workers.runtime.clearing import Clearing
from forebay.workers.runtime.rank_buffer import RankBuffer

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array

logger = logging.getLogger(__name__)

CANARY_TOKENS = 64  # some CPUs need a first prompt of this length: shorter ones run other code, which is not ready
CANARY_ID = "forebay-canary"
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0)
CLEAR_ATTEMPTS = 20
CLEAR_EVERY_S = 0.5  # blocks on their way to another worker cannot be dropped
DROPS_WEIGHTS = 2  # the level of sleep
LOAD_FAILED = "error"  # vLLM's reason for the end of a request whose KV it could not load


class VllmEngine(AsyncEngine):
    """One vLLM engine; its ranks are data parallel replicas. With a KV connector it computes or fetches for others."""

    NAME = "vLLM"
    TAKES_MEDIA = True

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._core = VllmCore()
        self._llm: Any = None
        self._calls: Any = None  # `vllm_calls`, which needs vLLM
        self._sockets: Path | None = None
        self._worker_id = ""
        self._scheduling_policy = "fcfs"
        self._feeds: dict[int, KvFeed] = {}
        self._transfers = KvTransfers(settings.model_name)
        self._clearing = Clearing(self._clear_patiently, self._fail)
        self._slept_level = 0

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start vLLM, load the adapters, and answer a first prompt on each rank."""
        settings, self._worker_id = self._settings, spec.worker_id
        await asyncio.to_thread(check_model, settings)
        require_nixl(settings)
        self._sockets = Path(tempfile.mkdtemp(prefix="forebay-vllm-"))
        arguments = engine_arguments(settings, kv_events=spec.kv_events, sockets=self._sockets)
        channel = side_channel(settings)
        self._llm = await self._core.start(arguments, lambda _, index: VllmStepStats(index, self._on_step), channel)
        self._calls = import_module("forebay.workers.engines.vllm.calls")
        config = self._llm.vllm_config
        self._scheduling_policy = config.scheduler_config.policy
        self._context_tokens = config.model_config.max_model_len
        tasks = await self._llm.get_supported_tasks()
        self._tasks = tuple(task for task in ("generate", "embed") if task in tasks)
        if not self._tasks:
            raise EngineError(f"the model {settings.model} does {', '.join(tasks)}: forebay serves generate and embed")
        kv_blocks = config.cache_config.num_gpu_blocks // settings.dp_size - 1
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        block_size = config.cache_config.block_size
        self._feeds = self._kv_feeds(spec, block_size)
        for name, directory in settings.loras.items():
            try:
                await self._load_lora(name, str(directory))
            except EngineRefused as refusal:
                raise EngineError(f"the adapter {name} cannot be loaded: {refusal}") from None
        layout = await self._transfers.start(self._llm, spec.worker_id)
        await self._warm_up()
        return msgspec.structs.replace(
            spec,
            block_size=block_size,
            kv_blocks_total=kv_blocks,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            tasks=self._tasks,
            loras=tuple(self._loras.loaded),
            kv_events=bool(self._feeds),
            kv_layout=layout,
        )

    def _kv_feeds(self, spec: WorkerSpec, block_size: int) -> dict[int, KvFeed]:
        if not self._llm.vllm_config.cache_config.enable_prefix_caching:
            return {}
        return {
            spec.ranks[index]: KvFeed(
                spec.ranks[index],
                KvSource(source.endpoint, source.replay_endpoint, source.topic),
                VllmDecoder(),
                ResidentBlocks(block_size, counts_copies=True),
            )
            for index, source in self._llm.get_kv_event_sources().items()
        }

    def _on_step(self, engine_index: int, running: int, waiting: int, usage: float) -> None:
        if (rank := self._ranks.get(engine_index + self._settings.dp_start_rank)) is not None:
            rank.report(running, waiting, usage)
            self._wake.set()

    def _is_dead(self) -> bool:
        return self._llm is None or self._llm.errored

    def _death(self) -> str:
        return "vLLM's engine core died; its log says why"

    async def _ask_canary(self, rank: int) -> None:
        """A prefill or decode worker answers it by itself: only what names a transfer has one."""
        prompt = prompt_of([0] * min(CANARY_TOKENS, self._context_tokens - 1))
        if "generate" in self._tasks:
            params = self._calls.sampling_params(CANARY_SAMPLING)
            answer = self._llm.generate(prompt, params, CANARY_ID, data_parallel_rank=self._index(rank))
        else:
            answer = self._llm.encode(prompt, self._calls.pooling_params(), CANARY_ID)
        async for _ in answer:
            pass

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [feed.run(self._on_changes, self._on_lost) for feed in self._feeds.values()]

    def _on_lost(self, _rank: int, _reason: str) -> None:
        # What the engine holds and nobody knows of goes, so that index and engine agree again.
        self._clearing.soon()

    async def stop(self) -> None:
        """End every request, and vLLM."""
        await self._end_tasks(self._clearing.task)
        await self._core.stop()
        self._llm = None
        if self._sockets is not None:
            await asyncio.to_thread(shutil.rmtree, self._sockets, ignore_errors=True)

    def held(self, rank: int) -> Sequence[int]:
        """The blocks in a rank's device cache, as far as vLLM has told; what is told here comes in no batch."""
        feed = self._feeds.get(rank)
        if feed is None or self._ranks[rank].muted:
            return ()
        self._ranks[rank].discard_changes()
        return feed.held()

    def submit_embedded(self, item: WorkItem, embeddings: "Array") -> None:
        """As `submit`, with the embeddings of all of `item.media`, one row a placeholder, in their order."""
        self._begin(item, partial(self._answer, embeddings=embeddings))

    def cancel(self, request_id: str) -> None:
        """Drop a request; vLLM frees its blocks with its next step, those that are kept for another a little later."""
        super().cancel(request_id)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Let vLLM have back soon what it keeps for this request, unless somebody says that it is about to fetch it."""
        if (releasing := self._transfers.release(request_id)) is not None:
            self._tell(releasing)

    def drop(self, prefilled: Prefilled) -> None:
        """Have vLLM tell the one that keeps it."""
        self._tell(self._transfers.drop(prefilled))

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling, name="vllm release")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def kept(self) -> int:
        """Requests whose KV is kept, until vLLM says that no block is in use."""
        if not self._requests and not any(rank.load.kv_blocks_used for rank in self._ranks.values()):
            self._transfers.forget()
        return self._transfers.kept()

    def _idle(self) -> None:
        if not self._transfers.kept():  # else vLLM takes steps, and says what it keeps
            super()._idle()

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset()
        self._clearing.soon()

    async def _clear_patiently(self) -> None:
        # What others may be reading just now stays where it is: for as long as its lease at the most.
        kept_s = max(0.0, self._transfers.kept_s)
        await self._clear(CLEAR_ATTEMPTS + int(kept_s / CLEAR_EVERY_S))

    async def _clear(self, attempts: int = CLEAR_ATTEMPTS) -> None:
        """Empty the prefix cache; requests under way are computed again. Raises EngineRefused."""
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        reason = ""
        for _ in range(attempts):
            before = {rank: buffer.clears for rank, buffer in self._ranks.items()}
            try:
                if await self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                    self._told_clear(before)
                    return
                reason = "vLLM did not drop all blocks"
            except Exception as error:
                if self._llm.errored:
                    raise EngineRefused("the engine died") from error
                reason = one_line(error)
            await asyncio.sleep(CLEAR_EVERY_S)
        raise EngineRefused(f"the prefix cache cannot be emptied: {reason}")

    def _told_clear(self, before: dict[int, int]) -> None:
        for rank, clears in before.items():
            self._ranks[rank].cleared(clears)
        self._wake.set()

    async def _ready(self) -> None:
        await self._clearing.over()

    async def _answer(
        self, item: WorkItem, prompt: list[int], rank: RankBuffer, embeddings: "Array | None" = None
    ) -> None:
        if item.task == "embed":
            await self._embed(item, prompt, rank)
            return
        if item.stage == "prefill":
            await self._prefill(item, await engine_prompt(self._llm, item, embeddings), rank)
            return
        transfer: dict[str, Any] | None = None
        if item.stage == "decode":
            try:
                transfer = self._transfers.wanted(item.prefilled, len(prompt))
            except Unfetchable as error:
                rank.not_fetched(item, str(error))
                return
        asked = await engine_prompt(self._llm, item, embeddings)
        params = self._calls.sampling_params(item.sampling, transfer)
        try:
            await self._generate(item, rank, asked, params)
        except TimeoutError:
            if transfer is None:
                raise
            # What came too late may be what others have written there since, and be in the cache by now.
            rank.not_fetched(item, "vLLM said nothing before the lease of the KV was over")
            self._clearing.soon()

    def _answer_error(self, error: Exception) -> ResponseError | None:
        if isinstance(error, self._calls.EngineDeadError):
            return None
        if not isinstance(error, self._calls.VLLMError | ValueError):
            logger.error("vLLM failed on a request", exc_info=error)  # it would end one worker after the other
        told: ResponseError = self._calls.answer_error(error)
        return told

    def _answers(self, item: WorkItem, prompt: Any, params: Any) -> AsyncIterator[Any]:
        answers: AsyncIterator[Any] = self._llm.generate(
            prompt,
            params,
            item.request_id,
            lora_request=self._lora_request(item.lora_name),
            priority=engine_priority(item.priority, self._scheduling_policy),
            data_parallel_rank=self._index(item.rank),
        )
        return answers

    async def _prefill(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        sampling = msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING)
        begun_s = time.monotonic()
        params = self._calls.sampling_params(sampling, PREFILL)
        last = [output async for output in self._answers(item, prompt, params)][-1]
        if (told := last.kv_transfer_params) is None:
            if (why := last.outputs[0].finish_reason) in REASONS:
                message = "vLLM keeps no KV for others: that takes the role prefill"
                rank.failed(item, ResponseError(status=501, code="not_supported", message=message))
            else:
                self._finish(item, rank, why, (0, 0, 0))
            return
        try:
            # By the clock of vLLM's core, which is this machine's.
            computed_s = getattr(last.metrics, "last_token_ts", None) or begun_s
            prefilled = self._transfers.kept_for(item, told, time.monotonic() - computed_s)
        except Unfetchable as error:
            rank.failed(item, ResponseError(status=500, code="engine_error", message=str(error)))
        else:
            rank.prefilled(item, prefilled, last.num_cached_tokens or 0)

    async def _generate(self, item: WorkItem, rank: RankBuffer, prompt: Any, params: Any) -> None:
        """Raises TimeoutError where KV is fetched, and its lease is over before the first token."""
        prompt_tokens = len(item.token_ids) // U32_BYTES
        top = item.sampling.logprobs
        said = cached = 0
        lease_s = self._transfers.lease_s(item.prefilled) if item.stage == "decode" else None
        async with asyncio.timeout(lease_s) as lease:
            async for output in self._answers(item, prompt, params):
                (one,) = output.outputs
                if not said and one.token_ids:
                    lease.reschedule(None)
                    cached = output.num_cached_tokens or 0
                    rank.began(item, cached)
                if one.token_ids:
                    logprobs: tuple[TokenLogprob, ...] = ()
                    if top is not None:
                        logprobs = token_logprobs(one.token_ids, one.logprobs, top)
                    rank.add_tokens(item, said, one.token_ids, logprobs)
                    said += len(one.token_ids)
                if output.finished:
                    if item.stage == "decode" and not said and one.finish_reason == LOAD_FAILED:
                        rank.not_fetched(item, "vLLM could not load the KV; its log says why")
                    else:
                        self._finish(item, rank, one.finish_reason, (prompt_tokens, said, cached))
                self._wake.set()

    def _finish(self, item: WorkItem, rank: RankBuffer, why: str, tokens: tuple[int, int, int]) -> None:
        if why == "abort":  # it dropped the request, which can be asked again
            rank.failed(item, ResponseError(status=503, code="engine_error", message="vLLM ended the answer: abort"))
        else:
            super()._finish(item, rank, why, tokens)

    async def _embed(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        answer = self._llm.encode(
            prompt_of(prompt, item.cache_namespace),
            self._calls.pooling_params(),
            item.request_id,
            lora_request=self._lora_request(item.lora_name),
            priority=engine_priority(item.priority, self._scheduling_policy),
        )
        async for output in answer:
            rank.embedded(item, output.outputs.data.float().cpu().numpy().astype("<f4").tobytes())
            tokens = (len(prompt), 0, output.num_cached_tokens or 0)
            rank.finished(Finished(item.request_id, item.attempt, "stop", *tokens))

    def _lora_request(self, name: str) -> Any:
        return self._calls.lora_request(self._loras.loaded[name]) if name else None

    async def command(self, command: Command) -> tuple[str, ...]:
        """One after the other. Sleep waits for what is under way; what comes meanwhile waits for `wake_up`."""
        async with self._commands:
            match command.action:
                case "load_lora":
                    await self._load_lora(command.lora_name, command.lora_path)
                case "unload_lora":
                    with self._loras.removing(command.lora_name) as adapter:
                        await self._call("remove_lora", adapter.number)
                case "clear_kv_blocks":
                    await self._clear()
                case "sleep":
                    await self._sleep(command.level)
                case "wake_up":
                    await self._wake_up()
                case "pause":
                    await self._call("pause_generation", mode="keep", clear_cache=False)
                    self._resting.add("pause")
                case "resume":
                    await self._call("resume_generation")
                    self._resting.discard("pause")
                case "list_loras":
                    pass
            return tuple(self._loras.loaded)

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await getattr(self._llm, name)(*arguments, **named)
        except Exception as error:
            raise EngineRefused(one_line(error)) from error

    async def _load_lora(self, name: str, directory: str) -> None:
        if not self._llm.vllm_config.lora_config:
            raise EngineRefused("vLLM was started without LoRA: give it the argument enable_lora")
        if (adapter := self._loras.offered(name, directory)) is None:
            return
        await self._call("add_lora", self._calls.lora_request(adapter))
        if self._loras.is_reused(name):
            await self._clear()
        self._loras.add(adapter)

    async def _sleep(self, level: int) -> None:
        before = {rank: buffer.clears for rank, buffer in self._ranks.items()}
        await self._call("sleep", level, mode="wait")
        self._told_clear(before)
        self._slept_level = max(self._slept_level, level)
        self._resting.add("sleep")

    async def _wake_up(self) -> None:
        if self._slept_level == DROPS_WEIGHTS:
            await self._call("wake_up", ["weights"])
            await self._call("collective_rpc", "reload_weights")
        await self._call("wake_up")
        self._slept_level = 0
        self._resting.discard("sleep")

    def collectors(self) -> Sequence[Collector]:
        """Those of vLLM, of LMCache where vLLM uses it, and of the KV events."""
        totals = {rank: feed.totals for rank, feed in self._feeds.items()}
        return (PrefixedMetrics(*PREFIXES), KvEventMetrics(self._worker_id, totals))
