"""Services of `forebay planner`: `run` decides the sizes of pools, `supervise` executes its decisions.

Decisions are executed with local processes or with Kubernetes.
"""

import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from forebay.cli.common.errors import explained
from forebay.cli.common.extras import require_extra
from forebay.cli.common.service import run_service
from forebay.cli.planner.command import PlannerRunCommand, PlannerSuperviseCommand
from forebay.cli.planner.planner_file import PlannerFile, pool_tables, read_planner_file, read_toml, require_known
from forebay.core.scaling.state import PoolKey
from forebay.events.names import unknown_name
from forebay.live.planner.actuator import ActuatorService
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner, PlannerMetrics
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessActuator, ProcessPool, SupervisorMetrics
from forebay.planner.actuators.worker_directory import WorkerDirectory
from forebay.planner.predictors import predictor
from forebay.planner.simulation import simulator
from forebay.processes.metrics_server import process_registry
from forebay.processes.names import named
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal
from forebay.runtime.errors import ConfigError
from forebay.transport.kafka.topics import count_topics

if TYPE_CHECKING:  # imports the client of Kubernetes, an extra
    from forebay.planner.actuators.kubernetes import KubernetesActuator

KUBECONFIG = "~/.kube/config"
KILL_AFTER_S_MAX = 7 * 86_400.0

ActuatorName = Literal["processes", "kubernetes"]
PodSetKind = Literal["deployment", "statefulset"]


class ProcessTable(msgspec.Struct, frozen=True, kw_only=True):
    """Table `[[pools]]` of the actuator `processes`."""

    group: str
    pool: str
    command: tuple[str, ...]
    kill_after_s: Annotated[float, msgspec.Meta(ge=0, le=KILL_AFTER_S_MAX)] = KILL_AFTER_S


class KubernetesTable(msgspec.Struct, frozen=True, kw_only=True):
    """Table `[[pools]]` of the actuator `kubernetes`."""

    group: str
    pool: str
    deployment: str = ""
    statefulset: str = ""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Contents of a file with the actuator `processes`."""

    state: Path
    pools: tuple[ProcessPool, ...]


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Contents of a file with the actuator `kubernetes`: kind, namespace and name of the object of each pool."""

    pools: Mapping[PoolKey, tuple[PodSetKind, str, str]]


def read_supervise_file(path: Path) -> ProcessSettings | KubernetesSettings:
    """Read a file of `forebay planner supervise`. Raises ConfigError, with file and key, if it is invalid."""
    try:
        return _settings(path, read_toml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _settings(path: Path, raw: Mapping[str, Any]) -> ProcessSettings | KubernetesSettings:
    actuator = raw.get("actuator")
    if actuator is None:
        raise ConfigError(f"the key actuator is missing; expected one of {', '.join(get_args(ActuatorName))}")
    if actuator not in get_args(ActuatorName):
        raise ConfigError(unknown_name("actuator", str(actuator), get_args(ActuatorName)))
    keys = ("actuator", "state", "pools") if actuator == "processes" else ("actuator", "pools")
    require_known(raw, keys)
    if actuator == "kubernetes":
        return KubernetesSettings({(one.group, one.pool): _object(one) for one in pool_tables(raw, KubernetesTable)})
    state = raw.get("state")
    if not isinstance(state, str) or not state:
        raise ConfigError("the key state is missing or not a path; expected a directory, such as state = 'supervisor'")
    tables = pool_tables(raw, ProcessTable)
    return ProcessSettings(path.parent / state, tuple(_process_pool(table) for table in tables))


def _process_pool(table: ProcessTable) -> ProcessPool:
    name = f"{table.group}/{table.pool}"
    if not table.command:
        raise ConfigError(f"{name}: the command is empty; expected a program and its arguments")
    if any("\0" in argument for argument in table.command):
        raise ConfigError(f"{name}: an argument of the command contains a NUL character")
    if shutil.which(table.command[0]) is None:
        raise ConfigError(f"{name}: the program {table.command[0]!r} was not found; use its path, or add it to PATH")
    return ProcessPool(table.group, table.pool, table.command, table.kill_after_s)


def _object(table: KubernetesTable) -> tuple[PodSetKind, str, str]:
    name = f"{table.group}/{table.pool}"
    if bool(table.deployment) == bool(table.statefulset):
        raise ConfigError(f"{name}: expected one of the keys deployment and statefulset")
    kind: PodSetKind = "deployment" if table.deployment else "statefulset"
    namespace, slash, own = (table.deployment or table.statefulset).partition("/")
    if not (namespace and slash and own) or "/" in own:
        raise ConfigError(f'{name}: expected {kind} = "NAMESPACE/NAME", got "{table.deployment or table.statefulset}"')
    return kind, namespace, own


# --- the services -----------------------------------------------------------------------------------------------------


def run_planner(options: PlannerRunCommand) -> None:
    options.logs.start()
    with explained():
        read = read_planner_file(options.file)
        name = named("--id", "planner", options.planner_id or f"{socket.gethostname()}-{os.getpid()}")
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(_plan(cluster, name, read))


async def _plan(cluster: Cluster, name: str, read: PlannerFile) -> None:
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
        announce(f"planner {name} plans {pools} every {settings.interval_s:g} s, or stands by")

        async def stop() -> None:
            planner.stop()

        await until_signal(planner.run(), observer.run(), stop=stop)
        announce(f"planner {name} ended")


def run_supervise(options: PlannerSuperviseCommand) -> None:
    options.logs.start()
    with explained():
        settings = read_supervise_file(options.file)
        if isinstance(settings, KubernetesSettings):
            require_extra("kubernetes", "actuator kubernetes", "kubernetes")
        elif sys.platform != "linux":
            raise ConfigError("actuator processes requires Linux, because it identifies processes by /proc")
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(_supervise(cluster, settings))


async def _supervise(cluster: Cluster, settings: ProcessSettings | KubernetesSettings) -> None:
    if isinstance(settings, KubernetesSettings):
        await _execute(cluster, _kubernetes(settings))
        return
    async with _processes(settings) as processes:
        announce(f"supervisor found {processes.running} running workers")
        await _execute(cluster, processes)
        announce(f"supervisor ended; {processes.running} workers continue to run")


async def _execute(cluster: Cluster, actuator: "ProcessActuator | KubernetesActuator") -> None:
    await count_topics(cluster.kafka)  # reports a missing topic, for which the client would wait
    registry = process_registry()
    async with connected(cluster, registry) as log:
        pools = ", ".join(sorted(f"{group}/{pool}" for group, pool in actuator.pools))
        announce(f"supervisor executes decisions about {pools} with {actuator.name}")
        service = ActuatorService(log, actuator)
        registry.register(SupervisorMetrics(service, actuator if isinstance(actuator, ProcessActuator) else None))
        parts = [actuator.run()] if isinstance(actuator, ProcessActuator) else []
        await until_signal(service.run(), *parts)


@asynccontextmanager
async def _processes(settings: ProcessSettings) -> AsyncIterator[ProcessActuator]:
    directory = await WorkerDirectory.open(settings.state)
    try:
        yield ProcessActuator(settings.pools, directory, os.environ)
    finally:
        directory.close()


def _kubernetes(settings: KubernetesSettings) -> "KubernetesActuator":
    # Imported here, because the client is an extra and takes half a second.
    from forebay.planner.actuators.kubernetes import KubernetesActuator, PodSet, connect  # noqa: PLC0415

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    path = str(Path(os.environ.get("KUBECONFIG", KUBECONFIG)).expanduser())
    api = connect(None if in_pod else path)
    return KubernetesActuator({pool: PodSet(*names) for pool, names in settings.pools.items()}, api)
