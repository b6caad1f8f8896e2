"""Reader of `--fleet FILE`: pools, workers, delays and life cycle of a simulated fleet, as TOML.

docs/simulate.md documents the format. Times in the file are in seconds, delays in milliseconds.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.core.routing.policies import BUILT_IN
from forebay.events.control import RouterConfig
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import in_terms_of_keys, unknown_field
from forebay.simulate.pool_routing_file import ModelRouting, require_unique
from forebay.simulate.profiles.profile import MOCKER, Gpus, Profile, Size, load_profile
from forebay.simulate.settings import (
    DELAYS,
    TIME_S_MAX,
    WORKERS_MAX,
    Delay,
    Delays,
    LifeCycleSettings,
    LifeTimes,
    PoolRole,
    PoolSettings,
    Seconds,
    Settings,
    SettingsUnusable,
    Transfer,
    WorkerFault,
    WorkerGroup,
    WorkerStart,
    engine_config,
    validate_settings,
)
from forebay.simulate.tiers.settings import FleetTiers

US_PER_S = 1e6
US_PER_MS = 1e3

Count = Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_S_MAX)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Workers(_Table, frozen=True, kw_only=True):
    count: Count
    engine_profile: str = MOCKER
    block_size: Size | None = None
    kv_blocks: Size | None = None
    max_num_seqs: Size | None = None
    max_num_batched_tokens: Size | None = None
    gpus: Gpus | None = None


class _Pool(_Table, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "default"
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "simulated"
    role: PoolRole = "aggregated"
    workers: tuple[_Workers, ...]
    router: dict[str, Any] | None = None


class _Delay(_Table, frozen=True, kw_only=True):
    fixed_ms: Milliseconds = 0.0
    jitter_ms: Milliseconds = 0.0


class _Delays(_Table, frozen=True, kw_only=True):
    submit: _Delay = _Delay()
    work: _Delay = _Delay()
    tokens: _Delay = _Delay()
    kv_events: _Delay = _Delay()
    progress: _Delay = _Delay()
    metrics: _Delay = _Delay()


class _Fault(_Table, frozen=True, kw_only=True):
    worker: str
    at_s: Seconds
    back_s: Seconds | None = None


class _Start(_Table, frozen=True, kw_only=True):
    at_s: Seconds
    pool: str = "default"
    group: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Count = 1


class _File(_Table, frozen=True, kw_only=True):
    pools: tuple[_Pool, ...]
    delays: str | _Delays = _Delays()
    life: LifeTimes = LifeTimes()
    transfer: Transfer = Transfer()
    tiers: FleetTiers | None = None
    faults: tuple[_Fault, ...] = ()
    starts: tuple[_Start, ...] = ()
    models: tuple[ModelRouting, ...] = ()


def load_fleet(path: Path) -> Settings:
    """Read a fleet file. Paths of engine profiles are relative to its folder.

    Raises ConfigError if the file cannot be read or a key is invalid.
    """
    raw = read_toml(path)
    try:
        _require_known(raw, _File, "")
        described = msgspec.convert(raw, _File)
        fleet = _fleet(described, path.parent)
        validate_settings(fleet)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {in_terms_of_keys(str(error))}") from error
    except SettingsUnusable as error:
        key = re.sub(r"^(faults.*)[.]at$", r"\1.at_s", error.where)
        raise ConfigError(f"{path}: {key}: {error.reason}") from error
    except (ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return fleet


def worker_group(profile: Profile, count: int, gpus: float | None = None, **sizes: int | None) -> WorkerGroup:
    """Return a group of identical workers whose engines have this profile.

    Sizes are named as the arguments of `engine_config`. None uses the value of the profile, or else the default. Raises
    ConfigError if sizes contradict each other.
    """
    known = {size: value or getattr(profile.sizes, size) for size, value in sizes.items()}
    try:
        engine = engine_config(**{size: value for size, value in known.items() if value is not None})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return WorkerGroup(
        count=count,
        engine=msgspec.structs.replace(engine, timing=profile.timing),
        profile=profile.name,
        gpus=gpus or profile.sizes.gpus or 1.0,
        tiers=profile.tiers,
    )


def _fleet(described: _File, folder: Path) -> Settings:
    pools = tuple(
        PoolSettings(
            name=pool.name,
            model=pool.model,
            role=pool.role,
            groups=tuple(
                _group(one, folder, f"pools[{at}].workers[{group_at}]") for group_at, one in enumerate(pool.workers)
            ),
            router=None if pool.router is None else _router(pool.router, f"pools[{at}].router"),
        )
        for at, pool in enumerate(described.pools)
    )
    require_unique(described.models)
    return Settings(
        pools=pools,
        delays=_delays(described.delays),
        life=LifeCycleSettings(
            **msgspec.structs.asdict(described.life),
            faults=tuple(map(_fault, described.faults)),
            starts=tuple(
                WorkerStart(at_us=round(one.at_s * US_PER_S), pool=one.pool, group=one.group, count=one.count)
                for one in described.starts
            ),
        ),
        transfer=described.transfer,
        tiers=described.tiers,
        model_rules=described.models,
    )


def _group(one: _Workers, folder: Path, where: str) -> WorkerGroup:
    with prefixed(f"{where}.engine_profile"):
        profile = load_profile(MOCKER if one.engine_profile == MOCKER else str(folder / one.engine_profile))
    sizes = {name: getattr(one, name) for name in ("block_size", "kv_blocks", "max_num_seqs", "max_num_batched_tokens")}
    with prefixed(where):
        return worker_group(profile, one.count, one.gpus, **sizes)


def _router(fields: dict[str, Any], where: str) -> RouterConfig:
    """Return the routing configuration of a pool. Its fields are those that a `--policy` accepts."""
    _require_known(fields, RouterConfig, where)
    try:
        router = msgspec.convert(fields, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(in_terms_of_keys(str(error), f"{where}.")) from error
    if router.mode == "direct" or ("." not in router.mode and router.mode not in BUILT_IN):
        modes = ", ".join(sorted(set(BUILT_IN) - {"direct"}))
        raise ConfigError(f"{where}.mode: {router.mode!r} cannot be simulated; use {modes} or a dotted class path")
    return router


def _require_known(table: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Reject unknown keys. msgspec ignores them in some structs, and never suggests a similar key."""
    if unknown := unknown_field(table, kind, "key", where):
        raise ConfigError(unknown)


def _delays(described: str | _Delays) -> Delays:
    if isinstance(described, str):
        if described not in DELAYS:
            raise ConfigError(f"delays: {unknown_name('delay profile', described, DELAYS)}")
        return DELAYS[described]
    hops = {name: getattr(described, name) for name in described.__struct_fields__}
    return Delays(
        **{
            name: Delay(fixed_us=round(one.fixed_ms * US_PER_MS), jitter_us=round(one.jitter_ms * US_PER_MS))
            for name, one in hops.items()
        }
    )


def _fault(one: _Fault) -> WorkerFault:
    back_us = None if one.back_s is None else round(one.back_s * US_PER_S)
    return WorkerFault(worker=one.worker, at_us=round(one.at_s * US_PER_S), back_us=back_us)
