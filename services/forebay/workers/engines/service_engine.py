"""Engine that runs a service: each request is a task that iterates over the endpoint `generate` of the service.

All events of one iteration of the event loop form one batch. If a service does not report its KV blocks, the engine
reports the number of blocks that the running requests would need as its load.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from prometheus_client import Counter
from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from forebay import runtime
from forebay.engine_model.model import EngineLoad, Finished
from forebay.events.base import U32_BYTES, unpack_u32, unpack_u64
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed, EngineError, EngineRefused, Publish, clipped
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.runtime.rank_buffer import RankBuffer
from forebay.workers.service import Cache, Refused, Request, Service

logger = logging.getLogger(__name__)

BLOCK_SIZE = 64
KV_BLOCKS = 16_384
MAX_NUM_BATCHED_TOKENS = 8_192
WAITING_MAX = 65_536  # beyond the queue limit of any router; reached only if nothing limits the callers
SLICE_S = 0.001  # a generator without awaits must not block the other requests
TOKEN_END = 1 << 32
# One batch of tokens is one record, which brokers limit to 1 MiB by default.
OBJECT_BYTES_MAX = 256 << 10
BATCH_BYTES_MAX = 512 << 10

Outcome = Literal["ok", "failed", "refused", "cancelled"]


@dataclass(slots=True, eq=False)
class _Execution:
    item: WorkItem
    request: Request
    task: "asyncio.Task[None] | None" = None
    emitted: int = 0
    cached_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.item.token_ids) // U32_BYTES


class ServiceEngine:
    """Engine that runs requests on one instance of a service class. It has one rank."""

    def __init__(self, service: Service, settings: EngineSettings) -> None:
        self._service = service
        self._settings = settings
        self.instance: Any = None
        self._tokenizer: Tokenizer | None = None
        self._wake = asyncio.Event()
        self._cache = Cache(self._wake.set)
        self._running: dict[str, _Execution] = {}
        self._waiting: dict[str, _Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent_bytes = 0  # of JSON values since the last batch
        self._sent = asyncio.Event()
        self._loras: list[str] = []
        self._max_num_seqs = settings.max_num_seqs or service.max_num_seqs
        self._block_size = settings.block_size or BLOCK_SIZE
        self._kv_blocks = settings.kv_blocks or KV_BLOCKS
        self._rank = RankBuffer(settings.dp_start_rank, self._kv_blocks)
        self._count = Counter(
            "forebay_endpoint_requests",
            "Requests and commands by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=None,
        )

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Create the instance of the service, await its `start` hook, and return the spec of the worker.

        Raises EngineError if the settings or the tokenizer are invalid, or the service cannot start.
        """
        name = self._service.name
        if spec.dp_size != 1:
            raise EngineError(f"{name}: a service has one rank, got {spec.dp_size}: start more workers instead")
        path = self._settings.model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"{path} is not a valid tokenizer: {error}") from error
        try:
            self.instance = self._service.cls()
            if self._service.kv_events:
                self.instance.cache = self._cache
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
            endpoints=self._service.calls,
            loras=tuple(self._loras),
        )

    async def run(self, publish: Publish) -> None:
        while True:
            self._wake.clear()
            self._rank.changed(self._cache.take_changes())
            self._rank.load = self._load()
            if (batch := self._rank.take()) is not None:
                publish(batch)
                self._unsent_bytes = 0
                self._sent.set()
            await self._wake.wait()

    async def stop(self) -> None:
        """Close the generators of all requests, then await the `stop` hook of the service."""
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.instance is not None:
            try:
                await self._hook("stop")
            except Exception:
                logger.exception("the stop hook of %s failed; the worker stops anyway", self._service.name)

    def held(self, rank: int) -> Sequence[int]:
        assert rank == self._rank.rank
        return self._cache.held()

    def submit(self, item: WorkItem) -> None:
        """Start a request, or queue it if `max_num_seqs` requests are running."""
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
        execution = _Execution(item, request)
        try:
            self._check_request(item)
            self._waiting[item.request_id] = execution
            self._begin_waiting()
        except AttemptFailed as refusal:
            self._fail(execution, refusal, "refused")
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is in flight: remove it from the queue, or close its generator."""
        execution = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if execution is not None:
            self._abort(execution)
            self._wake.set()

    async def command(self, command: Command) -> tuple[str, ...]:
        """Await the service's endpoint for a command, and return the names of the loaded adapters.

        Raises EngineRefused if the service has no endpoint for the command, or the endpoint raised an exception.
        """
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
        """Await the `check` hook of the service, if it has one. Raises EngineError if the hook raises an exception."""
        try:
            await self._hook("check")
        except Exception as error:
            raise EngineError(f"{self._service.name} is broken: {_describe(error)}") from error

    def collectors(self) -> Sequence[Collector]:
        return (self._count,)

    def reset(self) -> None:
        """Cancel every request. The cache of the service does not change, and `held` still returns it."""
        dropped = [*self._waiting.values(), *self._running.values()]
        self._waiting.clear()
        self._running.clear()
        self._cache.take_changes()
        self._rank.reset(clears=False)
        for execution in dropped:
            self._abort(execution)

    def _check_request(self, item: WorkItem) -> None:
        """Raise AttemptFailed for a request that the service cannot run."""
        name = self._service.name
        known = self._service.calls if item.task == "call" else self._service.tasks
        if (item.endpoint or item.task) not in known:
            raise AttemptFailed(400, "unsupported_task", f"{name} has no endpoint {item.endpoint or item.task}")
        if item.lora_name and item.lora_name not in self._loras:
            raise AttemptFailed(404, "adapter_not_loaded", f"{name} has not loaded the adapter {item.lora_name}")
        if item.sampling.logprobs is not None:
            raise AttemptFailed(400, "unsupported_parameter", f"{name} does not support logprobs")
        if len(self._waiting) >= WAITING_MAX:
            raise AttemptFailed(503, "engine_overloaded", f"{name}: {WAITING_MAX} requests are already waiting")

    def _begin(self, execution: _Execution) -> None:
        self._running[execution.item.request_id] = execution
        execution.task = asyncio.create_task(self._serve(execution), name=execution.item.request_id)
        self._tasks.add(execution.task)
        execution.task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._begin_waiting()
        self._wake.set()

    def _begin_waiting(self) -> None:
        """Start queued requests. A generator that is being closed still counts as running."""
        while self._waiting and len(self._tasks) < self._max_num_seqs:
            self._begin(self._waiting.pop(next(iter(self._waiting))))

    def _abort(self, execution: _Execution) -> None:
        self._cache.take_hit(execution.item.request_id)
        self._count_outcome(execution, "cancelled")
        execution.request.stopped.set()
        if execution.task is not None:
            execution.task.cancel()

    async def _serve(self, execution: _Execution) -> None:
        serve = {"generate": self._generate, "embed": self._embed, "call": self._call}
        try:
            await serve[execution.item.task](execution)
        except Refused as error:
            self._fail(execution, AttemptFailed(400, "invalid_request", _describe(error)), "refused")
        except Exception as error:
            where = self._endpoint_of(execution)
            if self._is_running(execution):
                item = execution.item
                logger.exception("%s failed on %s", where, item.request_id, extra=item.log_extra)
            failed = AttemptFailed(500, "engine_error", f"{where} failed: {_describe(error)}")
            self._fail(execution, failed, "failed")

    async def _generate(self, execution: _Execution) -> None:
        sampling, stops = execution.item.sampling, frozenset(execution.item.sampling.stop_token_ids)
        reason: Literal["length", "stop"] = "stop"
        began_s = runtime.monotonic_s()
        async with contextlib.aclosing(self._generated_tokens(execution.request)) as tokens:
            async for token in tokens:
                if not self._is_running(execution):
                    return
                if token in stops and execution.emitted >= sampling.min_tokens:
                    break
                if not execution.emitted:
                    self._rank.began(execution.item, self._hit(execution))
                self._rank.add_tokens(execution.item, execution.emitted, [token])
                execution.emitted += 1
                self._wake.set()
                if execution.emitted >= sampling.max_tokens:
                    reason = "length"
                    break
                if runtime.monotonic_s() - began_s > SLICE_S:
                    await asyncio.sleep(0)
                    began_s = runtime.monotonic_s()
        self._succeed(execution, reason)

    async def _generated_tokens(self, request: Request) -> AsyncGenerator[int]:
        """Yield the tokens of `generate`, whichever type it yields."""
        generate = getattr(self.instance, self._service.endpoints["generate"])
        async with contextlib.aclosing(generate(request)) as pieces:
            async for piece in pieces:
                for token in self._tokens(piece):
                    yield token

    def _tokens(self, piece: object) -> Sequence[int]:
        if isinstance(piece, int) and not isinstance(piece, bool):
            if 0 <= piece < TOKEN_END:
                return (piece,)
            raise ValueError(f"{piece} is not a token id, expected 0 to {TOKEN_END - 1}")
        if not isinstance(piece, str):
            raise TypeError(f"expected token ids (int) or text (str), got {type(piece).__name__}")
        if self._tokenizer is None:
            raise TypeError(f"got text, but there is no tokenizer.json in {self._settings.model}; yield token ids")
        encoded: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        return encoded

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise Refused(f"{self._service.name} has no tokenizer: there is no tokenizer.json in its model directory")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    async def _embed(self, execution: _Execution) -> None:
        embed = getattr(self.instance, self._service.endpoints["embed"])
        vector = [float(number) for number in await embed(execution.request)]
        if not vector:
            raise ValueError("got an empty vector, expected at least one number")
        if self._is_running(execution):
            self._rank.embedded(execution.item, struct.pack(f"<{len(vector)}f", *vector))
            self._succeed(execution, "stop")

    async def _call(self, execution: _Execution) -> None:
        item = execution.item
        request = dataclasses.replace(execution.request, payload=msgspec.json.decode(item.payload))
        method = getattr(self.instance, self._service.endpoints[item.endpoint.rpartition(".")[2]])
        async with contextlib.aclosing(method(request)) as values:
            async for value in values:
                text = msgspec.json.encode(value)
                if len(text) > OBJECT_BYTES_MAX:
                    raise ValueError(f"yielded {len(text):,} bytes of JSON; the limit is {OBJECT_BYTES_MAX:,}")
                while self._unsent_bytes and self._unsent_bytes + len(text) > BATCH_BYTES_MAX:
                    self._sent.clear()
                    await self._sent.wait()
                if not self._is_running(execution):
                    return
                if not execution.emitted:
                    self._rank.began(item, self._hit(execution))
                self._rank.add_object(item, execution.emitted, text.decode())
                self._unsent_bytes += len(text)
                execution.emitted += 1
                self._wake.set()
                await asyncio.sleep(0)  # a generator without awaits must not block the other requests
        self._succeed(execution, "stop")

    def _endpoint_of(self, execution: _Execution) -> str:
        return execution.item.endpoint or self._service.endpoint_name(execution.item.task)

    def _is_running(self, execution: _Execution) -> bool:
        return self._running.get(execution.item.request_id) is execution

    def _succeed(self, execution: _Execution, reason: Literal["length", "stop"]) -> None:
        if self._remove(execution):
            item, cached = execution.item, self._hit(execution)
            tokens = execution.prompt_tokens, execution.emitted, cached
            self._rank.finished(Finished(item.request_id, item.attempt, reason, *tokens))
            self._count_outcome(execution, "ok")

    def _fail(self, execution: _Execution, failed: AttemptFailed, outcome: Outcome) -> None:
        if execution.task is None or self._remove(execution):
            self._rank.failed(execution.item, failed.error)
            self._count_outcome(execution, outcome)
            self._wake.set()

    def _remove(self, execution: _Execution) -> bool:
        """Remove a running request. Return False if it was already cancelled."""
        if not self._is_running(execution):
            return False
        del self._running[execution.item.request_id]
        self._wake.set()
        return True

    def _hit(self, execution: _Execution) -> int:
        if hit := self._cache.take_hit(execution.item.request_id):
            execution.cached_tokens = hit
        return execution.cached_tokens

    def _count_outcome(self, execution: _Execution, outcome: Outcome) -> None:
        self._count.labels(self._endpoint_of(execution), outcome).inc()

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
        hook = getattr(self.instance, name, None)
        if hook is not None:
            await (hook(self._settings) if inspect.signature(hook).parameters else hook())

    async def _control(self, command: Command) -> None:
        method = self._service.endpoints.get(command.action)
        if method is None:
            known = ", ".join(self._service.endpoints)
            raise EngineRefused(f"{self._service.name} has no endpoint {command.action}; endpoints are {known}")
        await getattr(self.instance, method)(command)
        if command.action == "load_lora" and command.lora_name not in self._loras:
            self._loras.append(command.lora_name)
        elif command.action == "unload_lora" and command.lora_name in self._loras:
            self._loras.remove(command.lora_name)


def _describe(error: Exception) -> str:
    text = clipped(str(error))
    if isinstance(error, Refused | EngineRefused):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
