"""The router as a plain Faust app, to run it with Faust's own command line.

    export FOREBAY_KAFKA=host:9092 FOREBAY_REDIS=redis://host:6379
    faust -A forebay.cli.processes.faust_router worker -l warn

Each option of `forebay router` has a variable: FOREBAY_ROUTER_MODE for `--router-mode`, FOREBAY_ROUTER_KV_EVENTS=false
for `--no-router-kv-events`. Importing this module only creates the app. The router runs as a task of the app.
"""

import asyncio

from forebay.cli.common.cluster import connected
from forebay.cli.common.cluster_options import LOOPBACK
from forebay.cli.common.command_class import CliCommand
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.common.options import built
from forebay.cli.common.shutdown import STOP_S
from forebay.cli.processes.command import RouterCommand
from forebay.cli.processes.router_process import router_settings, sized, start_router, subscribe
from forebay.live.router.faust_app import Assignments, RouterApp
from forebay.live.router.faust_feed import Feed

# As `forebay router` without arguments, so every option has its value from a variable or its default.
context = CliCommand("router", RouterCommand, "router").make_context("router", [])
options = built(RouterCommand, context.params)
cluster = options.addresses.cluster(LOOPBACK, None)
settings = router_settings(options)
assignments = Assignments()
feed = Feed()
app = RouterApp(cluster.kafka, feed, assignments.publish)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def route() -> None:
    """Run the router until the app stops it. At its end the router seals the groups that it owns."""
    registry = process_registry()
    sizes = await sized(settings, cluster.kafka)
    async with connected(cluster, registry) as log:
        router = await start_router(cluster, log, feed, sizes, registry)
        subscribe(assignments, feed, router)
        running = asyncio.create_task(router.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await router.stop()
            await asyncio.wait([running], timeout=STOP_S)
            raise
