"""Stand-in for vLLM's `AsyncLLM` with the calls that the adapter makes. KV events go over real sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.events.requests import Sampling
from forebay.workers.engine import AttemptFailed
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.vllm.core import VllmCore
from tests.harness.openai_server.cache import BlocksCleared, CacheEvent, LittleCache, StandinRequest
from tests.harness.openai_server.events import EventPublisher
from tests.workers.standins.little import next_token

CONTEXT_TOKENS = 256


class EngineDeadError(Exception):
    pass


class VLLMError(Exception):
    pass


class AsyncLLM:
    """`AsyncLLM` that emits one token per turn of the event loop."""

    tokenizer: Any = None

    def __init__(self, arguments: dict[str, Any], make_logger: Any, sockets: Path) -> None:
        self.errored = False
        ranks, block_size = arguments.get("data_parallel_size", 1), arguments["block_size"]
        blocks = arguments["num_gpu_blocks_override"]
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                policy="fcfs",
                max_num_seqs=arguments["max_num_seqs"],
                max_num_batched_tokens=arguments["max_num_batched_tokens"],
            ),
            model_config=SimpleNamespace(max_model_len=CONTEXT_TOKENS, skip_tokenizer_init=False),
            cache_config=SimpleNamespace(
                num_gpu_blocks=blocks * ranks, block_size=block_size, enable_prefix_caching=True
            ),
            lora_config=SimpleNamespace(max_loras=arguments.get("max_loras", 1))
            if "enable_lora" in arguments
            else None,
            kv_transfer_config=None,
        )
        self.block_size = block_size
        self.loggers = [make_logger(None, index) for index in range(ranks)]
        self.caches = [LittleCache(block_size, blocks - 1) for _ in range(ranks)]
        self.running = [0] * ranks
        self.loras: set[str] = set()
        self.sources = {
            index: SimpleNamespace(
                endpoint=f"ipc://{sockets}/events{index}", replay_endpoint=f"ipc://{sockets}/replay{index}", topic=""
            )
            for index in range(ranks)
        }
        self.publishers = [EventPublisher("vllm", block_size) for _ in range(ranks)]

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def open(self) -> None:
        for source, publisher in zip(self.sources.values(), self.publishers, strict=True):
            await publisher.open(source.endpoint, source.replay_endpoint)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return self.sources

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: Sampling,
        request_id: str,
        *,
        lora_request: LoraAdapter | None = None,
        priority: int = 0,
        data_parallel_rank: int = 0,
        trace_headers: dict[str, str] | None = None,
    ) -> AsyncIterator[Any]:
        assert priority == 0, "the policy is fcfs"
        assert trace_headers is None, "tracing is disabled"
        lora, salt = "" if lora_request is None else lora_request.name, prompt.get("cache_salt", "")
        assert not lora or lora in self.loras
        tokens, rank = list(prompt["prompt_token_ids"]), data_parallel_rank
        request = StandinRequest(request_id, tokens, sampling_params.max_tokens, lora, salt, rank)
        cache = self.caches[rank]
        request.cached = cache.cached_tokens(request)
        self._step(rank, 1)
        try:
            self._publish(rank, cache.store(request, tokens))
            while len(request.generated) < sampling_params.max_tokens:
                await asyncio.sleep(0)
                request.generated.append(next_token([*tokens, *request.generated]))
                is_last = len(request.generated) == sampling_params.max_tokens
                if is_last:
                    self._publish(rank, cache.store(request, [*tokens, *request.generated[:-1]]))
                reason = "length" if is_last else None
                one = SimpleNamespace(token_ids=request.generated[-1:], logprobs=None, finish_reason=reason)
                yield SimpleNamespace(outputs=[one], finished=is_last, num_cached_tokens=request.cached)
        finally:
            self._step(rank, -1)

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests and reset_connector
        for cache, publisher in zip(self.caches, self.publishers, strict=True):
            cache.names.clear()
            publisher.publish([BlocksCleared()])
        return True

    async def add_lora(self, lora_request: LoraAdapter) -> None:
        self.loras.add(lora_request.name)

    async def remove_lora(self, lora_id: int) -> None:
        assert lora_id

    async def close(self) -> None:
        for publisher in self.publishers:
            await publisher.close()

    def _step(self, rank: int, change: int) -> None:
        self.running[rank] += change
        usage = len(self.caches[rank].names) / self.caches[rank].blocks if self.running[rank] else 0.0
        stats = SimpleNamespace(
            num_running_reqs=self.running[rank],
            num_waiting_reqs=0,
            num_skipped_waiting_reqs=0,
            kv_cache_usage=usage,
            kv_connector_stats=None,
        )
        self.loggers[rank].record(stats, None)

    def _publish(self, rank: int, changes: list[CacheEvent]) -> None:
        if changes:
            self.publishers[rank].publish(changes)


def install(monkeypatch: pytest.MonkeyPatch, sockets: Path) -> None:
    """Make the adapter start the stand-in, with its sockets in a new directory `sockets`."""
    sockets.mkdir()
    started: list[AsyncLLM] = []

    async def start(_: VllmCore, arguments: dict[str, Any], logger: Any, __: dict[str, str]) -> Any:
        started.append(AsyncLLM(arguments, logger, sockets))
        await started[-1].open()
        return started[-1]

    async def stop(_: VllmCore) -> None:
        while started:
            await started.pop().close()

    calls = SimpleNamespace(
        EngineDeadError=EngineDeadError,
        VLLMError=VLLMError,
        request_error=lambda error: AttemptFailed(400, "invalid_request", str(error)),
        sampling_params=lambda sampling, _transfer=None, _hints=None: sampling,
        lora_request=lambda adapter: adapter,
    )
    monkeypatch.setattr(VllmCore, "start", start)
    monkeypatch.setattr(VllmCore, "stop", stop)
    monkeypatch.setitem(sys.modules, "forebay.workers.engines.vllm.calls", calls)
