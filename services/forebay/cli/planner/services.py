"""`forebay planner`: `run` decides the sizes of pools, `supervise` executes its decisions, `set` gives it orders.

Decisions are executed with local processes or with Kubernetes.
"""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Annotated

import click
import msgspec

from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.common.extras import require_extra
from forebay.cli.common.operator_name import operator_name
from forebay.cli.common.terminal import printable
from forebay.cli.planner.command import AUTO, SIZE_MAX, PlannerRunCommand, PlannerSetCommand, PlannerSuperviseCommand
from forebay.cli.planner.planner_file import read_planner_file, require_distinct
from forebay.core.scaling.state import PoolKey
from forebay.events.names import unknown_name
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool
from forebay.planner.orders import Order, execute_order, pause_order, scaling_on_kafka, size_order
from forebay.processes.names import named, process_name
from forebay.processes.notices import complain
from forebay.processes.planner import KubernetesSettings, PodSetKind, ProcessSettings, run, supervise
from forebay.processes.service import Cluster
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted

NO_EFFECT = 1
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


def run_set(options: PlannerSetCommand) -> None:
    pool, size = options.pool, options.size
    if bool(pool) == (options.pause is not None) or bool(pool) != bool(size):
        fail("expected one of: GROUP/POOL and its size, --pause, --resume")
    is_number = size.isdecimal() and size.isascii() and len(size) <= len(str(SIZE_MAX))
    if size not in ("", AUTO) and not (is_number and int(size) <= SIZE_MAX):
        fail(f"N: expected {AUTO} or a number from 0 to {SIZE_MAX}, got {size}")
    count = int(size) if size not in ("", AUTO) else None
    timeout_s = options.timeout_s if options.wait else None
    name = operator_name(options.operator)

    def on_step(kind: str, text: str) -> None:
        if kind == "problem":
            complain(text)
        else:
            click.echo(printable(f"{kind:<10} {text}"))

    def make(pools: list[PoolKey]) -> Order:
        return size_order(pools, pool, count, name) if pool else pause_order(name, paused=bool(options.pause))

    async def run() -> bool:
        async with scaling_on_kafka(options.kafka.settings()) as log:
            return await execute_order(log, make, timeout_s, on_step)

    with explained():
        is_effective = asyncio.run(run())
    if not is_effective:
        raise click.exceptions.Exit(NO_EFFECT)
