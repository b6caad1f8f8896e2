"""Reader of the file of `forebay planner run`: the planner's settings and its pools, as TOML, with profiles as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forebay.cli.common.plain_file import kind_of, read_plain_file
from forebay.cli.planner.pools_file import convert, pool_tables, read_toml, require_known
from forebay.cli.profiler.profile_file import MeasuredProfile
from forebay.events.scaling import DecodePoint, PlannerSettings, PoolScaling, PrefillPoint
from forebay.ingress.errors import Unusable
from forebay.planner.predictors import PredictorUnusable, predictor

SETTINGS_BYTES_MAX = 1 << 20  # each claim on the topic has the settings with all profiles

PointT = TypeVar("PointT", PrefillPoint, DecodePoint)


class PoolTable(PoolScaling, frozen=True, kw_only=True):
    """Table `[[pools]]`: its profile is a file instead of points.

    Attributes:
        profile: path of the profile, relative to the file; empty without a profile.
    """

    profile: str = ""


def read_planner_file(path: Path) -> PlannerSettings:
    """Read a file of `forebay planner run`. Raises Unusable, with file and key, if it is invalid."""
    try:
        return _settings(path, read_toml(path))
    except Unusable as error:
        raise Unusable(f"{path}: {error}") from None


def _settings(path: Path, raw: Mapping[str, Any]) -> PlannerSettings:
    settings = convert({**raw, "pools": ()}, PlannerSettings)
    try:
        predictor(settings.predictor)
    except PredictorUnusable as error:
        raise Unusable(f"predictor: {error}") from None
    if settings.method == "simulate":
        raise Unusable("method: simulate cannot be used by this command yet; expected throughput, load or both")
    pools = []
    for number, table in enumerate(pool_tables(raw, PoolTable)):
        try:
            pools.append(_pool(path, settings, table))
        except Unusable as error:
            raise Unusable(f"pools[{number}]: {error}") from None
    settings = msgspec.structs.replace(settings, pools=tuple(pools))
    _require_gpus(settings)
    size = len(msgspec.json.encode(settings))
    if size > SETTINGS_BYTES_MAX:
        raise Unusable(f"the settings with all profiles have {size} bytes of {SETTINGS_BYTES_MAX}; use fewer points")
    return settings


def _pool(path: Path, settings: PlannerSettings, table: PoolTable) -> PoolScaling:
    """Return a pool with its profile. Raises Unusable if the planner could never scale it."""
    for stage in ("prefill", "decode"):
        if getattr(table, stage):
            raise Unusable(f"{stage}: expected the points in a JSON file; name it with profile")
    fields = {name: getattr(table, name) for name in PoolScaling.__struct_fields__}
    if table.profile:
        fields |= _profile(path.parent / table.profile)
    pool = PoolScaling(**fields)
    if pool.min_size > pool.max_size:
        raise Unusable(f"min_size: must be at most max_size, which is {pool.max_size}; got {pool.min_size}")
    if pool.role == "encode":
        raise Unusable("role: no method sizes pools of role encode; expected aggregated, prefill or decode")
    missing = (pool.role != "decode" and not pool.prefill) or (pool.role == "decode" and not pool.decode)
    if settings.method == "throughput" and missing:
        stage = "decode" if pool.role == "decode" else "prefill"
        raise Unusable(f"profile: method throughput needs {stage} points of this pool; name a file, or use method load")
    return pool


def _profile(path: Path) -> dict[str, Any]:
    """Return the points of a profile by stage."""
    raw = read_plain_file(path, "profile")
    try:
        if not isinstance(raw, dict):
            raise Unusable(f"expected an object with prefill and decode, got {kind_of(raw)}")
        require_known(raw, MeasuredProfile.__struct_fields__)
        return {
            "prefill": _points(raw, "prefill", PrefillPoint, ("isl",)),
            "decode": _points(raw, "decode", DecodePoint, ("context", "concurrency")),
        }
    except Unusable as error:
        raise Unusable(f"profile {path}: {error}") from None


def _points(raw: Mapping[str, Any], stage: str, kind: type[PointT], place: tuple[str, ...]) -> tuple[PointT, ...]:
    """Return the points of one stage. Raises Unusable if two points have the same values of `place`."""
    found = raw.get(stage, [])
    if not isinstance(found, list):
        raise Unusable(f"{stage}: expected a list of points, got {kind_of(found)}")
    points: dict[tuple[float, ...], PointT] = {}
    for number, one in enumerate(found):
        try:
            if not isinstance(one, dict):
                raise Unusable(f"expected a point, got {kind_of(one)}")
            point = convert(one, kind)
        except Unusable as error:
            raise Unusable(f"{stage}[{number}]: {error}") from None
        at = tuple(getattr(point, name) for name in place)
        if at in points:
            first = list(points).index(at)
            raise Unusable(f"{stage}[{number}]: {stage}[{first}] has the same {' and '.join(place)}")
        points[at] = point
    return tuple(points.values())


def _require_gpus(settings: PlannerSettings) -> None:
    """Raise Unusable if no sizes fit the limits of GPUs."""
    least = sum(pool.min_size * pool.gpus_per_worker for pool in settings.pools)
    if settings.gpu_budget and least > settings.gpu_budget:
        raise Unusable(f"gpu_budget: the smallest sizes of all pools need {least} GPUs, got {settings.gpu_budget}")
    if settings.gpu_budget and settings.min_gpus > settings.gpu_budget:
        raise Unusable(f"min_gpus: must be at most gpu_budget, which is {settings.gpu_budget}; got {settings.min_gpus}")
