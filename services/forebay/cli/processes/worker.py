"""`forebay worker`: a separate process with one engine."""

import asyncio
import os
import socket
import uuid
from pathlib import Path

import msgspec

from forebay.cli.common.cluster import connected, leases_at, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster, ClusterOptions, ServiceOptions
from forebay.cli.common.errors import explained
from forebay.cli.common.logs import LoggingOptions, announce
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.common.shutdown import stop_notice
from forebay.cli.processes.attached import UpstreamSettings, attachments, check_options, run_attached
from forebay.cli.processes.card_keeper import keep_card
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.engines import built, ranked_from, reached_at, tiered
from forebay.cli.processes.joining import join_group, warn_if_not_admitted
from forebay.cli.processes.options import KvEventsOption, names
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.upstream_options import UpstreamOptions
from forebay.events.fleet import WorkerSpec
from forebay.events.models import ModelCard
from forebay.ingress.errors import Unusable
from forebay.ingress.model_cards import read_card
from forebay.transport.models import stored_card
from forebay.workers.engine import Engine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.metrics import Probes, WorkerMetrics
from forebay.workers.runtime.worker import ENGINE_STOP_S, Worker


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
    upstream: UpstreamOptions,
    engine: EngineOptions,
    tiers: TierOptions,
) -> None:
    """Run `forebay worker`. worker_command.py documents its options."""
    logs.start()
    with explained():
        cluster = addresses.cluster(service.metrics_host, service.metrics_port)
        if servers := upstream.upstreams():
            check_options(engine)
            if tiers != TierOptions():
                raise Unusable("options of KV tiers cannot be combined with --upstream: the server has its own tiers")
            if dp_start_rank or kv_host is not None:
                flag = "--kv-host" if kv_host is not None else "--dp-start-rank"
                raise Unusable(f"{flag} cannot be combined with --upstream")
            attached = attachments(servers, worker_id)
            settings = UpstreamSettings(
                engine=engine,
                pool=pool,
                taints=names("--taint", taint),
                api_key=upstream.api_key(),
                allow_shared_cache=upstream.allow_shared_cache,
            )
            run_service(run_attached(cluster, attached, settings, lease_ttl_s=lease_ttl_s, drain_s=drain_s))
            return
        choice = tiered(ranked_from(engine.choice(), dp_start_rank), tiers.settings())
        choice = reached_at(choice, kv_host, addresses.kafka)
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
    leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
    probes = Probes()
    async with connected(cluster, registry, {"/ready": probes.ready, "/live": probes.live}) as log:
        if card is not None:
            spec = msgspec.structs.replace(spec, card=await stored_card(log, spec.model, *card))
        announce(f"forebay: worker {spec.worker_id} requests to join {spec.model}, pool {spec.pool}")
        waiting = asyncio.create_task(warn_if_not_admitted(probes, spec.worker_id))
        partition = await join_group(cluster, log, spec)
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
