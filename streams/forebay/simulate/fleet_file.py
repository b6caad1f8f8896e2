"""Reader of `--fleet FILE`: pools, workers, delays and life cycle of a simulated fleet, as TOML.

docs/simulate.md documents the format. Times in the file are in seconds, delays in milliseconds.
"""

from pathlib import Path
from typing import Annotated, get_args

import msgspec

from forebay.events.control import RouterConfig, RouterMode
from forebay.runtime.errors import ConfigError, prefixed
from forebay.runtime.files import read_toml
from forebay.simulate.field_descriptions import converted
from forebay.simulate.pool_routing_file import ModelRouting, require_unique
from forebay.simulate.profiles.profile import MOCKER, Gpus, Profile, Size, load_profile
from forebay.simulate.settings import (
    Count,
    Delays,
    LifeCycleSettings,
    LifeTimes,
    PoolRole,
    PoolSettings,
    Settings,
    Transfer,
    WorkerFault,
    WorkerGroup,
    WorkerStart,
    engine_config,
    named_delays,
    validate_settings,
)
from forebay.simulate.tiers.settings import FleetTiers


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
    router: RouterConfig | None = None


class _File(_Table, frozen=True, kw_only=True):
    pools: tuple[_Pool, ...]
    delays: str | Delays = Delays()
    life: LifeTimes = LifeTimes()
    transfer: Transfer = Transfer()
    tiers: FleetTiers | None = None
    faults: tuple[WorkerFault, ...] = ()
    starts: tuple[WorkerStart, ...] = ()
    models: tuple[ModelRouting, ...] = ()


def load_fleet(path: Path) -> Settings:
    """Read a fleet file. Paths of engine profiles are relative to its folder.

    Raises ConfigError if the file cannot be read or a key is invalid.
    """
    raw = read_toml(path)
    with prefixed(path):
        fleet = _fleet(converted(raw, _File, "key"), path.parent)
        validate_settings(fleet)
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
            router=_simulatable(pool.router, f"pools[{at}].router"),
        )
        for at, pool in enumerate(described.pools)
    )
    require_unique(described.models)
    return Settings(
        pools=pools,
        delays=described.delays if isinstance(described.delays, Delays) else named_delays("delays", described.delays),
        life=LifeCycleSettings(
            **msgspec.structs.asdict(described.life), faults=described.faults, starts=described.starts
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


def _simulatable(router: RouterConfig | None, where: str) -> RouterConfig | None:
    """Return the routing configuration of a pool. Raises ConfigError for a mode that no `--policy` accepts."""
    modes = sorted(set(get_args(RouterMode)) - {"direct"})
    if router is not None and "." not in router.mode and router.mode not in modes:
        raise ConfigError(
            f"{where}.mode: {router.mode!r} cannot be simulated; use {', '.join(modes)} or a dotted class path"
        )
    return router
