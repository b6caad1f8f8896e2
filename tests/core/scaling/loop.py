"""A planner and an actuator in a loop: observe, forecast, decide, and reply."""

from collections.abc import Mapping

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import RULES_VERSION
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    ReachedSize,
    RefusedPool,
    ScalingApplied,
    ScalingDecided,
    ScalingObserved,
    ScalingRefused,
)
from tests.core.scaling.records import Journal, S


class Loop(Journal):
    """A journal that a planner with these settings has claimed. Each round takes `step_s` seconds."""

    def __init__(self, settings: PlannerSettings, step_s: float = 10.0, start_us: int = 0) -> None:
        super().__init__()
        self.step_us = int(step_s * S)
        self.now_us = start_us
        self.add(PlannerClaimed(planner_id="p", rules_version=RULES_VERSION, settings=settings, at_us=start_us))

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
        """Append the replies of an actuator that reached the decided sizes, or other ones for some pools."""
        for decision, changes in self._open().items():
            sizes = [
                ReachedSize(group=key[0], pool=key[1], size=(reached or {}).get(key, size))
                for key, size in changes.items()
            ]
            self.add(ScalingApplied(decision=decision, actuator="processes", pools=tuple(sizes), at_us=self.now_us))

    def refuse(self, message: str = "") -> None:
        """Append the refusals of an actuator that could change nothing."""
        for decision, changes in self._open().items():
            pools = tuple(RefusedPool(group=key[0], pool=key[1]) for key in changes)
            refused = ScalingRefused(
                decision=decision,
                actuator="processes",
                pools=pools,
                reason="failed",
                message=message,
                at_us=self.now_us,
            )
            self.add(refused)

    def _open(self) -> dict[int, dict[tuple[str, str], int]]:
        """Return the decided sizes without reply, by decision."""
        found: dict[int, dict[tuple[str, str], int]] = {}
        for key, change in self.state.open.items():
            found.setdefault(change.decision, {})[key] = change.decided.to_size
        return found

    def set_size(self, pool: PoolScaling, size: int | None) -> None:
        self.add(PoolSizeSet(group=pool.group, pool=pool.pool, size=size))

    def size(self, pool: PoolScaling) -> int:
        size = self.state.size(pool)
        assert size is not None
        return size
