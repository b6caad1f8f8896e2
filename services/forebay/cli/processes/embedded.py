"""The system of `forebay up`: log, leases, owner, workers and ingress on one event loop of one process."""

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from forebay.cli.common.errors import cause_of
from forebay.cli.common.logs import announce
from forebay.cli.common.process_metrics import process_registry
from forebay.cli.common.shutdown import end_within, stop_notice
from forebay.cli.processes.engines import built, playing
from forebay.cli.processes.listening import Hosts, listening
from forebay.cli.processes.settings import EmbeddedSettings
from forebay.console.settings import ConsoleSettings
from forebay.core.state.fleet import WorkerPhase
from forebay.core.world import World
from forebay.events.base import unpack_u64
from forebay.events.control import DisaggConfig, PoolConfigured
from forebay.events.fleet import WorkerSpec
from forebay.events.snapshots import IndexBlocks
from forebay.events.topics import TOKENS
from forebay.ingress.child_process import ChildProcess
from forebay.ingress.errors import Unusable
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.http.app import build_app
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.http.protocol import ConnectionLimits, connections_allowed
from forebay.ingress.http.server import build_server, serve_until_drained
from forebay.ingress.ingress import Ingress
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.readiness import NO_PREFILL_WORKER, NO_WORKER
from forebay.ingress.served import OneModel
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.retention import Retention
from forebay.live.owner.retention_metrics import RetentionMetrics
from forebay.live.owner.start_check import open_checked
from forebay.replay.status import missing_worker, owner_status
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engine import Engine
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.kv_metrics import kv_path
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import WorkerMetrics
from forebay.workers.runtime.worker import Worker

logger = logging.getLogger(__name__)

CONSOLE = "forebay.cli.console.beside"
PARTITION = 0  # of the control topics: one process serves one group
END_S = 10.0  # seconds until the process is ended by force after a second signal; a stop takes about one

OnReady = Callable[[DisaggConfig], None]  # called once requests can be served, with the effective settings
Caches = dict[tuple[str, int], list[int]]
Engines = Sequence[tuple[Engine, WorkerSpec]]


@dataclass(frozen=True, slots=True)
class _System:
    ingress: Ingress
    app: FastAPI
    explainer: Explainer
    disagg: DisaggConfig  # in effect: includes what an operator set in an earlier process on the same log


def run(settings: EmbeddedSettings, on_ready: OnReady) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        Unusable: the system cannot start with these settings.
        EngineError: an engine failed.
        LogError: the log failed.
    """
    model = Model(settings.engine.settings.model)
    engines = [
        built(
            playing(settings.engine, place.role),
            name,
            pool=place.pool,
            taints=settings.taints[name],
            kv_events=settings.kv_events,
        )
        for name, place in settings.places.items()
    ]
    with (
        listening(settings.endpoint, settings.ingress) as (listener, hosts),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(settings, engines, model, listener, hosts, on_ready))


async def _serve(
    settings: EmbeddedSettings,
    engines: Engines,
    model: Model,
    listener: socket.socket,
    hosts: Hosts,
    on_ready: OnReady,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def stop_at_once() -> None:
        stop.set()
        main.cancel()

    # Before requests can be served nothing has to finish. Start-up may take long with a large log or fleet.
    _on_signals(loop, stop_at_once)
    try:
        async with _running(settings, engines, model, hosts) as system:
            _on_signals(loop, stop.set)
            async with _console(settings.console) as start_console:

                def ready(disagg: DisaggConfig) -> None:
                    on_ready(disagg)
                    start_console()

                await _serve_until(stop, system, listener, settings.endpoint, ready, settings.drain_s)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        main.uncancel()


@asynccontextmanager
async def _console(settings: ConsoleSettings | None) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that starts the process of the console, if there is one, which ends with the body."""
    child = None if settings is None else ChildProcess(CONSOLE, msgspec.json.encode(settings))
    starting: list[asyncio.Task[None]] = []

    def start() -> None:
        if child is not None:
            starting.append(asyncio.create_task(child.send(b"{}"), name="console"))

    try:
        yield start
    finally:
        await _ended(starting)
        if child is not None:
            await child.kill()


def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)


async def _serve_until(
    stop: asyncio.Event,
    system: _System,
    listener: socket.socket,
    endpoint: Endpoint,
    on_ready: OnReady,
    drain_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    limits = ConnectionLimits(system.ingress.metrics.reject, connections_allowed())
    server = build_server(system.app, lambda: on_ready(system.disagg), limits, endpoint.tls)
    ingress, drain = system.ingress, system.ingress.drain
    serving = serve_until_drained(server, listener, drain, ingress.front.slot.interrupt_all, drain_s)

    def end_at_once() -> None:
        end_within(END_S, "a second signal")
        drain.hurry()

    async def drain_at_signal() -> None:
        await stop.wait()
        _on_signals(loop, end_at_once)
        announce(stop_notice("", drain.in_flight, drain_s))
        drain.begin()

    stopping = loop.create_task(drain_at_signal(), name="signal")
    try:
        await serving
    finally:
        stopping.cancel()
    await system.explainer.close()


@asynccontextmanager
async def _running(settings: EmbeddedSettings, engines: Engines, model: Model, hosts: Hosts) -> AsyncIterator[_System]:
    """Start everything except the HTTP listener, and wait until requests can be served. Stop it all after the body."""
    async with AsyncExitStack() as stack:
        log, standby = await open_checked(settings.log, PARTITION, settings.policies, sync=settings.log_sync)
        stack.callback(log.close)
        leases = embedded_leases()
        keeper = LeaseKeeper(leases, ttl_s=settings.lease_ttl_s)
        keeper.start()
        stack.push_async_callback(keeper.stop)
        tasks = await stack.enter_async_context(_tasks())
        workers = [
            Worker(log, keeper, spec, engine, token=uuid.uuid4().hex, group=spec.model) for engine, spec in engines
        ]
        for worker in workers:
            tasks.run(worker.run(), worker.spec.worker_id)
        # Real engines report their sizes only after their start, and the pool is configured with these.
        await tasks.until(lambda: all(worker.life.state is not State.CREATED for worker in workers))
        block_size = _block_size(workers)
        owner = Owner(log, leases, _group(settings, block_size))
        registry = process_registry()
        registry.register(OwnerMetrics(owner, settings.engine.settings.model_name))
        registry.register(WorkerMetrics(*workers))
        await owner.start(standby)
        caches = _warmed(owner, engines)
        tasks.own(owner)
        retention = Retention(log, owner, PARTITION, settings.log_limits)
        registry.register(RetentionMetrics(log, retention))
        tasks.run(retention.run(), "retention")
        ingress = await _ingress(settings, block_size, log, model, owner, registry)
        layout = next((worker.spec.kv_layout for worker in workers if worker.spec.kv_layout is not None), None)
        if layout is not None:  # a worker with another layout is not admitted
            ingress.ready_details["kv_transport"] = kv_path(layout)
        tasks.run(ingress.run(), "ingress")
        await tasks.until(lambda: all(_admitted(owner, worker, caches) for worker in workers))
        allowed = tuple(settings.policies)
        source = None if settings.log is None else LogSource(path=str(settings.log.absolute()), policies=allowed)
        explainer = Explainer(source)
        stack.push_async_callback(explainer.close)
        disagg = _disagg(owner.world, settings)
        name = settings.engine.settings.model_name
        app = build_app(
            OneModel(ingress), registry, explainer, hosts, lambda: owner_status(log, PARTITION, name, owner.world)
        )
        yield _System(ingress, app, explainer, disagg)


class _Tasks:
    """Tasks of the system. If a task fails, the main task is cancelled and raises the error."""

    def __init__(self, main: "asyncio.Task[Any]") -> None:
        self.error: BaseException | None = None
        self._main = main
        self._tasks: list[asyncio.Task[None]] = []
        self._owner: tuple[Owner, asyncio.Task[None]] | None = None

    def run(self, part: Coroutine[Any, Any, None], name: str) -> None:
        """Start `part` as a task with this name."""
        self._tasks.append(self._task(part, name))

    def own(self, owner: Owner) -> None:
        """Start the task of the owner, which `stop` stops separately."""
        self._owner = owner, self._task(owner.run(), "owner")

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` returns true."""
        while not reached():  # noqa: ASYNC110 - these states set no event
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop all tasks, the owner first, so that it does not report workers as lost while their engines stop."""
        for task in self._tasks:
            task.cancel()
        if self._owner is not None:
            owner, task = self._owner
            await owner.stop()
            await task
            await owner.close()
        # Without a second cancel, which would interrupt engines that are stopping.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def abandon(self) -> None:
        """Cancel the remaining tasks."""
        await _ended([*self._tasks, *([] if self._owner is None else [self._owner[1]])])

    def _task(self, part: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and self.error is None and (error := task.exception()) is not None:
            self.error = error
            self._main.cancel()


@asynccontextmanager
async def _tasks() -> AsyncIterator[_Tasks]:
    main = asyncio.current_task()
    assert main is not None
    tasks = _Tasks(main)
    try:
        yield tasks
        await tasks.stop()
    except asyncio.CancelledError:
        if tasks.error is None:
            raise
        raise cause_of(tasks.error) from None
    finally:
        await tasks.abandon()


async def _ended(tasks: "Sequence[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _block_size(workers: Sequence[Worker]) -> int:
    """Return the block size of all workers. Raises Unusable if the workers have different block sizes."""
    sizes = sorted({worker.spec.block_size for worker in workers})
    if len(sizes) > 1:
        found = " and ".join(map(str, sizes))
        raise Unusable(
            f"the workers have KV blocks of {found} tokens, but pools of a model share one size; use one --block-size"
        )
    return sizes[0]


def _warmed(owner: Owner, engines: Engines) -> Caches:
    """Restore the caches of mock engines from the log, and return their blocks by worker and rank.

    A mock engine's cache holds no bytes, so the log has all of it. Restoring it imitates engine processes that survive
    a restart of the router.
    """
    caches: Caches = {}
    mocks = {spec.worker_id: engine for engine, spec in engines if isinstance(engine, MockEngine)}
    for chunk in owner.world.index.snapshot():
        if isinstance(chunk, IndexBlocks) and chunk.tier == "device" and chunk.worker_id in mocks:
            caches.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
    for engine, spec in engines:
        if isinstance(engine, MockEngine):
            for rank in spec.ranks:
                engine.warm(caches.get((spec.worker_id, rank), ()), rank)
    return caches


def _admitted(owner: Owner, worker: Worker, caches: Caches) -> bool:
    """Return whether this process's incarnation of a worker is ready and its restored cache is in the index."""
    spec = worker.spec
    member = owner.world.fleet.get(spec.worker_id)
    if member is None or member.worker_epoch != worker.worker_epoch or member.phase is not WorkerPhase.READY:
        return False
    return not spec.kv_events or all(
        owner.world.index.blocks_held(spec.worker_id, rank, "device")
        >= min(len(caches.get((spec.worker_id, rank), ())), spec.kv_blocks_total)
        for rank in spec.ranks
    )


def why_not_ready(world: World, model: str) -> str | None:
    """Return the reason why no request of a model can be served now; None if requests can be served."""
    missing = missing_worker(world, model)
    if missing is None:
        return None
    return NO_WORKER if missing == "worker" else NO_PREFILL_WORKER


def _disagg(world: World, settings: EmbeddedSettings) -> DisaggConfig:
    pool = world.pool_of(settings.engine.settings.model_name)
    configured = settings.router.disagg
    return configured if pool is None else world.disagg.get(pool.pool, configured)


def _group(settings: EmbeddedSettings, block_size: int) -> GroupSettings:
    name = settings.engine.settings.model_name
    return GroupSettings(
        group=name,
        partition=PARTITION,
        owner_id=f"embedded-{os.getpid()}",
        pools=tuple(
            PoolConfigured(pool=place.pool, model=name, block_size=block_size, router=settings.router, role=place.role)
            for place in dict.fromkeys(settings.places.values())
        ),
        routing=settings.routing,
        policies=settings.policies,
        snapshot_every=settings.snapshots.snapshot_every,
        snapshot_age_s=settings.snapshots.snapshot_age_s,
        poll_s=min(0.5, settings.lease_ttl_s / 6),
    )


async def _ingress(
    settings: EmbeddedSettings, block_size: int, log: SqliteLog, model: Model, owner: Owner, registry: CollectorRegistry
) -> Ingress:
    name = settings.ingress.model_name
    ingress_settings = replace(settings.ingress, block_size=block_size)
    metrics = IngressMetrics(registry, ingress_settings.model_name)
    reply_from = await log.end(TOKENS.name, ingress_settings.reply_slot)
    ingress = Ingress(
        log, model, ingress_settings, metrics, lambda: why_not_ready(owner.world, name) is None, reply_from
    )
    ingress.pools.allowed_policies = lambda: owner.world.owner_policies
    ingress.not_ready_reason = lambda: why_not_ready(owner.world, name) or NO_WORKER
    return ingress
