"""The whole system in one process: log, leases, owner, mock workers and ingress on one event loop."""

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import uvloop
from prometheus_client import CollectorRegistry

from forebay.cli.settings import Embedded, worker_ids
from forebay.core.engine_model import EngineConfig
from forebay.core.fleet import WorkerPhase
from forebay.events.base import unpack_u64
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerSpec
from forebay.events.snapshots import IndexBlocks
from forebay.events.topics import TOKENS
from forebay.ingress.app import build_app
from forebay.ingress.explain_worker import Source
from forebay.ingress.explainer import Explainer
from forebay.ingress.ingress import Ingress, IngressSettings
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model, speaking_vocabulary
from forebay.ingress.server import Server, build_server, listen
from forebay.live.metrics import OwnerMetrics
from forebay.live.owner import GroupSettings, Owner
from forebay.transport.redis_leases import embedded_leases
from forebay.transport.sqlite_log import SqliteLog
from forebay.workers.lease_keeper import LeaseKeeper
from forebay.workers.mock_engine import MockEngine
from forebay.workers.worker import Worker

logger = logging.getLogger(__name__)

POOL = "default"

Caches = dict[tuple[str, int], list[int]]


@dataclass(frozen=True, slots=True)
class _System:
    ingress: Ingress
    server: Server
    explainer: Explainer


def run(settings: Embedded, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the model's name.

    Raises Unusable for what cannot be started with, LogError when the log fails.
    """
    model = Model(settings.model or DEFAULT_MODEL)
    name = settings.model_name or ("forebay-default" if settings.model is None else settings.model.resolve().name)
    listener = listen(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(replace(settings, model_name=name), model, listener, on_ready))


async def _serve(settings: Embedded, model: Model, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    whole = asyncio.current_task()
    assert whole is not None

    def leave_at_once() -> None:
        stop.set()
        whole.cancel()

    # Until requests can be served there is nothing to finish; a large log or fleet takes its time.
    _on_signals(loop, leave_at_once)
    try:
        async with _running(settings, model) as system:
            _on_signals(loop, stop.set)
            await _serve_until(stop, system, settings, listener, on_ready)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        whole.uncancel()


def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)


async def _serve_until(
    stop: asyncio.Event,
    system: _System,
    settings: Embedded,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    loop = asyncio.get_running_loop()
    on_ready(settings.model_name)
    serving = loop.create_task(system.server.serve(sockets=[listener]), name="http")
    stopping = loop.create_task(stop.wait(), name="signal")
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    system.server.should_exit = True
    await system.explainer.close()
    await serving
    system.ingress.replies.interrupt_all("the server is stopping")


@asynccontextmanager
async def _running(settings: Embedded, model: Model) -> AsyncIterator[_System]:
    """Start every part but the HTTP listener, wait until requests can be served, and stop them in turn."""
    async with AsyncExitStack() as stack:
        log = SqliteLog.open(settings.log)
        stack.callback(log.close)
        leases = embedded_leases()
        keeper = LeaseKeeper(leases, ttl_s=settings.lease_ttl_s)
        owner = Owner(log, leases, _group(settings))
        registry = CollectorRegistry()
        registry.register(OwnerMetrics(owner, settings.model_name))
        await owner.start()
        keeper.start()
        stack.push_async_callback(keeper.stop)
        ingress = await _ingress(settings, log, model, owner, registry)
        config = EngineConfig(
            block_size=settings.block_size,
            kv_blocks_total=settings.kv_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            vocabulary=speaking_vocabulary(model.tokenizer),
        )
        caches = _caches(owner)
        workers = [_worker(settings, log, keeper, config, name, caches) for name in worker_ids(settings.workers)]
        parts = await stack.enter_async_context(_tasks(owner, workers, ingress))
        await _until_ready(owner, workers, caches, parts)
        explainer = Explainer(None if settings.log is None else Source(path=str(settings.log.absolute())))
        stack.push_async_callback(explainer.close)
        yield _System(ingress, build_server(build_app(ingress, registry, explainer)), explainer)


@asynccontextmanager
async def _tasks(owner: Owner, workers: list[Worker], ingress: Ingress) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run the parts; when one of them breaks the whole is cancelled and its error raised."""
    owning = asyncio.create_task(owner.run(), name="owner")
    others = [
        asyncio.create_task(ingress.run(), name="ingress"),
        *(asyncio.create_task(worker.run(), name=worker.spec.worker_id) for worker in workers),
    ]
    whole = asyncio.current_task()
    assert whole is not None
    broken: list[asyncio.Task[None]] = []

    def on_done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None and not broken:
            broken.append(task)
            whole.cancel()

    for task in (owning, *others):
        task.add_done_callback(on_done)
    try:
        yield [owning, *others]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await owner.stop()
        await owning
        await owner.close()
    except asyncio.CancelledError:
        if not broken:
            raise
        raise _cause(broken[0].exception()) from None
    finally:
        for task in (owning, *others):
            task.cancel()
        await asyncio.gather(owning, *others, return_exceptions=True)


def _cause(error: BaseException | None) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error


def _caches(owner: Owner) -> Caches:
    """What the mock engines of an earlier process had cached, by worker and rank.

    A mock engine's cache is bookkeeping without bytes, and its log holds all of it. So it outlives the process
    as an engine process of its own would outlive a restart of what is around it.
    """
    caches: Caches = {}
    for chunk in owner.world.index.snapshot():
        if isinstance(chunk, IndexBlocks) and chunk.tier == "device":
            caches.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
    return caches


def _admitted(owner: Owner, worker: Worker, caches: Caches) -> bool:
    """Whether a worker of this process, not its namesake of an earlier one, may get requests and is known warm."""
    spec = worker.spec
    member = owner.world.fleet.get(spec.worker_id)
    if member is None or member.worker_epoch != worker.worker_epoch or member.phase is not WorkerPhase.READY:
        return False
    return not spec.kv_events or all(
        owner.world.index.blocks_held(spec.worker_id, rank, "device")
        >= min(len(caches.get((spec.worker_id, rank), ())), spec.kv_blocks_total)
        for rank in spec.ranks
    )


async def _until_ready(owner: Owner, workers: list[Worker], caches: Caches, parts: list["asyncio.Task[None]"]) -> None:
    while not all(_admitted(owner, worker, caches) for worker in workers):
        await asyncio.sleep(0.01)
        for part in parts:
            if part.done():
                await part


def ready_workers(owner: Owner) -> int:
    """How many workers may get requests."""
    return sum(worker.phase is WorkerPhase.READY for worker in owner.world.fleet.workers())


def _group(settings: Embedded) -> GroupSettings:
    pool = PoolConfigured(pool=POOL, model=settings.model_name, block_size=settings.block_size, router=settings.router)
    return GroupSettings(
        group=settings.model_name,
        partition=0,
        owner_id=f"embedded-{os.getpid()}",
        pool=pool,
        snapshot_every=settings.snapshot_every,
        snapshot_age_s=settings.snapshot_age_s,
        poll_s=min(0.5, settings.lease_ttl_s / 6),
    )


async def _ingress(
    settings: Embedded, log: SqliteLog, model: Model, owner: Owner, registry: CollectorRegistry
) -> Ingress:
    ingress_settings = IngressSettings(
        model_name=settings.model_name,
        block_size=settings.block_size,
        ingress_id=f"embedded-{os.getpid()}",
        timeout_s=settings.timeout_s,
        routing_hints=settings.routing_hints,
        loras=settings.loras,
        admin_api=settings.admin_api,
    )
    metrics = IngressMetrics(registry, settings.model_name)
    reply_from = await log.end(TOKENS.name, ingress_settings.reply_slot)
    return Ingress(log, model, ingress_settings, metrics, lambda: ready_workers(owner) > 0, reply_from)


def _worker(
    settings: Embedded, log: SqliteLog, keeper: LeaseKeeper, config: EngineConfig, name: str, caches: Caches
) -> Worker:
    spec = WorkerSpec(
        worker_id=name,
        model=settings.model_name,
        block_size=config.block_size,
        kv_blocks_total=config.kv_blocks_total,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pool=POOL,
        dp_size=settings.dp_size,
        taints=settings.taints[name],
        loras=settings.loras,
        kv_events=settings.kv_events,
    )
    engine = MockEngine(config, dp_size=spec.dp_size, speedup=settings.speedup)
    for rank in spec.ranks:
        engine.warm(caches.get((name, rank), ()), rank)
    return Worker(log, keeper, spec, engine, token=uuid.uuid4().hex, group=settings.model_name)
