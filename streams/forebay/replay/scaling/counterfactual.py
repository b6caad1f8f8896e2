"""Replay the planner with other settings on recorded observations, and compute recorded forecasts again.

Theory of operation. The replay is an open loop: demand and load are those of the recording, although other sizes would
have changed the load. So it shows which sizes other settings decide, not which latency they lead to. Sizes count from
an observation to the next one, and their GPU hours are those of the decided sizes.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.core.scaling.changes import SizeChanges, size_changes
from forebay.core.scaling.observation import GroupObservation
from forebay.core.scaling.state import PlannerState, PoolKey
from forebay.core.scaling.virtual_planner import Forecast, VirtualPlanner
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.codec import DecodeError, decode
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
)
from forebay.events.topics import SCALING
from forebay.replay.diff.handover import state_of
from forebay.replay.moment import Fact
from forebay.replay.scaling.journal import PARTITION, OnProgress, pool_text
from forebay.replay.walk import walk_all
from forebay.transport.base import Log, LogError
from forebay.transport.history.reader import records_of

PROGRESS_EVERY = 1_000
TOLERANCE = 1e-3  # relative: fits end a little differently with another library of linear algebra
S_PER_HOUR = 3_600
US_PER_S = 1_000_000

Predictors = Callable[[str], Forecast | None]
"""Returns the predictor of a name, None if it cannot be used here."""


class Sizing(Fact, frozen=True, kw_only=True):
    """Sizes of one planner over the whole replay.

    Attributes:
        reversals: changes in the opposite direction of the pool's previous change.
    """

    gpu_hours: float
    changes: int
    reversals: int


class ReplayedPool(Fact, frozen=True, kw_only=True):
    """Size of a pool after one observation, and its latency before it.

    Attributes:
        pool: the pool as `GROUP/POOL`.
        recorded: recorded size; null if unknown.
        replayed: size by the replayed planner; null if unknown.
        ttft_ms: recorded mean TTFT of the interval that the observation ends, in milliseconds; null without a request.
        itl_ms: recorded mean ITL of this interval in milliseconds; null without a request.
    """

    pool: str
    recorded: int | None
    replayed: int | None
    reason: str
    ttft_ms: float | None = None
    itl_ms: float | None = None


class ReplayedInterval(Fact, frozen=True, kw_only=True):
    """Sizes after one observation.

    Attributes:
        at_us: time of the observation in microseconds.
        recorded_gpu_hours: GPU hours of the recorded sizes up to the next observation.
        replayed_gpu_hours: GPU hours of the replayed sizes up to the next observation.
        attained: whether the recorded means of all pools met both targets of the replayed planner in the interval that
            the observation ends; null without a request.
    """

    at_us: int
    recorded_gpu_hours: float
    replayed_gpu_hours: float
    attained: bool | None
    pools: list[ReplayedPool]


class ForecastCheck(Fact, frozen=True, kw_only=True):
    """Result of computing the recorded forecasts again.

    Attributes:
        unavailable: forecasts whose predictor cannot be used here.
        different: forecasts of which a number differs by more than `tolerance`.
        tolerance: accepted relative difference.
    """

    checked: int
    unavailable: int
    different: int
    difference_max: float
    tolerance: float = TOLERANCE


class PlannerReplay(Fact, frozen=True, kw_only=True):
    """Result of a replay.

    Attributes:
        source: `observations` of a recorded planner, or the recorded `requests` if there was no planner.
        recorded: recorded sizes. Without a recorded planner these are the ready workers.
        attained: share of the intervals with requests in which the recorded means met both targets of the replayed
            planner; null if there is none.
        intervals: sizes after each observation.
    """

    source: str
    settings: PlannerSettings
    recorded: Sizing
    replayed: Sizing
    attained: float | None
    forecasts: ForecastCheck
    intervals: list[ReplayedInterval]


@dataclass(slots=True)
class _Forecasts:
    """Computes recorded forecasts again and counts the differences."""

    predictors: Predictors
    checked: int = 0
    unavailable: int = 0
    different: int = 0
    difference_max: float = 0.0
    _known: dict[str, Forecast | None] = field(default_factory=dict)

    def check(self, state: PlannerState, recorded: DemandForecast) -> None:
        """Compute a forecast again from the observations of the state before it."""
        if recorded.predictor not in self._known:
            self._known[recorded.predictor] = self.predictors(recorded.predictor)
        forecast = self._known[recorded.predictor]
        if forecast is None or recorded.observed != state.observed:
            self.unavailable += 1
            return
        again = forecast(tuple(state.history), recorded.observed)
        difference = _difference(recorded.pools, again.pools)
        self.checked += 1
        self.different += difference > TOLERANCE
        self.difference_max = max(self.difference_max, difference)

    def report(self) -> ForecastCheck:
        return ForecastCheck(
            checked=self.checked,
            unavailable=self.unavailable,
            different=self.different,
            difference_max=self.difference_max,
        )


@dataclass(slots=True)
class _Comparison:
    """Runs the other planner on each observation, and compares its sizes with the recorded ones."""

    planner: VirtualPlanner
    at_us: int = 0
    decisions: list[list[ScalingDecided]] = field(default_factory=list)
    intervals: list[ReplayedInterval] = field(default_factory=list)
    gpu_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    observed: dict[PoolKey, PoolObserved] = field(default_factory=dict)

    def observe(self, pools: tuple[PoolObserved, ...], at_us: int, interval_s: float) -> None:
        """Let the planner decide about an observation."""
        self.at_us = at_us
        self.observed = {(one.group, one.pool): one for one in pools}
        self.decisions.append(self.planner.plan(pools, at_us, interval_s))

    def close(self, recorded: Callable[[PoolScaling], int | None], end_us: int) -> None:
        """Add the sizes since the last observation, which count until `end_us`."""
        if not self.decisions:
            return
        seconds = max(0, end_us - self.at_us) / US_PER_S
        reasons = {(one.group, one.pool): one.reason for one in self.decisions[-1][0].pools}
        found = []
        for pool in self.planner.settings.pools:
            sizes = recorded(pool), self.planner.state.size(pool)
            for at, size in enumerate(sizes):
                self.gpu_s[at] += (size or 0) * pool.gpus_per_worker * seconds
            key = (pool.group, pool.pool)
            seen = self.observed.get(key)
            found.append(
                ReplayedPool(
                    pool=pool_text(key),
                    recorded=sizes[0],
                    replayed=sizes[1],
                    reason=reasons[key],
                    ttft_ms=seen.ttft_ms if seen is not None else None,
                    itl_ms=seen.itl_ms if seen is not None else None,
                )
            )
        interval = ReplayedInterval(
            at_us=self.at_us,
            recorded_gpu_hours=self.gpu_s[0] / S_PER_HOUR,
            replayed_gpu_hours=self.gpu_s[1] / S_PER_HOUR,
            attained=_attained(found, self.planner.settings),
            pools=found,
        )
        self.intervals.append(interval)

    def report(self, source: str, recorded: SizeChanges, forecasts: ForecastCheck) -> PlannerReplay:
        replayed = size_changes(self.decisions)
        judged = [one.attained for one in self.intervals if one.attained is not None]
        return PlannerReplay(
            source=source,
            settings=self.planner.settings,
            recorded=_sizing(self.gpu_s[0], recorded),
            replayed=_sizing(self.gpu_s[1], replayed),
            attained=sum(judged) / len(judged) if judged else None,
            forecasts=forecasts,
            intervals=self.intervals,
        )


def _attained(pools: Sequence[ReplayedPool], settings: PlannerSettings) -> bool | None:
    """Return whether all means met their targets, None if there is none."""
    met = [one.ttft_ms <= settings.ttft_ms for one in pools if one.ttft_ms is not None]
    met += [one.itl_ms <= settings.itl_ms for one in pools if one.itl_ms is not None]
    return all(met) if met else None


def _sizing(gpu_s: float, changes: SizeChanges) -> Sizing:
    return Sizing(gpu_hours=gpu_s / S_PER_HOUR, changes=changes.changes, reversals=changes.reversals)


async def recorded_settings(log: Log) -> PlannerSettings | None:
    """Return the settings of the newest recorded planner, None if there is none. Raises LogError if unreadable."""
    found = None
    async for _, event in _records(log):
        if isinstance(event, PlannerClaimed):
            found = event.settings
    return found


async def replay_observations(
    log: Log, settings: PlannerSettings, predictors: Predictors, on_progress: OnProgress | None = None
) -> PlannerReplay:
    """Replay a planner on the recorded observations.

    Args:
        predictors: returns predictors by name. That of the settings must exist.
        on_progress: called regularly with the offset of the reader and the end of the topic.

    Raises:
        LogError: the log cannot be read, or has no observation.
    """
    end = await log.end(SCALING.name, PARTITION)
    state, checks = PlannerState(), _Forecasts(predictors)
    comparison: _Comparison | None = None
    recorded: list[list[ScalingDecided]] = []
    interval_us = 0
    async for offset, event in _records(log):
        if on_progress is not None and offset % PROGRESS_EVERY == 0:
            on_progress(offset, end)
        if isinstance(event, ScalingObserved) and comparison is not None:
            comparison.close(state.size, event.at_us)
        if event is None or state.apply(offset, event) == "stale":
            continue
        match event:
            case ScalingObserved():
                interval_us = round(event.interval_s * US_PER_S)
                if comparison is None:
                    comparison = _comparison(settings, predictors, event.at_us)
                comparison.observe(event.pools, event.at_us, event.interval_s)
                recorded.append([])
            case ScalingDecided() if recorded:
                recorded[-1].append(event)
            case DemandForecast():
                checks.check(state, event)
            case _:
                pass
    if comparison is None:
        raise LogError("the topic scaling has no observation; a planner writes the first one after its interval")
    comparison.close(state.size, comparison.at_us + interval_us)
    return comparison.report("observations", size_changes(recorded), checks.report())


async def replay_requests(
    log: Log, partition: int, settings: PlannerSettings, predictors: Predictors, on_progress: OnProgress | None = None
) -> PlannerReplay:
    """Replay a planner on observations that are derived from the recorded events of a group.

    Args:
        log: the log of a group without a planner.
        settings: settings of the replayed planner, whose pools are those of the group.
        predictors: returns predictors by name. That of the settings must exist.
        on_progress: called regularly with the number of journal records done, and their total.

    Raises:
        LogError: the log cannot be read, contradicts its journal, or is shorter than one interval.
    """
    walk = await walk_all(log, partition)
    observation, world = GroupObservation(settings.pools), walk.world
    observation.restore(state_of(world), world.now_us)
    interval_us = max(1, round(settings.interval_s * US_PER_S))
    comparison: _Comparison | None = None
    due_us, ready = 0, dict[PoolKey, int]()

    def recorded(pool: PoolScaling) -> int | None:
        return ready.get((pool.group, pool.pool))

    def on_applied(topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        nonlocal comparison, due_us
        if comparison is None:
            comparison = _comparison(settings, predictors, now_us)
            observation.begin(now_us)
            due_us = now_us + interval_us
        while now_us >= due_us:
            pools = observation.observe(due_us)
            comparison.close(recorded, due_us)
            ready.update({(pool.group, pool.pool): pool.ready for pool in pools})
            comparison.observe(pools, due_us, settings.interval_s)
            due_us += interval_us
        if event is not None:
            observation.apply(event, world.view.get(topic, 1) - 1, now_us)
        for one in decided:
            observation.apply(one, 0, now_us)

    walk.followed.on_applied = on_applied
    async for step in walk:
        if step.divergence is not None:
            raise LogError(f"journal record {step.offset} does not follow from the events; see `forebay replay verify`")
        if on_progress is not None and step.offset % PROGRESS_EVERY == 0:
            on_progress(step.offset, walk.end)
    if comparison is None or not comparison.decisions:
        raise LogError(f"the log is shorter than one interval of {settings.interval_s:g} s; set a shorter interval_s")
    comparison.close(recorded, comparison.at_us + interval_us)
    return comparison.report("requests", SizeChanges(), _Forecasts(predictors).report())


def _comparison(settings: PlannerSettings, predictors: Predictors, at_us: int) -> _Comparison:
    forecast = predictors(settings.predictor)
    assert forecast is not None, "the predictor of the settings exists"
    return _Comparison(VirtualPlanner(settings, forecast, at_us), at_us)


async def _records(log: Log) -> AsyncIterator[tuple[int, ScalingEvent | None]]:
    """Yield the records of the topic with their offsets; None for one that does not decode."""
    begin, end = await log.begin(SCALING.name, PARTITION), await log.end(SCALING.name, PARTITION)
    async for record in records_of(log, SCALING, PARTITION, begin, end):
        try:
            event: ScalingEvent | None = decode(SCALING, record.value)
        except DecodeError:
            event = None
        yield record.offset, event


def _difference(recorded: Sequence[PoolDemand], again: Sequence[PoolDemand]) -> float:
    """Return the highest relative difference of a number; infinite if one of the forecasts lacks a pool."""
    pools = {(one.group, one.pool): one for one in again}
    if len(pools) != len(recorded) or any((one.group, one.pool) not in pools for one in recorded):
        return float("inf")
    found = 0.0
    for one in recorded:
        other = pools[one.group, one.pool]
        for name in ("requests_per_s", "isl", "osl", "kv_hit_rate"):
            first, second = getattr(one, name), getattr(other, name)
            if first != second:
                found = max(found, abs(first - second) / max(abs(first), abs(second)))
    return found


def with_settings(settings: PlannerSettings, changes: dict[str, str]) -> PlannerSettings:
    """Return settings with some values replaced, which are given as text.

    Raises:
        msgspec.ValidationError: a value is invalid.
    """
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    pools = fields.pop("pools")
    made = msgspec.convert({**fields, **changes, "pools": ()}, PlannerSettings, strict=False)
    return msgspec.structs.replace(made, pools=pools)
