"""The transformers engine around a fake model, without torch."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from forebay.events.base import unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.workers.engine import EngineBatch, EngineError, EngineRefused
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.transformers.engine import TransformersEngine
from tests.workers.conftest import until, work_item

SPEC = WorkerSpec(worker_id="w", model="m", block_size=1, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1)
LONG = 5_000


class FakeModel:
    """Model that generates 1, 2, 3, ...; `arguments` select failures and blocking."""

    steps = threading.Semaphore(0)  # each permits one token if `blocks` is set
    vocabulary_size = 50
    context_tokens = 10_000

    def __init__(self, directory: Path, arguments: dict[str, Any]) -> None:
        if arguments.get("fails") == "load":
            raise EngineError(f"{directory}: broken")
        self.arguments = arguments

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, emit: Callable[[int], None], cancelled: threading.Event
    ) -> bool:
        if len(prompt) > 1 and self.arguments.get("fails") == "generate":
            raise RuntimeError("out of memory")
        for token in range(sampling.max_tokens):
            if cancelled.is_set():
                break
            if len(prompt) > 1 and self.arguments.get("blocks"):
                assert self.steps.acquire(timeout=20)
            emit(token + 1)
        return False


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    module = ModuleType("forebay.workers.engines.transformers.model")
    module.__dict__["TransformersModel"] = FakeModel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    FakeModel.steps = threading.Semaphore(0)
    yield tmp_path
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transformers")]


def engine_of(directory: Path, fails: str = "", *, blocks: bool = False, **changes: Any) -> TransformersEngine:
    arguments = {"fails": fails, "blocks": blocks}
    fields = {"model": directory, "model_name": "m", "block_size": 4, "arguments": arguments, **changes}
    return TransformersEngine(EngineSettings(**fields))


@asynccontextmanager
async def running(engine: TransformersEngine) -> AsyncIterator[list[EngineBatch]]:
    batches: list[EngineBatch] = []
    await engine.start(SPEC)
    task = asyncio.create_task(engine.run(batches.append))
    try:
        yield batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        FakeModel.steps.release(2 * LONG)
        await engine.stop()


def output(batches: list[EngineBatch], name: str) -> list[int]:
    chunks = [chunk for batch in batches for chunk in batch.emitted if chunk.request_id == name]
    return [token for chunk in chunks for token in unpack_u32(chunk.token_ids)]


def ended(batches: list[EngineBatch], name: str) -> bool:
    return any(end.request_id == name for batch in batches for end in batch.finished)


async def test_spec_has_default_sizes_and_no_kv_events(model: Path) -> None:
    engine = engine_of(model)
    spec = await engine.start(SPEC)
    await engine.stop()
    assert spec == msgspec.structs.replace(
        SPEC,
        block_size=4,
        kv_blocks_total=2_500,
        max_num_seqs=1,
        max_num_batched_tokens=10_000,
        tasks=("generate", "embed"),
        kv_events=False,
    )


async def test_tokens_are_streamed_and_cancellation_stops_the_generation(model: Path) -> None:
    engine = engine_of(model, blocks=True)
    async with running(engine) as batches:
        engine.submit(work_item("a", [1, 2, 3], LONG))
        engine.submit(work_item("b", [1, 2, 3], 3))
        for count in range(1, 6):
            FakeModel.steps.release()
            await until(lambda: len(output(batches, "a")) == count)  # noqa: B023 - awaited in the same turn
        assert (batches[-1].load.running, batches[-1].load.waiting) == (1, 1)
        engine.cancel("a")
        FakeModel.steps.release(2 * LONG)
        await until(lambda: ended(batches, "b"))
        assert output(batches, "a") == [1, 2, 3, 4, 5]
        assert output(batches, "b") == [1, 2, 3]
        await until(lambda: batches[-1].load.running == 0)


async def test_nothing_is_published_for_requests_before_a_reset(model: Path) -> None:
    engine = engine_of(model, blocks=True)
    async with running(engine) as batches:
        engine.submit(work_item("before", [1, 2, 3], LONG))
        FakeModel.steps.release(2)
        await until(lambda: len(output(batches, "before")) == 2)
        engine.reset()
        batches.clear()
        FakeModel.steps.release(2 * LONG)
        engine.submit(work_item("after", [1, 2, 3], 2))
        await until(lambda: ended(batches, "after"))
        assert {chunk.request_id for batch in batches for chunk in batch.emitted} == {"after"}
        assert engine.held(0) == ()


async def test_commands(model: Path) -> None:
    engine = engine_of(model)
    async with running(engine):
        assert await engine.command(Command(action="list_loras")) == ()
        assert await engine.command(Command(action="clear_kv_blocks")) == ()
        with pytest.raises(EngineRefused, match="load_lora"):
            await engine.command(Command(action="load_lora", lora_name="legal"))
        await engine.check()
        assert engine.collectors() == ()


@pytest.mark.parametrize(
    ("fails", "prompt", "sampling", "code"),
    [
        ("generate", [1, 2], {}, "engine_error"),
        ("", [], {}, "invalid_request"),
        ("", [1, 50], {}, "invalid_request"),
        ("", [1, 2], {"max_tokens": 9_999}, "context_length_exceeded"),
        ("", [1, 2], {"logprobs": 0}, "unsupported"),
        ("", [1, 2], {"presence_penalty": 0.5}, "unsupported"),
    ],
)
async def test_a_failed_request_leaves_the_engine_running(
    model: Path, fails: str, prompt: list[int], sampling: dict[str, Any], code: str
) -> None:
    engine = engine_of(model, fails)
    async with running(engine) as batches:
        engine.submit(work_item("a", prompt, 5, sampling=Sampling(**{"max_tokens": 5, **sampling})))
        await until(lambda: any(batch.failed for batch in batches))
        assert [failed.error.code for batch in batches for failed in batch.failed] == [code]
        engine.submit(work_item("b", [1], 5))
        await until(lambda: ended(batches, "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 2}, "one rank, got dp_size 2"),
        ({"max_num_seqs": 9}, "got max_num_seqs 9"),
        ({"role": "decode"}, "does not support role decode"),
        ({"loras": {"legal": Path()}}, "does not support LoRA adapters"),
        ({"model": Path("/nowhere")}, "/nowhere: no such model directory"),
        ({"fails": "load"}, ": broken"),
    ],
)
async def test_start_reports_unsupported_settings(model: Path, changes: dict[str, Any], message: str) -> None:
    engine = engine_of(model, **changes)
    with pytest.raises(EngineError, match=message):
        await engine.start(SPEC)
    await engine.stop()
