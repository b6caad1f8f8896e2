"""Reader of the TOML files of `forebay planner`: settings and pools of the planner, with profiles as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from forebay.cli.common.plain_file import read_plain_file
from forebay.core.scaling.state import PoolKey
from forebay.events.names import require_name
from forebay.events.scaling import DecodePoint, PlannerSettings, PoolScaling, PrefillPoint
from forebay.planner.predictors import predictor
from forebay.planner.simulation import PoolEngine, pool_engine
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted
from forebay.simulate.profiles.profile import MOCKER, load_profile
from forebay.simulate.settings import WORKERS_MAX

SETTINGS_BYTES_MAX = 1 << 20  # each claim on the topic has the settings with all profiles


class PoolTable(PoolScaling, frozen=True, kw_only=True):
    """Table `[[pools]]`: its profile is a file instead of points.

    Both profiles are paths relative to the file, or empty. `engine_profile` may also name a built-in profile.
    """

    profile: str = ""
    engine_profile: str = ""


class _File(PlannerSettings, frozen=True, kw_only=True):
    pools: tuple[PoolTable, ...] = ()


class _Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Points of a profile. Of a file that `forebay profile run` wrote, the other fields are ignored."""

    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    settings: Any = None
    left_out: Any = None


class _NamesPool(Protocol):
    @property
    def group(self) -> str: ...

    @property
    def pool(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlannerFile:
    """Contents of a file of `forebay planner run`. `engines` has the engines that method `simulate` simulates."""

    settings: PlannerSettings
    engines: Mapping[PoolKey, PoolEngine]


def read_planner_file(path: Path) -> PlannerFile:
    """Read a file of `forebay planner run`. Raises ConfigError, with file and key, if it is invalid."""
    raw = read_toml(path)
    with prefixed(path):
        return _settings(path, converted(raw, _File, "key"))


def _settings(path: Path, file: _File) -> PlannerFile:
    with prefixed("predictor"):
        predictor(file.predictor)
    require_distinct(file.pools)
    settings = PlannerSettings(**msgspec.structs.asdict(file) | {"pools": ()})
    pools, engines = [], {}
    for number, table in enumerate(file.pools):
        with prefixed(f"pools[{number}]"):
            pool = _pool(path, settings, table)
            pools.append(pool)
            if settings.method == "simulate":
                _require_simulatable(pool, table)
            if table.engine_profile:
                engines[pool.group, pool.pool] = _engine(path.parent, table.engine_profile, pool)
    settings = msgspec.structs.replace(settings, pools=tuple(pools))
    _require_gpus(settings)
    if settings.method == "simulate":
        _require_stages(settings.pools, engines)
    size = len(msgspec.json.encode(settings))
    if size > SETTINGS_BYTES_MAX:
        raise ConfigError(f"the settings with all profiles have {size} bytes of {SETTINGS_BYTES_MAX}; use fewer points")
    return PlannerFile(settings, engines)


def _pool(path: Path, settings: PlannerSettings, table: PoolTable) -> PoolScaling:
    """Return a pool with its profile. Raises ConfigError if the planner could never scale it."""
    for stage in ("prefill", "decode"):
        if getattr(table, stage):
            raise ConfigError(f"{stage}: expected the points in a JSON file; name it with profile")
    fields = {name: getattr(table, name) for name in PoolScaling.__struct_fields__}
    if table.profile:
        fields |= _profile(path.parent / table.profile)
    pool = PoolScaling(**fields)
    if pool.min_size > pool.max_size:
        raise ConfigError(f"min_size: must be at most max_size, which is {pool.max_size}; got {pool.min_size}")
    if pool.role == "encode":
        raise ConfigError("role: no method sizes pools of role encode; expected aggregated, prefill or decode")
    missing = (pool.role != "decode" and not pool.prefill) or (pool.role == "decode" and not pool.decode)
    if settings.method == "throughput" and missing:
        stage = "decode" if pool.role == "decode" else "prefill"
        raise ConfigError(
            f"profile: method throughput needs {stage} points of this pool; name a file, or use method load"
        )
    return pool


def _require_simulatable(pool: PoolScaling, table: PoolTable) -> None:
    """Raise ConfigError if method `simulate` cannot size a pool."""
    if pool.max_size > WORKERS_MAX:
        raise ConfigError(f"max_size: must be at most {WORKERS_MAX} with method simulate; got {pool.max_size}")
    if not table.engine_profile:
        raise ConfigError("engine_profile: method simulate needs an engine profile of this pool; name a file")


def _require_stages(pools: Sequence[PoolScaling], engines: Mapping[PoolKey, PoolEngine]) -> None:
    """Raise ConfigError if prefill and decode pools of a model cannot be simulated together."""
    for group in {pool.group: None for pool in pools if pool.role != "aggregated"}:
        roles = sorted(pool.role for pool in pools if pool.group == group and pool.role != "aggregated")
        if roles != ["decode", "prefill"]:
            found = ", ".join(roles)
            raise ConfigError(f"pools: method simulate needs one prefill and one decode pool of {group}; got {found}")
        sizes = {engine.workers.engine.block_size for key, engine in engines.items() if key[0] == group}
        if len(sizes) > 1:
            found = " and ".join(map(str, sorted(sizes)))
            raise ConfigError(f"pools: the engine profiles of {group} have blocks of {found} tokens; use one size")


def _engine(folder: Path, name: str, pool: PoolScaling) -> PoolEngine:
    """Return the engine with the built-in profile or the profile file of this name."""
    with prefixed("engine_profile"):
        profile = load_profile(MOCKER if name == MOCKER else str(folder / name))
        return pool_engine(profile, pool.kv_tokens)


def _profile(path: Path) -> dict[str, Any]:
    """Return the points in a profile. Raises ConfigError if two points of a stage are for the same place."""
    raw = read_plain_file(path, "profile")
    with prefixed(f"profile {path}"):
        profile = converted(raw, _Profile, "key")
        for stage, place in (("prefill", ("isl",)), ("decode", ("context", "concurrency"))):
            first: dict[tuple[float, ...], int] = {}
            for number, point in enumerate(getattr(profile, stage)):
                other = first.setdefault(tuple(getattr(point, name) for name in place), number)
                if other != number:
                    same = f"{stage}[{other}] has the same {' and '.join(place)}"
                    raise ConfigError(f"{stage}[{number}]: {same}")
    return {"prefill": profile.prefill, "decode": profile.decode}


def _require_gpus(settings: PlannerSettings) -> None:
    """Raise ConfigError if no sizes fit the limits of GPUs."""
    least = sum(pool.min_size * pool.gpus_per_worker for pool in settings.pools)
    if settings.gpu_budget and least > settings.gpu_budget:
        raise ConfigError(f"gpu_budget: the smallest sizes of all pools need {least} GPUs, got {settings.gpu_budget}")
    if settings.gpu_budget and settings.min_gpus > settings.gpu_budget:
        raise ConfigError(
            f"min_gpus: must be at most gpu_budget, which is {settings.gpu_budget}; got {settings.min_gpus}"
        )


def require_distinct(pools: Sequence[_NamesPool]) -> None:
    """Raise ConfigError if there is no table `[[pools]]`, or one has an invalid name or the same pool as another."""
    if not pools:
        raise ConfigError("expected at least one table [[pools]]")
    first: dict[tuple[str, str], int] = {}
    for number, table in enumerate(pools):
        with prefixed(f"pools[{number}]"):
            names = require_name("model", table.group), require_name("pool", table.pool)
            other = first.setdefault(names, number)
            if other != number:
                raise ConfigError(f"{'/'.join(names)} is also pools[{other}]; use each pool once")
