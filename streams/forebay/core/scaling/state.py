"""State of the planner, folded from the records of the topic `scaling`.

Theory of operation. Planners, actuators and operators append to one partition, and every reader applies its records in
order. A record has an effect unless it comes from a planner whose claim is not the newest, or is a stale decision: one
whose planner had not applied each earlier record with an effect. Therefore a valid decision follows from the state
before it, and all readers agree on which decisions are valid.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, assert_never

from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerPaused,
    PlannerRecord,
    PlannerSettings,
    PlannerStopped,
    PoolDecision,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    ScalingRefused,
    SizesSimulated,
)

RULES_VERSION = 1
HISTORY_MAX = 64  # observations; the regressions of method `load` use at most these
# A planner that writes no record for this many intervals and seconds has failed, and a standby claims the topic.
SILENT_INTERVALS = 2.0  # an interval may be missed, because observing or forecasting took long
SILENT_MORE_S = 5.0  # longer than an append to a broker that elects a leader

PoolKey = tuple[str, str]  # group and pool
Outcome = Literal["applied", "stale"]


@dataclass(frozen=True, slots=True)
class PoolChange:
    """Last change of a pool by a decision, with time and offset of the observation before it; offset -1 if none."""

    up: bool
    at_us: int
    observed: int


@dataclass(frozen=True, slots=True)
class OpenChange:
    """Decided change of a pool that no actuator has executed or refused yet, with the time of the decision."""

    decision: int
    decided: PoolDecision
    at_us: int


@dataclass(slots=True)
class PlannerState:
    """State after the records before `end`.

    Attributes:
        end: offset after the last applied record.
        effective: offset of the last record with an effect, -1 if there is none.
        epoch: offset of the newest claim, -1 before the first.
        claim: the newest claim; None before the first, or after the planner has stopped.
        manual: sizes set by operators.
        history: newest observations, oldest first.
        observed: offset of the newest observation, -1 if there is none.
        sizes: size of each pool that a decision has changed.
        peaks: largest size of these pools since the newest observation. Workers that were removed since then still run,
            but the observation does not show that they drain.
        changes: last change of each pool.
        open: decided changes without reply. Each pool waits for its own reply, because pools of one decision can have
            different actuators.
        fell_short: whether a reply after the newest observation left a pool at another size than decided. A planner
            that decided again at once would get the same reply, and fill the topic.
        now_us: highest wall clock of the planners' records, in microseconds.
        stale: number of records without an effect.
    """

    end: int = 0
    effective: int = -1
    epoch: int = -1
    claim: PlannerClaimed | None = None
    paused: bool = False
    manual: dict[PoolKey, int] = field(default_factory=dict)
    history: deque[ScalingObserved] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    observed: int = -1
    forecast: tuple[int, DemandForecast] | None = None
    simulated: SizesSimulated | None = None
    sizes: dict[PoolKey, int] = field(default_factory=dict)
    peaks: dict[PoolKey, int] = field(default_factory=dict)
    changes: dict[PoolKey, PoolChange] = field(default_factory=dict)
    open: dict[PoolKey, OpenChange] = field(default_factory=dict)
    fell_short: bool = False
    now_us: int = 0
    stale: int = 0

    @property
    def settings(self) -> PlannerSettings | None:
        return self.claim.settings if self.claim else None

    def size(self, pool: PoolScaling) -> int | None:
        """Return the size of a pool: as last decided, or else as last observed. None if neither exists.

        If a change has no reply in time, nobody knows what became of it, so the observed size counts.
        """
        key = (pool.group, pool.pool)
        if key in self.sizes and key not in overdue(self):
            return self.sizes[key]
        return self._ready(key)

    def running(self, pool: PoolScaling) -> int:
        """Return how many workers of a pool may run: those that are ready or start, those that drain, and more.

        The result includes workers that were removed since the newest observation, because they may still drain, and
        workers of a change whose outcome is not known yet.
        """
        key, observed = (pool.group, pool.pool), self.last_observed(pool)
        most = max(self.size(pool) or 0, self.peaks.get(key, 0))
        if key in self.open:
            most = max(most, self.open[key].decided.from_size, self.open[key].decided.to_size)
        return most if observed is None else max(most, observed.ready) + observed.draining

    def last_observed(self, pool: PoolScaling) -> PoolObserved | None:
        pools = self.history[-1].pools if self.history else ()
        return next((one for one in pools if (one.group, one.pool) == (pool.group, pool.pool)), None)

    def apply(self, offset: int, event: ScalingEvent) -> Outcome:
        """Apply the record at `offset`, which must be at least `end`. Return whether it has an effect."""
        self.end = offset + 1
        if not self._is_valid(event):
            self.stale += 1
            return "stale"
        if isinstance(event, PlannerRecord):
            self.now_us = max(self.now_us, event.at_us)
        self._apply(offset, event)
        self.effective = offset
        return "applied"

    def skip(self, offset: int) -> None:
        self.end = offset + 1
        self.stale += 1

    def _is_valid(self, event: ScalingEvent) -> bool:
        match event:
            case PlannerClaimed():
                return True
            case ScalingDecided():
                return self.claim is not None and event.planner_epoch == self.epoch and event.after >= self.effective
            case PlannerRecord():
                return self.claim is not None and event.planner_epoch == self.epoch
            case ScalingApplied() | ScalingRefused():
                return bool(self._answered(event))
        return True

    def _answered(self, reply: ScalingApplied | ScalingRefused) -> list[PoolKey]:
        """Return the pools whose changes a reply closes. A pool can wait for a later decision than the reply's."""
        pools = {(pool.group, pool.pool) for pool in reply.pools}
        return [key for key, change in self.open.items() if change.decision == reply.decision and key in pools]

    def _apply(self, offset: int, event: ScalingEvent) -> None:
        match event:
            case PlannerClaimed():
                self.epoch, self.claim = offset, event
                self.forecast = self.simulated = None
            case PlannerStopped():
                self.claim = None
            case ScalingObserved():
                self.history.append(event)
                self.observed = offset
                self.peaks = dict(self.sizes)
                self.fell_short = False
            case DemandForecast():
                self.forecast = (offset, event)
            case SizesSimulated():
                self.simulated = event
            case ScalingDecided():
                self._decide(offset, event)
            case ScalingApplied() | ScalingRefused():
                self._reply(event)
            case PoolSizeSet():
                self._set_manual((event.group, event.pool), event.size)
            case PlannerPaused():
                self.paused = event.paused
            case _ as never:
                assert_never(never)

    def _reply(self, reply: ScalingApplied | ScalingRefused) -> None:
        closed = {key: self.open.pop(key).decided for key in self._answered(reply)}
        if isinstance(reply, ScalingApplied):
            reached = {(pool.group, pool.pool): pool.size for pool in reply.pools}
            self.sizes |= {key: reached[key] for key in closed}
            self.fell_short |= any(reached[key] != change.to_size for key, change in closed.items())
        else:
            self.sizes |= {key: change.from_size for key, change in closed.items()}
            for key in [key for key in closed if self.sizes[key] == 0 and self._ready(key) is None]:
                del self.sizes[key]  # the size of a pool that was never observed is unknown
            self.fell_short |= reply.reason != "stale"

    def _ready(self, key: PoolKey) -> int | None:
        """Return the workers of a pool in its newest observation, None if it was never observed."""
        observed = (one for past in reversed(self.history) for one in past.pools if (one.group, one.pool) == key)
        return next((one.ready for one in observed), None)

    def _set_manual(self, pool: PoolKey, size: int | None) -> None:
        if size is None:
            self.manual.pop(pool, None)
        else:
            self.manual[pool] = size

    def _decide(self, offset: int, decided: ScalingDecided) -> None:
        if decided.advisory:
            return
        for key in overdue(self):
            self.sizes.pop(key, None)
            del self.open[key]
        for key, pool in changed_pools(decided).items():
            self.sizes[key] = pool.to_size
            self.peaks[key] = max(self.peaks.get(key, 0), pool.from_size, pool.to_size)
            self.changes[key] = PoolChange(pool.to_size > pool.from_size, self.now_us, self.observed)
            self.open[key] = OpenChange(offset, pool, self.now_us)


def changed_pools(decided: ScalingDecided) -> dict[PoolKey, PoolDecision]:
    return {(pool.group, pool.pool): pool for pool in decided.pools if pool.to_size != pool.from_size}


def overdue(state: PlannerState) -> set[PoolKey]:
    """Return the pools whose changes have waited longer for a reply than the settings allow."""
    settings = state.settings
    if settings is None:
        return set()
    before_us = state.now_us - settings.action_timeout_s * 1_000_000
    return {key for key, change in state.open.items() if change.at_us <= before_us}
