"""The process of `forebay router`: a Faust app and a router on one event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiokafka.errors import KafkaError

from forebay.live.router.faust_app import STATE_TOPICS, Assignments, RouterApp
from forebay.live.router.faust_feed import FaustLog, Feed
from forebay.live.router.router import ReadinessMetrics, Router, RouterSettings, ready
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, leases_at, until_signal
from forebay.processes.shutdown import CLOSE_S, ending_within
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.directory import Directory
from forebay.transport.kafka.errors import explain, is_transient
from forebay.transport.kafka.settings import KafkaSettings

logger = logging.getLogger(__name__)

REJOIN_S = 1.0
LEAVE_S = 10.0  # seconds; Faust's consumer commits and leaves within one second if the broker responds


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

        # The router stands by at once, because joining takes as long as the broker needs to notice a dead member.
        await until_signal(router.run(), _stay_member(cluster.kafka, feed, assignments, router_id), stop=stop)


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
            announce(f"router {router_id} is a member of {app.conf.id}")
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
