"""How a worker obeys operator commands, and how it ends: drained, at once, or because its engine is broken."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.control import Command
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLease, WorkerSpec
from forebay.events.kv import BlocksStored, CacheCleared
from forebay.events.progress import CommandDone, CommandRefused, EngineFailed, RequestFinished
from forebay.events.tokens import ResponseEnded, TokensEmitted
from forebay.events.topics import FLEET
from forebay.events.work import WorkerCommand
from forebay.transport.base import Draft
from forebay.workers.adapter_cache import AdapterCache
from forebay.workers.engine import EngineError, EngineRefused, Publish
from forebay.workers.engines.mock.engine import MockEngine, MockLoras
from forebay.workers.runtime import life_cycle as life
from forebay.workers.runtime import worker as worker_module
from forebay.workers.runtime.commands import ERROR_CHARS_MAX, WAITING_MAX
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import LIVE_S, Probes, WorkerMetrics
from forebay.workers.runtime.worker import Worker
from tests.workers.adapter_files import files, written
from tests.workers.conftest import GROUP, PARTITION, Scene, engine_config, until
from tests.workers.hosted import HOSTED_SPEC


class Fragile(MockEngine):
    """Mock engine that records its calls, executes commands when the test allows it, and breaks in several ways."""

    def __init__(self) -> None:
        super().__init__(engine_config(), speedup=1000.0)
        self.calls: list[str] = []
        self.commands: list[str] = []
        self.started, self.gate = asyncio.Event(), asyncio.Event()
        self.started.set()
        self.gate.set()
        self.error: Exception | None = None  # of commands
        self.sick: BaseException | None = None
        self.hangs = self.ends = False

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        self.calls.append("start")
        await self.started.wait()
        return msgspec.structs.replace(spec, kv_blocks_total=spec.kv_blocks_total * 2)

    async def run(self, publish: Publish) -> None:
        if not self.ends:
            await super().run(publish)

    async def check(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.sick is not None:
            raise self.sick

    async def command(self, command: Command) -> tuple[str, ...]:
        self.commands.append(command.lora_name or command.action)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().command(command)

    async def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def engine() -> Fragile:
    return Fragile()


@pytest.fixture
def worker(scene: Scene, engine: Fragile) -> Worker:
    return scene.worker(engine=engine)


async def order(scene: Scene, name: str, action: Any = "list_loras", **changes: Any) -> None:
    """Send a command to the worker that was admitted last."""
    lora = {key: changes.pop(key) for key in ("lora_name", "lora_path", "level") if key in changes}
    fields = {"owner_epoch": 0, "worker_epoch": scene.epoch, "timeout_us": 60_000_000, **changes}
    await scene.send(WorkerCommand(command_id=name, command=Command(action=action, **lora), **fields))


def results(scene: Scene) -> list[Any]:
    return [event for event in scene.progress() if isinstance(event, CommandDone | CommandRefused)]


def answers(scene: Scene) -> list[tuple[str, str | None]]:
    return [(event.command_id, getattr(event, "error", None)) for event in results(scene)]


async def obeyed(scene: Scene, name: str, action: Any = "list_loras", **changes: Any) -> Any:
    """Send a command, wait for its result, and return it."""
    before = len(results(scene))
    await order(scene, name, action, **changes)
    await until(lambda: len(results(scene)) > before)
    return results(scene)[-1]


@pytest.mark.usefixtures("epoch")
@pytest.mark.parametrize("name", [GROUP, "../x", "a\0b", "a\nb", ""])
async def test_invalid_adapter_name_is_refused(scene: Scene, engine: Fragile, tmp_path: Path, name: str) -> None:
    """A command may come from any producer on `control`, not only from an ingress that validates it."""
    refused = await obeyed(scene, "load", "load_lora", lora_name=name, lora_path=str(tmp_path))
    assert "the adapter name " in refused.error
    assert refused.error.isprintable()
    assert engine.commands == []


async def test_commands_run_in_order_and_have_results(
    scene: Scene, engine: Fragile, epoch: int, tmp_path: Path
) -> None:
    engine.gate.clear()
    for name in ("x", "y"):
        await order(scene, f"load-{name}", "load_lora", lora_name=name, lora_path=str(tmp_path))
    await order(scene, "list")
    await until(lambda: engine.commands)
    assert engine.commands == ["x"], "the second waits for the first"
    engine.gate.set()
    await until(lambda: len(answers(scene)) == 3)
    assert engine.commands == ["x", "y", "list_loras"]
    done = scene.progress(CommandDone)
    assert [(one.command_id, one.action, one.loras) for one in done] == [
        ("load-x", "load_lora", ("x",)),
        ("load-y", "load_lora", ("x", "y")),
        ("list", "list_loras", ("x", "y")),
    ]
    assert {(one.worker_id, one.worker_epoch, one.owner_epoch) for one in done} == {("w1", epoch, 0)}


@pytest.mark.usefixtures("epoch")
async def test_adapter_at_a_uri_is_loaded_from_the_cache_and_kept_while_it_is_used(
    scene: Scene, engine: Fragile, worker: Worker, tmp_path: Path
) -> None:
    uris = [written(tmp_path / name, files(name.encode() * 1_000)) for name in "ab"]
    worker.commands.adapters = AdapterCache(tmp_path / "cache", bytes_max=1_500)
    done = await obeyed(scene, "load", "load_lora", lora_name="a", lora_path=uris[0])
    assert done.loras == ("a",)
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert done.lora_digest == folder.name
    full = await obeyed(scene, "full", "load_lora", lora_name="b", lora_path=uris[1])
    assert "has no room for" in full.error
    assert (await obeyed(scene, "list")).loras == ("a",)
    await obeyed(scene, "unload", "unload_lora", lora_name="a")
    engine.error = EngineRefused("no free slot")
    await obeyed(scene, "refused", "load_lora", lora_name="a", lora_path=uris[0])
    engine.error = None
    assert (await obeyed(scene, "now", "load_lora", lora_name="b", lora_path=uris[1])).loras == ("b",)


async def test_mock_engine_has_a_limit_of_adapters(tmp_path: Path) -> None:
    engine = MockEngine(engine_config(), loras=MockLoras(slots=1))
    assert (await engine.start(HOSTED_SPEC)).max_loras == 1
    load = Command(action="load_lora", lora_name="x", lora_path=str(tmp_path))
    assert await engine.command(load) == await engine.command(load) == ("x",)
    with pytest.raises(EngineRefused, match="all 1 slots for adapters are taken; unload one first"):
        await engine.command(msgspec.structs.replace(load, lora_name="y"))


@pytest.mark.usefixtures("epoch")
async def test_an_id_that_is_used_again_is_another_command(scene: Scene, engine: Fragile, worker: Worker) -> None:
    await order(scene, "nightly", nonce=1)
    await order(scene, "nightly", "clear_kv_blocks", nonce=2)
    await until(lambda: len(answers(scene)) == 2)
    assert engine.commands == ["list_loras", "clear_kv_blocks"]
    assert worker.commands.repeated == 0


@pytest.mark.usefixtures("epoch")
async def test_repeated_command_runs_once_and_replies_to_the_new_owner(
    scene: Scene, engine: Fragile, worker: Worker, tmp_path: Path
) -> None:
    first = {"action": "load_lora", "lora_name": "x", "lora_path": str(tmp_path)}
    engine.gate.clear()
    await order(scene, "c1", **first)
    await until(lambda: engine.commands)
    await order(scene, "c1", **first, owner_epoch=7)
    await until(lambda: worker.commands.repeated == 1)
    engine.gate.set()
    await until(lambda: answers(scene))
    await obeyed(scene, "c2", **{**first, "lora_name": "y"})
    await obeyed(scene, "c1", **first, owner_epoch=9)
    assert engine.commands == ["x", "y"]
    # The repeated result does not hide adapters that were loaded later.
    assert [(one.command_id, one.owner_epoch, one.loras) for one in scene.progress(CommandDone)] == [
        ("c1", 7, ("x",)),
        ("c2", 0, ("x", "y")),
        ("c1", 9, ("x", "y")),
    ]


@pytest.mark.usefixtures("epoch")
async def test_refused_command_has_a_reason_and_no_effect(scene: Scene, engine: Fragile) -> None:
    for name, action, error in (("long", "list_loras", "x" * 5000), ("mute", "sleep", "")):
        engine.error = EngineRefused(error)
        await obeyed(scene, name, action)
    assert answers(scene) == [("long", "x" * ERROR_CHARS_MAX), ("mute", "the engine does not support sleep")]


@pytest.mark.usefixtures("epoch")
async def test_late_command_is_not_executed(scene: Scene, engine: Fragile) -> None:
    engine.gate.clear()
    await order(scene, "first")
    await until(lambda: engine.commands)
    await order(scene, "late", "sleep", timeout_us=0)
    await order(scene, "other", "pause")
    await until(lambda: scene.log.next_offset("work.default", 5) == 3)
    engine.gate.set()
    await until(lambda: len(answers(scene)) == 3)
    assert engine.commands == ["list_loras", "pause"]
    assert dict(answers(scene))["late"] == "it timed out while earlier commands were running"


@pytest.mark.usefixtures("epoch")
async def test_queued_commands_are_bounded(scene: Scene, engine: Fragile) -> None:
    engine.gate.clear()
    await order(scene, "first")
    await until(lambda: engine.commands)
    for number in range(WAITING_MAX + 1):
        await order(scene, f"c{number}")
    await until(lambda: answers(scene))
    full = f"the worker's queue of commands is full: {WAITING_MAX} are waiting"
    assert answers(scene) == [(f"c{WAITING_MAX}", full)]
    engine.gate.set()
    await until(lambda: len(answers(scene)) == WAITING_MAX + 2)


async def test_an_engine_that_breaks_ends_the_worker(scene: Scene, engine: Fragile, worker: Worker) -> None:
    engine.error = EngineError("out of memory")
    async with scene.running(worker) as task:
        await order(scene, "c")
        await asyncio.wait([task])
        error = task.exception()
    assert isinstance(error, ExceptionGroup)
    assert error.subgroup(EngineError) is not None
    assert answers(scene) == []
    await until(lambda: scene.lease() is None)


async def test_result_of_a_command_across_epochs_is_reported_in_the_next(
    scene: Scene, engine: Fragile, worker: Worker, epoch: int, tmp_path: Path
) -> None:
    engine.gate.clear()
    await order(scene, "c", "load_lora", lora_name="x", lora_path=str(tmp_path))
    await order(scene, "dropped", "sleep")
    await until(lambda: engine.commands and worker.commands.waiting == 1)
    await scene.lose(epoch)
    await until(lambda: scene.holds("t1.2"))
    engine.gate.set()
    await until(lambda: worker.commands.loras)
    assert answers(scene) == []
    again = await scene.admit(worker, "t1.2")
    await until(lambda: answers(scene))
    (generated,) = scene.progress(CommandDone)
    assert (generated.command_id, generated.worker_epoch, generated.loras) == ("c", again, ("x",))
    assert engine.commands == ["x"], "what had not begun belongs to the epoch that is over"


async def test_adapters_stay_loaded_in_the_next_epoch(scene: Scene, worker: Worker, epoch: int, tmp_path: Path) -> None:
    await obeyed(scene, "c", "load_lora", lora_name="x", lora_path=str(tmp_path))
    await scene.lose(epoch)
    await until(lambda: scene.holds("t1.2"))
    assert worker.spec.loras == ("x",)


# The mock engine


def finished(scene: Scene) -> list[str]:
    return [event.request_id for event in scene.progress(RequestFinished)]


async def test_a_cache_is_cleared_while_nothing_runs(scene: Scene) -> None:
    async with scene.serving(scene.worker()):
        await scene.finish("a", range(8))
        assert isinstance(await obeyed(scene, "c", "clear_kv_blocks"), CommandDone)
        await until(lambda: isinstance(scene.kv()[-1], CacheCleared))
        await scene.finish("b", range(8))
    assert [type(event) for event in scene.kv()] == [BlocksStored, CacheCleared, BlocksStored]
    assert scene.progress(RequestFinished)[1].cached_tokens == 0


async def test_a_cache_in_use_is_not_cleared(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=0.001)):
        await scene.ask("a", range(8), 30)
        await obeyed(scene, "p", "pause")
        refused = await obeyed(scene, "c", "clear_kv_blocks")
    assert "KV blocks are in use by running requests" in refused.error


async def test_paused_engine_keeps_requests_and_cache(scene: Scene) -> None:
    async with scene.serving(scene.worker()):
        await scene.finish("before", range(8))
        await obeyed(scene, "p", "pause")
        await scene.ask("a", range(8))
        await obeyed(scene, "list")
        assert finished(scene) == ["before"]
        await obeyed(scene, "w", "wake_up")
        assert finished(scene) == ["before"], "who is paused does not sleep"
        await obeyed(scene, "r", "resume")
        await until(lambda: finished(scene) == ["before", "a"])
    assert scene.progress(RequestFinished)[1].cached_tokens == 4


async def test_engine_continues_without_cache_after_sleep(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=30.0)):
        await scene.ask("a", range(8), 40)
        await until(scene.tokens)
        await obeyed(scene, "s", "sleep", level=2)
        await until(lambda: isinstance(scene.kv()[-1], CacheCleared))
        await until(lambda: scene.loads() and scene.loads()[-1].kv_blocks_used == 0)
        assert scene.loads()[-1].waiting == 1
        assert finished(scene) == []
        await obeyed(scene, "w", "wake_up")
        await until(lambda: finished(scene) == ["a"])
    assert scene.progress(RequestFinished)[0].output_tokens == 40
    positions = [chunk.first_index for chunk in scene.chunks("a")]
    assert positions == sorted(set(positions))


# The end of a worker


LONG_S = 3600.0
SLOW = 2.0


def offered(scene: Scene) -> WorkerLease | None:
    lease = scene.lease()
    return None if lease is None else msgspec.msgpack.decode(lease.payload, type=WorkerLease)


def is_draining(scene: Scene) -> bool:
    found = offered(scene)
    return found is not None and found.draining


async def announce(scene: Scene, worker_id: str = "w1", epochs_later: int = 0) -> None:
    """Record the drain of the worker, as an owner would."""
    await until(lambda: is_draining(scene))
    epoch = scene.epoch + epochs_later
    await scene.append(FLEET, PARTITION, WorkerDraining(owner_epoch=0, worker_id=worker_id, worker_epoch=epoch))


async def gone(scene: Scene, worker: Worker, *, held: bool = True) -> None:
    """Check that only a released lease is left of the worker."""
    assert worker.life.state is State.DEREGISTERED
    assert worker.worker_epoch is None
    await until(lambda: scene.lease() is None and (scene.released() or not held))


def shown(worker: Worker, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(worker))
    return registry.get_sample_value(name, {"worker_id": "w1", **labels})


async def test_idle_worker_leaves_once_the_owner_has_recorded_its_drain(scene: Scene) -> None:
    worker = scene.worker()
    async with scene.running(worker) as task:
        await until(lambda: worker.life.state is State.HEALTHY)
        worker.drain(LONG_S)
        await announce(scene, epochs_later=1)
        await announce(scene, "w2")
        await asyncio.sleep(0)
        assert not task.done()
        assert offered(scene) == WorkerLease(spec=worker.spec, draining=True)
        await announce(scene)
        await task
    await gone(scene, worker)


async def test_a_worker_drains_by_command(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with scene.running(worker) as task:
        await scene.ask("a", [1], 30)
        await until(lambda: scene.tokens(TokensEmitted))
        await order(scene, "c", "drain")
        await announce(scene)
        await task
    assert [(one.command_id, one.action) for one in scene.progress(CommandDone)] == [("c", "drain")]
    assert {end.request_id: end.finish_reason for end in scene.tokens(ResponseEnded)} == {"a": "length"}
    await gone(scene, worker)


async def test_drain_finishes_requests_in_flight_and_late_ones(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with scene.running(worker) as task:
        await scene.ask("a", [1], 30)
        await until(lambda: scene.tokens(TokensEmitted))
        worker.drain(LONG_S)
        worker.drain(0.0)  # the first word counts
        await until(lambda: is_draining(scene))
        await scene.ask("b", [1], 5)
        await scene.ask("c", [1], 240)
        await announce(scene)
        await scene.ended("a", "b")
        assert not task.done()
        await scene.cancel("c")
        await task
    assert {end.request_id: end.finish_reason for end in scene.tokens(ResponseEnded)} == dict.fromkeys("ab", "length")
    assert worker.counters.handed_back == 0
    await gone(scene, worker)


async def test_drain_finishes_a_running_command(scene: Scene, engine: Fragile, worker: Worker) -> None:
    async with scene.running(worker) as task:
        engine.gate.clear()
        await order(scene, "c")
        await until(lambda: engine.commands)
        worker.drain(LONG_S)
        await announce(scene)
        # Once this is answered the worker knows what the owner wrote before it, and waits all the same.
        await scene.finish("a", [1])
        assert not task.done()
        engine.gate.set()
        await task
    assert [event.command_id for event in scene.progress(CommandDone)] == ["c"]
    await gone(scene, worker)


async def test_unfinished_requests_are_handed_over(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with scene.running(worker) as task:
        await scene.ask("a", [1], 200)
        await until(lambda: scene.tokens(TokensEmitted))
        worker.drain(0.0)
        await task
    assert scene.tokens(ResponseEnded) == []
    assert worker.counters.handed_back == 1
    assert shown(worker, "forebay_worker_handed_back_total") == 1
    await gone(scene, worker)


async def test_drain_does_not_wait_long_for_a_silent_owner(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "FACT_S", 0.01)
    worker = scene.worker()
    async with scene.running(worker) as task:
        worker.drain(LONG_S)
        await task
    await gone(scene, worker)


async def test_worker_lost_during_its_drain_does_not_rejoin(scene: Scene) -> None:
    worker = scene.worker(speedup=0.01)
    async with scene.running(worker) as task:
        await scene.ask("a", [1], 200)
        worker.drain(LONG_S)
        await until(lambda: is_draining(scene))
        assert worker.life.state is State.STOPPING
        await scene.lose(scene.epoch)
        await task
    await gone(scene, worker)


async def test_a_worker_that_was_not_admitted_leaves_at_once(scene: Scene) -> None:
    worker = scene.worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: scene.holds("t1"))
    assert worker.life.state is State.REGISTERED
    worker.drain(LONG_S)
    await task
    await gone(scene, worker)


async def test_worker_stopped_during_the_engine_start_takes_no_lease(
    scene: Scene, engine: Fragile, worker: Worker
) -> None:
    engine.started.clear()
    task = asyncio.create_task(worker.run())
    await until(lambda: engine.calls)
    assert worker.life.state is State.CREATED
    worker.drain(LONG_S)
    await task
    assert engine.calls == ["start", "stop"]
    await gone(scene, worker, held=False)


async def test_failed_engine_start_takes_no_lease(scene: Scene) -> None:
    class Dies(Fragile):
        async def start(self, _: WorkerSpec) -> WorkerSpec:
            raise EngineError("no weights in this directory")

    engine = Dies()
    worker = scene.worker(engine=engine)
    with pytest.raises(EngineError, match="no weights in this directory"):
        await worker.run()
    assert engine.calls == ["stop"]
    assert scene.lease() is None
    await gone(scene, worker, held=False)
    (failed,) = scene.progress(EngineFailed)
    assert (failed.worker_id, failed.worker_epoch) == (worker.spec.worker_id, None)
    assert failed.error == "no weights in this directory"


async def test_lease_of_a_broken_engine_is_released_while_the_log_is_unavailable(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = asyncio.Event()

    class Dies(Fragile):
        async def run(self, publish: Publish) -> None:
            await back.wait()
            raise EngineError("out of memory")

    append = scene.log.append

    async def away(drafts: Sequence[Draft]) -> list[int]:
        await asyncio.Event().wait()
        return await append(drafts)

    worker = scene.worker(engine=Dies())
    task = asyncio.create_task(worker.run())
    await scene.admit(worker, "t1")
    monkeypatch.setattr(scene.log, "append", away)
    back.set()
    await until(scene.released)
    assert not task.done()
    assert worker.life.state is not State.DEREGISTERED
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("how", ["sick", "hangs", "ends"])
async def test_broken_engine_ends_the_worker_and_releases_its_requests(
    scene: Scene, engine: Fragile, worker: Worker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_S", 0.005)
    monkeypatch.setattr(worker_module, "CHECK_TIMEOUT_S", 0.05)
    engine.ends = how == "ends"
    task = asyncio.create_task(worker.run())
    if how != "ends":
        await scene.admit(worker, "t1")
        await until(lambda: worker.life.state is State.HEALTHY)
        if how == "sick":
            engine.sick = EngineError("the engine core is dead")
        else:
            engine.hangs = True
    with pytest.raises(ExceptionGroup) as raised:
        await task
    (error,) = raised.value.exceptions
    assert isinstance(error, EngineError)
    expected = {
        "sick": "the engine core is dead",
        "hangs": "the engine did not reply to a health check within 0.05 s",
        "ends": "the engine stopped serving on its own",
    }
    assert str(error) == expected[how]
    (failed,) = scene.progress(EngineFailed)
    assert failed.error == expected[how]
    assert (failed.worker_epoch is None) == (how == "ends"), "the log names its epoch"
    assert engine.calls == ["start", "stop"]
    assert scene.tokens(ResponseEnded) == []
    await gone(scene, worker, held=how != "ends")


async def test_engine_that_does_not_stop_is_abandoned(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Sticky(Fragile):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(worker_module, "ENGINE_STOP_S", 0.01)
    worker = scene.worker(engine=Sticky())
    async with scene.serving(worker):
        pass
    assert "the engine did not stop within 0.01 s" in caplog.text
    await gone(scene, worker)


async def test_worker_is_ready_as_a_healthy_member(scene: Scene, engine: Fragile, worker: Worker) -> None:
    probes = Probes()
    assert (probes.ready(), probes.live()) == ((False, "created"), (True, "created"))
    engine.started.clear()
    engine.hangs = True
    probes.worker = worker
    worker.health.checked_s -= 2 * LIVE_S  # a model that loads for long is alive
    task = asyncio.create_task(worker.run())
    await until(lambda: engine.calls)
    assert (probes.ready(), probes.live()) == ((False, "created"), (True, "created"))
    assert shown(worker, "forebay_worker_member") == 0
    engine.started.set()
    await until(lambda: scene.holds("t1"))
    assert (probes.ready(), probes.live()) == ((False, "registered"), (True, "registered"))
    await scene.admit(worker, "t1")
    states = {state: shown(worker, "forebay_worker_state", state=state) for state in State}
    assert states == {state: float(state is State.RUNNING) for state in State}
    assert probes.ready() == (False, "running")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (probes.ready(), probes.live()) == ((False, "deregistered"), (False, "deregistered"))
    await gone(scene, worker)


async def test_worker_with_a_blocked_event_loop_is_not_live(scene: Scene) -> None:
    probes = Probes()
    worker = probes.worker = scene.worker()
    async with scene.serving(worker):
        await until(lambda: probes.ready()[0])
        worker.health.checked_s -= LIVE_S + 1
        well, text = probes.live()
        assert (well, text.startswith("healthy, no health check for 31 s")) == (False, True)


async def test_a_worker_that_lost_its_epoch_is_not_ready_until_it_has_another(scene: Scene) -> None:
    probes = Probes()
    worker = probes.worker = scene.worker()
    async with scene.serving(worker):
        await until(lambda: probes.ready() == (True, "healthy"))
        assert probes.live() == (True, "healthy")
        assert shown(worker, "forebay_worker_state", state="healthy") == 1
        await scene.lose(scene.epoch)
        await until(lambda: scene.holds("t1.2"))
        assert probes.ready() == (False, "registered")
        await scene.admit(worker, "t1.2")
        await until(lambda: probes.ready() == (True, "healthy"))


async def test_lease_has_the_spec_of_the_started_engine(scene: Scene, worker: Worker) -> None:
    async with scene.serving(worker):
        found = offered(scene)
        assert found is not None
        assert found.spec.kv_blocks_total == 2 * scene.spec().kv_blocks_total
        (joined,) = scene.events(FLEET, WorkerJoined)
        assert joined.spec == found.spec
