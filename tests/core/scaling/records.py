"""Records of the topic `scaling` for tests, and a log of them with its state."""

from forebay.core.scaling.state import RULES_VERSION, Outcome, PlannerState
from forebay.events.scaling import (
    PlannerClaimed,
    PlannerSettings,
    PoolDecision,
    PoolObserved,
    PoolScaling,
    ReachedSize,
    Reason,
    RefusedPool,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    ScalingRefused,
)

GROUP, POOL = "llama", "default"
S = 1_000_000


class Journal:
    """Records of the topic in order, applied to one state."""

    def __init__(self) -> None:
        self.state = PlannerState()
        self.records: list[ScalingEvent] = []

    def add(self, event: ScalingEvent) -> Outcome:
        """Append and apply a record."""
        self.records.append(event)
        return self.state.apply(len(self.records) - 1, event)

    def claim(self, planner_id: str = "p1", **settings: object) -> int:
        self.add(claimed(planner_id, **settings))
        return self.state.epoch


def claimed(planner_id: str = "p1", **settings: object) -> PlannerClaimed:
    options = {"pools": (PoolScaling(group=GROUP, pool=POOL),), **settings}
    return PlannerClaimed(planner_id=planner_id, rules_version=RULES_VERSION, settings=PlannerSettings(**options))  # type: ignore[arg-type]


def observed(epoch: int, ready: int, at_us: int = 0) -> ScalingObserved:
    """Return an observation of the pool with `ready` workers."""
    pool = PoolObserved(group=GROUP, pool=POOL, ready=ready)
    return ScalingObserved(planner_epoch=epoch, at_us=at_us, interval_s=10, pools=(pool,))


def decided(epoch: int, after: int, from_size: int, to_size: int) -> ScalingDecided:
    """Return a decision about the pool."""
    reason: Reason = "scale_up" if to_size > from_size else "scale_down" if to_size < from_size else "hold"
    pool = PoolDecision(group=GROUP, pool=POOL, from_size=from_size, to_size=to_size, proposed=to_size, reason=reason)
    return ScalingDecided(planner_epoch=epoch, after=after, pools=(pool,))


def applied(decision: int, size: int) -> ScalingApplied:
    """Return the reply of an actuator that reached `size` workers."""
    return ScalingApplied(decision=decision, actuator="a", pools=(ReachedSize(group=GROUP, pool=POOL, size=size),))


def refused(decision: int) -> ScalingRefused:
    pools = (RefusedPool(group=GROUP, pool=POOL),)
    return ScalingRefused(decision=decision, actuator="a", pools=pools, reason="failed", message="no node")
