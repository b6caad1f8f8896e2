"""`forebay planner run`: decides the sizes of pools, or stands by for the planner that does."""

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster import (
    Cluster,
    KafkaOptions,
    ServiceOptions,
    connected,
    run_service,
    until_signal,
)
from forebay.cli.common.errors import explained
from forebay.cli.common.logs import LoggingOptions, announce
from forebay.cli.common.option_groups import spread
from forebay.cli.common.process_metrics import process_registry
from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.processes.options import named
from forebay.events.scaling import PlannerSettings
from forebay.live.planner.metrics import PlannerMetrics
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner
from forebay.planner.predictors import predictor
from forebay.transport.kafka.topics import count_topics


@spread
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file: settings and pools. See docs/scaling.md.")],
    kafka: KafkaOptions,
    planner_id: Annotated[str, typer.Option(help="Name of the planner. Default: host name and process id.")] = "",
    *,
    service: ServiceOptions,
    logs: LoggingOptions,
) -> None:
    """Decide the sizes of pools, each interval. Further planners stand by.

    Decisions have an effect only with an actuator, see `forebay planner supervise`.
    """
    logs.start()
    with explained():
        settings = read_planner_file(file)
        name = named("--planner-id", "planner", planner_id or f"{socket.gethostname()}-{os.getpid()}")
        cluster = Cluster(kafka.settings(), "", service.metrics_host, service.metrics_port)
    run_service(_run(cluster, name, settings))


async def _run(cluster: Cluster, name: str, settings: PlannerSettings) -> None:
    """Plan, or stand by, until SIGINT or SIGTERM."""
    await count_topics(cluster.kafka)  # reports a missing topic, for which the client would wait
    registry = process_registry()
    async with connected(cluster, registry) as log:
        observer = PoolObserver(log, settings.pools)
        planner = Planner(log, name, settings, observer, predictor(settings.predictor))
        registry.register(PlannerMetrics(planner))
        pools = ", ".join(f"{pool.group}/{pool.pool}" for pool in settings.pools)
        announce(f"forebay: planner {name} plans {pools} every {settings.interval_s:g} s, or stands by")

        async def stop() -> None:
            planner.stop()

        await until_signal(planner.run(), observer.run(), stop=stop)
        announce(f"forebay: planner {name} ended")
