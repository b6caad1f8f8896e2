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
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from prometheus_client.registry import Collector

from forebay.core.engine_model import Finished
from forebay.events.base import U32_BYTES, unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling, Task
from forebay.events.tokens import AnswerError, TokenLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, EngineError, EngineRefused, Publish
from forebay.workers.engine_metrics import PrefixedMetrics
from forebay.workers.engine_settings import EngineSettings
from forebay.workers.kv_events.metrics import KvEventMetrics
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.vllm_wire import VllmDecoder
from forebay.workers.kv_events.zmq_feed import KvFeed, KvSource
from forebay.workers.loras import Loras
from forebay.workers.model_directory import check_model, one_line
from forebay.workers.rank_buffer import RankBuffer
from forebay.workers.vllm_core import VllmCore, engine_arguments, first_error
from forebay.workers.vllm_media import engine_prompt
from forebay.workers.vllm_metrics import PREFIXES, StepStats
from forebay.workers.vllm_requests import (
    PREFILL,
    PREFILL_SAMPLING,
    KvTransfer,
    engine_priority,
    prompt_of,
    refusal,
    token_logprobs,
)

if TYPE_CHECKING:
    from forebay.workers.nixl_read import Array

logger = logging.getLogger(__name__)

CANARY_TOKENS = 64  # some CPUs need a first prompt of this length: shorter ones run other code, which is not ready
CANARY_ID = "forebay-canary"
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0)
CANARY_EVERY_S = 60.0  # without an answer to anything
CANARY_TIMEOUT_S = 30.0
WARM_UP_TIMEOUT_S = 600.0  # the first step may compile
WATCH_S = 0.5
CLEAR_ATTEMPTS = 20
CLEAR_EVERY_S = 0.5  # blocks on their way to another worker cannot be dropped
DROPS_WEIGHTS = 2  # the level of sleep
REASONS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length", "repetition": "stop"}


class VllmEngine:
    """One vLLM engine with `settings.dp_size` ranks, numbered from `settings.dp_start_rank` on; vLLM counts from 0."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._core = VllmCore()
        self._llm: Any = None
        self._calls: Any = None  # `vllm_calls`, which needs vLLM
        self._sockets: Path | None = None
        self._worker_id = ""
        self._tasks: tuple[Task, ...] = ()
        self._scheduling_policy = "fcfs"
        self._context_tokens = 0
        self._ranks: dict[int, RankBuffer] = {}
        self._feeds: dict[int, KvFeed] = {}
        self._loras = Loras()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not over yet
        self._wake = asyncio.Event()
        self._dead = asyncio.Event()
        self._fault: BaseException | None = None  # of this program; without one it was vLLM that died
        self._clearing: asyncio.Task[None] | None = None
        self._clear_again = False
        self._commands = asyncio.Lock()
        self._resting: set[str] = set()  # asleep, paused: nothing is answered then
        self._slept_level = 0
        self._answered_s = 0.0
        self._canary: asyncio.Task[None] | None = None
        self._canary_due_s = 0.0

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start vLLM, load the adapters, and answer a first prompt on each rank."""
        settings, self._worker_id = self._settings, spec.worker_id
        await asyncio.to_thread(check_model, settings)
        self._sockets = Path(tempfile.mkdtemp(prefix="forebay-vllm-"))
        arguments = engine_arguments(settings, kv_events=spec.kv_events, sockets=self._sockets)
        self._llm = await self._core.start(arguments, lambda _, index: StepStats(index, self._on_step))
        self._calls = import_module("forebay.workers.vllm_calls")
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

    async def _warm_up(self) -> None:
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                for rank in self._ranks:
                    await self._ask_canary(rank)
        except TimeoutError:
            raise EngineError(f"vLLM did not answer a first prompt within {WARM_UP_TIMEOUT_S:.0f} s") from None
        except Exception as error:
            raise EngineError(f"vLLM does not answer a first prompt: {one_line(error)}") from error
        self._answered_s = time.monotonic()

    async def _ask_canary(self, rank: int) -> None:
        """A small request such as this engine's role is for, answered here; a prefill or decode worker alone does."""
        prompt = prompt_of([0] * min(CANARY_TOKENS, self._context_tokens - 1))
        if "generate" in self._tasks:
            params = self._calls.sampling_params(CANARY_SAMPLING)
            answer = self._llm.generate(prompt, params, CANARY_ID, data_parallel_rank=self._index(rank))
        else:
            answer = self._llm.encode(prompt, self._calls.pooling_params(), CANARY_ID)
        async for _ in answer:
            pass

    def _index(self, rank: int) -> int:
        return rank - self._settings.dp_start_rank

    async def run(self, publish: Publish) -> None:
        """Publish batches until cancelled, or until the core is dead (EngineError)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds.values():
                    tasks.create_task(feed.run(self._on_changes, self._on_lost))
                tasks.create_task(self._watch())
                tasks.create_task(self._pump(publish))
        except BaseExceptionGroup as group:
            if (known := group.subgroup(EngineError)) is not None:
                raise first_error(known) from group
            raise

    async def _pump(self, publish: Publish) -> None:
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            for rank in self._ranks.values():
                if (batch := rank.take()) is not None:
                    publish(batch)

    async def _watch(self) -> None:
        while not (self._llm.errored or self._dead.is_set()):
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._dead.wait()
        if self._fault is not None:
            raise EngineError(f"the vLLM engine failed: {one_line(self._fault)}") from self._fault
        raise EngineError("vLLM's engine core died; its log says why")

    def _on_changes(self, rank: int, changes: Sequence[CacheChange]) -> None:
        self._ranks[rank].changed(changes)
        self._wake.set()

    def _on_lost(self, _rank: int, _reason: str) -> None:
        # What the engine holds and nobody knows of goes, so that index and engine agree again.
        self._clear_soon()

    async def stop(self) -> None:
        """End every request, and vLLM."""
        tasks = {*self._requests.values(), *self._ending, *filter(None, (self._clearing, self._canary))}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._core.stop()
        self._llm = None
        if self._sockets is not None:
            await asyncio.to_thread(shutil.rmtree, self._sockets, ignore_errors=True)

    def held(self, rank: int) -> Sequence[int]:
        """The blocks in a rank's device cache, as far as vLLM has told; what is told here comes in no batch."""
        feed = self._feeds.get(rank)
        if feed is None or self._ranks[rank].muted:
            return ()
        self._ranks[rank].held_told()
        return feed.held()

    def submit(self, item: WorkItem) -> None:
        """Give vLLM a request."""
        self._submit(item)

    def submit_embedded(self, item: WorkItem, embeddings: "Array") -> None:
        """As `submit`, with the embeddings of all of `item.media`, one row a placeholder, in their order."""
        self._submit(item, embeddings=embeddings)

    def submit_prefilled(self, item: WorkItem, transfer: KvTransfer) -> None:
        """As `submit`, in a decode role: the prompt's KV blocks are fetched from who prefilled them."""
        self._submit(item, transfer)

    async def prefill(self, item: WorkItem) -> KvTransfer:
        """In a prefill role: compute a prompt, and say where its KV blocks wait to be fetched.

        Raises EngineRefused. Nothing of it comes in batches but the cache's changes.
        """
        params = self._calls.sampling_params(msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING), PREFILL)
        try:
            prompt = await engine_prompt(self._llm, item, None)
            last = [output async for output in self._answers(item, prompt, params)][-1]
        except (self._calls.VLLMError, ValueError) as error:
            raise EngineRefused(self._calls.answer_error(error).message) from error
        if last.kv_transfer_params is None:
            raise EngineRefused("vLLM offers no KV blocks to fetch: that takes the role prefill")
        return cast(KvTransfer, last.kv_transfer_params)

    def _submit(self, item: WorkItem, transfer: KvTransfer | None = None, embeddings: "Array | None" = None) -> None:
        task = asyncio.create_task(self._serve(item, self._ranks[item.rank], transfer, embeddings))
        self._requests[item.request_id] = task
        task.add_done_callback(lambda done: self._served(item.request_id, done))

    def _served(self, request_id: str, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if self._requests.get(request_id) is task:
            del self._requests[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self._dead.set()

    def cancel(self, request_id: str) -> None:
        """Drop a request; vLLM frees its blocks with its next step."""
        if (task := self._requests.pop(request_id, None)) is not None:
            self._end(task)
            if not self._requests:
                for rank in self._ranks.values():
                    rank.idle()
                self._wake.set()

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._ending.add(task)
        task.cancel()

    def reset(self) -> None:
        """Drop every request and the cache. Requests that come now wait until vLLM has done so."""
        for task in self._requests.values():
            self._end(task)
        self._requests.clear()
        for rank in self._ranks.values():
            rank.reset()
        self._clear_soon()

    def _clear_soon(self) -> None:
        self._clear_again = True
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_all(), name="vllm clear")
            self._clearing.add_done_callback(self._clear_ended)

    async def _clear_all(self) -> None:
        while self._clear_again:
            self._clear_again = False
            await self._clear()

    def _clear_ended(self, task: "asyncio.Task[None]") -> None:
        self._clearing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _clear(self) -> None:
        """Empty the prefix cache; requests under way are computed again. Raises EngineRefused."""
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        reason = ""
        for _ in range(CLEAR_ATTEMPTS):
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

    async def _serve(
        self, item: WorkItem, rank: RankBuffer, transfer: KvTransfer | None, embeddings: "Array | None"
    ) -> None:
        while self._clearing is not None:
            await asyncio.wait([self._clearing])
        try:
            if error := refusal(item, self._tasks, self._loras.loaded, self._context_tokens):
                rank.failed(item, error)
            elif item.task == "embed":
                await self._embed(item, rank)
            else:
                prompt = await engine_prompt(self._llm, item, embeddings)
                await self._generate(item, rank, prompt, self._calls.sampling_params(item.sampling, transfer))
        except self._calls.EngineDeadError:
            self._dead.set()  # others go on with what this engine had
        except (self._calls.VLLMError, ValueError) as error:
            rank.failed(item, self._calls.answer_error(error))
        except Exception as error:  # the request would end one worker after the other
            logger.exception("vLLM failed on %s", item.request_id)
            rank.failed(item, self._calls.answer_error(error))
        self._answered_s = time.monotonic()
        self._wake.set()

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

    async def _generate(self, item: WorkItem, rank: RankBuffer, prompt: Any, params: Any) -> None:
        prompt_tokens = len(item.token_ids) // U32_BYTES
        top = item.sampling.logprobs
        said = cached = 0
        async for output in self._answers(item, prompt, params):
            (one,) = output.outputs
            if not said and one.token_ids:
                cached = output.num_cached_tokens or 0
                rank.began(item, cached)
            if one.token_ids:
                logprobs: tuple[TokenLogprob, ...] = ()
                if top is not None:
                    logprobs = token_logprobs(one.token_ids, one.logprobs, top)
                rank.said(item, said, one.token_ids, logprobs)
                said += len(one.token_ids)
            if output.finished:
                self._finish(item, rank, one.finish_reason, (prompt_tokens, said, cached))
            self._wake.set()

    def _finish(self, item: WorkItem, rank: RankBuffer, why: str, tokens: tuple[int, int, int]) -> None:
        reason = REASONS.get(why)
        if reason is not None:
            rank.finished(Finished(item.request_id, item.attempt, reason, *tokens))
        else:
            status = 503 if why == "abort" else 500
            rank.failed(item, AnswerError(status=status, code="engine_error", message=f"vLLM ended it: {why}"))

    async def _embed(self, item: WorkItem, rank: RankBuffer) -> None:
        prompt = unpack_u32(item.token_ids)
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

    async def check(self) -> None:
        """Whether the core lives; a health request is on its way now and then while there is nothing else to do."""
        if self._llm is None or self._llm.errored or self._dead.is_set():
            raise EngineError("vLLM's engine core died; its log says why")
        now = time.monotonic()
        if self._canary is not None and self._canary.done():
            if not self._canary.cancelled() and (error := self._canary.exception()) is not None:
                raise EngineError(f"vLLM does not answer a health request: {one_line(error)}")
            self._canary = None
            self._answered_s = now
        if self._canary is not None:
            if now > self._canary_due_s:
                raise EngineError(f"vLLM did not answer a health request within {CANARY_TIMEOUT_S:.0f} s")
        elif not self._requests and not self._resting and now - self._answered_s > CANARY_EVERY_S:
            self._canary_due_s = now + CANARY_TIMEOUT_S
            self._canary = asyncio.create_task(self._warm_up(), name="vllm canary")

    def collectors(self) -> Sequence[Collector]:
        """Those of vLLM, of LMCache where vLLM uses it, and of the KV events."""
        totals = {rank: feed.totals for rank, feed in self._feeds.items()}
        return (PrefixedMetrics(*PREFIXES), KvEventMetrics(self._worker_id, totals))
