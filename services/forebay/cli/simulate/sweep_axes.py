"""Values of `--set NAME=VALUE,VALUE`: settings of the router, the fleet and the workload that a sweep varies.

Names are those of the router's configuration, and those of the options of `forebay simulate` with underscores.
`A:B=1:4,2:2` varies two settings together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import click

from forebay.cli.common.options import CliOption, Number, parameters_of
from forebay.cli.simulate.options import AS_CONFIGURED, TIERS, FleetOptions, ShapeOptions, router_of, settings_of
from forebay.core.routing.policies import BUILT_IN
from forebay.events.control import RouterConfig
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.simulate.settings import ROUTER_SETTINGS, Settings

RUNS_MAX = 1_000
# Settings that only affect the cost function have no effect on modes that ignore costs.
COST_SETTINGS = (
    "selection_policy", "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "temperature",
    "host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_hit_weight", "tier_credit",
    "decode_active_request_weight", "eviction_weight",
)  # fmt: skip
BLIND_MODES = frozenset(BUILT_IN) - {"kv"}


def _scalars(group: type[Any]) -> dict[str, CliOption]:
    """Return the options of a group that are a single number or word, by the name of their field."""
    found = (one for one in parameters_of(group) if isinstance(one, CliOption))
    return {one.name or "": one for one in found if not one.multiple and not one.is_flag and one.type.name != "path"}


OF_FLEET = _scalars(FleetOptions)
OF_SHAPE = _scalars(ShapeOptions)
TIER_SIZES = {f"kv_{tier}_size": tier for tier in TIERS}  # sizes of `--kv-tier`
KNOWN = sorted({*ROUTER_SETTINGS, *OF_FLEET, *TIER_SIZES, *OF_SHAPE})


@dataclass(frozen=True, slots=True)
class Axis:
    """One `--set` option of a sweep: settings that vary together, and points with one value per setting, as text."""

    names: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep. Its router, fleet and shape include `varied`, the settings that apply to its policy."""

    policy: str
    varied: Mapping[str, str]
    router: RouterConfig
    fleet: Settings
    shape: ShapeOptions
    seed: int

    @property
    def name(self) -> str:
        return ", ".join([self.policy, *(f"{name}={value}" for name, value in self.varied.items())])


@dataclass(slots=True)
class _Parts:
    """Components of a combination while it is assembled."""

    fleet: FleetOptions
    shape: ShapeOptions
    router: list[str] = field(default_factory=list)


def axes_of(sets: Sequence[str]) -> list[Axis]:
    """Parse the `--set` options. Raises ConfigError if one is malformed, or a name or value is duplicate."""
    axes: list[Axis] = []
    seen: set[str] = set()
    for text in sets:
        left, equals, right = text.partition("=")
        names = tuple(name.strip() for name in left.split(":"))
        points = tuple(tuple(value.strip() for value in point.split(":", len(names) - 1)) for point in right.split(","))
        if not equals or not all(names) or not all(all(point) for point in points):
            raise ConfigError(f"--set {text}: expected NAME=VALUE,VALUE")
        if any(len(point) != len(names) for point in points):
            raise ConfigError(
                f"--set {text}: {len(names)} names need {len(names)} values per point (between commas), as in 2:6,4:4"
            )
        if len(set(points)) < len(points):
            raise ConfigError(f"--set {text}: duplicate value")
        for name in names:
            if name not in KNOWN:
                raise ConfigError(f"--set {text}: {unknown_name('setting', name, KNOWN)}")
            if name in seen:
                raise ConfigError(f"--set {text}: {name} is varied twice; use one --set for it")
            seen.add(name)
        axes.append(Axis(names, points))
    return axes


def combinations(
    policies: Sequence[str], axes: Sequence[Axis], fleet: FleetOptions, shape: ShapeOptions
) -> list[Combination]:
    """Return every combination of a policy and one point per axis, sorted in this order. Equal ones occur once.

    Raises ConfigError if there are too many combinations, or one is invalid.
    """
    runs = len(policies) * prod(len(axis.points) for axis in axes)
    if runs > RUNS_MAX:
        raise ConfigError(f"the sweep would have {runs} runs; the maximum is {RUNS_MAX}: use fewer values or policies")
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
    router = _router(text, parts.router)
    return Combination(text, varied, router, settings_of(parts.fleet), parts.shape, parts.fleet.seed)


def _router(text: str, more: Sequence[str]) -> RouterConfig:
    mode, _, given = text.partition(":")
    settings = [*(given.split(",") if given else ()), *more]
    names = [one.partition("=")[0] for one in settings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is in both --policy {text} and --set; remove one")
    if mode == AS_CONFIGURED and more:
        raise ConfigError(f"--set {names[0]}: has no effect, because every pool has its own router")
    return router_of(f"{mode}:{','.join(settings)}" if settings else mode)


def _vary(parts: _Parts, name: str, value: str) -> None:
    if name in ROUTER_SETTINGS:
        parts.router.append(f"{name}={value}")
    elif name in OF_FLEET:
        parts.fleet = replace(parts.fleet, **{name: _converted(name, value, OF_FLEET[name])})
    elif name in TIER_SIZES:
        more = f"{TIER_SIZES[name]}:size={value}"
        parts.fleet = replace(parts.fleet, kv_tier=[*(parts.fleet.kv_tier or ()), more])
    else:
        parts.shape = replace(parts.shape, **{name: _converted(name, value, OF_SHAPE[name])})


def _converted(name: str, text: str, option: CliOption) -> Any:
    if not isinstance(option.type, Number):
        return text
    try:
        return option.type.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"--set {name}={text}: {error.message}; separate values by commas") from None
