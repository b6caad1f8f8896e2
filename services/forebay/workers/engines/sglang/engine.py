"""SGLang behind a worker: `Engine` in this process, its schedulers and detokenizer in child processes.

Theory of operation. Answers come in pieces, KV events over sockets, loads from a page of shared memory, each on its
own way. A flush of the cache is published at once; until that comes the cache was told to be empty, and nothing more:
an index may know less than is there, never more. SGLang aborts by prefix of the request id, and remembers an id until
its scheduler has dropped it: so every request gets an id of its own, which begins none other. A node that is not the
first of an engine answers nothing: its `start` returns only when it fails, so its worker never takes a lease.
"""

import asyncio
import itertools
import logging
import shutil
import struct
import tempfile
from collections.abc import Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.async_engine import CANARY_TOKENS, WATCH_S, AsyncEngine
from forebay.workers.engines.kv_descriptor import Unfetchable, offered
from forebay.workers.engines.metrics import PrefixedMetrics
from forebay.workers.engines.model_directory import check_model, one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import requests as sglang_requests
from forebay.workers.engines.sglang.core import (
    DISAGGREGATION,
    PORT,
    SglangCore,
    bootstrap_host,
    engine_arguments,
    kv_sources,
    own_sources,
)
from forebay.workers.engines.sglang.transfer import (
    CONNECTOR,
    LEASE_S,
    PREFILL_SAMPLING,
    Rendezvous,
    new_room,
    rendezvous,
)
from forebay.workers.kv_events.metrics import KvEventMetrics
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.sglang_wire import decode_sglang
from forebay.workers.kv_events.zmq_feed import KvFeed
from forebay.workers.runtime.clearing import Clearing
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

LOADS_EVERY_S = 0.1  # as often as a worker reports them
FLUSH_S = 10.0  # for the scheduler to be through with what was aborted
FLUSH_ATTEMPTS = 20
FLUSH_EVERY_S = 0.1
NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's own name for a prefill or decode side that is not there
SERVER_ERROR = 500  # from here on an HTTP status says that nothing is wrong with the request
DROPS_WEIGHTS = 2  # the level of sleep
IDS = itertools.count(1)


class SglangEngine(AsyncEngine):
    """One SGLang engine; its data parallel ranks are replicas, or attention ranks if its arguments say so."""

    NAME = "SGLang"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._core = SglangCore(self._dead.set)
        self._manager: Any = None
        self._io: Any = None  # the module of SGLang's request types
        self._resolved: dict[str, Any] = {}
        self._sockets: Path | None = None
        self._worker_id = ""
        self._feeds: dict[int, KvFeed] = {}
        self._clearing = Clearing(self._clear, self._fail)
        self._awake = asyncio.Event()
        self._awake.set()
        self._given: set[asyncio.Task[Any]] = set()  # requests that SGLang has
        self._kept: set[str] = set()  # prompts for others, until those have come and gone
        self._slept_level = 0

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start SGLang and answer a first prompt on each rank; on a node that is not the first, wait for its end."""
        settings = self._settings
        self._worker_id = spec.worker_id
        await asyncio.to_thread(check_model, settings)
        self._sockets = Path(tempfile.mkdtemp(prefix="forebay-sglang-"))
        sources = own_sources(settings.dp_size, self._sockets) if spec.kv_events else None
        engine = await self._core.start(engine_arguments(settings, sources), self._fail)
        self._manager = engine.tokenizer_manager
        if self._manager is None:
            await self._watch()
        self._io = import_module("sglang.srt.managers.io_struct")
        self._resolved = engine.server_args.resolved_dict()
        self._context_tokens = self._manager.context_len
        self._tasks = ("generate",) if self._manager.is_generation else ("embed",)
        page_size = self._resolved["page_size"]
        kv_blocks = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"] // page_size
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        if not self._resolved["disable_radix_cache"]:
            self._feeds = {
                rank: KvFeed(rank, source, decode_sglang, ResidentBlocks(page_size, counts_copies=False))
                for rank, source in kv_sources(self._resolved, spec.ranks).items()
            }
        for name, directory in settings.loras.items():
            if (adapter := self._offered(name, str(directory))) is not None:
                self._loras.add(adapter)
        await self._warm_up()
        loads = await self._manager.get_loads()
        sizes = (self._resolved["chunked_prefill_size"], self._resolved["max_prefill_tokens"])
        told = max((load.max_running_requests for load in loads), default=0)
        return msgspec.structs.replace(
            spec,
            block_size=page_size,
            kv_blocks_total=kv_blocks,
            max_num_seqs=self._resolved["max_running_requests"] or max(1, told),
            max_num_batched_tokens=min(size for size in sizes if size and size > 0),
            tasks=self._tasks,
            loras=tuple(self._loras.loaded),
            kv_events=bool(self._feeds),
        )

    def _offered(self, name: str, directory: str) -> Any:
        try:
            return self._loras.offered(name, directory)
        except EngineRefused as refusal:
            raise EngineError(f"the adapter {name} cannot be loaded: {refusal}") from None

    def _is_dead(self) -> bool:
        return self._core.is_dead

    def _death(self) -> str:
        return "a process of SGLang died; its log says why"

    async def _ask_canary(self, rank: int) -> None:
        """A prefill or decode worker answers alone: the other side is said not to be there."""
        prompt = [0] * min(CANARY_TOKENS, self._context_tokens - 1)
        rid = f"{next(IDS)}:canary"
        if self._tasks == ("embed",):
            request = self._io.EmbeddingReqInput(input_ids=prompt, rid=rid)
            async for _ in self._manager.generate_request(request):
                pass
            return
        alone: dict[str, Any] = {}
        if self._settings.role in DISAGGREGATION:
            alone = {"bootstrap_host": NO_TRANSFER_HOST, "bootstrap_room": self._index(rank)}
        answer = await self._core.engine.async_generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            stream=True,
            rid=rid,
            routed_dp_rank=self._index(rank),
            **alone,
        )
        async for out in answer:
            if (reason := out["meta_info"]["finish_reason"]) and reason["type"] == "abort":
                raise EngineError(reason.get("message") or "aborted")

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        feeds = [feed.run(self._on_changes, self._on_lost) for feed in self._feeds.values()]
        return [*feeds, self._read_loads()]

    async def _read_loads(self) -> None:
        while True:
            for load in await self._manager.get_loads():
                rank = self._ranks.get(load.dp_rank + self._settings.dp_start_rank)
                if rank is not None and load.max_total_num_tokens:
                    used = load.num_used_tokens / load.max_total_num_tokens
                    rank.report(load.num_running_reqs, load.num_waiting_reqs, min(1.0, used))
            self._wake.set()
            await asyncio.sleep(LOADS_EVERY_S)

    def _on_lost(self, _rank: int, _reason: str) -> None:
        # What the engine holds and nobody knows of goes, so that index and engine agree again.
        self._clearing.soon()

    async def stop(self) -> None:
        """End every request, and SGLang."""
        await self._end_tasks(self._clearing.task)
        await self._core.stop()
        if self._sockets is not None:
            await asyncio.to_thread(shutil.rmtree, self._sockets, ignore_errors=True)

    def held(self, rank: int) -> Sequence[int]:
        """The blocks in a rank's device cache, as far as SGLang has told; what is told here comes in no batch."""
        feed = self._feeds.get(rank)
        if feed is None or self._ranks[rank].muted:
            return ()
        self._ranks[rank].discard_changes()
        return feed.held()

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=rank.rank in self._feeds)
        self._clearing.soon()

    async def _clear(self) -> None:
        """Flush the cache; requests under way are computed again. Raises EngineRefused."""
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        if "sleep" in self._resting:
            return  # it has no cache then
        before = {rank: buffer.clears for rank, buffer in self._ranks.items()}
        flushed = await self._call("flush_cache", timeout_s=None if self._given else FLUSH_S)
        if not flushed.success:
            await self._call("pause_generation", self._io.PauseGenerationReqInput(mode="retract"))
            try:
                # Without a time to wait: that would be for requests that are gone, not for retracted ones.
                for _ in range(FLUSH_ATTEMPTS):
                    flushed = await self._call("flush_cache")
                    if flushed.success:
                        break
                    await asyncio.sleep(FLUSH_EVERY_S)
            finally:
                if "pause" not in self._resting:
                    await self._call("continue_generation", self._io.ContinueGenerationReqInput())
        if not flushed.success:
            raise EngineRefused(f"the prefix cache cannot be emptied: {flushed.message or 'SGLang did not'}")
        self._told_clear(before)

    def _told_clear(self, before: dict[int, int]) -> None:
        for rank, clears in before.items():
            if rank in self._feeds:
                self._ranks[rank].cleared(clears)
        self._wake.set()

    async def _ready(self) -> None:
        await self._clearing.over()
        await self._awake.wait()

    async def _answer(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._given.add(task)
        try:
            if item.task == "embed":
                await self._embed(item, prompt, rank)
            elif item.stage == "prefill":
                await self._prefill(item, prompt, rank)
            elif item.stage == "decode":
                await self._decode(item, prompt, rank)
            else:
                await self._generate(item, prompt, rank)
        finally:
            self._given.discard(task)

    def _refusal(self, item: WorkItem, prompt_tokens: int) -> ResponseError | None:
        does = self._settings.role if self._settings.role in DISAGGREGATION else "aggregated"
        if item.stage != does:
            message = f"SGLang with the role {does} does nothing else, and this asks for {item.stage}"
            if does == "decode":
                message += ": it computes no prompts, so its pool must be told that prefill workers have to"
            return ResponseError(status=501, code="not_supported", message=message)
        return super()._refusal(item, prompt_tokens)

    async def _prefill(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        """It is told of at once: SGLang begins when who goes on from it has come."""
        room = new_room(self._index(item.rank), self._settings.dp_size)
        meet = Rendezvous(host=bootstrap_host(self._resolved), port=self._resolved[PORT], room=room)
        model, packed, tokens = self._settings.model_name, msgspec.json.encode(meet), len(prompt)
        told = offered(item, self._worker_id, model, CONNECTOR, packed, tokens=tokens, lease_s=LEASE_S)
        self._kept.add(item.request_id)
        rank.prefilled(item, told, 0)
        self._wake.set()
        sampling = sglang_requests.sampling_arguments(item.sampling) | PREFILL_SAMPLING
        try:
            async with asyncio.timeout(LEASE_S):
                answer = await self._ask(item, prompt, sampling, meet.arguments())
                try:
                    async for out in answer:
                        if (reason := out["meta_info"]["finish_reason"]) and reason["type"] == "abort":
                            logger.warning("SGLang ended the prompt of %s: %s", item.request_id, reason.get("message"))
                            break
                finally:
                    await answer.aclose()
        except Exception as error:
            if self._core.is_dead:
                raise
            # Who waits for it learns nothing of it, and gives up by itself.
            logger.warning("SGLang did not compute the prompt of %s: %s", item.request_id, one_line(error))
        finally:
            self._kept.discard(item.request_id)

    def release(self, request_id: str) -> None:
        """Take back a prompt that was told of."""
        if request_id in self._kept:
            self.cancel(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        """Nobody can be told: who computes it waits for its lease."""

    def kept(self) -> int:
        """Prompts that were told of, and are not fetched yet."""
        return len(self._kept)

    async def _decode(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        try:
            meet = rendezvous(item.prefilled, self._settings.model_name, len(prompt))
        except Unfetchable as error:
            rank.not_fetched(item, str(error))
            return
        try:
            await self._generate(item, prompt, rank, meet)
        except TimeoutError:
            rank.not_fetched(item, f"SGLang said nothing within {LEASE_S:g} s: nobody came to the room")

    async def _ask(self, item: WorkItem, prompt: list[int], sampling: dict[str, Any], meet: dict[str, Any]) -> Any:
        return await self._core.engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling,
            stream=True,
            rid=_rid(item),
            lora_path=item.lora_name or None,
            routed_dp_rank=self._index(item.rank),
            priority=sglang_requests.engine_priority(item.priority, self._resolved),
            cache_salt=item.cache_namespace or None,
            **sglang_requests.logprob_arguments(item.sampling),
            **meet,
        )

    async def _generate(
        self, item: WorkItem, prompt: list[int], rank: RankBuffer, meet: Rendezvous | None = None
    ) -> None:
        """Raises TimeoutError if there is somebody to `meet`, and no token in time."""
        sampling = item.sampling
        said = cached = 0
        async with asyncio.timeout(None if meet is None else LEASE_S) as lease:
            arguments = {} if meet is None else meet.arguments()
            answer = await self._ask(item, prompt, sglang_requests.sampling_arguments(sampling), arguments)
            try:
                async for out in answer:
                    meta = out["meta_info"]
                    reason = meta["finish_reason"]
                    if reason is not None and reason["type"] == "abort":
                        self._aborted(item, rank, reason, fetching=meet is not None and not said)
                        break  # what is said with it was said before
                    token_ids = out["output_ids"]
                    if token_ids:
                        if not said:
                            lease.reschedule(None)
                            cached = meta["cached_tokens"]
                            rank.began(item, cached)
                        logprobs = (
                            () if sampling.logprobs is None else sglang_requests.token_logprobs(meta, sampling.logprobs)
                        )
                        rank.add_tokens(item, said, token_ids, logprobs)
                        said += len(token_ids)
                    if reason is not None:
                        self._finish(item, rank, reason["type"], (len(prompt), said, cached))
                    self._wake.set()
            finally:
                await answer.aclose()  # one that was not read to its end is aborted

    def _aborted(self, item: WorkItem, rank: RankBuffer, reason: dict[str, Any], *, fetching: bool) -> None:
        error = sglang_requests.abort_error(reason)
        if fetching and error.status >= SERVER_ERROR:
            rank.not_fetched(item, error.message)
        else:
            rank.failed(item, error)

    async def _embed(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        request = self._io.EmbeddingReqInput(
            input_ids=prompt,
            rid=_rid(item),
            lora_path=item.lora_name or None,
            priority=sglang_requests.engine_priority(item.priority, self._resolved),
        )
        async for out in self._manager.generate_request(request):
            vector = out["embedding"]
            rank.embedded(item, struct.pack(f"<{len(vector)}f", *vector))
            self._finish(item, rank, "stop", (len(prompt), 0, 0))

    def _answer_error(self, error: Exception) -> ResponseError | None:
        if self._core.is_dead:
            return None
        if isinstance(error, ValueError):
            return ResponseError(status=400, code="invalid_request", message=one_line(error))
        status = getattr(error, "status_code", 500)  # of an HTTP exception
        return sglang_requests.status_error(status, str(getattr(error, "detail", None) or one_line(error)))

    async def command(self, command: Command) -> tuple[str, ...]:
        """One after the other. Sleep waits for what is under way; what comes meanwhile waits for `wake_up`."""
        async with self._commands:
            match command.action:
                case "load_lora":
                    await self._load_lora(command.lora_name, command.lora_path)
                case "unload_lora":
                    with self._loras.removing(command.lora_name) as adapter:
                        request = self._io.UnloadLoRAAdapterReqInput(lora_name=adapter.name)
                        _require(await self._call("unload_lora_adapter", request))
                case "clear_kv_blocks":
                    await self._clear()
                case "sleep":
                    await self._sleep(command.level)
                case "wake_up":
                    await self._wake_up()
                case "pause":
                    await self._call("pause_generation", self._io.PauseGenerationReqInput(mode="in_place"))
                    self._resting.add("pause")
                case "resume":
                    await self._call("continue_generation", self._io.ContinueGenerationReqInput())
                    self._resting.discard("pause")
                case "list_loras":
                    pass
            return tuple(self._loras.loaded)

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A call of the tokenizer manager's; an answer that its dead scheduler owes is not waited for."""
        call = asyncio.ensure_future(getattr(self._manager, name)(*arguments, **named))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=WATCH_S)
                if self._core.is_dead or self._dead.is_set():
                    raise EngineRefused("the engine died")
            return call.result()
        except EngineRefused:
            raise
        except Exception as error:
            raise EngineRefused(one_line(error)) from error
        finally:
            call.cancel()

    async def _load_lora(self, name: str, directory: str) -> None:
        if not self._resolved["enable_lora"]:
            raise EngineRefused("SGLang was started without LoRA: give it the argument enable_lora")
        if (adapter := self._loras.offered(name, directory)) is None:
            return
        _require(
            await self._call("load_lora_adapter", self._io.LoadLoRAAdapterReqInput(lora_name=name, lora_path=directory))
        )
        if self._loras.is_reused(name):
            await self._clear()
        self._loras.add(adapter)

    async def _sleep(self, level: int) -> None:
        """Free the KV cache, and weights too where they can come back."""
        if not self._resolved["enable_memory_saver"]:
            raise EngineRefused("SGLang was started without enable_memory_saver: it keeps its memory")
        if "sleep" in self._resting:
            raise EngineRefused("it sleeps already")
        if "pause" in self._resting and self._given:
            raise EngineRefused("it is paused with requests under way: resume it first")
        self._awake.clear()
        try:
            if self._given:
                await asyncio.wait(tuple(self._given))
            await self._clear()  # the scheduler would die of a release while it has anything to do
            request = self._io.ReleaseMemoryOccupationReqInput(tags=self._slept_tags(level))
            await self._call("release_memory_occupation", request)
        except BaseException:
            self._awake.set()
            raise
        self._slept_level = level
        self._resting.add("sleep")

    def _slept_tags(self, level: int) -> list[str] | None:
        """Which memory a level frees; None is all. Weights without a copy in host memory are lost."""
        keeps = level < DROPS_WEIGHTS and not self._resolved["enable_weights_cpu_backup"]
        return ["kv_cache"] if keeps else None

    async def _wake_up(self) -> None:
        if "sleep" not in self._resting:
            return
        request = self._io.ResumeMemoryOccupationReqInput(tags=self._slept_tags(self._slept_level))
        await self._call("resume_memory_occupation", request)
        if self._slept_level == DROPS_WEIGHTS and not self._resolved["enable_weights_cpu_backup"]:
            again = self._io.UpdateWeightFromDiskReqInput(model_path=str(self._settings.model))
            success, message, _ = await self._call("update_weights_from_disk", again)
            if not success:
                raise EngineRefused(f"the weights cannot be loaded again: {message}")
        self._resting.discard("sleep")
        self._awake.set()

    def collectors(self) -> Sequence[Collector]:
        """Those of SGLang, of this process and of its others, and what was odd in its KV events."""
        totals = {rank: feed.totals for rank, feed in self._feeds.items()}
        return (PrefixedMetrics("sglang:"), KvEventMetrics(self._worker_id, totals))


def _rid(item: WorkItem) -> str:
    return f"{next(IDS)}:{item.request_id}"


def _require(outcome: Any) -> None:
    if not outcome.success:
        raise EngineRefused(one_line(RuntimeError(outcome.error_message or "SGLang does not say why")))
