"""Options of `forebay worker`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.cluster_options import ClusterOptions, ServiceOptions
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.option_groups import spread
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.options import KvEventsOption
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.upstream_options import UpstreamOptions


@spread
def worker(
    addresses: ClusterOptions,
    worker_id: Annotated[
        str, typer.Option(help="Worker id, unique in its group. Default: host name and process id.")
    ] = "",
    pool: Annotated[
        str, typer.Option(help="Pool to join. Default: the pool of the service class, else the role, else 'default'.")
    ] = "",
    dp_start_rank: Annotated[int, typer.Option(min=0, max=1 << 20, help="First data-parallel rank of the worker.")] = 0,
    taint: Annotated[
        list[str] | None, typer.Option(help="Worker label that requests may require or prefer. Repeatable.")
    ] = None,
    kv_events: KvEventsOption = True,
    kv_host: Annotated[
        str | None,
        typer.Option(
            help="Address from which other workers fetch KV. Default: the local address of the route to Kafka."
        ),
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0.0, max=86_400.0, help="Seconds to finish requests in flight after SIGTERM.")
    ] = 30.0,
    lease_ttl_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a lease renewal after which the worker is lost.")
    ] = 3.0,
    *,
    service: ServiceOptions,
    logs: LoggingOptions,
    upstream: UpstreamOptions,
    engine: EngineOptions,
    tiers: TierOptions,
) -> None:
    """Run a worker of a distributed system."""
    from forebay.cli.processes.worker import run_worker  # noqa: PLC0415

    run_worker(
        addresses=addresses,
        worker_id=worker_id,
        pool=pool,
        dp_start_rank=dp_start_rank,
        taint=taint,
        kv_events=kv_events,
        kv_host=kv_host,
        drain_s=drain_s,
        lease_ttl_s=lease_ttl_s,
        service=service,
        logs=logs,
        upstream=upstream,
        engine=engine,
        tiers=tiers,
    )
