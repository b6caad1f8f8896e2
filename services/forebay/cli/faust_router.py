"""The router as a plain Faust app, for those who run it with Faust's own command line.

    FOREBAY_KAFKA=host:9092 FOREBAY_REDIS=redis://host:6379 faust -A forebay.cli.faust_router worker -l warning

Also read: FOREBAY_NAMESPACE, FOREBAY_KAFKA_CONFIG, FOREBAY_ROUTER_ID, FOREBAY_ROUTER_MODE. Importing this module
makes the app and nothing else; the router runs as a task of it.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry

from forebay.cli.cluster import KAFKA, LOOPBACK, NAMESPACE, REDIS, STOP_S, Cluster, connected, kafka_settings
from forebay.cli.router_process import start_router
from forebay.events.control import RouterConfig, RouterMode
from forebay.live.faust_app import Assignments, RouterApp
from forebay.live.faust_feed import Feed
from forebay.live.router import RouterSettings
from forebay.transport.kafka_settings import KafkaUnusable
from forebay.transport.kafka_topics import count_topics


def _cluster() -> Cluster:
    properties = os.environ.get("FOREBAY_KAFKA_CONFIG")
    kafka = kafka_settings(
        os.environ.get("FOREBAY_KAFKA", KAFKA),
        os.environ.get("FOREBAY_NAMESPACE", NAMESPACE),
        Path(properties) if properties else None,
    )
    return Cluster(kafka, os.environ.get("FOREBAY_REDIS", REDIS), LOOPBACK, None)


def _config() -> RouterConfig:
    mode = os.environ.get("FOREBAY_ROUTER_MODE", RouterConfig().mode)
    if mode not in get_args(RouterMode):
        raise KafkaUnusable(f"FOREBAY_ROUTER_MODE is {mode}; the modes are {', '.join(get_args(RouterMode))}")
    return msgspec.convert({"mode": mode}, RouterConfig)


cluster = _cluster()
config = _config()
assignments = Assignments()
feed = Feed()
app = RouterApp(cluster.kafka, feed, assignments.tell)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def route() -> None:
    """Run the router until the app stops it; what it owns is sealed first."""
    registry = CollectorRegistry()
    counts = await count_topics(cluster.kafka)
    settings = RouterSettings(
        router_id=os.environ.get("FOREBAY_ROUTER_ID", f"{socket.gethostname()}-{os.getpid()}"),
        partitions=counts.groups,
        slots_max=min(counts.pools.values(), default=0),
        config=config,
    )
    async with connected(cluster, registry) as log:
        router = await start_router(cluster, log, feed, settings, registry)
        assignments.hear(router.assign)
        running = asyncio.create_task(router.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await router.stop()
            await asyncio.wait([running], timeout=STOP_S)
            raise
