"""The process of `forebay router`: a Faust app and a router on one event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from forebay.live.router.faust_app import STATE_TOPICS, Assignments, RouterApp
from forebay.live.router.faust_feed import FaustLog, Feed
from forebay.live.router.router import ReadinessMetrics, Router, RouterSettings, ready
from forebay.processes.faust_member import stay_member
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, leases_at, until_signal
from forebay.transport.directory import Directory


async def run(cluster: Cluster, settings: RouterSettings) -> None:
    """Run a router, which owns groups or stands by for them, until SIGINT or SIGTERM."""
    router_id, assignments, feed = settings.router_id, Assignments(), Feed()
    async with started(cluster, settings, feed, assignments) as router:

        async def stop() -> None:
            groups = len(router.owners)
            announce(
                f"router {router_id} is shutting down: taking snapshots of {groups} groups that it owns; "
                "press Ctrl-C again or send a second signal to end at once"
            )
            await router.stop()

        def leave() -> None:
            assignments.publish(set())

        def app() -> RouterApp:
            return RouterApp(cluster.kafka, feed, assignments.publish)

        # The router stands by at once, because joining takes as long as the broker needs to notice a dead member.
        # Membership is only a preference, so without it the router keeps its groups, and may claim others.
        await until_signal(router.run(), stay_member(f"router {router_id}", app, leave), stop=stop)


@asynccontextmanager
async def started(
    cluster: Cluster, settings: RouterSettings, feed: Feed, assignments: Assignments
) -> AsyncIterator[Router]:
    """Yield a router that reads its state topics from `feed`, once it knows the partition of each group.

    The sizes of the topics in `settings` are read from Kafka. Metrics and probe of the router are served while the body
    runs. Raises LogError if Kafka lacks a topic.
    """
    registry = process_registry()
    routers: list[Router] = []

    def probe() -> tuple[bool, str]:
        return ready(routers[0]) if routers else (False, "the router starts")

    def on_owned(group: str, epoch: int) -> None:
        announce(f"router {settings.router_id} owns {group} since offset {epoch}")

    def assign(partitions: set[int]) -> None:
        feed.assign(partitions)
        router.assign(partitions)

    async with connected(cluster, registry, {"/ready": probe}) as (kafka_log, counts):
        slots_max = min(counts.pools.values(), default=0)
        sized = msgspec.structs.replace(settings, partitions=counts.groups, slots_max=slots_max)
        log = FaustLog(kafka_log, feed, [topic.name for topic in STATE_TOPICS])
        directory = Directory(log)
        await directory.start()
        leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
        ingress_leases = leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress")
        router = Router(log, leases, directory, sized, registry, on_owned, ingress_leases)
        routers.append(router)
        registry.register(ReadinessMetrics(router))
        assignments.subscribe(assign)
        yield router
