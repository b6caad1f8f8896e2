"""A planner and an actuator in a loop: observe, forecast, decide, and reply."""

from collections.abc import Mapping

import msgspec

from forebay.core.scaling.decide import decide
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    ReachedSize,
    ScalingApplied,
    ScalingDecided,
    ScalingObserved,
)
from tests.core.scaling.records import Journal, S


class Loop(Journal):
    """A journal that a planner with these settings has claimed. Each round takes `step_s` seconds."""

    def __init__(self, settings: PlannerSettings, step_s: float = 10.0, start_us: int = 0) -> None:
        super().__init__()
        self.step_us = int(step_s * S)
        self.now_us = start_us
        self.add(PlannerClaimed(planner_id="p", rules_version=1, settings=settings, at_us=start_us))

    def observe(self, *pools: PoolObserved) -> None:
        """Append an observation, a step later than the last."""
        self.now_us += self.step_us
        observed = ScalingObserved(planner_epoch=self.state.epoch, at_us=self.now_us, interval_s=10, pools=pools)
        assert self.add(observed) == "applied"

    def forecast(self, *pools: PoolDemand) -> None:
        """Append a forecast that knows the newest observation."""
        epoch, observed = self.state.epoch, self.state.observed
        self.add(DemandForecast(planner_epoch=epoch, predictor="constant", observed=observed, pools=pools))

    def decide(self) -> ScalingDecided:
        """Append the planner's decision, and check that it is valid."""
        decision = decide(self.state)
        assert decision is not None
        assert decide(self.state) == decision
        decision = msgspec.structs.replace(decision, at_us=self.now_us)
        assert self.add(decision) == "applied"
        return decision

    def reply(self, reached: Mapping[tuple[str, str], int] | None = None) -> None:
        """Append the reply of an actuator that reached the decided sizes, or other ones for some pools."""
        if self.state.open is not None:
            changed = [one for one in self.state.open.decided.pools if one.to_size != one.from_size]
            sizes = [
                ReachedSize(
                    group=one.group, pool=one.pool, size=(reached or {}).get((one.group, one.pool), one.to_size)
                )
                for one in changed
            ]
            decision = self.state.open.offset
            self.add(ScalingApplied(decision=decision, actuator="a", pools=tuple(sizes), at_us=self.now_us))

    def set_size(self, pool: PoolScaling, size: int | None) -> None:
        """Append a size that an operator sets."""
        self.add(PoolSizeSet(group=pool.group, pool=pool.pool, size=size))

    def size(self, pool: PoolScaling) -> int:
        """Return the size in force."""
        size = self.state.size(pool)
        assert size is not None
        return size
