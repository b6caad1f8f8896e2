"""The planner at one moment: its status, its newest decisions, and demand and sizes of each pool over time."""

from collections import deque

from forebay.core.scaling.rederive import RecordedDecision
from forebay.core.scaling.state import PlannerState
from forebay.replay.moment import Fact
from forebay.replay.scaling.decisions import DecisionEntry, entry_of
from forebay.replay.scaling.journal import NoPlanner, ScalingJournal, has_scaling, pool_text
from forebay.replay.scaling.status import NewestDecisions, PlannerStatus, expected_demand, observed_demand
from forebay.transport.base import Log

DECISIONS_MAX = 200
POINTS_MAX = 600  # per pool; the oldest ones are left out


class PoolPoint(Fact, frozen=True, kw_only=True):
    """Demand and size of a pool at one decision.

    Attributes:
        at_us: the planner's wall clock in microseconds of Unix time.
        ready: ready workers in the observation before the decision; null if the pool is not in it.
        queued: requests in the router's queue in this observation; null if the pool is not in it.
        requests_per_s: observed requests per second; null if the pool is not in the observation.
        forecast_per_s: expected requests per second; null without a forecast.
        ttft_ms: observed mean TTFT in milliseconds; null without a request.
        itl_ms: observed mean ITL in milliseconds; null without a request.
    """

    at_us: int
    size: int
    ready: int | None
    queued: int | None
    requests_per_s: float | None
    forecast_per_s: float | None
    ttft_ms: float | None
    itl_ms: float | None


class ScalingView(Fact, frozen=True, kw_only=True):
    """The planner at one moment.

    Attributes:
        status: status of the planner and its pools; null if no planner has claimed the topic by then.
        decisions: newest decisions by then, newest first.
        history: demand and size over time, oldest first, by pool as `GROUP/POOL`.
    """

    status: PlannerStatus | None
    decisions: list[DecisionEntry]
    history: dict[str, list[PoolPoint]]


async def read_scaling(log: Log, at_us: int | None, now_us: int | None) -> ScalingView:
    """Return the planner at a moment.

    Args:
        at_us: the moment in microseconds since 1970; None for the end of the topic.
        now_us: wall clock in microseconds since 1970, by which a silent planner is found; None for the past.

    Raises:
        LogError: the log is unreadable, or retention removed records of the topic.
    """
    if not await has_scaling(log):
        return ScalingView(status=None, decisions=[], history={})
    journal, newest = ScalingJournal(log, until_us=at_us), NewestDecisions()
    decisions: deque[RecordedDecision] = deque(maxlen=DECISIONS_MAX)
    history: dict[str, deque[PoolPoint]] = {}
    try:
        async for decision in journal.read():
            newest.add(decision)
            decisions.append(decision)
            for key, point in _points(decision, journal.state):
                history.setdefault(key, deque(maxlen=POINTS_MAX)).append(point)
    except NoPlanner:
        return ScalingView(status=None, decisions=[], history={})
    return ScalingView(
        status=newest.status(journal, now_us),
        decisions=[entry_of(one, journal.state.open) for one in reversed(decisions)],
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
            ready=None if now is None else now.ready,
            queued=None if now is None else now.queued,
            requests_per_s=None if now is None or observed is None else observed_demand(observed, now).requests_per_s,
            forecast_per_s=None if expected is None else expected_demand(expected).requests_per_s,
            ttft_ms=None if now is None else now.ttft_ms,
            itl_ms=None if now is None else now.itl_ms,
        )
        found.append((pool_text(key), point))
    return found
