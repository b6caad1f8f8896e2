"""Reader of the file of `forebay planner supervise`: an actuator and its pools, as TOML."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from forebay.cli.planner.pools_file import pool_tables, read_toml, require_known
from forebay.core.scaling.state import PoolKey
from forebay.events.names import unknown_name
from forebay.ingress.errors import Unusable
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool

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
    """Contents of a file with the actuator `kubernetes`.

    Attributes:
        pools: kind, namespace and name of the object of each pool.
    """

    pools: Mapping[PoolKey, tuple[PodSetKind, str, str]]


def read_supervise_file(path: Path) -> ProcessSettings | KubernetesSettings:
    """Read a file of `forebay planner supervise`. Raises Unusable, with file and key, if it is invalid."""
    try:
        return _settings(path, read_toml(path))
    except Unusable as error:
        raise Unusable(f"{path}: {error}") from None


def _settings(path: Path, raw: Mapping[str, Any]) -> ProcessSettings | KubernetesSettings:
    actuator = raw.get("actuator")
    if actuator is None:
        raise Unusable(f"the key actuator is missing; expected one of {', '.join(get_args(ActuatorName))}")
    if actuator not in get_args(ActuatorName):
        raise Unusable(unknown_name("actuator", str(actuator), get_args(ActuatorName)))
    keys = ("actuator", "state", "pools") if actuator == "processes" else ("actuator", "pools")
    require_known(raw, keys)
    if actuator == "kubernetes":
        return KubernetesSettings({(one.group, one.pool): _object(one) for one in pool_tables(raw, KubernetesTable)})
    state = raw.get("state")
    if not isinstance(state, str) or not state:
        raise Unusable("the key state is missing or not a path; expected a directory, such as state = 'supervisor'")
    tables = pool_tables(raw, ProcessTable)
    return ProcessSettings(path.parent / state, tuple(_process_pool(table) for table in tables))


def _process_pool(table: ProcessTable) -> ProcessPool:
    name = f"{table.group}/{table.pool}"
    if not table.command:
        raise Unusable(f"{name}: the command is empty; expected a program and its arguments")
    if any("\0" in argument for argument in table.command):
        raise Unusable(f"{name}: an argument of the command contains a NUL character")
    if shutil.which(table.command[0]) is None:
        raise Unusable(f"{name}: the program {table.command[0]!r} was not found; use its path, or add it to PATH")
    return ProcessPool(table.group, table.pool, table.command, table.kill_after_s)


def _object(table: KubernetesTable) -> tuple[PodSetKind, str, str]:
    name = f"{table.group}/{table.pool}"
    if bool(table.deployment) == bool(table.statefulset):
        raise Unusable(f"{name}: expected one of the keys deployment and statefulset")
    kind: PodSetKind = "deployment" if table.deployment else "statefulset"
    namespace, slash, own = (table.deployment or table.statefulset).partition("/")
    if not (namespace and slash and own) or "/" in own:
        raise Unusable(f'{name}: expected {kind} = "NAMESPACE/NAME", got "{table.deployment or table.statefulset}"')
    return kind, namespace, own
