"""`forebay router`: owns groups, or stands by, as a process of its own."""

import os
import socket
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

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
    connected,
    kafka_settings,
    leases_at,
    run_service,
    start_logging,
    until_signal,
)
from forebay.cli.errors import explained
from forebay.events.control import RouterConfig, RouterMode
from forebay.live.faust_app import STATE_TOPICS, Assignments, RouterApp
from forebay.live.faust_feed import FaustLog, Feed
from forebay.live.router import Router, RouterSettings
from forebay.transport.directory import Directory
from forebay.transport.kafka_log import KafkaLog
from forebay.transport.kafka_topics import count_topics


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
    run_service(_run(Cluster(settings, redis, metrics_host, metrics_port), name, config, snapshot_every))


async def _run(cluster: Cluster, router_id: str, config: RouterConfig, snapshot_every: int) -> None:
    counts = await count_topics(cluster.kafka)
    settings = RouterSettings(
        router_id=router_id,
        partitions=counts.groups,
        slots_max=min(counts.pools.values(), default=0),
        config=config,
        snapshot_every=snapshot_every,
    )
    registry = CollectorRegistry()
    assignments = Assignments()
    feed = Feed()
    app = RouterApp(cluster.kafka, feed, assignments.tell)
    async with connected(cluster, registry) as log:
        router = await start_router(cluster, log, feed, settings, registry)
        assignments.hear(router.assign)
        app.finalize()
        await app.start()
        typer.echo(f"forebay: router {router_id} is a member of {app.conf.id}")
        try:
            await until_signal(router.run(), stop=router.stop)
        finally:
            await app.stop()


async def start_router(
    cluster: Cluster, kafka_log: KafkaLog, feed: Feed, settings: RouterSettings, registry: CollectorRegistry
) -> Router:
    """A router that reads its state topics from `feed`, and knows where groups live."""
    log = FaustLog(kafka_log, feed, [topic.name for topic in STATE_TOPICS])
    directory = Directory(log)
    await directory.start()

    def on_owned(group: str, epoch: int) -> None:
        typer.echo(f"forebay: router {settings.router_id} owns {group} since offset {epoch}")

    leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
    return Router(log, leases, directory, settings, registry, on_owned)
