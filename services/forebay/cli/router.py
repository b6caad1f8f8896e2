"""`forebay router`: owns groups, or stands by, as a process of its own."""

import os
import socket
from typing import Annotated

import typer

from forebay.cli.cluster import (
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
from forebay.cli.errors import explained
from forebay.events.control import RouterConfig, RouterMode


def router(
    kafka: KafkaOption = KAFKA,
    redis: RedisOption = REDIS,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    router_id: Annotated[str, typer.Option(help="For people; host and process when empty.")] = "",
    router_mode: Annotated[RouterMode, typer.Option(help="How requests are routed.")] = "kv",
    router_temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the lowest cost; above, a draw.")] = 0.0,
    snapshot_every: Annotated[int, typer.Option(min=1, help="Journal records between snapshots.")] = 5_000,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    verbose: VerboseOption = False,
) -> None:
    """Run one router of a distributed system: the first owns, others stand by or share the groups."""
    start_logging(verbose=verbose)
    with explained():
        settings = kafka_settings(kafka, namespace, kafka_config)
    config = RouterConfig(mode=router_mode, temperature=router_temperature)
    name = router_id or f"{socket.gethostname()}-{os.getpid()}"
    # Imported here, because no other command should wait for Faust to load.
    from forebay.cli.router_process import serve  # noqa: PLC0415

    run_service(serve(Cluster(settings, redis, metrics_host, metrics_port), name, config, snapshot_every))
