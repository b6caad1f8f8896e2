"""`forebay worker`: a separate process with one engine."""

import os
import socket

from forebay.cli.common.cluster import run_service
from forebay.cli.common.cluster_options import ClusterOptions, ServiceOptions
from forebay.cli.common.errors import explained
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.processes.attached import Attachment, UpstreamSettings, attachments, check_options, run_attached
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.engines import built, ranked_from, reached_at, tiered
from forebay.cli.processes.options import KvEventsOption, names
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.upstream_options import UpstreamOptions
from forebay.ingress.errors import Unusable


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
    one = Attachment(None, spec.worker_id, (running, spec, choice.settings.model))
    run_service(run_attached(cluster, [one], None, lease_ttl_s=lease_ttl_s, drain_s=drain_s))
