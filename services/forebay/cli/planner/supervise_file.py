"""Reader of the file of `forebay planner supervise`: an actuator and its pools, as TOML."""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from forebay.cli.common.plain_file import kind_of
from forebay.core.scaling.state import PoolKey
from forebay.events.names import NameInvalid, require_name, unknown_name
from forebay.ingress.errors import Unusable
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool
from forebay.simulate.field_descriptions import invalid_field

FILE_BYTES_MAX = 1 << 20
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
    """Contents of a file with the actuator `processes`.

    Attributes:
        state: state directory.
        pools: the pools.
    """

    state: Path
    pools: tuple[ProcessPool, ...]


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Contents of a file with the actuator `kubernetes`.

    Attributes:
        pools: kind, namespace and name of the object of each pool.
    """

    pools: Mapping[PoolKey, tuple[PodSetKind, str, str]]


Table = TypeVar("Table", ProcessTable, KubernetesTable)


def read_supervise_file(path: Path) -> ProcessSettings | KubernetesSettings:
    """Read a file of `forebay planner supervise`. Raises Unusable, with file and key, if it is invalid."""
    try:
        return _settings(path, _toml(path))
    except Unusable as error:
        raise Unusable(f"{path}: {error}") from None


def _settings(path: Path, raw: Mapping[str, Any]) -> ProcessSettings | KubernetesSettings:
    actuator = raw.get("actuator")
    if actuator is None:
        raise Unusable(f"the key actuator is missing; expected one of {', '.join(get_args(ActuatorName))}")
    if actuator not in get_args(ActuatorName):
        raise Unusable(unknown_name("actuator", str(actuator), get_args(ActuatorName)))
    keys = ("actuator", "state", "pools") if actuator == "processes" else ("actuator", "pools")
    _require_known(raw, keys)
    if actuator == "kubernetes":
        return KubernetesSettings({(one.group, one.pool): _object(one) for one in _pools(raw, KubernetesTable)})
    state = raw.get("state")
    if not isinstance(state, str) or not state:
        raise Unusable("the key state is missing or not a path; expected a directory, such as state = 'supervisor'")
    tables = _pools(raw, ProcessTable)
    return ProcessSettings(path.parent / state, tuple(_process_pool(table) for table in tables))


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise Unusable(f"the file is larger than {FILE_BYTES_MAX >> 20} MiB")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise Unusable(f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise Unusable(f"not TOML: {error}") from None


def _pools(raw: Mapping[str, Any], kind: type[Table]) -> list[Table]:
    found = raw.get("pools")
    if not isinstance(found, list) or not found:
        raise Unusable("expected at least one table [[pools]]")
    tables: list[Table] = []
    for number, table in enumerate(found):
        try:
            tables.append(_pool(table, kind))
        except Unusable as error:
            raise Unusable(f"pools[{number}]: {error}") from None
        names = [(one.group, one.pool) for one in tables]
        if names[-1] in names[:-1]:
            first = names.index(names[-1])
            raise Unusable(f"pools[{number}]: {'/'.join(names[-1])} is also pools[{first}]; use each pool once")
    return tables


def _pool(raw: Any, kind: type[Table]) -> Table:
    if not isinstance(raw, dict):
        raise Unusable(f"expected a table, got {kind_of(raw)}")
    _require_known(raw, kind.__struct_fields__)
    try:
        table = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise Unusable(invalid_field(raw, kind, error)) from None
    try:
        require_name("model", table.group)
        require_name("pool", table.pool)
    except NameInvalid as error:
        raise Unusable(str(error)) from None
    return table


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


def _require_known(raw: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in raw:
        if key not in keys:
            raise Unusable(unknown_name("key", key, keys))
