"""Services of `forebay planner`: `run` decides the sizes of pools, `supervise` executes its decisions.

Decisions are executed with local processes or with Kubernetes.
"""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from forebay.cli.common.errors import explained, run_service
from forebay.cli.common.extras import require_extra
from forebay.cli.planner.command import PlannerRunCommand, PlannerSuperviseCommand
from forebay.cli.planner.planner_file import read_planner_file, require_distinct
from forebay.events.names import unknown_name
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool
from forebay.processes.names import named, process_name
from forebay.processes.planner import run
from forebay.processes.service import Cluster
from forebay.processes.supervisor import KubernetesSettings, PodSetKind, ProcessSettings
from forebay.processes.supervisor import run as supervise
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted

KILL_AFTER_S_MAX = 7 * 86_400.0


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


class ProcessFile(msgspec.Struct, frozen=True, kw_only=True):
    actuator: str
    state: Annotated[str, msgspec.Meta(min_length=1)]  # path of a directory, relative to the file
    pools: tuple[ProcessTable, ...] = ()


class KubernetesFile(msgspec.Struct, frozen=True, kw_only=True):
    actuator: str
    pools: tuple[KubernetesTable, ...] = ()


FILES: dict[str, type[ProcessFile | KubernetesFile]] = {"processes": ProcessFile, "kubernetes": KubernetesFile}


def read_supervise_file(path: Path) -> ProcessSettings | KubernetesSettings:
    """Read a file of `forebay planner supervise`. Raises ConfigError, with file and key, if it is invalid."""
    raw = read_toml(path)
    with prefixed(path):
        actuator = str(raw.get("actuator", ""))
        if actuator not in FILES:
            raise ConfigError(unknown_name("actuator", actuator, FILES))
        file = converted(raw, FILES[actuator], "key")
        require_distinct(file.pools)
        if isinstance(file, KubernetesFile):
            return KubernetesSettings({(one.group, one.pool): _object(one) for one in file.pools})
        return ProcessSettings(path.parent / file.state, tuple(map(_process_pool, file.pools)))


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
        name = named("--id", "planner", options.planner_id or process_name())
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(run(cluster, name, read.settings, read.engines))


def run_supervise(options: PlannerSuperviseCommand) -> None:
    options.logs.start()
    with explained():
        settings = read_supervise_file(options.file)
        if isinstance(settings, KubernetesSettings):
            require_extra("kubernetes", "actuator kubernetes", "kubernetes")
        elif sys.platform != "linux":
            raise ConfigError("actuator processes requires Linux, because it identifies processes by /proc")
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(supervise(cluster, settings))
