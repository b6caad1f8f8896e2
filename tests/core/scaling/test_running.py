"""Limits hold at every instant: draining and starting workers count, and a constant load leaves the size alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.core.scaling.virtual_planner import VirtualPlanner
from forebay.events.scaling import (
    DecodePoint,
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
from tests.core.scaling.loop import Loop
from tests.core.scaling.records import GROUP, POOL, S

FAST: Any = {"interval_s": 10.0, "ttft_ms": 10.0, "itl_ms": 10.0}
ONE_PER_S = (PrefillPoint(isl=1_000, ttft_ms=1, tokens_per_s=1_000),)  # one prompt of 1,000 tokens per second
DECODES = (DecodePoint(context=1_000, concurrency=1, itl_ms=1, tokens_per_s=1_000),)


@dataclass
class ToyPool:
    """Workers of a pool, each with the number of intervals for which it still starts, or drains."""

    scaling: PoolScaling
    starting: list[int]
    draining: list[int] = field(default_factory=list)

    @property
    def running(self) -> int:
        return len(self.starting) + len(self.draining)

    def observed(self, rate: float) -> PoolObserved:
        return PoolObserved(
            group=GROUP,
            pool=self.scaling.pool,
            ready=sum(not left for left in self.starting),
            draining=len(self.draining),
            requests=round(rate * 10),
            isl=1_000,
            osl=0 if self.scaling.role == "aggregated" else 1_000,
        )

    def resize(self, size: int, startup: int, drain: int) -> None:
        self.starting.sort()
        removed = self.starting[size:]
        self.starting = self.starting[:size] + [startup] * (size - len(self.starting))
        self.draining += [drain] * sum(not left for left in removed)  # a worker that starts is stopped at once

    def pass_interval(self) -> None:
        self.starting = [max(0, left - 1) for left in self.starting]
        self.draining = [left - 1 for left in self.draining if left > 1]


def scaled(name: str, role: str = "aggregated", **fields: object) -> PoolScaling:
    profile: dict[str, Any] = {"prefill": ONE_PER_S, "decode": DECODES if role != "prefill" else ()}
    if role == "aggregated":
        profile["decode"] = ()
    described: dict[str, Any] = {"group": GROUP, "pool": name, "role": role, "startup_s": 10.0, **profile, **fields}
    return PoolScaling(**described)


def expected(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    last = history[-1]
    pools = tuple(
        PoolDemand(
            group=one.group, pool=one.pool, requests_per_s=one.requests / last.interval_s, isl=1_000, osl=one.osl or 0
        )
        for one in last.pools
    )
    return DemandForecast(predictor="constant", observed=observed, pools=pools)


rates = st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.0, 7.0, 12.0])
intervals = st.lists(
    st.tuples(rates, rates, st.integers(0, 3), st.integers(1, 6)),
    max_size=14,
)


@given(
    intervals,
    st.sampled_from([4, 8, 9]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([2, 5, 64]),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_workers_that_drain_or_start_count_in_every_limit(
    intervals: list[tuple[float, float, int, int]],
    budget: int,
    gpus: int,
    max_change: int,
    max_size: int,
    first: int,
    second: int,
) -> None:
    assume(first * gpus + second <= budget)
    scalings = (
        scaled("prefill", "prefill", max_size=max_size, gpus_per_worker=gpus),
        scaled("decode", "decode", max_size=max_size),
    )
    settings = PlannerSettings(pools=scalings, gpu_budget=budget, max_change=max_change, **FAST)
    planner = VirtualPlanner(settings, expected)
    pools = [ToyPool(scaling, [0] * size) for scaling, size in zip(scalings, (first, second), strict=True)]
    for number, (prefill_rate, decode_rate, startup, drain) in enumerate(intervals, 1):
        seen = tuple(pool.observed(rate) for pool, rate in zip(pools, (prefill_rate, decode_rate), strict=True))
        planner.plan(seen, number * 10 * S)
        for pool in pools:
            pool.resize(planner.state.size(pool.scaling) or 0, startup, drain)
        assert sum(pool.running * pool.scaling.gpus_per_worker for pool in pools) <= budget
        assert all(pool.running <= max_size for pool in pools)
        for pool in pools:
            pool.pass_interval()


def test_a_pool_grows_into_what_another_pool_frees_once_it_is_free() -> None:
    scalings = (scaled("a", max_size=8), scaled("b", max_size=8))
    planner = VirtualPlanner(PlannerSettings(pools=scalings, gpu_budget=8, **FAST), expected)
    pools = [ToyPool(scalings[0], [0] * 6), ToyPool(scalings[1], [0] * 2)]
    grown = []
    for number in range(1, 6):
        planner.plan((pools[0].observed(1.0), pools[1].observed(6.0)), number * 10 * S)
        for pool in pools:
            pool.resize(planner.state.size(pool.scaling) or 0, 1, 3)
            pool.pass_interval()
        grown.append(len(pools[1].starting))
    assert grown == [2, 2, 2, 6, 6]


def test_a_change_whose_outcome_is_unknown_counts_with_its_larger_size() -> None:
    pool, other = scaled("a", max_size=8), scaled("b", max_size=8)
    loop = Loop(PlannerSettings(pools=(pool, other), gpu_budget=8, **FAST))
    sizes = {"a": 6, "b": 2}

    def observe(a: float, b: float) -> None:
        rate = {"a": a, "b": b}
        loop.observe(*(PoolObserved(group=GROUP, pool=name, ready=size) for name, size in sizes.items()))
        loop.forecast(
            *(PoolDemand(group=GROUP, pool=name, requests_per_s=rate[name], isl=1_000, osl=0) for name in rate)
        )

    observe(1.0, 2.0)
    assert [one.to_size for one in loop.decide().pools] == [2, 2]
    observe(1.0, 8.0)  # no actuator has replied: the workers may still run
    assert [one.to_size for one in loop.decide().pools] == [2, 2]
    loop.reply({(GROUP, "a"): 2})
    sizes["a"] = 2
    observe(1.0, 8.0)
    assert [one.to_size for one in loop.decide().pools] == [2, 6]


def test_workers_that_came_and_went_since_the_observation_count() -> None:
    pool, other = scaled("a", max_size=8), scaled("b", max_size=8)
    loop = Loop(PlannerSettings(pools=(pool, other), gpu_budget=8, **FAST))
    loop.observe(*(PoolObserved(group=GROUP, pool=name, ready=2) for name in ("a", "b")))
    for size in (6, 2):
        loop.set_size(pool, size)
        loop.decide()
        loop.reply()
    loop.forecast(PoolDemand(group=GROUP, pool="b", requests_per_s=6.0, isl=1_000, osl=0))
    assert [(made.pool, made.to_size) for made in loop.decide().pools] == [("a", 2), ("b", 2)]


def poisson(draw: random.Random, mean: float) -> int:
    if mean > 60:
        return max(0, round(draw.gauss(mean, mean**0.5)))
    count, product, limit = 0, draw.random(), exp(-mean)
    while product > limit:
        count, product = count + 1, product * draw.random()
    return count


def sizes_of(requests: list[int], *, start: int = 3, seconds: float = 30.0, **fields: object) -> list[int]:
    """Return the size after each interval with this number of requests, whose workers carry one request per second."""
    pool = scaled("default", max_size=64)
    options: dict[str, Any] = {"gpu_budget": 0, "ttft_ms": 10.0, "interval_s": seconds, **fields}
    planner = VirtualPlanner(PlannerSettings(pools=(pool,), **options), expected)
    found, size = [], start
    for number, count in enumerate(requests, 1):
        seen = PoolObserved(group=GROUP, pool="default", ready=size, requests=max(1, count), isl=1_000)
        planner.plan((seen,), number * 10 * S)
        size = planner.state.size(pool) or 0
        found.append(size)
    return found


def reversals(sizes: list[int]) -> int:
    moves = [after > before for before, after in pairwise(sizes) if after != before]
    return sum(before != after for before, after in pairwise(moves))


@pytest.mark.parametrize("mean", [1.0, 1.95, 2.0, 3.02, 5.0, 7.9])
def test_the_noise_of_a_constant_load_changes_a_size_once_at_most(mean: float) -> None:
    draw = random.Random(round(100 * mean))
    for _ in range(20):
        sizes = sizes_of([poisson(draw, mean * 300) for _ in range(40)], seconds=300.0, start=max(1, round(mean)))
        assert reversals(sizes) == 0, sizes
        assert sum(before != after for before, after in pairwise(sizes)) <= 2, sizes


def test_a_size_follows_steps_and_ramps_of_the_load_in_the_next_interval() -> None:
    assert sizes_of([60] * 3 + [240] * 3 + [60] * 3, start=2) == [2, 2, 2, 8, 8, 8, 3, 3, 3]
    ramp = sizes_of([30 * rate for rate in (1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5, 4, 3, 2, 1)], start=1)
    assert ramp == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 7, 5, 4, 3, 2]


@pytest.mark.parametrize(("sensitivity", "size"), [(1.0, 2), (0.5, 4), (0.0, 8)])
def test_the_margin_of_a_reduction_is_a_setting(sensitivity: float, size: int) -> None:
    assert sizes_of([60], start=8, down_sensitivity=sensitivity) == [size]


def test_a_pool_without_demand_shrinks_to_its_lowest_size() -> None:
    pool = scaled("default")
    planner = VirtualPlanner(PlannerSettings(pools=(pool,), **FAST), expected)
    planner.plan((PoolObserved(group=GROUP, pool="default", ready=5),), 10 * S)
    assert planner.state.size(pool) == 1


# The planner in virtual time


PREFILL = (PrefillPoint(isl=100, ttft_ms=10, tokens_per_s=1_000),)


def planner_settings(**fields: object) -> PlannerSettings:
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


def sizes_decided(decisions: list[ScalingDecided]) -> list[int]:
    return [decided.pools[0].to_size for decided in decisions]


def test_method_simulate_decides_the_simulated_size() -> None:
    rates: list[float] = []

    def simulate(forecast: DemandForecast, target: float) -> list[SimulatedSize]:
        rates.append(forecast.pools[0].requests_per_s)
        attained = {2: 0.9, 3: target, 4: 1.0}
        return [SimulatedSize(group=GROUP, pool=POOL, size=size, attained=share) for size, share in attained.items()]

    planner = VirtualPlanner(planner_settings(method="simulate"), last_value, simulate=simulate)
    assert sizes_decided(planner.plan(busy(600, 1), 10 * S)) == [3, 3]
    assert rates == [60.0], "one forecast per interval"
    with pytest.raises(ValueError, match="method simulate"):
        VirtualPlanner(planner_settings(method="simulate"), last_value)


def test_a_change_that_is_limited_per_decision_continues() -> None:
    planner = VirtualPlanner(planner_settings(max_change=2), last_value)
    assert sizes_decided(planner.plan(busy(600, 1), 10 * S)) == [3, 5, 6, 6]
    assert sizes_decided(planner.plan(busy(80, 6), 20 * S)) == [4, 2, 1, 1]
    assert planner.state.open == {}


def test_a_load_leads_to_one_reduction() -> None:
    planner = VirtualPlanner(planner_settings(method="load", min_observations=1), last_value)
    assert sizes_decided(planner.plan(idle(4), 10 * S)) == [3, 3]
    assert sizes_decided(planner.plan(idle(3), 20 * S)) == [2, 2]


def test_an_advisory_decision_is_not_executed() -> None:
    planner = VirtualPlanner(planner_settings(advisory=True), last_value)
    assert sizes_decided(planner.plan(busy(600, 1), 10 * S)) == [6]
    assert sizes_decided(planner.plan(busy(600, 1), 20 * S)) == [6]
