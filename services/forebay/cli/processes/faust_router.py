"""The router as a plain Faust app, to run it with Faust's own command line.

    export FOREBAY_KAFKA=host:9092 FOREBAY_REDIS=redis://host:6379
    faust -A forebay.cli.processes.faust_router worker -l warn

Each option of `forebay router` has a variable: FOREBAY_ROUTER_MODE for `--router-mode`, FOREBAY_ROUTER_KV_EVENTS=false
for `--no-router-kv-events`. Importing this module only creates the app. The router runs as a task of the app.
"""

import asyncio
import os
import socket

from forebay.cli.common.cluster import connected
from forebay.cli.common.cluster_options import LOOPBACK
from forebay.cli.common.command_class import CliCommand
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.common.options import built
from forebay.cli.common.shutdown import STOP_S
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import RouterCommand
from forebay.cli.processes.options import pool_routing_by_model
from forebay.cli.processes.router_process import start_router, subscribe
from forebay.live.router.faust_app import Assignments, RouterApp
from forebay.live.router.faust_feed import Feed
from forebay.live.router.router import RouterSettings
from forebay.transport.kafka.topics import count_topics

# As `forebay router` without arguments, so every option has its value from a variable or its default.
context = CliCommand("router", RouterCommand, "router").make_context("router", [])
options = built(RouterCommand, context.params)
cluster = options.addresses.cluster(LOOPBACK, None)
config = options.router.config()
assignments = Assignments()
feed = Feed()
app = RouterApp(cluster.kafka, feed, assignments.publish)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def route() -> None:
    """Run the router until the app stops it. At its end the router seals the groups that it owns."""
    registry = process_registry()
    counts = await count_topics(cluster.kafka)
    settings = RouterSettings(
        router_id=options.router_id or f"{socket.gethostname()}-{os.getpid()}",
        partitions=counts.groups,
        slots_max=min(counts.pools.values(), default=0),
        config=config,
        policies=allowed_policies(options.allow_policy, [config.mode]),
        routing=pool_routing_by_model(options.pool_routing),
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
