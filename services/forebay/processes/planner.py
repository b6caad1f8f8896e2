"""The processes of `forebay planner`: `run` plans, and `supervise` executes the decisions of planners."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forebay.core.scaling.state import PoolKey
from forebay.events.scaling import PlannerSettings
from forebay.live.planner.actuator import ActuatorService
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner, planner_metrics
from forebay.planner.actuators.processes import ProcessActuator, ProcessPool, supervisor_metrics
from forebay.planner.actuators.worker_directory import WorkerDirectory
from forebay.planner.predictors import predictor
from forebay.planner.simulation import PoolEngine, simulator
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal

if TYPE_CHECKING:  # imports the client of Kubernetes, an extra
    from forebay.planner.actuators.kubernetes import KubernetesActuator

KUBECONFIG = "~/.kube/config"

PodSetKind = Literal["deployment", "statefulset"]


async def run(cluster: Cluster, name: str, settings: PlannerSettings, engines: Mapping[PoolKey, PoolEngine]) -> None:
    """Plan, or stand by, until SIGINT or SIGTERM. `engines` has the engines that method `simulate` simulates."""
    registry = process_registry()
    async with connected(cluster, registry) as (log, _):
        observer = PoolObserver(log, settings.pools)
        simulate = simulator(settings, engines) if settings.method == "simulate" else None
        planner = Planner(log, name, settings, observer, predictor(settings.predictor), simulate)
        registry.register(planner_metrics(planner))
        pools = ", ".join(f"{pool.group}/{pool.pool}" for pool in settings.pools)
        announce(f"planner {name} plans {pools} every {settings.interval_s:g} s, or stands by")

        async def stop() -> None:
            planner.stop()

        await until_signal(planner.run(), observer.run(), stop=stop)
        announce(f"planner {name} ended")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of the actuator `processes`: its state directory, and the pools."""

    state: Path
    pools: tuple[ProcessPool, ...]


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Settings of the actuator `kubernetes`: kind, namespace and name of the object of each pool."""

    pools: Mapping[PoolKey, tuple[PodSetKind, str, str]]


async def supervise(cluster: Cluster, settings: ProcessSettings | KubernetesSettings) -> None:
    """Execute the decisions of planners with one actuator until SIGINT or SIGTERM. Workers continue to run."""
    if isinstance(settings, KubernetesSettings):
        await _execute(cluster, _kubernetes(settings))
        return
    async with _processes(settings) as processes:
        announce(f"supervisor found {processes.running} running workers")
        await _execute(cluster, processes)
        announce(f"supervisor ended; {processes.running} workers continue to run")


async def _execute(cluster: Cluster, actuator: "ProcessActuator | KubernetesActuator") -> None:
    registry = process_registry()
    async with connected(cluster, registry) as (log, _):
        pools = ", ".join(sorted(f"{group}/{pool}" for group, pool in actuator.pools))
        announce(f"supervisor executes decisions about {pools} with {actuator.name}")
        service = ActuatorService(log, actuator)
        registry.register(supervisor_metrics(service, actuator if isinstance(actuator, ProcessActuator) else None))
        parts = [actuator.run()] if isinstance(actuator, ProcessActuator) else []
        await until_signal(service.run(), *parts)


@asynccontextmanager
async def _processes(settings: ProcessSettings) -> AsyncIterator[ProcessActuator]:
    directory = await WorkerDirectory.open(settings.state)
    try:
        yield ProcessActuator(settings.pools, directory, os.environ)  # noqa: TID251 - workers inherit it
    finally:
        directory.close()


def _kubernetes(settings: KubernetesSettings) -> "KubernetesActuator":
    # Imported here, because the client is an extra and takes half a second.
    from forebay.planner.actuators.kubernetes import KubernetesActuator, PodSet, connect  # noqa: PLC0415

    variables = os.environ  # noqa: TID251 - those of every client of Kubernetes
    in_pod = "KUBERNETES_SERVICE_HOST" in variables and "KUBECONFIG" not in variables
    path = str(Path(variables.get("KUBECONFIG", KUBECONFIG)).expanduser())
    api = connect(None if in_pod else path)
    return KubernetesActuator({pool: PodSet(*names) for pool, names in settings.pools.items()}, api)
