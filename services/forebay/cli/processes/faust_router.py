"""The router as a plain Faust app, to run it with Faust's own command line.

    export FOREBAY_KAFKA=host:9092 FOREBAY_REDIS=redis://host:6379
    faust -A forebay.cli.processes.faust_router worker -l warn

Further environment variables: FOREBAY_NAMESPACE, FOREBAY_KAFKA_CONFIG, FOREBAY_ROUTER_ID, FOREBAY_POOL_ROUTING, and
FOREBAY_ALLOW_POLICY with policy classes separated by spaces. Each router option has a variable, too:
FOREBAY_ROUTER_MODE for `--router-mode`, FOREBAY_ROUTER_KV_EVENTS=false for `--no-router-kv-events`. Importing this
module only creates the app. The router runs as a task of the app.
"""

import asyncio
import os
import socket
from pathlib import Path

from forebay.cli.common.cluster import connected
from forebay.cli.common.cluster_options import KAFKA, LOOPBACK, NAMESPACE, REDIS, Cluster, kafka_settings
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.common.shutdown import STOP_S
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.router_options import router_config_of
from forebay.cli.processes.options import pool_routing_by_model
from forebay.cli.processes.router_process import start_router, subscribe
from forebay.live.router.faust_app import Assignments, RouterApp
from forebay.live.router.faust_feed import Feed
from forebay.live.router.router import RouterSettings
from forebay.transport.kafka.topics import count_topics


def _cluster() -> Cluster:
    properties = os.environ.get("FOREBAY_KAFKA_CONFIG")
    kafka = kafka_settings(
        os.environ.get("FOREBAY_KAFKA", KAFKA),
        os.environ.get("FOREBAY_NAMESPACE", NAMESPACE),
        Path(properties) if properties else None,
    )
    return Cluster(kafka, os.environ.get("FOREBAY_REDIS", REDIS), LOOPBACK, None)


cluster = _cluster()
config = router_config_of(os.environ)
routing_file = os.environ.get("FOREBAY_POOL_ROUTING")
routing = pool_routing_by_model(Path(routing_file) if routing_file else None)
policies = allowed_policies(os.environ.get("FOREBAY_ALLOW_POLICY", "").split(), [config.mode])
assignments = Assignments()
feed = Feed()
app = RouterApp(cluster.kafka, feed, assignments.publish)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def route() -> None:
    """Run the router until the app stops it. At its end the router seals the groups that it owns."""
    registry = process_registry()
    counts = await count_topics(cluster.kafka)
    settings = RouterSettings(
        router_id=os.environ.get("FOREBAY_ROUTER_ID", f"{socket.gethostname()}-{os.getpid()}"),
        partitions=counts.groups,
        slots_max=min(counts.pools.values(), default=0),
        config=config,
        policies=policies,
        routing=routing,
    )
    async with connected(cluster, registry) as log:
        router = await start_router(cluster, log, feed, settings, registry)
        subscribe(assignments, feed, router)
        running = asyncio.create_task(router.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await router.stop()
            await asyncio.wait([running], timeout=STOP_S)
            raise
