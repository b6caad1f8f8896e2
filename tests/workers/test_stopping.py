"""How a worker ends: drained, at once, or because its engine is broken; never with a lease left over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.control import Command
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLease, WorkerLost, WorkerSpec
from forebay.events.progress import CommandDone, EngineFailed
from forebay.events.tokens import ResponseEnded, TokensEmitted
from forebay.events.topics import FLEET
from forebay.events.work import WorkCancelled, WorkerCommand
from forebay.transport.base import Draft
from forebay.workers.engine import EngineError, Publish
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime import life_cycle as life
from forebay.workers.runtime import worker as worker_module
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import LIVE_S, Probes, WorkerMetrics
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import PARTITION, Scene, engine_config, until, work_item

LONG_S = 3600.0
SLOW = 2.0


def offered(scene: Scene) -> WorkerLease | None:
    lease = scene.lease()
    return None if lease is None else msgspec.msgpack.decode(lease.payload, type=WorkerLease)


def is_draining(scene: Scene) -> bool:
    found = offered(scene)
    return found is not None and found.draining


async def announce(scene: Scene, epoch: int, worker_id: str = "w1") -> None:
    """Record the drain of the worker, as an owner would."""
    await until(lambda: is_draining(scene))
    fact = WorkerDraining(owner_epoch=0, worker_id=worker_id, worker_epoch=epoch)
    await scene.append(FLEET, PARTITION, fact)


@asynccontextmanager
async def admitted(scene: Scene, worker: Worker) -> AsyncIterator[tuple["asyncio.Task[None]", int]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task, await scene.admit(worker, "t1")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
    async with admitted(scene, worker) as (task, epoch):
        await until(lambda: worker.life.state is State.HEALTHY)
        worker.drain(LONG_S)
        await announce(scene, epoch + 1)
        await announce(scene, epoch, "w2")
        await asyncio.sleep(0)
        assert not task.done()
        assert offered(scene) == WorkerLease(spec=worker.spec, draining=True)
        await announce(scene, epoch)
        await task
    await gone(scene, worker)


async def test_a_worker_drains_by_command(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 30, worker_epoch=epoch))
        await until(lambda: scene.tokens(TokensEmitted))
        await scene.send(
            WorkerCommand(
                command_id="c",
                command=Command(action="drain"),
                owner_epoch=0,
                worker_epoch=epoch,
                timeout_us=60_000_000,
            )
        )
        await announce(scene, epoch)
        await task
    assert [(one.command_id, one.action) for one in scene.progress(CommandDone)] == [("c", "drain")]
    assert {end.request_id: end.finish_reason for end in scene.tokens(ResponseEnded)} == {"a": "length"}
    await gone(scene, worker)


async def test_drain_finishes_requests_in_flight_and_late_ones(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 30, worker_epoch=epoch))
        await until(lambda: scene.tokens(TokensEmitted))
        worker.drain(LONG_S)
        worker.drain(0.0)  # the first word counts
        await until(lambda: is_draining(scene))
        await scene.send(work_item("b", [1], 5, worker_epoch=epoch))
        await announce(scene, epoch)
        await task
    ends = {end.request_id: end.finish_reason for end in scene.tokens(ResponseEnded)}
    assert ends == {"a": "length", "b": "length"}
    assert worker.counters.handed_back == 0
    await gone(scene, worker)


async def test_a_drain_ends_when_the_last_request_is_cancelled(scene: Scene) -> None:
    worker = scene.worker(speedup=0.01)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 200, worker_epoch=epoch))
        await until(lambda: scene.loads() and scene.loads()[-1].running)
        worker.drain(LONG_S)
        await announce(scene, epoch)
        await scene.send(WorkCancelled(request_id="a", attempt=1, owner_epoch=0, worker_epoch=epoch))
        await task
    assert scene.tokens(ResponseEnded) == []
    await gone(scene, worker)


async def test_drain_finishes_a_running_command(scene: Scene) -> None:
    engine = Fragile()
    worker = scene.worker(engine=engine)
    async with admitted(scene, worker) as (task, epoch):
        engine.reported = asyncio.Event()
        order = Command(action="list_loras")
        reported = WorkerCommand(
            command_id="c", command=order, owner_epoch=0, worker_epoch=epoch, timeout_us=60_000_000
        )
        await scene.send(reported)
        await until(lambda: "command" in engine.calls)
        worker.drain(LONG_S)
        await announce(scene, epoch)
        # Once this is answered the worker knows what the owner wrote before it, and waits all the same.
        await scene.send(work_item("a", [1], 2, worker_epoch=epoch))
        await until(lambda: scene.tokens(ResponseEnded))
        assert not task.done()
        engine.reported.set()
        await task
    assert [event.command_id for event in scene.progress(CommandDone)] == ["c"]
    await gone(scene, worker)


async def test_unfinished_requests_are_handed_over(scene: Scene) -> None:
    worker = scene.worker(speedup=SLOW)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 200, worker_epoch=epoch))
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
    async with admitted(scene, worker) as (task, _):
        worker.drain(LONG_S)
        await task
    await gone(scene, worker)


async def test_worker_lost_during_its_drain_does_not_rejoin(scene: Scene) -> None:
    worker = scene.worker(speedup=0.01)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 200, worker_epoch=epoch))
        worker.drain(LONG_S)
        await until(lambda: is_draining(scene))
        assert worker.life.state is State.STOPPING
        lost = WorkerLost(owner_epoch=0, worker_id="w1", worker_epoch=epoch, reason="test")
        await scene.append(FLEET, PARTITION, lost)
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


async def test_cancelled_drain_leaks_nothing(scene: Scene) -> None:
    worker = scene.worker(speedup=0.01)
    async with admitted(scene, worker) as (task, epoch):
        await scene.send(work_item("a", [1], 200, worker_epoch=epoch))
        worker.drain(LONG_S)
        await until(lambda: is_draining(scene))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    await gone(scene, worker)


class Fragile(MockEngine):
    def __init__(self) -> None:
        super().__init__(engine_config(), speedup=1000.0)
        self.calls: list[str] = []
        self.started = asyncio.Event()
        self.started.set()
        self.sick: BaseException | None = None
        self.hangs = self.ends = False
        self.reported = asyncio.Event()
        self.reported.set()

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
        self.calls.append("command")
        await self.reported.wait()
        return await super().command(command)

    async def stop(self) -> None:
        self.calls.append("stop")


async def test_worker_stopped_during_the_engine_start_takes_no_lease(scene: Scene) -> None:
    engine = Fragile()
    engine.started.clear()
    worker = scene.worker(engine=engine)
    task = asyncio.create_task(worker.run())
    await until(lambda: engine.calls)
    assert worker.life.state is State.CREATED
    worker.drain(LONG_S)
    await task
    assert engine.calls == ["start", "stop"]
    await gone(scene, worker, held=False)


def failures(scene: Scene) -> list[EngineFailed]:
    return [event for event in scene.progress() if isinstance(event, EngineFailed)]


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
    (failed,) = failures(scene)
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
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_S", 0.005)
    monkeypatch.setattr(worker_module, "CHECK_TIMEOUT_S", 0.05)
    engine = Fragile()
    engine.ends = how == "ends"
    worker = scene.worker(engine=engine)
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
    (failed,) = failures(scene)
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


async def test_worker_is_ready_as_a_healthy_member(scene: Scene) -> None:
    engine, probes = Fragile(), Probes()
    assert (probes.ready(), probes.live()) == ((False, "created"), (True, "created"))
    engine.started.clear()
    engine.hangs = True
    worker = probes.worker = scene.worker(engine=engine)
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
    async with scene.serving(worker) as epoch:
        await until(lambda: probes.ready() == (True, "healthy"))
        assert probes.live() == (True, "healthy")
        assert shown(worker, "forebay_worker_state", state="healthy") == 1
        lost = WorkerLost(owner_epoch=0, worker_id="w1", worker_epoch=epoch, reason="test")
        await scene.append(FLEET, PARTITION, lost)
        await until(lambda: scene.holds("t1.2"))
        assert probes.ready() == (False, "registered")
        await scene.admit(worker, "t1.2")
        await until(lambda: probes.ready() == (True, "healthy"))


async def test_lease_has_the_spec_of_the_started_engine(scene: Scene) -> None:
    worker = scene.worker(engine=Fragile())
    async with scene.serving(worker):
        found = offered(scene)
        assert found is not None
        assert found.spec.kv_blocks_total == 2 * scene.spec().kv_blocks_total
        (joined,) = scene.events(FLEET, WorkerJoined)
        assert joined.spec == found.spec
