"""`forebay router`: a separate process that owns groups, or stands by for them."""

import os
import socket
from typing import Annotated

import typer

from forebay.cli.common.cluster import (
    KAFKA,
    LOOPBACK,
    NAMESPACE,
    REDIS,
    Cluster,
    KafkaOption,
    MetricsHostOption,
    MetricsPortOption,
    NamespaceOption,
    PropertiesOption,
    RedisOption,
    VerboseOption,
    kafka_settings,
    run_service,
    start_logging,
)
from forebay.cli.common.errors import explained
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.router_options import router_options
from forebay.cli.processes.options import SnapshotAgeOption, SnapshotEveryOption, named
from forebay.events.control import RouterConfig


@router_options
def router(
    router: RouterConfig,
    kafka: KafkaOption = KAFKA,
    redis: RedisOption = REDIS,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    allow_policy: AllowPolicyOption = None,
    router_id: Annotated[str, typer.Option(help="Display name of the router. Default: host name and process id.")] = "",
    snapshot_every: SnapshotEveryOption = 5_000,
    snapshot_age_s: SnapshotAgeOption = 300,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    verbose: VerboseOption = False,
) -> None:
    """Run a router of a distributed system.

    Further routers stand by or share the groups.
    """
    start_logging(verbose=verbose)
    with explained():
        settings = kafka_settings(kafka, namespace, kafka_config)
        custom = allowed_policies(allow_policy, [router.mode])
        name = named("--router-id", "router", router_id or f"{socket.gethostname()}-{os.getpid()}")
    # Imported here, because no other command should wait for Faust to load.
    from forebay.cli.processes.router_process import serve  # noqa: PLC0415

    cluster = Cluster(settings, redis, metrics_host, metrics_port)
    run_service(serve(cluster, name, router, custom, snapshot_every, snapshot_age_s))
