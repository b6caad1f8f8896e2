"""The system of `forebay up`: log, leases, owner, workers and ingress on one event loop of one process."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from forebay import runtime
from forebay.events.control import DisaggConfig
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import FLEET, TOKENS
from forebay.ingress.child_process import ChildProcess
from forebay.ingress.drain import IngressDrain
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.front import Front
from forebay.ingress.group import Readiness
from forebay.ingress.http.app import IngressApp, build_app
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.served_models import ServedModels
from forebay.ingress.settings import IngressSettings
from forebay.live.heartbeats import owner_heartbeat
from forebay.live.owner.owner import Owner
from forebay.live.owner.retention import Retention, retention_metrics
from forebay.live.owner.start_check import open_checked
from forebay.processes.embedded_group import EmbeddedGroup, EmbeddedSettings, EngineRestarts
from forebay.processes.listening import Hosts, listening, serve_http
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import until_signal
from forebay.processes.shutdown import stop_notice
from forebay.runtime.metrics import collector, counter
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import WorkerMetrics
from forebay.workers.runtime.worker import ENGINE_STOP_S, Worker

END_S = 10.0  # seconds until the process is ended by force after its requests; a stop takes about one

# Called once requests can be served, with the effective settings of each model.
OnReady = Callable[[Mapping[str, DisaggConfig]], None]


class Tasks:
    """Tasks of the system."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self._owners: list[tuple[Owner, asyncio.Task[None]]] = []

    def run(self, part: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(self._group.create_task(part, name=name))

    def own(self, owner: Owner, group: str) -> None:
        """Start the task of the owner of a group, which `stop` stops separately."""
        self._owners.append((owner, self._group.create_task(owner.run(), name=f"owner of {group}")))

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():  # noqa: ASYNC110 - these states set no event
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop all tasks, the owners first, so that they do not report workers as lost while their engines stop."""
        for task in self._tasks:
            task.cancel()
        for owner, _ in self._owners:
            await owner.stop()
        for owner, task in self._owners:
            await task
            await owner.close()
        # Without a second cancel, which would interrupt engines that are stopping.
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running_tasks() -> AsyncIterator[Tasks]:
    """Yield the tasks of a system, and stop them after the body. If a task fails, end the body.

    Raises an error of a task or of the body in a group.
    """
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        yield tasks
        await tasks.stop()


async def run(settings: EmbeddedSettings, on_ready: OnReady) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError, EngineError or LogError."""
    # An ingress of several models loads their tokenizers from the log.
    engine = settings.models[0].engine
    only = Model(engine.settings.model, engine.context_tokens) if len(settings.models) == 1 else None
    restarts = EngineRestarts()
    groups = [EmbeddedGroup(settings, model, restarts, has_card=only is None) for model in settings.models]
    drains: list[IngressDrain] = []  # of the ingress, once requests can be served

    async def serve(listeners: list[socket.socket], hosts: Hosts) -> None:
        async with (
            _running(settings, groups, restarts, only, hosts) as (app, front, disagg),
            _console(settings, groups[0].partition) as start_console,
        ):

            def started() -> None:
                on_ready(disagg)
                start_console()

            restarts.is_serving = True
            drains.append(front.drain)
            await serve_http(app, front, listeners, settings.endpoint, settings.drain_s, started)

    async def stop() -> None:
        for drain in drains:
            announce(stop_notice("", drain.in_flight, settings.drain_s))
            drain.begin()
        if not drains:  # Nothing has to finish yet. Start-up may take long with a large log or fleet.
            serving.cancel()

    def hurry() -> None:
        for drain in drains:
            drain.hurry()

    with listening(settings.endpoint, settings.ingress) as (listeners, hosts):
        serving = asyncio.create_task(serve(listeners, hosts), name="system")
        await until_signal(serving, stop=stop, stop_s=settings.drain_s + END_S + ENGINE_STOP_S, hurry=hurry)


@asynccontextmanager
async def _console(settings: EmbeddedSettings, partition: int) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that starts the process of the console, if there is one, which ends with the body."""
    child = None
    if settings.console is not None:
        console = msgspec.structs.replace(settings.console, partition=partition)
        child = ChildProcess(settings.console_module, msgspec.json.encode(console))
    starting: list[asyncio.Task[None]] = []

    def start() -> None:
        if child is not None:
            starting.append(asyncio.create_task(child.send(b"{}"), name="console"))

    try:
        yield start
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        if child is not None:
            await child.kill()


@asynccontextmanager
async def _running(
    settings: EmbeddedSettings,
    groups: Sequence[EmbeddedGroup],
    restarts: EngineRestarts,
    only: Model | None,
    hosts: Hosts,
) -> AsyncIterator[tuple[IngressApp, Front, dict[str, DisaggConfig]]]:
    """Start everything except the HTTP listener, and wait until requests can be served. Stop it all after the body.

    The settings in effect by model include what an operator set in an earlier process on the same log.
    """
    async with AsyncExitStack() as stack:
        names = [group.name for group in groups]
        opened = await open_checked(settings.log, names, settings.policies, sync=settings.log_sync)
        log = opened.log
        stack.callback(log.close)
        for group in groups:
            await group.store_card(log)
        leases = embedded_leases()
        keeper = LeaseKeeper(leases, ttl_s=settings.lease_ttl_s)
        keeper.start()
        stack.push_async_callback(keeper.stop)
        registry = process_registry()
        if settings.spans is not None:
            from forebay.processes.spans import exporting_beside  # noqa: PLC0415 - it needs an extra

            await stack.enter_async_context(exporting_beside(log, registry, settings.spans, "embedded"))
        tasks = await stack.enter_async_context(running_tasks())
        for group in groups:
            group.create(opened, leases, keeper)

        def workers() -> list[Worker]:
            return [worker for group in groups for worker in group.workers]

        def serving() -> int:
            return sum(worker.worker_epoch is not None for worker in workers())

        for group in groups:
            for place, worker in enumerate(group.workers):
                tasks.run(group.run_worker(place, serving), worker.spec.worker_id)
        # Real engines report their sizes only after their start, and the pools are configured with these.
        await tasks.until(lambda: all(worker.life.state is not State.CREATED for worker in workers()))
        registry.register(_workers_metrics(workers, restarts))
        for group in groups:
            await group.start_owner(registry)
            tasks.own(group.owner, group.name)
        _start_retention(settings, log, groups, tasks, registry)
        source = None
        if settings.log is not None:
            source = LogSource(path=str(settings.log.absolute()), policies=tuple(settings.policies))
        explainer = Explainer(source)
        stack.push_async_callback(explainer.close)
        await tasks.until(lambda: all(group.is_admitted() for group in groups))
        by_name = {group.name: group for group in groups}
        ingress = replace(settings.ingress, incarnation=runtime.random_id(), has_lease=False)
        if only is not None:
            ingress = replace(ingress, block_size=groups[0].block_size)
        async with serving_models(ingress, log, registry, tasks, by_name, only) as models:
            app = build_app(models, registry, explainer, hosts, lambda name: by_name[name].status())
            yield app, models.front, {group.name: group.disagg() for group in groups}


@collector
def _workers_metrics(workers: Callable[[], Sequence[Worker]], restarts: EngineRestarts) -> Iterator[Metric]:
    """Prometheus collector for the current workers, and for the failures of their engines."""
    yield from WorkerMetrics(*workers()).collect()
    text = "Failures of engines of `forebay up`."
    yield counter("forebay_worker_engine_failures", text, restarts.failures, "worker_id")


def _start_retention(
    settings: EmbeddedSettings,
    log: SqliteLog,
    groups: Sequence[EmbeddedGroup],
    tasks: Tasks,
    registry: CollectorRegistry,
) -> None:
    if settings.log_limits.wal_bytes:
        log.limit_wal(settings.log_limits.wal_bytes)
    retentions = [Retention(log, group.owner, group.partition, settings.log_limits) for group in groups]
    for retention in retentions:
        retention.peers = [peer for peer in retentions if peer is not retention]
        tasks.run(retention.run(), "retention")
    registry.register(retention_metrics(log, *retentions))


# --- the ingress, and its models --------------------------------------------------------------------------------------


class OwnerInProcess:
    """Owner of a group that is a task of this process, so it needs no heartbeats, and the process ends if it fails."""

    owner_age_s = 0.0
    has_owner = True

    def __init__(self, group: EmbeddedGroup) -> None:
        self.group = group.name
        self._owner = group.owner
        self._fleet_read = -1
        self._beat: RouterHeartbeat | None = None

    @property
    def owner(self) -> RouterHeartbeat:
        world = self._owner.world
        fleet_read = world.view.get(FLEET.name, 0)
        if self._beat is None or fleet_read != self._fleet_read:
            self._beat, self._fleet_read = owner_heartbeat(world, self.group, "embedded"), fleet_read
        return self._beat

    def standbys(self) -> Sequence[RouterHeartbeat]:
        """Return no standbys, because the process has none."""
        return ()

    async def follow(self, partition: int) -> None:
        """Wait until cancelled, because `owner` is always current."""
        del partition
        await asyncio.Event().wait()


class EmbeddedReadiness(Readiness):
    """Readiness of a group of this process, from the state of its owner, which is newer than any heartbeat."""

    def __init__(self, group: EmbeddedGroup, directory: Directory) -> None:
        super().__init__(OwnerInProcess(group), directory)
        self._group = group
        layouts = (worker.spec.kv_layout for worker in group.workers)
        layout = next((layout for layout in layouts if layout is not None), None)
        if layout is not None:  # a worker with another layout is not admitted
            self.details["kv_transport"] = layout.connector

    def partition(self) -> int | None:
        return self._group.partition  # the log has no placement while it has only one model

    def problem(self) -> str | None:
        return self._group.why_not_ready()


@asynccontextmanager
async def serving_models(
    settings: IngressSettings,
    log: SqliteLog,
    registry: CollectorRegistry,
    tasks: Tasks,
    groups: Mapping[str, EmbeddedGroup],
    only: Model | None,
) -> AsyncIterator[ServedModels]:
    """Yield the models: `only` with the tokenizer of its directory, or all with tokenizers from the cards on the log.

    Raises ConfigError if a model cannot be loaded.
    """
    directory, store = Directory(log), ModelStore(log)
    await directory.start()
    if only is None:
        await store.start()
    metrics = IngressMetrics(registry, None if only is None else settings.model_name)
    front = Front(log, settings, metrics, await log.end(TOKENS.name, settings.reply_slot), only)
    await front.keys.start()
    ready = {name: EmbeddedReadiness(group, directory) for name, group in groups.items()}
    with tempfile.TemporaryDirectory(prefix="forebay-models-") as folder:
        models = ServedModels(front, directory, store, Path(folder), lambda _: None, ready.get, only)
        tasks.run(front.run(), "ingress")
        tasks.run(front.keys.run(), "keys")
        tasks.run(directory.run(), "directory")
        tasks.run(models.run(), "models")
        await tasks.until(lambda: models.names == sorted(groups))
        await models.load_all()
        yield models
