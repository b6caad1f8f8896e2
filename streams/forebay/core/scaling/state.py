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
    """Last change of a pool by a decision of the planner.

    Attributes:
        up: whether the pool grew.
        at_us: time of the observation that led to it, in microseconds.
        observed: offset of that observation, -1 if there was none.
    """

    up: bool
    at_us: int
    observed: int


@dataclass(frozen=True, slots=True)
class OpenDecision:
    """Decision that an actuator has neither executed nor refused yet."""

    offset: int
    decided: ScalingDecided
    at_us: int


@dataclass(slots=True)
class PlannerState:
    """State after the records before `end`.

    Attributes:
        end: offset after the last applied record.
        effective: offset of the last record with an effect, -1 if there is none.
        epoch: offset of the newest claim, -1 before the first.
        claim: the newest claim; None before the first, or after the planner has stopped.
        paused: whether an operator has paused the planner.
        manual: sizes set by operators.
        history: newest observations, oldest first.
        observed: offset of the newest observation, -1 if there is none.
        forecast: newest forecast of this planner with its offset.
        simulated: newest simulations of this planner.
        sizes: size of each pool that a decision has changed.
        changes: last change of each pool.
        open: decision without reply.
        fell_short: whether the newest reply left a pool at another size than decided, and no observation followed. A
            planner that decided again at once would get the same reply, and fill the topic.
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
    changes: dict[PoolKey, PoolChange] = field(default_factory=dict)
    open: OpenDecision | None = None
    fell_short: bool = False
    now_us: int = 0
    stale: int = 0

    @property
    def settings(self) -> PlannerSettings | None:
        """Settings of the newest planner, None before the first claim."""
        return self.claim.settings if self.claim else None

    def size(self, pool: PoolScaling) -> int | None:
        """Return the size of a pool: as last decided, or else as last observed. None if neither exists.

        If a decision has no reply in time, nobody knows what became of it, so the observed size counts.
        """
        key = (pool.group, pool.pool)
        is_lost = self.open is not None and is_overdue(self) and key in changed_pools(self.open.decided)
        if key in self.sizes and not is_lost:
            return self.sizes[key]
        return self._ready(key)

    def last_observed(self, pool: PoolScaling) -> PoolObserved | None:
        """Return the pool in the newest observation, None if it is not in it."""
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
        """Pass over a record that does not decode."""
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
                return self.open is not None and event.decision == self.open.offset
        return True

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
        assert self.open is not None
        changed = changed_pools(self.open.decided)
        if isinstance(reply, ScalingApplied):
            self.sizes |= {(pool.group, pool.pool): pool.size for pool in reply.pools}
            self.fell_short = any(self.sizes[key] != change.to_size for key, change in changed.items())
        else:
            self.sizes |= {key: change.from_size for key, change in changed.items()}
            for key in [key for key in changed if self.sizes[key] == 0 and self._ready(key) is None]:
                del self.sizes[key]  # the size of a pool that was never observed is unknown
            self.fell_short = reply.reason != "stale"
        self.open = None

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
        if self.open is not None and is_overdue(self):
            for key in changed_pools(self.open.decided):
                self.sizes.pop(key, None)
            self.open = None
        changed = changed_pools(decided)
        for key, pool in changed.items():
            self.sizes[key] = pool.to_size
            self.changes[key] = PoolChange(pool.to_size > pool.from_size, self.now_us, self.observed)
        if changed:
            self.open = OpenDecision(offset, decided, self.now_us)


def changed_pools(decided: ScalingDecided) -> dict[PoolKey, PoolDecision]:
    """Return the pools whose sizes a decision changes."""
    return {(pool.group, pool.pool): pool for pool in decided.pools if pool.to_size != pool.from_size}


def is_overdue(state: PlannerState) -> bool:
    """Return whether the open decision has waited longer for its reply than the settings allow."""
    settings = state.settings
    if state.open is None or settings is None:
        return False
    return state.now_us - state.open.at_us >= settings.action_timeout_s * 1_000_000
