"""What `--set NAME=VALUE,VALUE` varies in a sweep: settings of the router, of the fleet and of the workload.

Names are those of the router's configuration, and those of the options of `forebay simulate` with underscores;
`pool.NAME.workers` is of one pool. `A:B=1:4,2:2` varies two of them together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from math import prod
from typing import Any, get_args

import msgspec

from forebay.cli.common.option_groups import options_of
from forebay.cli.simulate.options import AS_CONFIGURED, FleetOptions, ShapeOptions, router_of, settings_of
from forebay.core.routing.policies import BUILT_IN
from forebay.events.control import RouterConfig
from forebay.simulate.settings import ROUTER_SETTINGS, PolicyUnusable, Settings, WorkerGroup, require_sense

RUNS_MAX = 1_000
RANGE = re.compile(r"(?P<first>\d{1,9})\s*(-|\.\.|:)\s*(?P<last>\d{1,9})")
RANGE_WRITTEN_MAX = 12  # values of a range that a message writes out
POOL_SETTING = re.compile(r"pool\.(?P<pool>.+?)(\.(?P<group>\d+))?\.(?P<size>[a-z_]+)")
ENGINE_SIZES = {
    "block_size": "block_size",
    "blocks": "kv_blocks_total",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
POOL_SIZES = ("workers", *ENGINE_SIZES)
# What only goes into costs is nothing to a mode that does not look at costs.
COST_SETTINGS = (
    "selection_policy", "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "temperature",
    "host_cache_hit_weight", "disk_cache_hit_weight", "decode_active_request_weight",
)  # fmt: skip
BLIND_MODES = frozenset(BUILT_IN) - {"kv"}


def _scalars(group: type[Any]) -> dict[str, tuple[type[Any], Any]]:
    """The options of a group that are one number or word: their type, and what typer knows of their bounds."""
    found: dict[str, tuple[type[Any], Any]] = {}
    for name, option in options_of(group).items():
        kind, said = get_args(option.annotation)
        kinds = [one for one in (get_args(kind) or (kind,)) if one in (int, float, str)]
        if kinds:
            found[name] = (kinds[0], said)
    return found


OF_FLEET = _scalars(FleetOptions)
OF_SHAPE = _scalars(ShapeOptions)


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that vary together, and for each point on it a value of each, as text."""

    names: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep.

    Attributes:
        policy: as the user gave it; with what is varied in it, it is `router`.
        varied: the value of everything that varies and means something to it, by name.
    """

    policy: str
    varied: Mapping[str, str]
    router: RouterConfig
    fleet: Settings
    shape: ShapeOptions
    seed: int

    @property
    def name(self) -> str:
        """What people call it."""
        return ", ".join([self.policy, *(f"{name}={value}" for name, value in self.varied.items())])


@dataclass(slots=True)
class _Parts:
    """What a combination is put together of."""

    fleet: FleetOptions
    shape: ShapeOptions
    router: list[str] = field(default_factory=list)
    pools: list[tuple[str, str]] = field(default_factory=list)


def axes_of(sets: Sequence[str]) -> list[Axis]:
    """The axes that `--set` options stand for. Raises ValueError for what is none, or stands there twice."""
    axes: list[Axis] = []
    seen: set[str] = set()
    for text in sets:
        left, equals, right = text.partition("=")
        names = tuple(name.strip() for name in left.split(":"))
        points = tuple(tuple(value.strip() for value in point.split(":", len(names) - 1)) for point in right.split(","))
        if not equals or not all(names) or not all(all(point) for point in points):
            raise ValueError(f"--set {text}: not of the form NAME=VALUE,VALUE")
        if any(len(point) != len(names) for point in points):
            raise ValueError(f"--set {text}: {len(names)} names need {len(names)} values at each point, as in 2:6,4:4")
        if len(set(points)) < len(points):
            raise ValueError(f"--set {text}: a value stands there twice")
        for name in names:
            _require_known(name, text)
            if name in seen:
                raise ValueError(f"--set {text}: {name} is varied twice")
            seen.add(name)
        axes.append(Axis(names, points))
    return axes


def combinations(
    policies: Sequence[str], axes: Sequence[Axis], fleet: FleetOptions, shape: ShapeOptions
) -> list[Combination]:
    """All of them, policies first, then in the order of the axes; those that would be the same stand there once.

    Raises ValueError.
    """
    runs = len(policies) * prod(len(axis.points) for axis in axes)
    if runs > RUNS_MAX:
        raise ValueError(f"that makes {runs} runs, and a sweep has at most {RUNS_MAX}: leave out values or policies")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Combination] = {}
    for text in policies:
        mode = router_of(text).mode
        for point in product(*(axis.points for axis in axes)):
            varied = {
                name: value
                for axis, values in zip(axes, point, strict=True)
                for name, value in zip(axis.names, values, strict=True)
                if mode not in BLIND_MODES or name not in COST_SETTINGS
            }
            key = (text, tuple(varied.items()))
            if key not in found:
                found[key] = _combination(text, varied, fleet, shape)
    return list(found.values())


def _combination(text: str, varied: Mapping[str, str], fleet: FleetOptions, shape: ShapeOptions) -> Combination:
    parts = _Parts(fleet, shape)
    for name, value in varied.items():
        _vary(parts, name, value)
    settings = settings_of(parts.fleet)
    for name, value in parts.pools:
        settings = _resized(settings, name, value)
    require_sense(settings)
    return Combination(text, varied, _router(text, parts.router), settings, parts.shape, parts.fleet.seed)


def _router(text: str, more: Sequence[str]) -> RouterConfig:
    """The policy with more settings than its text has."""
    mode, _, given = text.partition(":")
    settings = [*(given.split(",") if given else ()), *more]
    names = [one.partition("=")[0] for one in settings]
    for name in names:
        if names.count(name) > 1:
            raise PolicyUnusable(f"{name} is both in --policy {text} and in --set")
    if mode == AS_CONFIGURED and more:
        raise PolicyUnusable(f"--set {names[0]}: every pool has a router of its own, so it decides nothing")
    return router_of(f"{mode}:{','.join(settings)}" if settings else mode)


def _vary(parts: _Parts, name: str, value: str) -> None:
    if name in ROUTER_SETTINGS:
        parts.router.append(f"{name}={value}")
    elif name in OF_FLEET:
        parts.fleet = replace(parts.fleet, **{name: _converted(name, value, *OF_FLEET[name])})
    elif name in OF_SHAPE:
        parts.shape = replace(parts.shape, **{name: _converted(name, value, *OF_SHAPE[name])})
    else:
        parts.pools.append((name, value))


def _converted(name: str, text: str, kind: type[Any], bounds: Any = None) -> Any:
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"--set {name}={text}: not of the type {kind.__name__}; {_written_out(text)}") from None
    low, high = getattr(bounds, "min", None), getattr(bounds, "max", None)
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ValueError(f"--set {name}={text}: from {low} to {high if high is not None else 'any'}")
    return value


def _written_out(text: str) -> str:
    """How to write the values that a text seems to stand for."""
    span = RANGE.fullmatch(text)
    values = range(int(span["first"]), int(span["last"]) + 1) if span else range(0)
    if 1 < len(values) <= RANGE_WRITTEN_MAX:
        return f"write {','.join(map(str, values))}"
    return "write single values with commas between them, as in 4,5,6"


def _require_known(name: str, text: str) -> None:
    if name in ROUTER_SETTINGS or name in OF_FLEET or name in OF_SHAPE:
        return
    pool = POOL_SETTING.fullmatch(name)
    known = sorted({*ROUTER_SETTINGS, *OF_FLEET, *OF_SHAPE})
    if pool is None:
        near = get_close_matches(name, known, n=3) or known
        raise ValueError(f"--set {text}: there is nothing called {name} to vary; there is {', '.join(near)}")
    if pool["size"] not in POOL_SIZES:
        raise ValueError(f"--set {text}: of a pool {', '.join(POOL_SIZES)} can vary, not {pool['size']}")


def _resized(settings: Settings, name: str, text: str) -> Settings:
    """The fleet with another number or size of workers in a group of a pool."""
    said = POOL_SETTING.fullmatch(name)
    assert said is not None, "known names only"
    pools = {pool.name: pool for pool in settings.pools}
    if said["pool"] not in pools:
        raise ValueError(f"--set {name}: there is no pool {said['pool']}; there are {', '.join(pools)}")
    pool = pools[said["pool"]]
    if said["group"] is None and len(pool.groups) > 1:
        last = len(pool.groups) - 1
        names = f"pool.{pool.name}.0.{said['size']} to pool.{pool.name}.{last}.{said['size']}"
        raise ValueError(f"--set {name}: the pool has several groups of workers, {names}")
    number = int(said["group"] or 0)
    if number >= len(pool.groups):
        raise ValueError(f"--set {name}: pool {pool.name} has {len(pool.groups)} groups of workers, counted from 0")
    groups = list(pool.groups)
    groups[number] = _resized_group(groups[number], name, said["size"], _converted(name, text, *OF_FLEET[said["size"]]))
    return msgspec.structs.replace(
        settings,
        pools=tuple(
            msgspec.structs.replace(one, groups=tuple(groups)) if one is pool else one for one in settings.pools
        ),
    )


def _resized_group(group: WorkerGroup, name: str, size: str, value: int) -> WorkerGroup:
    if size == "workers":
        return msgspec.structs.replace(group, count=value)
    return msgspec.structs.replace(group, engine=msgspec.structs.replace(group.engine, **{ENGINE_SIZES[size]: value}))
