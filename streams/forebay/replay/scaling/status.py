"""Current status of the planner and its pools.

`forebay planner status --json` prints a `PlannerStatus`. A later version may add fields. It changes the meaning of a
field only together with `VERSION`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.core.scaling.rederive import RecordedDecision
from forebay.core.scaling.state import SILENT_INTERVALS, SILENT_MORE_S, PlannerState, PoolKey, changed_pools, overdue
from forebay.events.control import Role
from forebay.events.scaling import (
    DemandForecast,
    Equations,
    Method,
    PlannerClaimed,
    PoolObserved,
    PoolScaling,
    ScalingObserved,
)
from forebay.replay.moment import Fact
from forebay.replay.scaling.decisions import DecisionEntry, entry_of
from forebay.replay.scaling.reader import NoPlanner, OnProgress, ScalingReader, has_scaling, pool_text
from forebay.transport.base import Log

VERSION = 1
US = 1_000_000
SHOWN_SETTINGS = ("advisory", "method", "equations", "predictor", "interval_s", "ttft_ms", "itl_ms")
SHOWN_LIMITS = ("gpu_budget", "min_gpus")


class ObservedDemand(Fact, frozen=True, kw_only=True):
    requests_per_s: float
    isl: float | None
    osl: float | None
    kv_hit_rate: float | None


class ScaledPoolStatus(Fact, frozen=True, kw_only=True):
    """A pool that the planner scales.

    Attributes:
        size: size as last decided, or else as last observed; null if neither exists.
        forecast: expected demand; null without a forecast that knows the newest observation.
        decision: newest decision with an effect that is about the pool; null without one.
        change: newest decision with an effect that changed the pool; null without one.
    """

    group: str
    pool: str
    role: Role
    size: int | None
    min_size: int
    max_size: int
    gpus_per_worker: int
    ready: int | None = None
    draining: int | None = None
    queued: int | None = None
    manual_size: int | None = None
    manual_by: str = ""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    observed: ObservedDemand | None = None
    forecast: ObservedDemand | None = None
    decision: DecisionEntry | None = None
    change: DecisionEntry | None = None


class OpenAction(Fact, frozen=True, kw_only=True):
    """Decided change of a pool that no actuator has replied to."""

    pool: str
    size: int
    decision: int
    since_us: int
    overdue: bool


class PlannerStatus(Fact, frozen=True, kw_only=True):
    """The planner and its pools. `newest_us` is the wall clock of the newest record of a planner.

    `problems` say what keeps the planner from scaling pools; empty if it is active.
    """

    version: int = VERSION
    problems: list[str]
    planner_id: str
    epoch: int
    since_us: int
    stopped_us: int | None
    newest_us: int
    advisory: bool
    paused: bool
    paused_by: str
    paused_us: int | None
    method: Method
    equations: Equations
    predictor: str
    interval_s: float
    ttft_ms: float
    itl_ms: float
    gpus: int
    gpu_budget: int
    min_gpus: int
    pools: list[ScaledPoolStatus]
    open: list[OpenAction]
    decisions: int
    undecodable: int


async def read_planner_status(
    log: Log, now_us: int | None = None, on_progress: OnProgress | None = None
) -> PlannerStatus:
    """Return the status at the end of the topic.

    `now_us` is the wall clock in Unix time, by which a silent planner is found; None for a log of the past.
    """
    reader, newest = ScalingReader(log, on_progress), NewestDecisions()
    async for found in reader.read():
        newest.add(found)
    return newest.status(reader, now_us)


class NewestDecisions:
    """The newest decision and the newest change of each pool."""

    def __init__(self) -> None:
        self._latest: dict[PoolKey, RecordedDecision] = {}
        self._changes: dict[PoolKey, RecordedDecision] = {}

    def add(self, found: RecordedDecision) -> None:
        if found.outcome == "applied":
            self._latest |= dict.fromkeys(((one.group, one.pool) for one in found.decided.pools), found)
            self._changes |= dict.fromkeys(changed_pools(found.decided), found)

    def status(self, reader: ScalingReader, now_us: int | None) -> PlannerStatus:
        """Return the status after the records that `reader` has read; it must have found a claim."""
        assert reader.claim is not None, "without a claim, reading raises NoPlanner"
        epoch, claim = reader.claim
        pools = []
        for pool in claim.settings.pools:
            key = (pool.group, pool.pool)
            entries = [
                None if one is None else entry_of(one, reader.state.open)
                for one in (self._latest.get(key), self._changes.get(key))
            ]
            pools.append(_pool_status(reader, pool, *entries))
        return _status(reader, epoch, claim, pools, now_us)


def _status(
    reader: ScalingReader, epoch: int, claim: PlannerClaimed, pools: list[ScaledPoolStatus], now_us: int | None
) -> PlannerStatus:
    state, settings, order = reader.state, claim.settings, reader.paused if reader.state.paused else None
    return PlannerStatus(
        problems=list(_problems(reader, claim, now_us)),
        planner_id=claim.planner_id,
        epoch=epoch,
        since_us=claim.at_us,
        stopped_us=reader.stopped.at_us if reader.stopped is not None else None,
        newest_us=state.now_us,
        paused=state.paused,
        paused_by=order.operator if order is not None else "",
        paused_us=order.at_us if order is not None else None,
        gpus=sum(pool.gpus_per_worker * (pool.size or 0) for pool in pools),
        pools=pools,
        open=_open_actions(state),
        decisions=reader.decisions,
        undecodable=reader.undecodable,
        **{name: getattr(settings, name) for name in (*SHOWN_SETTINGS, *SHOWN_LIMITS)},
    )


def _problems(reader: ScalingReader, claim: PlannerClaimed, now_us: int | None) -> Iterator[str]:
    state, settings = reader.state, claim.settings
    if reader.stopped is not None:
        yield f"the planner {claim.planner_id} has stopped, and no other one is active"
    elif now_us is not None and now_us - state.now_us > (SILENT_INTERVALS * settings.interval_s + SILENT_MORE_S) * US:
        silent_s = (now_us - state.now_us) / US
        yield f"the planner {claim.planner_id} has written nothing for {silent_s:,.0f} s, and no other one is active"
    late = sorted(overdue(state))
    for decision in sorted({state.open[key].decision for key in late}):
        pools = ", ".join(pool_text(key) for key in late if state.open[key].decision == decision)
        waited_s = settings.action_timeout_s
        yield f"decision {decision} has no reply for {pools} after {waited_s:g} s; check that an actuator manages it"


def _pool_status(
    reader: ScalingReader, pool: PoolScaling, decision: DecisionEntry | None, change: DecisionEntry | None
) -> ScaledPoolStatus:
    state, key = reader.state, (pool.group, pool.pool)
    seen = state.last_observed(pool)
    manual = state.manual.get(key)
    return ScaledPoolStatus(
        group=pool.group,
        pool=pool.pool,
        role=pool.role,
        size=state.size(pool),
        min_size=pool.min_size,
        max_size=pool.max_size,
        gpus_per_worker=pool.gpus_per_worker,
        manual_size=manual,
        manual_by=reader.sizes_set[key][1].operator if manual is not None else "",
        observed=observed_demand(state.history[-1], seen) if seen is not None else None,
        forecast=_demand(state, key),
        decision=decision,
        change=change,
        **_seen_fields(seen, "ready", "draining", "queued", "ttft_ms", "itl_ms"),
    )


def _seen_fields(seen: PoolObserved | None, *names: str) -> dict[str, Any]:
    return {} if seen is None else {name: getattr(seen, name) for name in names}


def observed_demand(observed: ScalingObserved, pool: PoolObserved) -> ObservedDemand:
    return ObservedDemand(
        requests_per_s=pool.requests / observed.interval_s, isl=pool.isl, osl=pool.osl, kv_hit_rate=pool.kv_hit_rate
    )


def _demand(state: PlannerState, key: PoolKey) -> ObservedDemand | None:
    forecast: DemandForecast | None = state.forecast[1] if state.forecast is not None else None
    if forecast is None or forecast.observed != state.observed:
        return None
    found = next((one for one in forecast.pools if (one.group, one.pool) == key), None)
    return None if found is None else msgspec.convert(found, ObservedDemand, from_attributes=True)


def _open_actions(state: PlannerState) -> list[OpenAction]:
    late = overdue(state)
    return [
        OpenAction(
            pool=pool_text(key),
            size=one.decided.to_size,
            decision=one.decision,
            since_us=one.at_us,
            overdue=key in late,
        )
        for key, one in sorted(state.open.items())
    ]


DECISIONS_MAX = 200
POINTS_MAX = 600  # per pool; the oldest ones are left out


class PoolPoint(Fact, frozen=True, kw_only=True):
    """Demand and size of a pool at one decision. `ready` is null if the observation before it lacks the pool."""

    at_us: int
    size: int
    ready: int | None = None
    queued: int | None = None
    requests_per_s: float | None
    forecast_per_s: float | None
    ttft_ms: float | None = None
    itl_ms: float | None = None


class ScalingView(Fact, frozen=True, kw_only=True):
    """The planner at one moment.

    `status` is null if no planner has claimed the topic by then. `history` is oldest first, by pool as `GROUP/POOL`.
    """

    status: PlannerStatus | None
    decisions: list[DecisionEntry]
    history: dict[str, list[PoolPoint]]


async def read_scaling(log: Log, at_us: int | None, now_us: int | None) -> ScalingView:
    """Return the planner at `at_us`, in microseconds since 1970; None for the end of the topic.

    `now_us` is the wall clock by which a silent planner is found; None for the past.
    """
    if not await has_scaling(log):
        return ScalingView(status=None, decisions=[], history={})
    reader, newest = ScalingReader(log, until_us=at_us), NewestDecisions()
    decisions: deque[RecordedDecision] = deque(maxlen=DECISIONS_MAX)
    history: dict[str, deque[PoolPoint]] = {}
    try:
        async for decision in reader.read():
            newest.add(decision)
            decisions.append(decision)
            for key, point in _points(decision, reader.state):
                history.setdefault(key, deque(maxlen=POINTS_MAX)).append(point)
    except NoPlanner:
        return ScalingView(status=None, decisions=[], history={})
    return ScalingView(
        status=newest.status(reader, now_us),
        decisions=[entry_of(one, reader.state.open) for one in reversed(decisions)],
        history={key: list(points) for key, points in history.items()},
    )


def _points(decision: RecordedDecision, state: PlannerState) -> list[tuple[str, PoolPoint]]:
    observed = state.history[-1] if state.history else None
    seen = {} if observed is None else {(one.group, one.pool): one for one in observed.pools}
    forecast = {} if state.forecast is None else {(one.group, one.pool): one for one in state.forecast[1].pools}
    found = []
    for pool in decision.decided.pools:
        key = (pool.group, pool.pool)
        now, expected = seen.get(key), forecast.get(key)
        point = PoolPoint(
            at_us=decision.decided.at_us,
            size=pool.to_size,
            requests_per_s=None if now is None or observed is None else observed_demand(observed, now).requests_per_s,
            forecast_per_s=None if expected is None else expected.requests_per_s,
            **_seen_fields(now, "ready", "queued", "ttft_ms", "itl_ms"),
        )
        found.append((pool_text(key), point))
    return found
