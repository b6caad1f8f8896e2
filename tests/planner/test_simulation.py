"""Method `simulate`: which sizes of a pool attain the targets under a forecast."""

import asyncio
import functools
import multiprocessing
from collections.abc import Sequence
from math import ceil, log2

import msgspec
import pytest

from forebay import runtime
from forebay.engine_model.timing import LinearTiming
from forebay.events.codec import decode
from forebay.events.scaling import (
    DemandForecast,
    PlannerPaused,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    ScalingDecided,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from forebay.live.planner.planner import Planner
from forebay.planner.predictors import predictor
from forebay.planner.simulation import SimulationFailed, pool_engine, simulated_sizes, simulator
from forebay.simulate.profiles.profile import EngineSizes, Profile
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.scaling_decisions import decisions_of
from tests.live.planning import PATIENCE_S, append, until

GROUP, POOL = "llama", "default"
TARGET = 0.99
MAX_SIZE = 24
# One worker prefills 1,000 tokens per second, so it carries about 2 prompts of 400 tokens per second.
PROFILE = Profile(timing=LinearTiming(prefill_token=1_000.0), sizes=EngineSizes(kv_blocks=4_096))
ENGINES = {(GROUP, POOL): pool_engine(PROFILE, 0)}
SETTINGS = PlannerSettings(
    pools=(PoolScaling(group=GROUP, pool=POOL, max_size=MAX_SIZE),), interval_s=20.0, ttft_ms=1_500.0, itl_ms=2_000.0
)


def forecast(requests_per_s: float, isl: float = 400.0, kv_hit_rate: float = 0.0) -> DemandForecast:
    demand = PoolDemand(
        group=GROUP, pool=POOL, requests_per_s=requests_per_s, isl=isl, osl=2.0, kv_hit_rate=kv_hit_rate
    )
    return DemandForecast(predictor="constant", observed=1, pools=(demand,))


def simulated(demand: DemandForecast, settings: PlannerSettings = SETTINGS) -> list[SimulatedSize]:
    return list(simulated_sizes(demand, settings, ENGINES, TARGET))


@functools.cache
def at_rate(requests_per_s: float) -> list[SimulatedSize]:
    """Return the simulated sizes at a request rate, simulated once in each process of pytest."""
    return simulated(forecast(requests_per_s))


def smallest(sizes: Sequence[SimulatedSize]) -> int:
    return min(one.size for one in sizes if one.attained >= TARGET)


def test_more_load_needs_more_workers_and_the_size_below_misses_the_target() -> None:
    found = [at_rate(rate) for rate in (1.0, 8.0, 20.0)]
    low, middle, high = map(smallest, found)
    assert low < middle < high
    assert middle >= 8.0 * 0.4, "the workers have to compute all prompts"
    for sizes, size in zip(found[1:], (middle, high), strict=True):
        assert next(one for one in sizes if one.size == size - 1).attained < TARGET


def test_equal_forecasts_have_equal_results_and_few_sizes_are_simulated() -> None:
    found = at_rate(8.0)
    assert simulated(forecast(8.0)) == found
    sizes = [one.size for one in found]
    assert len(set(sizes)) == len(sizes) <= ceil(log2(MAX_SIZE + 1))


def test_cached_prompt_tokens_need_no_workers() -> None:
    assert smallest(simulated(forecast(8.0, kv_hit_rate=0.8))) < smallest(at_rate(8.0))


def test_the_largest_and_the_smallest_size_are_simulated_if_none_attains_the_target() -> None:
    found = simulated(forecast(8.0, isl=4_000.0))
    assert all(one.attained < TARGET for one in found)
    assert {1, MAX_SIZE} <= {one.size for one in found}
    pool = msgspec.structs.replace(SETTINGS.pools[0], min_size=1, max_size=1)
    only = simulated(forecast(8.0), msgspec.structs.replace(SETTINGS, pools=(pool,)))
    assert [one.size for one in only] == [1]


@pytest.mark.parametrize("requests_per_s", [1e-12, pytest.param(1e6, marks=pytest.mark.slow)])
def test_extreme_rates_are_simulated_with_a_bounded_number_of_requests(requests_per_s: float) -> None:
    assert simulated(forecast(requests_per_s))


def test_a_pool_without_requests_needs_its_smallest_size_and_one_without_forecast_none() -> None:
    idle = msgspec.structs.replace(SETTINGS.pools[0], min_size=0)
    settings = msgspec.structs.replace(SETTINGS, pools=(idle,))
    assert simulated(forecast(0.0), settings) == [SimulatedSize(group=GROUP, pool=POOL, size=0, attained=1.0)]
    assert simulated(DemandForecast(predictor="constant", observed=1, pools=())) == []


@pytest.mark.slow
def test_prefill_and_decode_pools_are_sized_by_the_work_of_their_stage() -> None:
    pools = [PoolScaling(group=GROUP, pool=role, role=role, max_size=8) for role in ("prefill", "decode")]
    settings = msgspec.structs.replace(SETTINGS, pools=tuple(pools), itl_ms=25.0)
    slow = LinearTiming(prefill_token=1_000.0, decode_sequence=2_000.0)
    engine = pool_engine(msgspec.structs.replace(PROFILE, timing=slow), 0)

    def of(isl: float, osl: float) -> dict[str, int]:
        demands = tuple(
            PoolDemand(
                group=GROUP, pool=pool.pool, requests_per_s=4.0, isl=isl, osl=1.0 if pool.role == "prefill" else osl
            )
            for pool in pools
        )
        found = simulated_sizes(
            DemandForecast(predictor="constant", observed=1, pools=demands),
            settings,
            {(GROUP, pool.pool): engine for pool in pools},
            TARGET,
        )
        sizes = list(found)
        return {pool.pool: smallest([one for one in sizes if one.pool == pool.pool]) for pool in pools}

    short, long_prompts, long_outputs = of(100.0, 20.0), of(400.0, 20.0), of(100.0, 120.0)
    assert long_prompts["prefill"] > short["prefill"]
    assert long_prompts["decode"] == short["decode"], "the other pool has its largest size"
    assert long_outputs["prefill"] == short["prefill"]
    assert long_outputs["decode"] > short["decode"]


@pytest.mark.slow
async def test_another_process_finds_the_same_sizes() -> None:
    demand, settings = forecast(0.4), msgspec.structs.replace(SETTINGS, interval_s=600.0)
    assert list(await simulator(settings, ENGINES)(demand, TARGET)) == simulated(demand, settings)


async def test_a_simulation_that_takes_too_long_is_killed() -> None:
    settings = msgspec.structs.replace(SETTINGS, interval_s=1e-3)
    with pytest.raises(SimulationFailed, match="interval_s"):
        await simulator(settings, ENGINES)(forecast(20.0), TARGET)
    assert not multiprocessing.active_children()


async def test_a_cancelled_simulation_ends_its_process() -> None:
    task = asyncio.ensure_future(simulator(SETTINGS, ENGINES)(forecast(20.0), TARGET))
    async with asyncio.timeout(50.0):
        while not multiprocessing.active_children():  # noqa: ASYNC110 - the process is the subject
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not multiprocessing.active_children()


async def test_a_process_that_fails_is_reported() -> None:
    with pytest.raises(SimulationFailed, match="ended early"):
        await simulator(msgspec.structs.replace(SETTINGS, interval_s=600.0), {})(forecast(20.0), TARGET)


class FewRequests:
    """Observer of one worker of the pool, which gets 0.8 long prompts per second."""

    def observe(self) -> tuple[PoolObserved, ...]:
        return (PoolObserved(group=GROUP, pool=POOL, ready=1, requests=480, isl=4_000.0, osl=2.0),)


async def test_a_planner_decides_the_simulated_size_and_the_decision_is_derived_again(log: SqliteLog) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, method="simulate", interval_s=600.0, ttft_ms=15_000.0, max_change=MAX_SIZE, gpu_budget=0
    )
    clock = FakeRuntime()
    with runtime.use(clock):
        planner = Planner(log, "p", settings, FewRequests(), predictor("constant"), simulator(settings, ENGINES))
        task = asyncio.create_task(planner.run())
        try:
            await until(log, ScalingDecided, 1)
            clock.monotonic_shift_s += settings.interval_s
            await append(log, PlannerPaused(paused=False, operator="ops"))  # the planner looks at the clock
            (simulated,) = await until(log, SizesSimulated, 1)
            await until(log, ScalingDecided, 2)
            planner.stop()
            await asyncio.wait_for(task, PATIENCE_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    events = [(one.offset, decode(SCALING, one.value)) for one in log.records(SCALING.name, 0, 0, 10_000)]
    decisions = decisions_of(events)
    assert all(one.is_verified for one in decisions if one.outcome == "applied")
    assert decisions[-1].decided.pools[0].to_size == smallest(simulated.sizes) > 1
    assert planner.simulation_failures == 0
