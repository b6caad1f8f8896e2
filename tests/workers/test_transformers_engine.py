"""The thread of the transformers engine and the event loop around it, with a model that needs no torch."""

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

from forebay.engine_model.model import Stored
from forebay.events.base import unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.workers.engine import Cleared, EngineBatch, EngineError, EngineRefused
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.transformers.engine import BEHIND_MAX, TransformersEngine
from forebay.workers.engines.transformers.scheduler import Row
from tests.workers.conftest import until, work_item
from tests.workers.test_transformers_scheduler import FakeRunner, answer

SPEC = WorkerSpec(worker_id="w", model="m", block_size=1, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1)
BYTES_A_TOKEN = 1 << 20
ENDLESS = Sampling(max_tokens=10, ignore_eos=True)


class FakeModel(FakeRunner):
    """`arguments`: where it `fails`, and where it `waits`."""

    passes = threading.Semaphore(0)  # each lets it decode, or prefill, once, if it is one that `waits`
    vocabulary_size = 50
    context_tokens = 10_000

    def __init__(self, directory: Path, arguments: dict[str, Any]) -> None:
        if arguments.get("fails") == "load":
            raise EngineError(f"{directory}: broken")
        self.arguments = arguments
        super().__init__(1)

    def probe(self) -> int:
        return BYTES_A_TOKEN

    def allocate(self, block_size: int, blocks: int) -> None:
        assert block_size == 4
        super().__init__(blocks)

    def prefill(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> list[int]:
        if self.arguments.get("waits") == "prefill":
            assert self.passes.acquire(timeout=20)
        return super().prefill(tokens, first, places)

    def decode(self, rows: Sequence[Row]) -> list[list[int]]:
        if self.arguments.get("fails") == "decode":
            raise RuntimeError("out of memory")
        if self.arguments.get("waits") == "decode":
            assert self.passes.acquire(timeout=20)
        return super().decode(rows)


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    module = ModuleType("forebay.workers.engines.transformers.model")
    module.__dict__["TransformersModel"] = FakeModel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    FakeModel.passes = threading.Semaphore(0)
    yield tmp_path
    FakeModel.passes.release(100_000)
    assert not [thread for thread in threading.enumerate() if thread.name == "transformers"]


def engine_of(directory: Path, fails: str = "", *, waits: str = "", **changes: Any) -> TransformersEngine:
    told = {"model": directory, "model_name": "m", "block_size": 4, "arguments": {"fails": fails, "waits": waits}}
    return TransformersEngine(EngineSettings(**{**told, **changes}))


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
        FakeModel.passes.release(100_000)
        await engine.stop()


def said(batches: list[EngineBatch], name: str) -> list[int]:
    chunks = [chunk for batch in batches for chunk in batch.emitted if chunk.request_id == name]
    return [token for chunk in chunks for token in unpack_u32(chunk.token_ids)]


def said_so_much(batches: list[EngineBatch], name: str, length: int) -> Callable[[], bool]:
    return lambda: len(said(batches, name)) == length


def ended(batches: list[EngineBatch], name: str) -> Callable[[], bool]:
    return lambda: any(end.request_id == name for batch in batches for end in batch.finished)


async def test_sizes_that_nobody_gave_are_the_engines(model: Path) -> None:
    engine = engine_of(model)
    spec = await engine.start(SPEC)
    await engine.stop()
    assert spec == msgspec.structs.replace(
        SPEC,
        block_size=4,
        kv_blocks_total=256,  # a GiB
        max_num_seqs=16,
        max_num_batched_tokens=256,
        tasks=("generate", "embed"),
    )


async def test_a_small_step_runs_as_many_sequences_as_it_has_tokens(model: Path) -> None:
    engine = engine_of(model, max_num_batched_tokens=5, kv_blocks=9)
    spec = await engine.start(SPEC)
    await engine.stop()
    assert (spec.max_num_seqs, spec.max_num_batched_tokens, spec.kv_blocks_total) == (5, 5, 9)


async def test_tokens_come_as_they_are_made(model: Path) -> None:
    engine = engine_of(model, waits="decode")
    async with running(engine) as batches:
        engine.submit(work_item("a", [1, 2, 3], 10, sampling=ENDLESS))
        for length in range(1, 6):
            await until(said_so_much(batches, "a", length))
            FakeModel.passes.release()
        engine.cancel("a")
        FakeModel.passes.release()
        await until(lambda: batches[-1].load.running == 0)
    assert 5 <= len(said(batches, "a")) <= 7
    assert said(batches, "a") == answer([1, 2, 3], 10, ignore_eos=True)[: len(said(batches, "a"))]


async def test_nothing_from_before_a_reset_is_told_after_it(model: Path) -> None:
    engine = engine_of(model)
    async with running(engine) as batches:
        for round_ in range(20):
            engine.submit(work_item(f"before {round_}", list(range(20)), 2000, sampling=Sampling(max_tokens=2000)))
            await until(lambda: batches)
            engine.reset()
            batches.clear()
            assert engine.held(0) == []
            engine.submit(work_item(f"after {round_}", list(range(20)), 1))
            await until(ended(batches, f"after {round_}"))
            assert {chunk.request_id for batch in batches for chunk in batch.emitted} == {f"after {round_}"}
            assert [end.cached_tokens for batch in batches for end in batch.finished] == [0]
            changes = [change for batch in batches for change in batch.cache_changes]
            told = [block for change in changes if isinstance(change, Stored) for block in change.hashes]
            assert engine.held(0) == told
            assert len(told) == 5
            engine.reset()
            batches.clear()


async def test_a_batch_that_is_on_its_way_at_a_reset_is_dropped(model: Path) -> None:
    engine = engine_of(model, waits="decode")
    async with running(engine) as batches:
        engine.submit(work_item("before", [1, 2, 3, 4, 5], 10, sampling=ENDLESS))
        await until(lambda: batches)
        FakeModel.passes.release(2)
        while FakeModel.passes._value:
            threading.Event().wait(0.001)  # the event loop stands still; the second pass comes after the first's batch
        engine.reset()
        heard = len(batches)
        FakeModel.passes.release(100)
        engine.submit(work_item("after", [1, 2, 3], 1))
        await until(ended(batches, "after"))
        assert {chunk.request_id for batch in batches[heard:] for chunk in batch.emitted} == {"after"}
        assert engine.held(0) == []


async def test_a_cache_that_is_said_to_be_clear_was_told_so(model: Path) -> None:
    engine = engine_of(model, waits="prefill")
    async with running(engine) as batches:
        FakeModel.passes.release()
        engine.submit(work_item("a", [1, 2, 3, 4, 5], 1_000, sampling=Sampling(max_tokens=1_000, ignore_eos=True)))
        await until(lambda: batches)
        command = asyncio.create_task(engine.command(Command(action="clear_kv_blocks")))
        told: list[bool] = []
        command.add_done_callback(
            lambda _: told.append(any(change == Cleared() for batch in batches for change in batch.cache_changes))
        )
        # The request is computed again in the step that clears, which gives whoever answers too soon the time to.
        await asyncio.wait((command,), timeout=0.1)
        FakeModel.passes.release()
        await command
        assert told == [True]


async def test_commands(model: Path) -> None:
    engine = engine_of(model)
    async with running(engine) as batches:
        engine.submit(work_item("a", list(range(20)), 1))
        await until(ended(batches, "a"))
        assert len(engine.held(0)) == 5
        assert await engine.command(Command(action="list_loras")) == ()
        assert await engine.command(Command(action="clear_kv_blocks")) == ()
        assert batches[-1].cache_changes == [Cleared()]
        assert engine.held(0) == []
        with pytest.raises(EngineRefused, match="the transformers engine does not load_lora"):
            await engine.command(Command(action="load_lora", lora_name="legal"))
        await engine.check()
        assert engine.collectors() == ()
    with pytest.raises(EngineError, match="the transformers engine has ended"):
        await engine.check()
    with pytest.raises(EngineRefused, match="the transformers engine has ended"):
        await engine.command(Command(action="clear_kv_blocks"))


async def test_a_model_that_breaks_ends_the_engine(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(model, "decode")
    await engine.start(SPEC)
    engine.submit(work_item("a", [1, 2, 3], 10))
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=r"the transformers engine broke: RuntimeError\('out of memory'\)"):
            await engine.run(lambda _: None)
    with pytest.raises(EngineError, match="has ended"):
        await engine.check()
    await engine.stop()
    assert "Traceback" in caplog.text


async def test_the_model_waits_for_an_event_loop_that_is_late(model: Path) -> None:
    engine = engine_of(model, waits="decode", kv_blocks=2_000)
    async with running(engine) as batches:
        engine.submit(work_item("a", [1], 5_000, sampling=Sampling(max_tokens=5_000, ignore_eos=True)))
        await until(lambda: batches)
        heard = len(batches)
        FakeModel.passes.release(5_000)
        left = -1
        while left != (left := FakeModel.passes._value):
            threading.Event().wait(0.2)  # the event loop stands still
        assert len(batches) == heard
        assert 5_000 - left <= BEHIND_MAX
        await until(lambda: len(said(batches, "a")) > 2 * BEHIND_MAX)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dp_size": 2}, "the transformers engine has one rank, not 2"),
        ({"role": "decode"}, "the transformers engine answers whole requests: it is no decode worker"),
        ({"loras": {"legal": Path()}}, "the transformers engine has no LoRA adapters"),
        ({"model": Path("/nowhere")}, "/nowhere: no such model directory"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_batched_tokens \(8\) must be at least"),
        ({"fails": "load"}, ": broken"),
    ],
)
async def test_what_cannot_start_says_why(model: Path, changes: dict[str, Any], says: str) -> None:
    engine = engine_of(model, **changes)
    with pytest.raises(EngineError, match=says):
        await engine.start(SPEC)
    await engine.stop()
