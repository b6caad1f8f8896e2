"""`forebay router`: a separate process that owns groups, or stands by for them."""

import os
import socket
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import ClusterOptions, ServiceOptions
from forebay.cli.common.errors import explained
from forebay.cli.common.extras import require_extra
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.option_groups import spread
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.router_options import router_options
from forebay.cli.processes.options import PoolRoutingOption, SnapshotOptions, named, pool_routing_by_model
from forebay.events.control import RouterConfig


@spread
@router_options
def router(
    router: RouterConfig,
    addresses: ClusterOptions,
    allow_policy: AllowPolicyOption = None,
    router_id: Annotated[str, typer.Option(help="Display name of the router. Default: host name and process id.")] = "",
    pool_routing: PoolRoutingOption = None,
    *,
    take_over_at_last_snapshot: Annotated[
        bool,
        typer.Option(
            "--take-over-at-last-snapshot",
            help="Continue from the last snapshot of a group whose journal this router cannot derive. The decisions"
            " after the snapshot are given up. The router first prints how many these are.",
        ),
    ] = False,
    snapshots: SnapshotOptions,
    service: ServiceOptions,
    logs: LoggingOptions,
) -> None:
    """Run a router of a distributed system.

    Further routers stand by or share the groups. Requires Faust: pip install 'forebay[router]'.
    """
    require_extra("router", "forebay router", "faust")
    logs.start(quiet=("forebay.live.router.faust_app",))  # Faust logs each part that it starts and stops
    with explained():
        cluster = addresses.cluster(service.metrics_host, service.metrics_port)
        custom = allowed_policies(allow_policy, [router.mode])
        routing = pool_routing_by_model(pool_routing)
        name = named("--router-id", "router", router_id or f"{socket.gethostname()}-{os.getpid()}")
    # Imported here, because no other command should wait for Faust to load.
    from forebay.cli.common.cluster import run_service  # noqa: PLC0415
    from forebay.cli.processes.router_process import serve  # noqa: PLC0415

    run_service(serve(cluster, name, router, custom, snapshots, routing, accepts_loss=take_over_at_last_snapshot))
