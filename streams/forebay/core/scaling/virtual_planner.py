"""Planner in virtual time: the rules of the planner without a log, for simulation.

It writes the records that a planner with the same observations would write, and applies them in that order. Each of its
decisions counts as executed at once, as if the actuator replied without delay. After such a reply the planner decides
again, so a change that is limited per decision continues. A pool has the size of its first observation until a decision
changes it, whatever becomes of its workers.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import RULES_VERSION, PlannerState, changed_pools
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerSettings,
    PoolObserved,
    ReachedSize,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    SimulatedSize,
    SizesSimulated,
)

Forecast = Callable[[Sequence[ScalingObserved], int], DemandForecast]
# Simulates a forecast with different sizes of the pools. The second argument is the target.
SimulateSizes = Callable[[DemandForecast, float], Iterable[SimulatedSize]]
SIMULATED_TARGET = 0.99  # share of requests that must meet both targets, for method `simulate`
EPOCH = 0  # offset of the only claim
DECISIONS_MAX = 64  # per observation; each but the last one changes a size


class VirtualPlanner:
    """Planner of some pools in virtual time."""

    def __init__(self, settings: PlannerSettings, forecast: Forecast, simulate: SimulateSizes | None = None) -> None:
        """Claim a topic without records. Raises ValueError if the method is `simulate`, and `simulate` is None.

        `forecast` returns the forecast for the next interval, from the observations of the state, oldest first, and the
        offset of the newest one.
        """
        if settings.method == "simulate" and simulate is None:
            raise ValueError("method simulate needs a function that simulates")
        self.state = PlannerState()
        self.settings = settings
        self._forecast = forecast
        self._simulate = simulate
        claim = PlannerClaimed(planner_id="virtual", rules_version=RULES_VERSION, settings=settings)
        self._append(claim)

    def plan(self, pools: tuple[PoolObserved, ...], at_us: int) -> list[ScalingDecided]:
        """Plan from the observations of the interval that ends at `at_us`, until no size changes any more."""
        observed = ScalingObserved(planner_epoch=EPOCH, at_us=at_us, interval_s=self.settings.interval_s, pools=pools)
        offset = self._append(observed)
        for pool in pools:
            self.state.sizes.setdefault((pool.group, pool.pool), pool.ready)
        if self.settings.method != "load":
            forecast = self._forecast(tuple(self.state.history), offset)
            place = self._append(msgspec.structs.replace(forecast, planner_epoch=EPOCH, at_us=at_us))
            if self.settings.method == "simulate" and self._simulate is not None:
                sizes = tuple(self._simulate(forecast, SIMULATED_TARGET))
                self._append(
                    SizesSimulated(
                        planner_epoch=EPOCH, at_us=at_us, forecast=place, target=SIMULATED_TARGET, sizes=sizes
                    )
                )
        decisions = [self._decide(at_us)]
        while changed_pools(decisions[-1]) and not decisions[-1].advisory and len(decisions) < DECISIONS_MAX:
            decisions.append(self._decide(at_us))
        return decisions

    def _decide(self, at_us: int) -> ScalingDecided:
        decided = decide(self.state)
        assert decided is not None, "the topic is claimed"
        decided = msgspec.structs.replace(decided, at_us=at_us)
        decision = self._append(decided)
        changed = changed_pools(decided)
        if changed and not decided.advisory:
            reached = tuple(ReachedSize(group=key[0], pool=key[1], size=one.to_size) for key, one in changed.items())
            self._append(ScalingApplied(decision=decision, actuator="virtual", pools=reached, at_us=at_us))
        return decided

    def _append(self, event: ScalingEvent) -> int:
        offset = self.state.end
        self.state.apply(offset, event)
        return offset
