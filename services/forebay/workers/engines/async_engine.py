"""What the adapters of vLLM, SGLang and TensorRT-LLM share: requests as tasks, batches, health requests, adapters.

Theory of operation. A task a request takes the engine's answer as it comes; what all of them got in one turn of the
event loop is one batch. Beside the tasks run the subclass's followers, of KV events and of loads. What ends wrong
without anybody having asked for it, a follower or a task, ends `run`: the worker goes down with its engine.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from forebay.engine_model.model import Finished
from forebay.events.base import unpack_u32
from forebay.events.requests import Task
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, EngineError, Publish
from forebay.workers.engines.loras import Loras
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.runtime.rank_buffer import RankBuffer

CANARY_TOKENS = 16  # of a health request
CANARY_EVERY_S = 60.0  # without an answer to anything
CANARY_TIMEOUT_S = 30.0
WARM_UP_TIMEOUT_S = 600.0  # the first step may compile
WATCH_S = 0.5
REASONS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length", "repetition": "stop"}
Answering = Callable[[WorkItem, list[int], RankBuffer], Awaitable[None]]
"""Asks the engine for an item, with its prompt's tokens, and notes what it says."""


class AsyncEngine(ABC):
    """One engine with `settings.dp_size` ranks, numbered from `settings.dp_start_rank` on; the engine counts from 0."""

    NAME: ClassVar[str]  # of the engine, in messages
    TAKES_MEDIA: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tasks: tuple[Task, ...] = ()
        self._context_tokens = 0
        self._ranks: dict[int, RankBuffer] = {}
        self._loras = Loras()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not over yet
        self._wake = asyncio.Event()
        self._dead = asyncio.Event()
        self._fault: BaseException | None = None  # of this program; without one the engine died
        self._commands = asyncio.Lock()
        self._resting: set[str] = set()  # asleep, paused: nothing is answered then
        self._answered_s = 0.0
        self._canary: asyncio.Task[None] | None = None
        self._canary_due_s = 0.0

    @abstractmethod
    def _is_dead(self) -> bool:
        """Whether the engine is known to be gone."""

    @abstractmethod
    async def _ask_canary(self, rank: int) -> None:
        """A small request such as this engine's role is for, answered here. Raises whatever the engine does."""

    @abstractmethod
    async def _answer(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        """Ask the engine, and note what it says. Cancelled, it takes the request back."""

    @abstractmethod
    def _answer_error(self, error: Exception) -> ResponseError | None:
        """What a request is told whose answer failed so; None when the engine is dead, and others go on with it."""

    @abstractmethod
    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs beside the requests until cancelled."""

    @abstractmethod
    def _drop_cache(self) -> None:
        """A reset: the requests are gone; begin to empty the cache, or see to it that `held` tells what is in it."""

    async def _ready(self) -> None:  # noqa: B027 - for those that cannot be asked at any time
        """Wait until the engine may be given a request."""

    async def run(self, publish: Publish) -> None:
        """Publish batches until cancelled, or until the engine is dead (EngineError)."""
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
        return f"{self.NAME} died; its log says why"

    def _on_changes(self, rank: int, changes: Sequence[CacheChange]) -> None:
        self._ranks[rank].changed(changes)
        self._wake.set()

    def _fail(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self._dead.set()

    async def _end_tasks(self, *others: "asyncio.Task[None] | None") -> None:
        """End every request, the health request, and what else there is."""
        tasks = {*self._requests.values(), *self._ending, *filter(None, (self._canary, *others))}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, item: WorkItem) -> None:
        """Give the engine a request."""
        self._begin(item, self._answer)

    def _begin(self, item: WorkItem, answering: Answering) -> None:
        serving = self._serve(item, self._ranks[item.rank], answering)
        task = asyncio.create_task(serving, name=f"{self.NAME} {item.request_id}")
        self._requests[item.request_id] = task
        task.add_done_callback(lambda done: self._served(item.request_id, done))

    def _served(self, request_id: str, task: "asyncio.Task[None]") -> None:
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
        """Drop a request; the engine frees its blocks with one of its next steps."""
        if (task := self._requests.pop(request_id, None)) is not None:
            self._end(task)
            if not self._requests:
                self._idle()

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._ending.add(task)
        task.cancel()

    def reset(self) -> None:
        """Drop every request; what becomes of the cache is `_drop_cache`'s."""
        for task in self._requests.values():
            self._end(task)
        self._requests.clear()
        self._drop_cache()

    async def _serve(self, item: WorkItem, rank: RankBuffer, answering: Answering) -> None:
        await self._ready()
        prompt = unpack_u32(item.token_ids)
        if error := self._refusal(item, len(prompt)):
            rank.failed(item, error)
        else:
            try:
                await answering(item, prompt, rank)
            except Exception as failure:  # noqa: BLE001 - engines raise what they like
                told = self._answer_error(failure)
                if told is None:
                    self._dead.set()  # others go on with what this engine had
                else:
                    rank.failed(item, told)
        self._answered_s = time.monotonic()
        self._wake.set()

    def _refusal(self, item: WorkItem, prompt_tokens: int) -> ResponseError | None:
        """What the engine need not be asked."""
        if item.task not in self._tasks:
            does = ", ".join(self._tasks)
            return ResponseError(status=400, code="invalid_request", message=f"the model does {does}, not {item.task}")
        if item.media and not self.TAKES_MEDIA:
            message = f"the {self.NAME} adapter takes text only"
            return ResponseError(status=400, code="invalid_request", message=message)
        if item.lora_name and item.lora_name not in self._loras.loaded:
            message = f"the adapter {item.lora_name} is not loaded here"
            return ResponseError(status=404, code="model_not_found", message=message)
        room = self._context_tokens - (item.task == "generate")
        if prompt_tokens > room:
            message = f"the prompt has {prompt_tokens} tokens: at most {room} fit into the model's context"
            return ResponseError(status=400, code="context_length_exceeded", message=message)
        return None

    def _index(self, rank: int) -> int:
        return rank - self._settings.dp_start_rank

    def _finish(self, item: WorkItem, rank: RankBuffer, why: str, tokens: tuple[int, int, int]) -> None:
        """The end of an answer; `tokens` are the prompt's, the answer's and the cached ones."""
        if (reason := REASONS.get(why)) is not None:
            rank.finished(Finished(item.request_id, item.attempt, reason, *tokens))
        else:
            rank.failed(
                item, ResponseError(status=500, code="engine_error", message=f"{self.NAME} ended the answer: {why}")
            )

    async def _warm_up(self) -> None:
        """A first answer on each rank. Raises EngineError."""
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await self._ask_canaries()
        except TimeoutError:
            text = f"{self.NAME} did not answer a first prompt within {WARM_UP_TIMEOUT_S:.0f} s"
            raise EngineError(text) from None
        except Exception as error:
            raise EngineError(f"{self.NAME} does not answer a first prompt: {one_line(error)}") from error
        self._answered_s = time.monotonic()

    async def _ask_canaries(self) -> None:
        for rank in self._ranks:
            await self._ask_canary(rank)

    async def check(self) -> None:
        """Whether the engine lives; a health request is on its way now and then while there is nothing else to do."""
        if self._dead.is_set() or self._is_dead():
            raise EngineError(self._death())
        now = time.monotonic()
        if self._canary is not None and self._canary.done():
            if not self._canary.cancelled() and (error := self._canary.exception()) is not None:
                raise EngineError(f"{self.NAME} does not answer a health request: {one_line(error)}")
            self._canary = None
            self._answered_s = now
        if self._canary is not None:
            if now > self._canary_due_s:
                raise EngineError(f"{self.NAME} did not answer a health request within {CANARY_TIMEOUT_S:.0f} s")
        elif not self._requests and not self._resting and now - self._answered_s > CANARY_EVERY_S:
            self._canary_due_s = now + CANARY_TIMEOUT_S
            self._canary = asyncio.create_task(self._ask_canaries(), name=f"{self.NAME} canary")


def _first(group: BaseExceptionGroup[EngineError]) -> EngineError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError)
    return error
