"""Engine that runs a service: each request is a task that iterates over `generate`.

All events of one turn of the event loop form one batch. If a service does not report its blocks, its load is the number
of blocks that its requests would need.
"""

import asyncio
import contextlib
import inspect
import logging
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from prometheus_client import Counter
from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from forebay import runtime
from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import U32_BYTES, pack_u32, unpack_u32, unpack_u64
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, EngineError, EngineRefused, Failed, Publish, Vector
from forebay.workers.engines.service.cache import Cache
from forebay.workers.engines.service.request import Refused, Request
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.pipeline import Pipeline
from forebay.workers.service import Service

logger = logging.getLogger(__name__)

BLOCK_SIZE = 64
KV_BLOCKS = 16_384
MAX_NUM_BATCHED_TOKENS = 8_192
WAITING_MAX = 65_536  # beyond the queue limit of any router; reached only if nothing limits the callers
SLICE_S = 0.001  # a generator without awaits must not block the other requests
TOKEN_END = 1 << 32
MESSAGE_CHARS_MAX = 500  # of an exception, for the client

Outcome = Literal["ok", "failed", "refused", "cancelled"]


@dataclass(slots=True, eq=False)
class _Answer:
    """Waiting or running request. `new` has the tokens since the last batch, `emitted` counts all."""

    item: WorkItem
    request: Request
    task: "asyncio.Task[None] | None" = None
    emitted: int = 0
    begun: bool = False
    cached_tokens: int = 0
    new: list[int] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.item.token_ids) // U32_BYTES


@dataclass(slots=True)
class _Ends:
    """Ends since the last batch."""

    answers: list[_Answer] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)


class ServiceEngine:
    """Engine that runs one instance of a service's class on one rank."""

    def __init__(self, service: Service, settings: EngineSettings) -> None:
        self._service = service
        self._settings = settings
        self._instance: Any = None
        self._tokenizer: Tokenizer | None = None
        self._pipeline = Pipeline(self._generated_tokens, service.pipeline)
        self._wake = asyncio.Event()
        self._cache = Cache(self._wake.set)
        self._running: dict[str, _Answer] = {}
        self._waiting: dict[str, _Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = _Ends()
        self._loras: list[str] = []
        self._max_num_seqs = settings.max_num_seqs or service.max_num_seqs
        self._block_size = settings.block_size or BLOCK_SIZE
        self._kv_blocks = settings.kv_blocks or KV_BLOCKS
        self._rank = settings.dp_start_rank
        self._describe: EngineLoad | None = None
        self._count = Counter(
            "forebay_endpoint_requests",
            "Requests and commands by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=None,
        )

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Create the instance and await its `start`. Raises EngineError."""
        name = self._service.name
        if spec.dp_size != 1:
            raise EngineError(f"{name}: a service has one rank, got {spec.dp_size}: start more workers instead")
        path = self._settings.model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"{path} is not a valid tokenizer: {error}") from error
        try:
            self._instance = self._service.cls()
            if self._service.kv_events:
                self._instance.cache = self._cache
            await self._hook("start")
            for lora_name, path in self._settings.loras.items():
                await self._control(Command(action="load_lora", lora_name=lora_name, lora_path=str(path)))
        except Exception as error:
            raise EngineError(f"{name} failed to start: {_describe(error)}") from error
        logger.info("%s started", name)
        return msgspec.structs.replace(
            spec,
            engine=name,
            block_size=self._block_size,
            kv_blocks_total=self._kv_blocks,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._settings.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
            kv_events=spec.kv_events and self._service.kv_events,
            tasks=self._service.tasks,
            loras=tuple(self._loras),
        )

    async def run(self, publish: Publish) -> None:
        """Publish the events of all requests until cancelled."""
        while True:
            self._wake.clear()
            batch = self._collect()
            if batch is not None:
                publish(batch)
            await self._wake.wait()

    async def stop(self) -> None:
        """Close every generator, then await the service's `stop`."""
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._instance is not None:
            try:
                await self._hook("stop")
            except Exception:
                logger.exception("%s failed to stop", self._service.name)

    def held(self, rank: int) -> Sequence[int]:
        """Return the blocks that the service has reported as cached."""
        assert rank == self._rank
        return self._cache.held()

    def submit(self, item: WorkItem) -> None:
        """Start a request, or queue it if too many are running."""
        request = Request(
            request_id=item.request_id,
            token_ids=tuple(unpack_u32(item.token_ids)),
            sampling=item.sampling,
            sequence_hashes=tuple(unpack_u64(item.sequence_hashes)),
            lora_name=item.lora_name,
            cache_namespace=item.cache_namespace,
            priority=item.priority,
            detokenize=self._detokenize,
        )
        answer = _Answer(item, request)
        if (refusal := self._refusal(item)) is not None:
            self._end_badly(answer, refusal, "refused")
        else:
            self._waiting[item.request_id] = answer
            self._begin_waiting()
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Close the generator of a request, if it is in flight."""
        answer = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if answer is not None:
            self._abort(answer)
            self._wake.set()

    async def command(self, command: Command) -> tuple[str, ...]:
        """Await the control endpoint of that name and return the loaded adapters. Raises EngineRefused."""
        if command.action != "list_loras":
            try:
                await self._control(command)
            except EngineRefused:
                raise
            except Exception as error:
                name = self._service.endpoint_name(command.action)
                if not isinstance(error, Refused):
                    logger.exception("%s failed", name)
                raise EngineRefused(f"{name}: {_describe(error)}") from error
        return tuple(self._loras)

    async def check(self) -> None:
        """Await the service's `check`, if it has one. Raises EngineError."""
        try:
            await self._hook("check")
        except Exception as error:
            raise EngineError(f"{self._service.name} is broken: {_describe(error)}") from error

    def collectors(self) -> Sequence[Collector]:
        """Return the counter of requests by endpoint and outcome."""
        return (self._count,)

    def reset(self) -> None:
        """Drop every request. The service's cache is unchanged, and `held` returns it."""
        dropped = [*self._waiting.values(), *self._running.values()]
        self._waiting.clear()
        self._running.clear()
        self._ends = _Ends()
        self._cache.take_changes()
        self._describe = None
        for answer in dropped:
            self._abort(answer)

    def _refusal(self, item: WorkItem) -> ResponseError | None:
        name = self._service.name
        if item.task not in self._service.tasks:
            return ResponseError(status=400, code="unsupported_task", message=f"{name} has no endpoint {item.task}")
        if item.lora_name and item.lora_name not in self._loras:
            message = f"{name} has not loaded the adapter {item.lora_name}"
            return ResponseError(status=404, code="adapter_not_loaded", message=message)
        if item.sampling.logprobs is not None:
            return ResponseError(status=400, code="unsupported_parameter", message=f"{name} does not support logprobs")
        if len(self._waiting) >= WAITING_MAX:
            message = f"{name}: {WAITING_MAX} requests are already waiting"
            return ResponseError(status=503, code="engine_overloaded", message=message)
        return None

    def _begin(self, answer: _Answer) -> None:
        self._running[answer.item.request_id] = answer
        answer.task = asyncio.create_task(self._serve(answer), name=answer.item.request_id)
        self._tasks.add(answer.task)
        answer.task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._begin_waiting()
        self._wake.set()

    def _begin_waiting(self) -> None:
        """Start queued requests. A generator that is being closed still counts as running."""
        while self._waiting and len(self._tasks) < self._max_num_seqs:
            self._begin(self._waiting.pop(next(iter(self._waiting))))

    def _abort(self, answer: _Answer) -> None:
        self._cache.take_hit(answer.item.request_id)
        self._counted(answer, "cancelled")
        answer.request.stopped.set()
        if answer.task is not None:
            answer.task.cancel()

    async def _serve(self, answer: _Answer) -> None:
        serve = self._embed if answer.item.task == "embed" else self._generate
        try:
            await serve(answer)
        except Refused as error:
            self._end_badly(
                answer, ResponseError(status=400, code="invalid_request", message=_describe(error)), "refused"
            )
        except Exception as error:
            where = self._service.endpoint_name(answer.item.task)
            if self._under_way(answer):
                logger.exception("%s failed on %s", where, answer.item.request_id)
            message = f"{where} failed: {_describe(error)}"
            self._end_badly(answer, ResponseError(status=500, code="engine_error", message=message), "failed")

    async def _generate(self, answer: _Answer) -> None:
        sampling, stops = answer.item.sampling, frozenset(answer.item.sampling.stop_token_ids)
        reason: Literal["length", "stop"] = "stop"
        began_s = runtime.monotonic_s()
        async with contextlib.aclosing(self._pipeline(answer.request)) as tokens:
            async for token in tokens:
                if not self._under_way(answer):
                    return
                if token in stops and answer.emitted >= sampling.min_tokens:
                    break
                answer.new.append(token)
                answer.emitted += 1
                self._wake.set()
                if answer.emitted >= sampling.max_tokens:
                    reason = "length"
                    break
                if runtime.monotonic_s() - began_s > SLICE_S:
                    await asyncio.sleep(0)
                    began_s = runtime.monotonic_s()
        self._end_well(answer, reason)

    async def _generated_tokens(self, request: Request) -> AsyncGenerator[int]:
        """Yield the tokens of `generate`, whichever type it yields."""
        generate = getattr(self._instance, self._service.endpoints["generate"])
        async with contextlib.aclosing(generate(request)) as pieces:
            async for piece in pieces:
                for token in self._tokens(piece):
                    yield token

    def _tokens(self, piece: object) -> Sequence[int]:
        if isinstance(piece, int) and not isinstance(piece, bool):
            if 0 <= piece < TOKEN_END:
                return (piece,)
            raise ValueError(f"{piece} is not a token id")
        if not isinstance(piece, str):
            raise TypeError(f"expected token ids (int) or text (str), got {type(piece).__name__}")
        if self._tokenizer is None:
            raise TypeError(f"got text, but there is no tokenizer.json in {self._settings.model}")
        encoded: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        return encoded

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise Refused(f"{self._service.name} has no tokenizer: there is no tokenizer.json in its model directory")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    async def _embed(self, answer: _Answer) -> None:
        embed = getattr(self._instance, self._service.endpoints["embed"])
        vector = [float(number) for number in await embed(answer.request)]
        if not vector:
            raise ValueError("got an empty vector")
        if self._under_way(answer):
            item = answer.item
            self._ends.vectors.append(Vector(item.request_id, item.attempt, struct.pack(f"<{len(vector)}f", *vector)))
            self._end_well(answer, "stop")

    def _under_way(self, answer: _Answer) -> bool:
        return self._running.get(answer.item.request_id) is answer

    def _end_well(self, answer: _Answer, reason: Literal["length", "stop"]) -> None:
        if self._left(answer):
            item, cached = answer.item, self._hit(answer)
            self._ends.finished.append(
                Finished(item.request_id, item.attempt, reason, answer.prompt_tokens, answer.emitted, cached)
            )
            self._counted(answer, "ok")

    def _end_badly(self, answer: _Answer, error: ResponseError, outcome: Outcome) -> None:
        if answer.task is None or self._left(answer):
            self._ends.failed.append(Failed(answer.item.request_id, answer.item.attempt, error))
            self._counted(answer, outcome)
            self._wake.set()

    def _left(self, answer: _Answer) -> bool:
        """Remove a running request. Return False if it was already cancelled."""
        if not self._under_way(answer):
            return False
        del self._running[answer.item.request_id]
        self._ends.answers.append(answer)
        self._wake.set()
        return True

    def _hit(self, answer: _Answer) -> int:
        if hit := self._cache.take_hit(answer.item.request_id):
            answer.cached_tokens = hit
        return answer.cached_tokens

    def _counted(self, answer: _Answer, outcome: Outcome) -> None:
        self._count.labels(self._service.endpoint_name(answer.item.task), outcome).inc()

    def _collect(self) -> EngineBatch | None:
        ends, self._ends = self._ends, _Ends()
        emitted: list[Emitted] = []
        first_tokens: list[FirstTokenStep] = []
        for answer in (*ends.answers, *self._running.values()):
            if answer.new:
                item, new = answer.item, answer.new
                answer.new = []
                if not answer.begun:
                    answer.begun = True
                    first_tokens.append(FirstTokenStep(item.request_id, item.attempt, self._hit(answer)))
                emitted.append(Emitted(item.request_id, item.attempt, answer.emitted - len(new), pack_u32(new)))
        changes, load = self._cache.take_changes(), self._load()
        if not (changes or emitted or ends.finished or ends.failed) and load == self._describe:
            return None
        self._describe = load
        return EngineBatch(
            rank=self._rank,
            load=load,
            cache_changes=changes,
            emitted=emitted,
            vectors=ends.vectors,
            first_tokens=first_tokens,
            finished=ends.finished,
            failed=ends.failed,
        )

    def _load(self) -> EngineLoad:
        if self._service.kv_events:
            used = len(self._cache.held())
        else:
            used = sum(-(-(one.prompt_tokens + one.emitted) // self._block_size) for one in self._running.values())
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=min(used, self._kv_blocks),
            kv_blocks_total=self._kv_blocks,
        )

    async def _hook(self, name: str) -> None:
        hook = getattr(self._instance, name, None)
        if hook is not None:
            await (hook(self._settings) if inspect.signature(hook).parameters else hook())

    async def _control(self, command: Command) -> None:
        """Await a control endpoint and update the list of adapters."""
        method = self._service.endpoints.get(command.action)
        if method is None:
            known = ", ".join(self._service.endpoints)
            raise EngineRefused(f"{self._service.name} has no endpoint {command.action}; endpoints are {known}")
        await getattr(self._instance, method)(command)
        if command.action == "load_lora" and command.lora_name not in self._loras:
            self._loras.append(command.lora_name)
        elif command.action == "unload_lora" and command.lora_name in self._loras:
            self._loras.remove(command.lora_name)


def _describe(error: Exception) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())[:MESSAGE_CHARS_MAX]
    if isinstance(error, Refused | EngineRefused):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
