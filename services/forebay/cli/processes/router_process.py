"""The process of `forebay router`: a Faust app and a router on one event loop."""

import asyncio
import logging
import os
import socket

import msgspec
from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from forebay.cli.common.cluster import connected, leases_at, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster
from forebay.cli.common.errors import explained
from forebay.cli.common.logs import announce
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.common.shutdown import CLOSE_S, ending_within
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import RouterCommand
from forebay.cli.processes.options import named, pool_routing_by_model
from forebay.live.router.faust_app import STATE_TOPICS, Assignments, RouterApp
from forebay.live.router.faust_feed import FaustLog, Feed
from forebay.live.router.router import ReadinessMetrics, Router, RouterSettings, ready
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.directory import Directory
from forebay.transport.kafka.errors import explain, is_transient
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics

logger = logging.getLogger(__name__)

REJOIN_S = 1.0
LEAVE_S = 10.0  # seconds; Faust's consumer commits and leaves within one second if the broker responds


def run_router(options: RouterCommand) -> None:
    options.logs.start(quiet=("forebay.live.router.faust_app",))  # Faust logs each part that it starts and stops
    with explained():
        cluster = options.addresses.cluster(options.service.metrics_host, options.service.metrics_port)
        settings = router_settings(options)
    run_service(_serve(cluster, settings))


def router_settings(options: RouterCommand) -> RouterSettings:
    """Return the settings of a router, before its topics are counted. Raises ConfigError if one is invalid."""
    config = options.router.config()
    accepts_loss = options.take_over_at_last_snapshot
    return RouterSettings(
        router_id=named("--id", "router", options.router_id or f"{socket.gethostname()}-{os.getpid()}"),
        partitions=0,
        slots_max=0,
        config=config,
        policies=allowed_policies(options.allow_policy, [config.mode]),
        routing=pool_routing_by_model(options.pool_routing),
        snapshot_every=options.snapshots.snapshot_every,
        snapshot_age_s=options.snapshots.snapshot_age_s,
        on_loss=(lambda tail: announce(f"forebay: {tail.text()}")) if accepts_loss else None,
    )


async def sized(settings: RouterSettings, kafka: KafkaSettings) -> RouterSettings:
    """Return the settings with the sizes of the topics. Raises LogError if Kafka lacks a topic."""
    counts = await count_topics(kafka)
    slots_max = min(counts.pools.values(), default=0)
    return msgspec.structs.replace(settings, partitions=counts.groups, slots_max=slots_max)


async def _serve(cluster: Cluster, settings: RouterSettings) -> None:
    """Run a router, which owns groups or stands by for them, until SIGINT or SIGTERM."""
    settings, router_id = await sized(settings, cluster.kafka), settings.router_id
    registry = process_registry()
    assignments = Assignments()
    feed = Feed()
    routers: list[Router] = []

    def probe() -> tuple[bool, str]:
        return ready(routers[0]) if routers else (False, "the router starts")

    async with connected(cluster, registry, {"/ready": probe}) as log:
        router = await start_router(cluster, log, feed, settings, registry)
        routers.append(router)
        registry.register(ReadinessMetrics(router))
        subscribe(assignments, feed, router)

        async def stop() -> None:
            groups = len(router.owners)
            announce(
                f"forebay: router {router_id} is shutting down: taking snapshots of {groups} groups that it owns; "
                "press Ctrl-C again or send a second signal to end at once"
            )
            await router.stop()

        # The router stands by at once, because joining takes as long as the broker needs to notice a dead member.
        await until_signal(router.run(), _stay_member(cluster.kafka, feed, assignments, router_id), stop=stop)


async def _stay_member(kafka: KafkaSettings, feed: Feed, assignments: Assignments, router_id: str) -> None:
    """Be a member of the consumer group of routers until cancelled, and join it again if the membership breaks.

    Membership is only a preference, so the router keeps its groups meanwhile, and may claim others. Raises LogError if
    Kafka does not let this program join.
    """
    while True:
        app = RouterApp(kafka, feed, assignments.publish)
        app.finalize()
        try:
            await app.start()
            announce(f"forebay: router {router_id} is a member of {app.conf.id}")
            await app.until_broken()
        except LogUnavailable as error:
            logger.warning("%s; joining again", error)
        except (KafkaError, OSError) as error:
            text = f"the router cannot join {app.conf.id}: {explain(error)}"
            if not is_transient(error):
                raise LogError(text) from error
            logger.warning("%s; trying again", text)
        finally:
            with ending_within(LEAVE_S + CLOSE_S, "its work ended, because it cannot leave the group of routers"):
                await app.stop()
        assignments.publish(set())
        await asyncio.sleep(REJOIN_S)


async def start_router(
    cluster: Cluster,
    kafka_log: KafkaLog,
    feed: Feed,
    settings: RouterSettings,
    registry: CollectorRegistry,
) -> Router:
    """Start a router that reads its state topics from `feed`. Return it once it knows the partition of each group."""
    log = FaustLog(kafka_log, feed, [topic.name for topic in STATE_TOPICS])
    directory = Directory(log)
    await directory.start()

    def on_owned(group: str, epoch: int) -> None:
        announce(f"forebay: router {settings.router_id} owns {group} since offset {epoch}")

    leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
    ingress_leases = leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress")
    return Router(log, leases, directory, settings, registry, on_owned, ingress_leases)


def subscribe(assignments: Assignments, feed: Feed, router: Router) -> None:
    def assign(partitions: set[int]) -> None:
        feed.assign(partitions)
        router.assign(partitions)

    assignments.subscribe(assign)
