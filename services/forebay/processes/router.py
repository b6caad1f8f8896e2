"""The process of `forebay router`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from forebay.live.owner.admission import SLOTS_MAX
from forebay.live.router.router import Router, RouterSettings, readiness_metrics, ready
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, leases_at, until_signal
from forebay.transport.directory import Directory
from forebay.transport.kafka.topics import WorkTopics


async def run(cluster: Cluster, settings: RouterSettings) -> None:
    """Run a router, which owns groups or stands by for them, until SIGINT or SIGTERM."""
    async with _started(cluster, settings) as router:

        async def stop() -> None:
            groups = len(router.owners)
            announce(
                f"router {settings.router_id} is shutting down: taking snapshots of {groups} groups that it owns; "
                "press Ctrl-C again or send a second signal to end at once"
            )
            await router.stop()

        announce(f"router {settings.router_id} follows the groups of {cluster.kafka.namespace}")
        await until_signal(router.run(), stop=stop)


@asynccontextmanager
async def _started(cluster: Cluster, settings: RouterSettings) -> AsyncIterator[Router]:
    """Yield a router once it knows the partition of each group.

    The sizes of the topics in `settings` are read from Kafka. Metrics and probe of the router are served while the body
    runs. Raises LogError if Kafka lacks a topic.
    """
    registry = process_registry()
    routers: list[Router] = []

    def probe() -> tuple[bool, str]:
        return ready(routers[0]) if routers else (False, "the router starts")

    def on_owned(group: str, epoch: int) -> None:
        announce(f"router {settings.router_id} owns {group} since offset {epoch}")

    async with connected(cluster, registry, {"/ready": probe}) as (log, counts):
        sized = msgspec.structs.replace(
            settings,
            partitions=counts.groups,
            slots_max=max([SLOTS_MAX * counts.groups, *counts.pools.values()]),
            require_slot=WorkTopics(cluster.kafka, counts).require_slot,
        )
        directory = Directory(log)
        await directory.start()
        leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
        ingress_leases = leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress")
        router = Router(log, leases, directory, sized, registry, on_owned, ingress_leases)
        routers.append(router)
        registry.register(readiness_metrics(router))
        yield router
