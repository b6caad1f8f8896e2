"""Common base of the engine adapters: requests as tasks, batches, health requests, LoRA adapters.

Theory of operation. Each request runs in its own task. All events of one iteration of the event loop form one batch.
Coroutines of the subclass that follow the KV events and loads of the engine run beside the tasks. If one of them or a
task fails unexpectedly, `run` ends, and the worker stops with its engine.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from forebay import runtime
from forebay.engine_model.steps import Finished, StoreChange
from forebay.events.base import unpack_u32
from forebay.events.requests import Task
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, EngineError, Publish
from forebay.workers.engines.loras import Loras
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.runtime.rank_buffer import RankBuffer

CANARY_TOKENS = 16  # prompt length of a health request
CANARY_EVERY_S = 60.0  # interval between health requests while the engine is idle
CANARY_TIMEOUT_S = 30.0
WARM_UP_TIMEOUT_S = 600.0  # the first step may compile
WATCH_S = 0.5
FILTERED = "content_filter"
REASONS: dict[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "length": "length",
    "repetition": "stop",
    FILTERED: "stop",
}
RunRequest = Callable[[WorkItem, list[int], RankBuffer], Awaitable[None]]
"""Function that runs an item, with its prompt's tokens, and adds the events to the buffer."""


class AsyncEngine(ABC):
    """Base of engines that have an asynchronous Python interface. It runs each request in a task.

    The engine has `settings.dp_size` ranks. On the log they are numbered from `settings.dp_start_rank` on, in the
    engine from 0.

    Attributes:
        TAKES_MEDIA: whether the engine accepts images and videos.
    """

    NAME: ClassVar[str]
    TAKES_MEDIA: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tasks: tuple[Task, ...] = ()
        self._context_tokens = 0
        self._ranks: dict[int, RankBuffer] = {}
        self._loras = Loras()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not ended yet
        self._wake = asyncio.Event()
        self._dead = asyncio.Event()
        self._fault: BaseException | None = None  # unexpected error of forebay; None if the engine died
        self._commands = asyncio.Lock()
        self._resting: set[str] = set()  # "asleep" or "paused"; requests then make no progress
        self._last_response_s = 0.0
        self._canary: asyncio.Task[None] | None = None
        self._canary_due_s = 0.0

    @abstractmethod
    def _is_dead(self) -> bool: ...

    @abstractmethod
    async def _run_canary(self, rank: int) -> None:
        """Run a small request suited to this engine's role. Raises the exceptions of the engine."""

    @abstractmethod
    async def _run_request(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        """Run a request and add its events to `rank`. On cancellation, abort it in the engine."""

    @abstractmethod
    def _request_error(self, error: Exception) -> ResponseError | None:
        """Return the error for a failed request; None if the engine died, so that other workers continue it."""

    def _is_rejection(self, _error: Exception) -> bool:
        """Return whether another engine may accept the request, if this attempt has no output."""
        return False

    @abstractmethod
    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines that follow KV events and loads of the engine, until cancelled."""

    @abstractmethod
    def _drop_cache(self) -> None:
        """Begin to clear the cache after a reset, or make `held` report its content."""

    async def _ready(self) -> None:  # noqa: B027 - most engines accept requests at any time
        """Wait until the engine accepts requests."""

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
                raise _first(known) from group
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
        """Start a request in its own task."""
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
        """Cancel a request, if it is in flight. The engine frees its KV blocks in one of its next steps."""
        if (task := self._requests.pop(request_id, None)) is not None:
            self._end(task)
            if not self._requests:
                self._idle()

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._ending.add(task)
        task.cancel()

    def reset(self) -> None:
        """Cancel every request. The subclass clears the cache or reports its content later, in `_drop_cache`."""
        for task in self._requests.values():
            self._end(task)
        self._requests.clear()
        self._drop_cache()

    async def _serve(self, item: WorkItem, rank: RankBuffer, run_request: RunRequest) -> None:
        await self._ready()
        prompt = unpack_u32(item.token_ids)
        if error := self._refusal(item, len(prompt)):
            rank.failed(item, error)
        else:
            try:
                await run_request(item, prompt, rank)
            except Exception as failure:  # noqa: BLE001 - engines raise what they like
                error = self._request_error(failure)
                if error is None:
                    self._dead.set()  # other workers continue the requests of this engine
                else:
                    rank.failed(item, error, is_rejection=self._is_rejection(failure))
        self._last_response_s = runtime.monotonic_s()
        self._wake.set()

    def _refusal(self, item: WorkItem, prompt_tokens: int) -> ResponseError | None:
        """Return the error for a request that the engine cannot run; None if it can."""
        if item.task not in self._tasks:
            does = ", ".join(self._tasks)
            return ResponseError(
                status=400, code="invalid_request", message=f"the model supports the tasks {does}, not {item.task}"
            )
        if item.media and not self.TAKES_MEDIA:
            message = f"the {self.NAME} adapter supports text only"
            return ResponseError(status=400, code="invalid_request", message=message)
        if item.lora_name and item.lora_name not in self._loras.loaded:
            message = f"the adapter {item.lora_name} is not loaded on this worker"
            return ResponseError(status=404, code="model_not_found", message=message)
        room = self._context_tokens - (item.task == "generate")
        if prompt_tokens > room:
            message = f"the prompt has {prompt_tokens} tokens, but the model's context allows at most {room}"
            return ResponseError(status=400, code="context_length_exceeded", message=message)
        return None

    def _index(self, rank: int) -> int:
        return rank - self._settings.dp_start_rank

    def _finish(self, item: WorkItem, rank: RankBuffer, why: str, tokens: tuple[int, int, int]) -> None:
        """Add the end of a response. `tokens` are the numbers of prompt, output and cached tokens."""
        if (reason := REASONS.get(why)) is not None:
            rank.finished(Finished(item.request_id, item.attempt, reason, *tokens, filtered=why == FILTERED))
        else:
            rank.failed(
                item,
                ResponseError(
                    status=500, code="engine_error", message=f"{self.NAME} ended the response with reason {why}"
                ),
            )

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

        Raises:
            EngineError: the engine is dead, or the health request failed.
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


def _first(group: BaseExceptionGroup[EngineError]) -> EngineError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError)
    return error
