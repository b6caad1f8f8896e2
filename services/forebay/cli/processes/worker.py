"""`forebay worker`: a separate process with one engine."""

import os
import socket

from forebay.cli.common.cluster import run_service
from forebay.cli.common.errors import explained
from forebay.cli.processes.attached import Attachment, UpstreamSettings, attachments, check_options, run_attached
from forebay.cli.processes.command import WorkerCommand
from forebay.cli.processes.engines import built, ranked_from, reached_at, tiered
from forebay.cli.processes.options import names
from forebay.cli.processes.tier_options import TierOptions
from forebay.ingress.errors import Unusable


def run_worker(options: WorkerCommand) -> None:
    options.logs.start()
    with explained():
        cluster = options.addresses.cluster(options.service.metrics_host, options.service.metrics_port)
        if servers := options.upstream.upstreams():
            check_options(options.engine)
            if options.tiers != TierOptions():
                raise Unusable("options of KV tiers cannot be combined with --upstream: the server has its own tiers")
            if options.dp_start_rank or options.kv_host is not None:
                flag = "--kv-host" if options.kv_host is not None else "--dp-start-rank"
                raise Unusable(f"{flag} cannot be combined with --upstream")
            attached = attachments(servers, options.worker_id)
            settings = UpstreamSettings(
                engine=options.engine,
                pool=options.pool,
                taints=names("--taint", options.taint),
                api_key=options.upstream.api_key(),
                allow_shared_cache=options.upstream.allow_shared_cache,
            )
            run_service(
                run_attached(cluster, attached, settings, lease_ttl_s=options.lease_ttl_s, drain_s=options.drain_s)
            )
            return
        choice = tiered(ranked_from(options.engine.choice(), options.dp_start_rank), options.tiers.settings())
        choice = reached_at(choice, options.kv_host, options.addresses.kafka)
        running, spec = built(
            choice,
            options.worker_id or f"{socket.gethostname()}-{os.getpid()}",
            pool=options.pool,
            taints=names("--taint", options.taint),
            kv_events=options.kv_events,
        )
    one = Attachment(None, spec.worker_id, (running, spec, choice.settings.model))
    run_service(run_attached(cluster, [one], None, lease_ttl_s=options.lease_ttl_s, drain_s=options.drain_s))
