"""`forebay planner run`: decides the sizes of pools, or stands by for the planner that does."""

import os
import socket

from forebay.cli.common.cluster import connected, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster
from forebay.cli.common.errors import explained
from forebay.cli.common.logs import announce
from forebay.cli.common.metrics_server import process_registry
from forebay.cli.planner.command import PlannerRunCommand
from forebay.cli.planner.planner_file import PlannerFile, read_planner_file
from forebay.cli.processes.options import named
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner, PlannerMetrics
from forebay.planner.predictors import predictor
from forebay.planner.simulation import simulator
from forebay.transport.kafka.topics import count_topics


def run_planner(options: PlannerRunCommand) -> None:
    options.logs.start()
    with explained():
        read = read_planner_file(options.file)
        name = named("--id", "planner", options.planner_id or f"{socket.gethostname()}-{os.getpid()}")
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(_run(cluster, name, read))


async def _run(cluster: Cluster, name: str, read: PlannerFile) -> None:
    """Plan, or stand by, until SIGINT or SIGTERM."""
    settings = read.settings
    await count_topics(cluster.kafka)  # reports a missing topic, for which the client would wait
    registry = process_registry()
    async with connected(cluster, registry) as log:
        observer = PoolObserver(log, settings.pools)
        simulate = simulator(settings, read.engines) if settings.method == "simulate" else None
        planner = Planner(log, name, settings, observer, predictor(settings.predictor), simulate)
        registry.register(PlannerMetrics(planner))
        pools = ", ".join(f"{pool.group}/{pool.pool}" for pool in settings.pools)
        announce(f"forebay: planner {name} plans {pools} every {settings.interval_s:g} s, or stands by")

        async def stop() -> None:
            planner.stop()

        await until_signal(planner.run(), observer.run(), stop=stop)
        announce(f"forebay: planner {name} ended")
