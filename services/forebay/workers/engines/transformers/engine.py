"""Simple reference engine: one `generate` call of the transformers library per request.

It serves real text on a CPU and is not for production. Requests run one after another on one thread, without
batching. Nothing is cached between requests, so there are no KV events.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.async_engine import AsyncEngine
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.runtime.rank_buffer import RankBuffer

BLOCK_SIZE = 32
KV_BLOCKS_MAX = 16_384
UNSUPPORTED = ("structured", "logprobs", "presence_penalty", "frequency_penalty")  # sampling parameters
DEFAULTS = Sampling(max_tokens=1)
CANARY_SAMPLING = Sampling(max_tokens=1, temperature=0.0)


class TransformersEngine(AsyncEngine):
    """Engine that generates text and computes mean-pooled embeddings on one rank, one request after another."""

    NAME = "transformers"

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._thread = ThreadPoolExecutor(1, "transformers")
        self._model: Any = None  # a `TransformersModel`, whose module needs torch

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the model, run a first prompt, and return the spec of the worker. Raises EngineError if either fails."""
        _check_settings(self._settings)
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._thread, self._load)
        self._context_tokens = self._model.context_tokens
        self._tasks = ("generate", "embed")
        block_size = self._settings.block_size or BLOCK_SIZE
        kv_blocks = self._settings.kv_blocks or min(KV_BLOCKS_MAX, -(-self._context_tokens // block_size))
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        await self._warm_up()
        return msgspec.structs.replace(
            spec,
            block_size=block_size,
            kv_blocks_total=kv_blocks,
            max_num_seqs=1,
            max_num_batched_tokens=self._settings.max_num_batched_tokens or self._context_tokens,
            tasks=self._tasks,
            kv_events=False,
        )

    async def stop(self) -> None:
        """Cancel every request and wait until the thread has finished its current token."""
        await self._end_tasks()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def held(self, rank: int) -> Sequence[int]:
        """Return no blocks, because nothing is cached between requests."""
        return ()

    async def command(self, command: Command) -> tuple[str, ...]:
        """Return no adapters for `list_loras` and `clear_kv_blocks`, which do nothing here.

        Raises:
            EngineRefused: any other command.
        """
        if command.action not in ("list_loras", "clear_kv_blocks"):
            raise EngineRefused(f"the transformers engine does not support {command.action}")
        return ()

    def collectors(self) -> Sequence[Collector]:
        """Return no Prometheus collectors, because the library has no metrics."""
        return ()

    def _load(self) -> Any:
        # The import takes seconds and up to a gigabyte of memory, so it runs on the thread, only with this engine.
        module = import_module("forebay.workers.engines.transformers.model")
        return module.TransformersModel(self._settings.model, self._settings.arguments)

    def _is_dead(self) -> bool:
        return False

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return ()

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=False)

    async def _run_canary(self, rank: int) -> None:
        generate, cancelled = self._model.generate, threading.Event()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, generate, [0], CANARY_SAMPLING, lambda *_: None, cancelled)

    def _request_error(self, error: Exception) -> ResponseError:
        if isinstance(error, ValueError):
            return ResponseError(status=400, code="invalid_request", message=one_line(error))
        return ResponseError(status=500, code="engine_error", message=f"transformers failed: {one_line(error)}")

    def _refusal(self, item: WorkItem, prompt_tokens: int) -> ResponseError | None:
        sampling, room = item.sampling, self._context_tokens
        if not prompt_tokens:
            return ResponseError(status=400, code="invalid_request", message="the prompt is empty")
        if unsupported := [name for name in UNSUPPORTED if getattr(sampling, name) != getattr(DEFAULTS, name)]:
            message = f"the transformers engine does not support {', '.join(unsupported)}"
            return ResponseError(status=400, code="unsupported", message=message)
        if item.task == "generate" and prompt_tokens + sampling.max_tokens > room:
            message = f"{prompt_tokens} prompt tokens and max_tokens {sampling.max_tokens} exceed the context of {room}"
            return ResponseError(status=400, code="context_length_exceeded", message=message)
        return super()._refusal(item, prompt_tokens)

    async def _run_request(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        self._report_load(rank)
        highest = max(*prompt, *(bias.token_id for bias in item.sampling.logit_bias), 0)
        if highest > (last := self._model.vocabulary_size - 1):
            raise ValueError(f"token id {highest} is out of range: the model has ids 0 to {last}")
        loop = asyncio.get_running_loop()
        if item.task == "embed":
            rank.embedded(item, await loop.run_in_executor(self._thread, self._model.embed, prompt))
            self._finish(item, rank, "stop", (len(prompt), 0, 0))
            return
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        cancelled = threading.Event()

        def emit(token: int) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        job = loop.run_in_executor(self._thread, self._model.generate, prompt, item.sampling, emit, cancelled)
        job.add_done_callback(lambda _: tokens.put_nowait(None))
        count = 0
        try:
            while (token := await tokens.get()) is not None:
                if not count:
                    rank.began(item, cached_tokens=0)
                    self._report_load(rank)
                rank.add_tokens(item, count, [token])
                count += 1
                self._wake.set()
            self._finish(item, rank, "stop" if job.result() else "length", (len(prompt), count, 0))
        finally:
            cancelled.set()
            job.cancel()

    def _report_load(self, rank: RankBuffer) -> None:
        active = len(self._requests)
        rank.report(running=min(active, 1), waiting=max(0, active - 1), usage=0.0)


def _check_settings(settings: EngineSettings) -> None:
    if settings.dp_size != 1:
        raise EngineError(f"the transformers engine has one rank, got dp_size {settings.dp_size}: start more workers")
    if (settings.max_num_seqs or 1) != 1:
        raise EngineError(f"the transformers engine runs 1 request at a time, got max_num_seqs {settings.max_num_seqs}")
    if settings.role != "aggregated":
        raise EngineError(f"the transformers engine does not support role {settings.role}; use aggregated")
    if settings.loras:
        raise EngineError("the transformers engine does not support LoRA adapters; use vllm")
    if not settings.model.is_dir():
        raise EngineError(f"{settings.model}: no such model directory")
