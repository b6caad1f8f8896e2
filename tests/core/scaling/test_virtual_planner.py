"""The planner in virtual time: each decision is executed at once, and the planner decides again as after a reply."""

from collections.abc import Sequence

import pytest

from forebay.core.scaling.virtual_planner import VirtualPlanner
from forebay.events.scaling import (
    DemandForecast,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PrefillPoint,
    ScalingDecided,
    ScalingObserved,
    SimulatedSize,
    WorkerObserved,
)
from tests.core.scaling.records import GROUP, POOL, S

PREFILL = (PrefillPoint(isl=100, ttft_ms=10, tokens_per_s=1_000),)


def settings(**fields: object) -> PlannerSettings:
    pool = PoolScaling(group=GROUP, pool=POOL, role="prefill", prefill=PREFILL)
    options = {"pools": (pool,), "gpu_budget": 0, "interval_s": 10.0, **fields}
    return PlannerSettings(**options)  # type: ignore[arg-type]


def last_value(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    (pool,) = history[-1].pools
    demand = PoolDemand(
        group=GROUP, pool=POOL, requests_per_s=pool.requests / history[-1].interval_s, isl=pool.isl or 0, osl=0
    )
    return DemandForecast(predictor="constant", observed=observed, pools=(demand,))


def idle(ready: int) -> tuple[PoolObserved, ...]:
    workers = tuple(
        WorkerObserved(
            worker_id=f"w{at}", running=0, waiting=0, prefill_tokens=0, kv_tokens=0, kv_tokens_max=0, ttft_ms=5.0
        )
        for at in range(ready)
    )
    return (PoolObserved(group=GROUP, pool=POOL, ready=ready, workers=workers),)


def busy(requests: int, ready: int) -> tuple[PoolObserved, ...]:
    return (PoolObserved(group=GROUP, pool=POOL, ready=ready, requests=requests, isl=100.0),)


def sizes(decisions: list[ScalingDecided]) -> list[int]:
    return [decided.pools[0].to_size for decided in decisions]


def test_method_simulate_decides_the_simulated_size() -> None:
    rates: list[float] = []

    def simulate(forecast: DemandForecast, target: float) -> list[SimulatedSize]:
        rates.append(forecast.pools[0].requests_per_s)
        attained = {2: 0.9, 3: target, 4: 1.0}
        return [SimulatedSize(group=GROUP, pool=POOL, size=size, attained=share) for size, share in attained.items()]

    planner = VirtualPlanner(settings(method="simulate"), last_value, simulate=simulate)
    assert sizes(planner.plan(busy(600, 1), 10 * S)) == [3, 3]
    assert rates == [60.0], "one forecast per interval"
    with pytest.raises(ValueError, match="method simulate"):
        VirtualPlanner(settings(method="simulate"), last_value)


def test_a_change_that_is_limited_per_decision_continues() -> None:
    planner = VirtualPlanner(settings(max_change=2), last_value)
    assert sizes(planner.plan(busy(600, 1), 10 * S)) == [3, 5, 6, 6]
    assert sizes(planner.plan(busy(80, 6), 20 * S)) == [4, 2, 1, 1]
    assert planner.state.open == {}


def test_a_load_leads_to_one_reduction() -> None:
    planner = VirtualPlanner(settings(method="load", min_observations=1), last_value)
    assert sizes(planner.plan(idle(4), 10 * S)) == [3, 3]
    assert sizes(planner.plan(idle(3), 20 * S)) == [2, 2]


def test_an_advisory_decision_is_not_executed() -> None:
    planner = VirtualPlanner(settings(advisory=True), last_value)
    assert sizes(planner.plan(busy(600, 1), 10 * S)) == [6]
    assert sizes(planner.plan(busy(600, 1), 20 * S)) == [6]
