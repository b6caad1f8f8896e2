"""Common base of the vLLM, SGLang, TensorRT-LLM and attached-server adapters.

Theory of operation. Each request runs in its own task. All events of one iteration of the event loop form one batch.
Coroutines that follow the KV events and loads of the engine run beside the tasks. If one of them or a task fails
unexpectedly, `run` ends, and the worker stops with its engine.

KV events arrive separately from responses. The prefix index may contain fewer blocks than the engine's cache, never
more. So when a cache is being cleared, the adapter reports it as empty at once, and ignores its changes until the
engine confirms the clearing. A decode request first fetches KV. If that fails before the first token, the owner lets
the prompt be computed again. If the request is cancelled before its first token, its output is dropped, but the engine
aborts it only with this token, after `ABORT_WITHIN_S`, or when the lease of the KV ends. An abort while KV is being
fetched has crashed releases of vLLM, and in releases of SGLang it freed blocks into which KV was still written.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.engine_model.steps import Finished, StoreChange
from forebay.events.base import U32_BYTES, unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import OnboardedTokens
from forebay.events.requests import Task
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.runtime.errors import cause_of
from forebay.workers.engine import AttemptFailed, CacheChange, EngineError, EngineRefused, Publish, one_line
from forebay.workers.engines.kv_descriptor import KeptKv, Unfetchable, offered
from forebay.workers.engines.loras import LoraAdapter, Loras
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.tokenizer_check import check_tokenizer
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.zmq_feed import KvEventMetrics, KvFeed
from forebay.workers.kv_tiers.identity import WEIGHT_FILES
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

SAFETENSORS = "*.safetensors"
DROPS_WEIGHTS = 2  # sleep level that frees the weights, too
CANARY_TOKENS = 16  # prompt length of a health request
CANARY_EVERY_S = 60.0  # interval between health requests while the engine is idle
CANARY_TIMEOUT_S = 30.0
WARM_UP_TIMEOUT_S = 600.0  # the first step may compile
WATCH_S = 0.5
FILTERED = "content_filter"
ABORTED = "abort"  # the engine dropped the request, which may be sent again
REASONS: dict[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "length": "length",
    "repetition": "stop",
    FILTERED: "stop",
}
RunRequest = Callable[[WorkItem, list[int], RankBuffer], Awaitable[None]]
"""Function that runs an item, with its prompt's tokens, and adds the events to the buffer."""


class RankCache(Protocol):
    """The blocks in the cache of one rank, as the engine's KV events report them."""

    resident: ResidentBlocks

    def totals(self) -> Mapping[str, int]:
        """Return the counters of the rank's KV events by name, for `KvEventMetrics`."""


class GeneratedResponse:
    """Response to one request, whose output tokens it passes to the buffer of the request's rank.

    `lease` is the timeout of a decode request until its first token, because its KV may be gone later; None for others.
    """

    def __init__(self, item: WorkItem, rank: RankBuffer) -> None:
        self.item = item
        self.rank = rank
        self.prompt_tokens = len(item.token_ids) // U32_BYTES
        self.tokens = 0
        self.cached_tokens = 0
        self.lease: asyncio.Timeout | None = None
        self._abort: Callable[[], object] | None = None

    def discard(self, abort: Callable[[], object]) -> None:
        """Drop the output, and call `abort` with the first token."""
        self._abort = abort
        self.rank = RankBuffer(self.rank.rank, 1)

    def add(
        self,
        token_ids: Sequence[int],
        cached_tokens: int,
        logprobs: Sequence[TokenLogprob] = (),
        onboarded: tuple[OnboardedTokens, ...] = (),
    ) -> None:
        """Add output tokens. If there are none, nothing happens.

        Only the first call counts for the prompt tokens in the cache, and for the part of them loaded from other tiers.
        There is one log probability per token, or none if none were requested.
        """
        if not token_ids:
            return
        if not self.tokens:
            if self.lease is not None:
                self.lease.reschedule(None)
            if self._abort is not None:
                self._abort()
            self.cached_tokens = cached_tokens
            self.rank.began(self.item, cached_tokens, onboarded)
        self.rank.add_tokens(self.item, self.tokens, token_ids, logprobs)
        self.tokens += len(token_ids)


class ModelEngine(ABC):
    """Base of the adapters for vLLM, SGLang, TensorRT-LLM and attached servers. It runs each request in a task.

    The engine has `settings.dp_size` ranks. On the log they are numbered from `settings.dp_start_rank` on, in the
    engine from 0. `METRICS` are prefixes of the names of the engine's own metrics. `EXPERIMENTAL` is why this adapter
    is experimental; empty if it is not. `ABORT_WITHIN_S` is the time after which a cancelled request is aborted even if
    it may still be fetching KV. A request that begins to fetch later could get other KV, because the cancellation also
    releases the KV, and vLLM keeps released KV for a third of `LEASE_S`.
    """

    NAME: ClassVar[str]
    TAKES_MEDIA: ClassVar[bool] = False
    METRICS: ClassVar[tuple[str, ...]]
    LORA_ARGUMENT: ClassVar[str]
    EXPERIMENTAL: ClassVar[str] = ""
    ABORT_WITHIN_S: ClassVar[float] = 15.0

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tasks: tuple[Task, ...] = ()
        self._context_tokens = 0
        self._tokenizer: Any = None  # of the engine, if it offers one
        self._ranks: dict[int, RankBuffer] = {}
        self._loras = Loras()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not ended yet
        self._decoding: dict[asyncio.Task[Any], GeneratedResponse] = {}  # requests that fetch KV before the first token
        self._wake = asyncio.Event()
        self._dead = asyncio.Event()
        self._fault: BaseException | None = None  # unexpected error of forebay; None if the engine died
        self._commands = asyncio.Lock()
        self._resting: set[str] = set()  # "sleep" or "pause"; requests then make no progress
        self._last_response_s = 0.0
        self._canary: asyncio.Task[None] | None = None
        self._canary_due_s = 0.0
        self._worker_id = ""
        self._caches: dict[int, RankCache] = {}  # empty without KV events
        self._sockets: Path | None = None
        self._clearing = Clearing(self._clear_in_background, self._fail)
        self._kept = KeptKv()
        self._slept_level = 0

    @abstractmethod
    def _is_dead(self) -> bool: ...

    @abstractmethod
    async def _run_canary(self, rank: int) -> None:
        """Run a small request suited to this engine's role. Raises the exceptions of the engine."""

    @abstractmethod
    def _request_error(self, error: Exception) -> AttemptFailed | None:
        """Convert another exception of a request; None if the engine died, so that other workers continue it."""

    @abstractmethod
    async def _launch(self, spec: WorkerSpec) -> None:
        """Start the engine and set tasks, context length, ranks and caches."""

    @abstractmethod
    async def _sized(self, spec: WorkerSpec) -> WorkerSpec: ...

    @abstractmethod
    async def _shut_down(self) -> None:
        """Stop the engine. Its start may have failed or been cancelled."""

    @abstractmethod
    async def _prefill(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        """Compute a prompt and report the descriptor of its KV."""

    @abstractmethod
    async def _generate(self, prompt: Any, response: GeneratedResponse, transfer: Any) -> None:
        """Generate a response. `transfer`, from `_transfer`, describes the KV to fetch first; None for no KV."""

    @abstractmethod
    def _transfer(self, item: WorkItem, prompt_tokens: int) -> tuple[Any, float]:
        """Return what the engine needs to fetch a prompt's KV, and the maximum seconds to the first token.

        Raises Unfetchable if this engine cannot fetch it.
        """

    @abstractmethod
    def _has_lora(self) -> bool: ...

    @abstractmethod
    async def _add_lora(self, adapter: LoraAdapter) -> None:
        """Load an adapter into the engine. Raises EngineRefused if the engine refuses or fails."""

    async def _remove_lora(self, adapter: LoraAdapter) -> None:  # noqa: B027 - an engine may only forget its name
        """Unload an adapter from the engine. Raises EngineRefused if the engine refuses or fails."""

    async def _tokenize(self, text: str, is_prompt: bool) -> list[int] | None:
        tokenizer = self._tokenizer
        if tokenizer is None or "Mistral" in type(tokenizer).__name__:  # mistral-common reads special tokens as text
            return None
        try:
            return list(await runtime.offload(partial(tokenizer.encode, text, add_special_tokens=is_prompt)))
        except Exception as error:  # noqa: BLE001 - a model may bring a tokenizer of its own
            logger.warning("%s cannot tokenize %r: %s", self.NAME, text, one_line(error))
            return None

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start the engine, load the LoRA adapters, and run a prompt on each rank.

        Return the spec with the actual sizes. Raises EngineError if the model directory is invalid, the engine cannot
        start, or its tokenizer differs from the one of the ingress.
        """
        if self.EXPERIMENTAL:
            logger.warning("the %s engine is experimental: %s", self.NAME, self.EXPERIMENTAL)
        self._worker_id = spec.worker_id
        await runtime.offload(check_model, self._settings)
        await self._launch(spec)
        await check_tokenizer(self._settings, self._tokenize, self.NAME, EngineError)
        for name, directory in self._settings.loras.items():
            try:
                await self._load_configured_lora(name, str(directory))
            except EngineRefused as refusal:
                raise EngineError(f"cannot load the adapter {name}: {refusal}") from None
        await self._warm_up()
        return await self._described(spec)

    async def _described(self, spec: WorkerSpec) -> WorkerSpec:
        return msgspec.structs.replace(
            await self._sized(spec), tasks=self._tasks, loras=tuple(self._loras.loaded), kv_events=bool(self._caches)
        )

    async def stop(self) -> None:
        await self._end_tasks(self._clearing.task)
        await self._shut_down()
        if self._sockets is not None:
            await runtime.offload(shutil.rmtree, self._sockets, ignore_errors=True)

    def _make_sockets(self) -> Path:
        """Return a new private directory for sockets, removed by `stop`."""
        self._sockets = Path(tempfile.mkdtemp(prefix="forebay-engine-"))
        return self._sockets

    async def run(self, publish: Publish) -> None:
        """Run requests and publish batches of their events until cancelled. Raises EngineError if the engine dies."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for follower in self._followers():
                    tasks.create_task(follower)
                tasks.create_task(self._watch())
                tasks.create_task(self._pump(publish))
        except BaseExceptionGroup as group:
            if (known := group.subgroup(EngineError)) is not None:
                raise cause_of(known) from group
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
        while not (self._dead.is_set() or self._is_dead()):
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._dead.wait()
        if self._fault is not None:
            raise EngineError(f"the {self.NAME} engine failed: {one_line(self._fault)}") from self._fault
        raise EngineError(self._death())

    def _death(self) -> str:
        return f"{self.NAME} died; see its log for the cause"

    def _on_changes(self, rank: int, changes: Sequence[CacheChange | StoreChange]) -> None:
        self._ranks[rank].changed([change for change in changes if not isinstance(change, StoreChange)])
        for change in changes:
            if isinstance(change, StoreChange):
                self._ranks[rank].store_changed(change)
        self._wake.set()

    def _fail(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self._dead.set()

    async def _end_tasks(self, *others: "asyncio.Task[None] | None") -> None:
        """Cancel all requests, the health request and `others`, and wait for their end."""
        tasks = {*self._requests.values(), *self._ending, *filter(None, (self._canary, *others))}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, item: WorkItem) -> None:
        self._begin(item, self._run_request)

    def _begin(self, item: WorkItem, run_request: RunRequest) -> None:
        serving = self._serve(item, self._ranks[item.rank], run_request)
        task = asyncio.create_task(serving, name=f"{self.NAME} {item.request_id}")
        self._requests[item.request_id] = task
        task.add_done_callback(lambda done: self._on_request_end(item.request_id, done))

    def _on_request_end(self, request_id: str, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if self._requests.get(request_id) is task:
            del self._requests[request_id]
        if not self._requests:
            self._idle()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _idle(self) -> None:
        for rank in self._ranks.values():
            rank.idle()
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is in flight. The engine frees its KV blocks in one of its next steps.

        If the request may be fetching KV, the engine aborts it with its first token, or after `ABORT_WITHIN_S`.
        """
        if (task := self._requests.pop(request_id, None)) is not None:
            self._end(task)
            if not self._requests:
                self._idle()

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._ending.add(task)
        response = self._decoding.get(task)
        if response is None or response.tokens:
            task.cancel()
        else:
            response.discard(task.cancel)
            asyncio.get_running_loop().call_later(self.ABORT_WITHIN_S, task.cancel)

    def reset(self) -> None:
        """Cancel every request. The subclass clears the cache or reports its content later, in `_drop_cache`."""
        for task in self._requests.values():
            self._end(task)
        self._requests.clear()
        self._drop_cache()

    async def _serve(self, item: WorkItem, rank: RankBuffer, run_request: RunRequest) -> None:
        await self._ready()
        prompt = unpack_u32(item.token_ids)
        try:
            self._check_request(item, len(prompt))
            await run_request(item, prompt, rank)
        except Exception as error:  # noqa: BLE001 - engines raise what they like
            failed = error if isinstance(error, AttemptFailed) else self._request_error(error)
            if failed is None:
                self._dead.set()  # other workers continue the requests of this engine
            elif asyncio.current_task() not in self._ending:
                rank.failed(item, failed.error, is_rejection=failed.may_move)
        self._last_response_s = runtime.monotonic_s()
        self._wake.set()

    def _check_request(self, item: WorkItem, prompt_tokens: int) -> None:
        """Raise AttemptFailed for a request that this engine cannot run."""
        if item.task not in self._tasks:
            does = ", ".join(self._tasks)
            raise AttemptFailed(400, "invalid_request", f"the model supports the tasks {does}, not {item.task}")
        if item.media and not self.TAKES_MEDIA:
            raise AttemptFailed(400, "invalid_request", f"the {self.NAME} adapter supports text only")
        if item.lora_name and item.lora_name not in self._loras.loaded:
            raise AttemptFailed(404, "model_not_found", f"the adapter {item.lora_name} is not loaded on this worker")
        room = self._context_tokens - (item.task == "generate")
        if prompt_tokens > room:
            message = f"the prompt has {prompt_tokens} tokens, but the model's context allows at most {room}"
            raise AttemptFailed(400, "context_length_exceeded", message)

    def _index(self, rank: int) -> int:
        return rank - self._settings.dp_start_rank

    def _rank_at(self, index: int) -> RankBuffer | None:
        return self._ranks.get(index + self._settings.dp_start_rank)

    def _finish(self, item: WorkItem, rank: RankBuffer, why: str, tokens: tuple[int, int, int]) -> None:
        """Add the end of a response. `tokens` are the numbers of prompt, output and cached tokens."""
        if (reason := REASONS.get(why)) is not None:
            rank.finished(Finished(item.request_id, item.attempt, reason, *tokens, filtered=why == FILTERED))
        else:
            message = f"{self.NAME} ended the response with reason {why}"
            status = 503 if why == ABORTED else 500
            rank.failed(item, ResponseError(status=status, code="engine_error", message=message))

    async def _warm_up(self) -> None:
        """Run a small request on each rank. Raises EngineError if a request fails or is not completed in time."""
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await self._run_canaries()
        except TimeoutError:
            text = f"{self.NAME} did not respond to its first prompt within {WARM_UP_TIMEOUT_S:.0f} s; see its log"
            raise EngineError(text) from None
        except Exception as error:
            raise EngineError(f"{self.NAME} failed on its first prompt: {one_line(error)}") from error
        self._last_response_s = runtime.monotonic_s()

    async def _run_canaries(self) -> None:
        for rank in self._ranks:
            await self._run_canary(rank)

    async def check(self) -> None:
        """Check the engine. If it is idle, run a small request from time to time (health request).

        Raises EngineError if the engine is dead, or the health request failed.
        """
        if self._dead.is_set() or self._is_dead():
            raise EngineError(self._death())
        now = runtime.monotonic_s()
        if self._canary is not None and self._canary.done():
            if not self._canary.cancelled() and (error := self._canary.exception()) is not None:
                raise EngineError(f"{self.NAME} failed on a health request: {one_line(error)}")
            self._canary = None
            self._last_response_s = now
        if self._canary is not None:
            if now > self._canary_due_s:
                raise EngineError(f"{self.NAME} did not respond to a health request within {CANARY_TIMEOUT_S:.0f} s")
        elif not self._requests and not self._resting and now - self._last_response_s > CANARY_EVERY_S:
            self._canary_due_s = now + CANARY_TIMEOUT_S
            self._canary = asyncio.create_task(self._run_canaries(), name=f"{self.NAME} canary")

    # KV events

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        feeds = [cache for cache in self._caches.values() if isinstance(cache, KvFeed)]
        return [feed.run(self._on_changes, self._on_lost) for feed in feeds]

    def _on_lost(self, _rank: int, _reason: str) -> None:
        self._clearing.soon()  # blocks that the index does not know are dropped, so that engine and index agree again

    def held(self, rank: int) -> Sequence[int]:
        """Return the sequence hashes of a rank's blocks in device memory, as reported by KV events.

        Changes that were collected for the next batch are dropped, because the result already contains them. The next
        batch reports the blocks in slower tiers.
        """
        cache = self._caches.get(rank)
        if cache is None or self._ranks[rank].muted:
            return ()
        self._ranks[rank].discard_changes()
        self._ranks[rank].changed(cache.resident.lower())
        return cache.resident.held()

    def stored(self) -> Sequence[int]:
        return tuple({block: None for cache in self._caches.values() for block in cache.resident.shared()})

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=rank.rank in self._caches)
        self._clearing.soon()

    async def _clear_in_background(self) -> None:
        await self._clear()

    def _clears(self) -> dict[int, int]:
        """Return how often each rank has reported an empty cache, for `_report_cleared`."""
        return {rank: self._ranks[rank].clears for rank in self._caches}

    def _report_cleared(self, clears_before: Mapping[int, int]) -> None:
        """Report the caches as empty, except those that the engine has reported as empty since `_clears`."""
        for rank, clears in clears_before.items():
            self._ranks[rank].cleared(clears)
        self._wake.set()

    async def _ready(self) -> None:
        await self._clearing.over()

    # Requests

    async def _run_request(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        if item.task == "embed":
            await self._embed(item, prompt, rank)
        elif item.stage == "prefill":
            await self._prefill(item, prompt, rank)
        else:
            await self._respond(item, prompt, GeneratedResponse(item, rank))

    async def _respond(self, item: WorkItem, prompt: Any, response: GeneratedResponse) -> None:
        """Generate a response. Report KV that cannot be fetched, or not before its lease ends."""
        transfer, lease_s, task = None, None, asyncio.current_task()
        assert task is not None
        try:
            if item.stage == "decode":
                transfer, lease_s = self._transfer(item, response.prompt_tokens)
                self._decoding[task] = response
            async with asyncio.timeout(lease_s) as response.lease:
                await self._generate(prompt, response, transfer)
        except Exception as error:
            reason = self._fetch_failure(error) if item.stage == "decode" and not response.tokens else None
            if reason is None:
                raise
            response.rank.not_fetched(item, reason)
        finally:
            self._decoding.pop(task, None)

    def _fetch_failure(self, error: Exception) -> str | None:
        """Return why a decode request without output could not fetch its KV; None if that is not its error."""
        if isinstance(error, TimeoutError):
            return f"{self.NAME} emitted no token before the lease of the KV ended"
        return str(error) if isinstance(error, Unfetchable) else None

    async def _embed(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        """Compute an embedding. An engine whose `_tasks` contain `embed` overrides this method."""
        raise AssertionError(f"{self.NAME} computes no embeddings")

    def _end_response(self, response: GeneratedResponse, reason: str) -> None:
        tokens = response.prompt_tokens, response.tokens, response.cached_tokens
        self._finish(response.item, response.rank, reason, tokens)

    def _offer(
        self, item: WorkItem, rank: RankBuffer, connector: str, descriptor: bytes, lease_s: float, cached: int = 0
    ) -> None:
        """Report the KV of the whole prompt, which the engine keeps for `lease_s`. Raises Unfetchable as `offered`."""
        model, tokens = self._settings.model_name, len(item.token_ids) // U32_BYTES
        prefilled = offered(item, self._worker_id, model, connector, descriptor, tokens=tokens, lease_s=lease_s)
        self._kept.add(item.request_id, lease_s)
        rank.prefilled(item, prefilled, cached)

    def release(self, request_id: str) -> None:
        """Forget that KV is kept for a request. The engine itself frees the KV when the lease ends."""
        self._kept.pop(request_id)

    def drop(self, prefilled: Prefilled) -> None:  # noqa: B027 - a default
        """Do nothing, because this engine cannot notify the prefill worker that its KV is not needed."""

    def kept(self) -> int:
        """Return the number of requests whose KV may still be kept: 0 if none runs and no rank reports used blocks."""
        if not self._requests and not any(rank.load.kv_blocks_used for rank in self._ranks.values()):
            self._kept.clear()
        return len(self._kept)

    # Commands

    async def command(self, command: Command) -> tuple[str, ...]:
        """Execute a command after all earlier ones, and return the names of the loaded adapters.

        The command `sleep` waits until requests in flight have ended. Requests that arrive later wait for `wake_up`.
        Raises EngineRefused if the engine does not support the command, or cannot execute it now.
        """
        async with self._commands:
            match command.action:
                case "load_lora":
                    await self._load_lora(command.lora_name, command.lora_path, command.lora_digest)
                case "unload_lora":
                    with self._loras.removing(command.lora_name) as adapter:
                        await self._remove_lora(adapter)
                case "clear_kv_blocks":
                    await self._clear()
                case "sleep":
                    await self._sleep(command.level)
                    self._resting.add("sleep")
                case "wake_up":
                    await self._wake_up()
                    self._resting.discard("sleep")
                case "pause":
                    await self._pause()
                    self._resting.add("pause")
                case "resume":
                    await self._resume()
                    self._resting.discard("pause")
                case "list_loras":
                    pass
            return tuple(self._loras.loaded)

    async def _load_configured_lora(self, name: str, directory: str) -> None:
        await self._load_lora(name, directory)

    async def _load_lora(self, name: str, directory: str, digest: str = "") -> None:
        if not self._has_lora():
            raise EngineRefused(f"{self.NAME} was started without LoRA: set its argument {self.LORA_ARGUMENT}")
        if (adapter := self._loras.offered(name, directory, digest)) is None:
            return
        await self._add_lora(adapter)
        if self._loras.is_reused(adapter):
            await self._clear()
        self._loras.add(adapter)

    async def _clear(self) -> None:
        """Clear the prefix cache. Raises EngineRefused if the engine cannot clear it."""
        raise EngineRefused(f"the {self.NAME} engine does not support clearing its KV cache")

    async def _sleep(self, _level: int) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support sleep")

    async def _wake_up(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support wake_up")

    async def _pause(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support pause")

    async def _resume(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support resume")

    def collectors(self) -> Sequence[Collector]:
        totals = {rank: cache.totals for rank, cache in self._caches.items()}
        return (PrefixedMetrics(*self.METRICS), KvEventMetrics(self._worker_id, totals))


MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # directory in which other processes of an engine write their metrics


class PrefixedMetrics(Collector):
    """Prometheus collector that exports the metrics of an engine whose names start with one of `prefixes`.

    It reads them from the directory in `PROMETHEUS_MULTIPROC_DIR`, which contains the sums over all processes of the
    engine. Metrics that are not there are read from the default registry of this process: it contains them if
    prometheus_client was imported before the engine set that variable.
    """

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        registries: list[CollectorRegistry] = [REGISTRY]
        if os.environ.get(MULTIPROCESS):
            written = CollectorRegistry()
            MultiProcessCollector(written)  # type: ignore[no-untyped-call]
            registries.insert(0, written)
        seen: set[str] = set()
        for registry in registries:
            for metric in registry.collect():
                if metric.name.startswith(self._prefixes) and metric.name not in seen:
                    seen.add(metric.name)
                    yield metric


@contextmanager
def start_errors(engine: str) -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except (TypeError, ValueError) as error:
        raise EngineError(f"{engine} rejects these arguments: {one_line(error)}") from error
    except Exception as error:
        text = f"{engine} died while it started; see its log for the cause: {one_line(error)}"
        raise EngineError(text) from error


class Clearing:
    """Clears a cache in a background task. If a clearing is requested while it runs, it runs once more."""

    def __init__(self, clear: Callable[[], Awaitable[None]], on_fault: Callable[[BaseException], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._clear = clear
        self._on_fault = on_fault
        self._again = False

    def soon(self) -> None:
        self._again = True
        if self.task is None:
            self.task = asyncio.create_task(self._all(), name="clear the cache")
            self.task.add_done_callback(self._ended)

    async def over(self) -> None:
        while self.task is not None:
            await asyncio.wait([self.task])

    async def _all(self) -> None:
        while self._again:
            self._again = False
            await self._clear()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)


def check_model(settings: EngineSettings) -> None:
    """Raise EngineError unless the model directory exists and has a configuration and readable weights."""
    directory = settings.model
    if not directory.is_dir():
        raise EngineError(f"no such model directory: {directory}")
    if not (directory / "config.json").is_file():
        raise EngineError(f"{directory} is not a model directory: it has no config.json")
    if settings.arguments.get("load_format", "auto") != "auto":
        return
    if not any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern)):
        raise EngineError(f"the model directory {directory} has no weights: expected {', '.join(WEIGHT_FILES)}")
    if importlib.util.find_spec("safetensors") is None:  # a dependency of every engine
        return
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - comes with the engines

    for weights in directory.glob(SAFETENSORS):
        try:
            with safe_open(weights, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise EngineError(f"the weights {weights} are broken: {one_line(error)}") from None
