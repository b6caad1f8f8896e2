"""Operator commands at a worker: executed once, in order, with a result; and their effect on the mock engine."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksStored, CacheCleared
from forebay.events.progress import CommandDone, CommandRefused, RequestFinished
from forebay.events.work import WorkerCommand, WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.commands import ERROR_CHARS_MAX, WAITING_MAX
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import GROUP, PARTITION, Scene, engine_config, until, work_item


class CommandableEngine(MockEngine):
    """Mock engine that records commands and executes them when the test allows it."""

    def __init__(self) -> None:
        super().__init__(engine_config(), speedup=1000.0)
        self.reported: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def command(self, command: Command) -> tuple[str, ...]:
        self.reported.append(command.lora_name or command.action)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().command(command)


def obedient(scene: Scene) -> tuple[Worker, CommandableEngine]:
    engine = CommandableEngine()
    spec: WorkerSpec = scene.spec()
    return Worker(scene.log, scene.keeper, spec, engine, token="t1", group=GROUP, partition=PARTITION), engine


def command(name: str, epoch: int, action: Any = "list_loras", **changes: Any) -> WorkerCommand:
    lora = {key: changes.pop(key) for key in ("lora_name", "lora_path", "level") if key in changes}
    fields: dict[str, Any] = {
        "command_id": name,
        "command": Command(action=action, **lora),
        "owner_epoch": 0,
        "worker_epoch": epoch,
        "timeout_us": 60_000_000,
        **changes,
    }
    return WorkerCommand(**fields)


def answers(scene: Scene) -> list[tuple[str, str | None]]:
    generated = [event for event in scene.progress() if isinstance(event, CommandDone | CommandRefused)]
    return [(event.command_id, getattr(event, "error", None)) for event in generated]


@pytest.mark.parametrize("name", [GROUP, "../x", "a\0b", "a\nb", ""])
async def test_invalid_adapter_name_is_refused(scene: Scene, tmp_path: Path, name: str) -> None:
    """A command may come from any producer on `control`, not only from an ingress that validates it."""
    worker, engine = obedient(scene)
    async with scene.serving(worker) as epoch:
        await scene.send(command("load", epoch, "load_lora", lora_name=name, lora_path=str(tmp_path)))
        await until(lambda: answers(scene))
    ((_, error),) = answers(scene)
    assert error is not None
    assert "the adapter name " in error
    assert error.isprintable()
    assert engine.reported == []


async def test_commands_run_in_order_and_have_results(scene: Scene, tmp_path: Path) -> None:
    worker, engine = obedient(scene)
    engine.gate.clear()
    async with scene.serving(worker) as epoch:
        for name in ("x", "y"):
            where = {"lora_name": name, "lora_path": str(tmp_path)}
            await scene.send(command(f"load-{name}", epoch, "load_lora", **where))
        await scene.send(command("list", epoch))
        await until(lambda: engine.reported)
        assert engine.reported == ["x"], "the second waits for the first"
        engine.gate.set()
        await until(lambda: len(answers(scene)) == 3)
    assert engine.reported == ["x", "y", "list_loras"]
    done = scene.progress(CommandDone)
    assert [(one.command_id, one.action, one.loras) for one in done] == [
        ("load-x", "load_lora", ("x",)),
        ("load-y", "load_lora", ("x", "y")),
        ("list", "list_loras", ("x", "y")),
    ]
    assert {(one.worker_id, one.worker_epoch, one.owner_epoch) for one in done} == {("w1", epoch, 0)}


async def test_an_id_that_is_used_again_is_another_command(scene: Scene) -> None:
    worker, engine = obedient(scene)
    async with scene.serving(worker) as epoch:
        await scene.send(command("nightly", epoch, nonce=1))
        await scene.send(command("nightly", epoch, "clear_kv_blocks", nonce=2))
        await until(lambda: len(answers(scene)) == 2)
    assert engine.reported == ["list_loras", "clear_kv_blocks"]
    assert worker.commands.repeated == 0


async def test_repeated_command_runs_once_and_replies_to_the_new_owner(scene: Scene, tmp_path: Path) -> None:
    worker, engine = obedient(scene)
    engine.gate.clear()
    where = {"lora_path": str(tmp_path)}
    async with scene.serving(worker) as epoch:
        await scene.send(command("c1", epoch, "load_lora", lora_name="x", **where))
        await until(lambda: engine.reported)
        await scene.send(command("c1", epoch, "load_lora", lora_name="x", owner_epoch=7, **where))
        await until(lambda: worker.commands.repeated == 1)
        engine.gate.set()
        await until(lambda: answers(scene))
        await scene.send(command("c2", epoch, "load_lora", lora_name="y", **where))
        await until(lambda: len(answers(scene)) == 2)
        await scene.send(command("c1", epoch, "load_lora", lora_name="x", owner_epoch=9, **where))
        await until(lambda: len(answers(scene)) == 3)
    assert engine.reported == ["x", "y"]
    # The repeated result does not hide adapters that were loaded later.
    assert [(one.command_id, one.owner_epoch, one.loras) for one in scene.progress(CommandDone)] == [
        ("c1", 7, ("x",)),
        ("c2", 0, ("x", "y")),
        ("c1", 9, ("x", "y")),
    ]


async def test_refused_command_has_a_reason_and_no_effect(scene: Scene) -> None:
    worker, engine = obedient(scene)
    async with scene.serving(worker) as epoch:
        engine.error = EngineRefused("x" * 5000)
        await scene.send(command("long", epoch))
        await until(lambda: len(answers(scene)) == 1)
        engine.error = EngineRefused("")
        await scene.send(command("mute", epoch, "sleep"))
        await until(lambda: len(answers(scene)) == 2)
    assert answers(scene) == [("long", "x" * ERROR_CHARS_MAX), ("mute", "the engine does not support sleep")]


async def test_late_command_is_not_executed(scene: Scene) -> None:
    worker, engine = obedient(scene)
    engine.gate.clear()
    async with scene.serving(worker) as epoch:
        await scene.send(command("first", epoch))
        await until(lambda: engine.reported)
        await scene.send(command("late", epoch, "sleep", timeout_us=0))
        await scene.send(command("other", epoch, "pause"))
        await until(lambda: scene.log.next_offset("work.default", 5) == 3)
        engine.gate.set()
        await until(lambda: len(answers(scene)) == 3)
    assert engine.reported == ["list_loras", "pause"]
    assert dict(answers(scene))["late"] == "it timed out while earlier commands were running"


async def test_queued_commands_are_bounded(scene: Scene) -> None:
    worker, engine = obedient(scene)
    engine.gate.clear()
    async with scene.serving(worker) as epoch:
        await scene.send(command("first", epoch))
        await until(lambda: engine.reported)
        for number in range(WAITING_MAX + 1):
            await scene.send(command(f"c{number}", epoch))
        await until(lambda: answers(scene))
        assert answers(scene) == [
            (f"c{WAITING_MAX}", f"the worker's queue of commands is full: {WAITING_MAX} are waiting")
        ]
        engine.gate.set()
        await until(lambda: len(answers(scene)) == WAITING_MAX + 2)


async def test_an_engine_that_breaks_ends_the_worker(scene: Scene) -> None:
    worker, engine = obedient(scene)
    engine.error = EngineError("out of memory")
    running = asyncio.create_task(worker.run())
    epoch = await scene.admit(worker, "t1")
    await scene.send(command("c", epoch))
    await asyncio.wait([running])
    error = running.exception()
    assert isinstance(error, ExceptionGroup)
    assert error.subgroup(EngineError) is not None
    assert answers(scene) == []
    await until(lambda: scene.lease() is None)


async def test_result_of_a_command_across_epochs_is_reported_in_the_next(scene: Scene, tmp_path: Path) -> None:
    worker, engine = obedient(scene)
    engine.gate.clear()
    async with scene.serving(worker) as epoch:
        await scene.send(command("c", epoch, "load_lora", lora_name="x", lora_path=str(tmp_path)))
        await scene.send(command("dropped", epoch, "sleep"))
        await until(lambda: engine.reported)
        await until(lambda: worker.commands.waiting == 1)
        await scene.lose(epoch)
        await until(lambda: scene.holds("t1.2"))
        engine.gate.set()
        await until(lambda: worker.commands.loras)
        assert answers(scene) == []
        again = await scene.admit(worker, "t1.2")
        await until(lambda: answers(scene))
    (generated,) = scene.progress(CommandDone)
    assert (generated.command_id, generated.worker_epoch, generated.loras) == ("c", again, ("x",))
    assert engine.reported == ["x"], "what had not begun belongs to the epoch that is over"


async def test_adapters_stay_loaded_in_the_next_epoch(scene: Scene, tmp_path: Path) -> None:
    worker, _ = obedient(scene)
    async with scene.serving(worker) as epoch:
        await scene.send(command("c", epoch, "load_lora", lora_name="x", lora_path=str(tmp_path)))
        await until(lambda: answers(scene))
        await scene.lose(epoch)
        await until(lambda: scene.holds("t1.2"))
        assert worker.spec.loras == ("x",)


# The mock engine


async def reported(scene: Scene, *sent: WorkerCommand | WorkItem) -> list[Any]:
    """Send commands, wait for their results, and return them."""
    before = len(answers(scene))
    for event in sent:
        await scene.send(event)
    commands = sum(isinstance(event, WorkerCommand) for event in sent)
    await until(lambda: len(answers(scene)) == before + commands)
    generated: Sequence[Any] = scene.progress()
    return [event for event in generated if isinstance(event, CommandDone | CommandRefused)][before:]


def finished(scene: Scene) -> list[str]:
    return [event.request_id for event in scene.progress(RequestFinished)]


async def test_a_cache_is_cleared_while_nothing_runs(scene: Scene) -> None:
    async with scene.serving(scene.worker()) as epoch:
        await scene.send(work_item("a", list(range(8)), 2, worker_epoch=epoch))
        await until(lambda: finished(scene) == ["a"])
        (done,) = await reported(scene, command("c", epoch, "clear_kv_blocks"))
        assert isinstance(done, CommandDone)
        await until(lambda: isinstance(scene.kv()[-1], CacheCleared))
        await scene.send(work_item("b", list(range(8)), 2, worker_epoch=epoch))
        await until(lambda: finished(scene) == ["a", "b"])
    assert [type(event) for event in scene.kv()] == [BlocksStored, CacheCleared, BlocksStored]
    assert scene.progress(RequestFinished)[1].cached_tokens == 0


async def test_a_cache_in_use_is_not_cleared(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=0.001)) as epoch:
        await scene.send(work_item("a", list(range(8)), 30, worker_epoch=epoch))
        pause = command("p", epoch, "pause")
        refused = (await reported(scene, pause, command("c", epoch, "clear_kv_blocks")))[1]
    assert isinstance(refused, CommandRefused)
    assert "KV blocks are in use by running requests" in refused.error


async def test_paused_engine_keeps_requests_and_cache(scene: Scene) -> None:
    async with scene.serving(scene.worker()) as epoch:
        await scene.send(work_item("before", list(range(8)), 2, worker_epoch=epoch))
        await until(lambda: finished(scene))
        await reported(scene, command("p", epoch, "pause"))
        await scene.send(work_item("a", list(range(8)), 2, worker_epoch=epoch))
        await reported(scene, command("list", epoch))
        assert finished(scene) == ["before"]
        await reported(scene, command("w", epoch, "wake_up"))
        assert finished(scene) == ["before"], "who is paused does not sleep"
        await reported(scene, command("r", epoch, "resume"))
        await until(lambda: finished(scene) == ["before", "a"])
    assert scene.progress(RequestFinished)[1].cached_tokens == 4


async def test_engine_continues_without_cache_after_sleep(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=30.0)) as epoch:
        await scene.send(work_item("a", list(range(8)), 40, worker_epoch=epoch))
        await until(scene.tokens)
        await reported(scene, command("s", epoch, "sleep", level=2))
        await until(lambda: isinstance(scene.kv()[-1], CacheCleared))
        await until(lambda: scene.loads() and scene.loads()[-1].kv_blocks_used == 0)
        assert scene.loads()[-1].waiting == 1
        assert finished(scene) == []
        await reported(scene, command("w", epoch, "wake_up"))
        await until(lambda: finished(scene) == ["a"])
    generated = list(scene.progress(RequestFinished))
    assert generated[0].output_tokens == 40
    chunks = [chunk for event in scene.tokens() if hasattr(event, "chunks") for chunk in event.chunks]
    assert [chunk.first_index for chunk in chunks] == sorted({chunk.first_index for chunk in chunks})
