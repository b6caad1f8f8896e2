"""`forebay worker`: a separate process with one engine."""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from pathlib import Path

import msgspec

from forebay.cli.common.cluster import connected, leases_at, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster, ClusterOptions, ServiceOptions
from forebay.cli.common.errors import complain, explained
from forebay.cli.common.logs import LoggingOptions, announce
from forebay.cli.common.process_metrics import process_registry
from forebay.cli.common.shutdown import stop_notice
from forebay.cli.processes.card_keeper import keep_card
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.engines import built, ranked_from, reached_at
from forebay.cli.processes.options import KvEventsOption, names
from forebay.events.fleet import WorkerSpec
from forebay.events.models import ModelCard
from forebay.ingress.model_cards import read_card
from forebay.transport.base import LeaseError, Leases
from forebay.transport.directory import Directory
from forebay.transport.kafka.topics import TopicPlan, count_topics, create_topics
from forebay.transport.models import stored_card
from forebay.workers.engine import Engine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import WorkerMetrics
from forebay.workers.runtime.probes import Probes
from forebay.workers.runtime.worker import ENGINE_STOP_S, Worker

logger = logging.getLogger(__name__)

ANNOUNCEMENT_TTL_MS = 6_000
CHECK_S = 5.0
CHECKS = 3  # consecutive checks: a takeover takes six seconds, and an owner reads the leases twice per second


def run_worker(
    *,
    addresses: ClusterOptions,
    worker_id: str,
    pool: str,
    dp_start_rank: int,
    taint: list[str] | None,
    kv_events: KvEventsOption,
    kv_host: str | None,
    drain_s: float,
    lease_ttl_s: float,
    service: ServiceOptions,
    logs: LoggingOptions,
    engine: EngineOptions,
) -> None:
    """Run `forebay worker`. worker_command.py documents its options."""
    logs.start()
    with explained():
        cluster = addresses.cluster(service.metrics_host, service.metrics_port)
        choice = reached_at(ranked_from(engine.choice(), dp_start_rank), kv_host, addresses.kafka)
        running, spec = built(
            choice,
            worker_id or f"{socket.gethostname()}-{os.getpid()}",
            pool=pool,
            taints=names("--taint", taint),
            kv_events=kv_events,
        )
        card = read_card(choice.settings.model)
    run_service(_run(cluster, spec, running, choice.settings.model, card, lease_ttl_s=lease_ttl_s, drain_s=drain_s))


async def _run(
    cluster: Cluster,
    spec: WorkerSpec,
    engine: Engine,
    folder: Path,
    card: tuple[ModelCard, dict[str, bytes]] | None,
    *,
    lease_ttl_s: float,
    drain_s: float,
) -> None:
    registry = process_registry()
    counts = await count_topics(cluster.kafka)
    if spec.pool not in counts.pools:
        await create_topics(cluster.kafka, TopicPlan(slots=max(counts.pools.values())), [spec.pool])
    leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
    probes = Probes()
    async with connected(cluster, registry, {"/ready": probes.ready, "/live": probes.live}) as log:
        if card is not None:
            spec = msgspec.structs.replace(spec, card=await stored_card(log, spec.model, *card))
        directory = Directory(log)
        await directory.start()
        announce(f"forebay: worker {spec.worker_id} requests to join {spec.model}, pool {spec.pool}")
        waiting = asyncio.create_task(warn_if_not_admitted(probes, spec.worker_id))
        partition = await _partition_of(directory, leases, spec.model)
        directory.close()
        keeper = LeaseKeeper(leases, ttl_s=lease_ttl_s)
        keeper.start()
        token = uuid.uuid4().hex
        worker = Worker(log, keeper, spec, engine, token=token, group=spec.model, partition=partition, drain_s=drain_s)
        probes.worker = worker
        registry.register(WorkerMetrics(worker))

        async def stop() -> None:
            announce(stop_notice(f"worker {spec.worker_id}", len(worker.active_requests), drain_s))
            worker.drain(drain_s)

        def is_member() -> bool:
            return worker.worker_epoch is not None

        keeping = None
        if card is not None:
            keeping = asyncio.create_task(keep_card(log, spec.model, spec.card, folder, is_member))
        try:
            await until_signal(worker.run(), stop=stop, stop_s=drain_s + ENGINE_STOP_S)
        finally:
            waiting.cancel()
            if keeping is not None:
                keeping.cancel()
            await keeper.stop()


async def warn_if_not_admitted(probes: Probes, name: str, *, check_s: float = CHECK_S) -> None:
    """Print a warning if the engine runs, but `CHECKS` checks in a row find that no owner has added the worker."""
    checks = 0
    while checks < CHECKS:
        await asyncio.sleep(check_s)
        is_waiting = probes.worker is None or probes.worker.life.state is State.REGISTERED
        checks = checks + 1 if is_waiting else 0
    why = "either no router is running, or the router rejected the worker and logged the reason"
    complain(f"worker {name} is not admitted and keeps trying: {why}")


async def _partition_of(directory: Directory, leases: Leases, group: str) -> int:
    """Announce the group until a router has assigned a partition to it, and return the partition."""
    is_first_error = True
    while (partition := directory.partition_of(group)) is None:
        try:
            await asyncio.to_thread(leases.announce, group, ANNOUNCEMENT_TTL_MS)
        except LeaseError as error:
            if is_first_error:
                logger.warning("cannot announce the group %s, will retry: %s", group, error)
            is_first_error = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCEMENT_TTL_MS / 3000):
                await directory.placed(group)
    return partition
