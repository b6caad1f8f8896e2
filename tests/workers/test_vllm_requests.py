"""Isolation of requests on a vLLM engine, with a stand-in."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.events.base import pack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines import model_engine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import VllmCore
from forebay.workers.engines.vllm.engine import VllmEngine

SPEC = WorkerSpec(
    worker_id="w",
    model="m",
    pool="p",
    engine="vllm",
    block_size=1,
    kv_blocks_total=1,
    max_num_seqs=1,
    max_num_batched_tokens=1,
)


class Llm:
    """Stand-in that emits one token, and raises an unexpected exception for the request `odd`."""

    errored = False
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=8, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=64),
        cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=32, enable_prefix_caching=False),
        kv_transfer_config=None,
    )

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        if request_id == "odd":
            raise AttributeError("'list' object has no attribute 'get'")
        answer = SimpleNamespace(token_ids=[5], logprobs=None, finish_reason="length")
        yield SimpleNamespace(outputs=[answer], num_cached_tokens=0, finished=True)


def item(request_id: str) -> WorkItem:
    return WorkItem(
        request_id=request_id,
        attempt=1,
        owner_epoch=1,
        worker_epoch=1,
        rank=0,
        token_ids=pack_u32([1, 2]),
        sequence_hashes=b"",
        sampling=Sampling(max_tokens=1),
        reply_slot=0,
    )


async def test_unexpected_exception_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> Llm:
        return Llm()

    calls = SimpleNamespace(
        EngineDeadError=EOFError,
        VLLMError=OverflowError,
        sampling_params=lambda *_: None,
        response_error=lambda error: ResponseError(status=500, code="engine_error", message=str(error)),
    )
    monkeypatch.setattr(VllmCore, "start", start)
    monkeypatch.setattr(model_engine, "check_model", lambda _: None)
    monkeypatch.setitem(sys.modules, "forebay.workers.engines.vllm.calls", calls)
    engine = VllmEngine(EngineSettings(model=Path("/models/m"), model_name="m"))
    await engine.start(SPEC)
    batches: list[EngineBatch] = []
    ended = asyncio.Event()

    def publish(batch: EngineBatch) -> None:
        batches.append(batch)
        if any(one.request_id == "good" for one in batch.finished):
            ended.set()

    running = asyncio.create_task(engine.run(publish))
    try:
        engine.submit(item("odd"))
        engine.submit(item("good"))
        waiting = asyncio.create_task(ended.wait())
        async with asyncio.timeout(30):
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), running
        assert [one.error.message for batch in batches for one in batch.failed] == [
            "'list' object has no attribute 'get'"
        ]
        await engine.check()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.stop()
