"""The router as a plain Faust app, to run it with Faust's own command line.

    export FOREBAY_KAFKA=host:9092 FOREBAY_REDIS=redis://host:6379
    faust -A forebay.cli.processes.faust_router worker -l warn

Each option of `forebay router` has a variable: FOREBAY_ROUTER_MODE for `--router-mode`, FOREBAY_ROUTER_KV_EVENTS=false
for `--no-router-kv-events`. Importing this module only creates the app. The router runs as a task of the app.
"""

import asyncio

from forebay.cli.common.command_class import CliCommand
from forebay.cli.common.options import built
from forebay.cli.processes.command import RouterCommand
from forebay.cli.processes.router import router_settings
from forebay.live.router.faust_app import Assignments, RouterApp
from forebay.live.router.faust_feed import Feed
from forebay.processes.router import started
from forebay.processes.shutdown import STOP_S

# As `forebay router` without arguments, so every option has its value from a variable or its default.
context = CliCommand("router", RouterCommand, "router").make_context("router", [])
cluster, settings = router_settings(built(RouterCommand, context.params))
assignments = Assignments()
feed = Feed()
app = RouterApp(cluster.kafka, feed, assignments.publish)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def route() -> None:
    """Run the router until the app stops it. At its end the router seals the groups that it owns."""
    async with started(cluster, settings, feed, assignments) as router:
        running = asyncio.create_task(router.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await router.stop()
            await asyncio.wait([running], timeout=STOP_S)
            raise
