"""The process of `forebay planner run`."""

from collections.abc import Mapping

from forebay.core.scaling.state import PoolKey
from forebay.events.scaling import PlannerSettings
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner, PlannerMetrics
from forebay.planner.predictors import predictor
from forebay.planner.simulation import PoolEngine, simulator
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal


async def run(cluster: Cluster, name: str, settings: PlannerSettings, engines: Mapping[PoolKey, PoolEngine]) -> None:
    """Plan, or stand by, until SIGINT or SIGTERM. `engines` has the engines that method `simulate` simulates."""
    registry = process_registry()
    async with connected(cluster, registry) as (log, _):
        observer = PoolObserver(log, settings.pools)
        simulate = simulator(settings, engines) if settings.method == "simulate" else None
        planner = Planner(log, name, settings, observer, predictor(settings.predictor), simulate)
        registry.register(PlannerMetrics(planner))
        pools = ", ".join(f"{pool.group}/{pool.pool}" for pool in settings.pools)
        announce(f"planner {name} plans {pools} every {settings.interval_s:g} s, or stands by")

        async def stop() -> None:
            planner.stop()

        await until_signal(planner.run(), observer.run(), stop=stop)
        announce(f"planner {name} ended")
