"""A planner in a simulation: sizes over time, cold starts, drains and failures; and sessions under cache pressure."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.outcome import SimulationOutcome, summary
from forebay.simulate.planned import Planning
from forebay.simulate.settings import (
    LifeCycleSettings,
    Settings,
    SettingsUnusable,
    engine_config,
    policy,
)
from forebay.simulate.simulation import Simulation
from forebay.simulate.workload import Turn
from tests.depth import examples
from tests.simulate.pressure_traces import PRESSURES, Pressure
from tests.simulate.scene import (
    INTERVAL_S,
    S,
    comparable,
    crash_at,
    fleet,
    one_pool,
    planning,
    played,
    run,
    split,
    start_at,
    turn,
    wave,
)

SLOW = {"max_num_batched_tokens": 512, "max_num_seqs": 8}


def planned(system: Settings, planner: Planning, *turns: Turn) -> SimulationOutcome:
    return run(system, *turns, planning=planner)


def disaggregated(one: Planning, **decode: Any) -> Planning:
    """Return a planner of a prefill and a decode pool, each with the settings of the pool of `one`."""
    (pool,) = one.settings.pools
    prefill = msgspec.structs.replace(pool, pool="prefill", role="prefill")
    pools = (prefill, msgspec.structs.replace(pool, role="decode", **decode))
    return Planning(msgspec.structs.replace(one.settings, pools=pools), one.forecast)


def sizes(outcome: SimulationOutcome, pool: str = "default") -> list[int]:
    return [one.sizes[pool] for one in outcome.planned]


def ready(outcome: SimulationOutcome) -> list[int]:
    return [one.observed[0].ready for one in outcome.planned]


def test_the_fleet_follows_the_demand_and_gpu_time_counts_cold_starts_and_drains() -> None:
    outcome = planned(fleet(1), planning(), *wave(1, 4, 4, 4, 1, 1, 1))
    assert sizes(outcome) == [1, 4, 4, 4, 1, 1]
    assert ready(outcome) == [1, 1, 1, 4, 4, 1], "workers start in 40 s, which is after the next interval"
    assert outcome.requests.failures == {}
    assert [one.at_us for one in outcome.planned] == [round(at * INTERVAL_S * S) for at in range(1, 7)]
    more = 3 * (5 - 2) * INTERVAL_S  # from the second decision to the fifth
    drained = 3 * 1.0  # until the next check
    assert outcome.gpu_s == pytest.approx(outcome.lasted_us / S + more + drained)
    assert outcome.planned[-1].gpu_s < outcome.gpu_s


def test_a_draining_worker_finishes_its_requests() -> None:
    long = turn(0, 1_000, 4_000, at_us=int(3.5 * INTERVAL_S) * S)
    turns = sorted([*wave(1, 4, 4, 4, 1, 1, 1), long], key=lambda one: one.at_us)
    outcome = planned(fleet(1), planning(), *(turn(at, one.prompt_tokens, one.output_tokens, at_us=one.at_us)
                                          for at, one in enumerate(turns)))  # fmt: skip
    assert outcome.requests.failures == {}
    assert max(outcome.requests.column("attempts")) == 1


def test_a_worker_that_starts_is_stopped_at_once() -> None:
    life = LifeCycleSettings(faults=(crash_at(worker="mock-0", at_us=10 * S, back_us=5 * S),), cold_start_s=1e6)
    outcome = planned(fleet(2, life), planning(), *wave(1, 1, 1))
    assert sizes(outcome) == [1, 1]
    assert outcome.gpu_s == pytest.approx(outcome.lasted_us / S + 10 + (INTERVAL_S - 15))


def test_workers_are_used_again() -> None:
    outcome = planned(fleet(1), planning(pool={"startup_s": 1.0}), *wave(1, 3, 1, 3, 1, 3, 1, 1))
    assert sizes(outcome) == [1, 3, 1, 3, 1, 3, 1]
    assert outcome.workers == ["mock-0", "mock-1", "mock-2"]


def test_a_failed_worker_lowers_the_ready_workers_until_it_is_back() -> None:
    fault = crash_at(worker="mock-1", at_us=10 * S, back_us=40 * S)
    outcome = planned(fleet(2, LifeCycleSettings(faults=(fault,))), planning(), *wave(2, 2, 2, 2))
    assert sizes(outcome) == [2, 2, 2]
    assert ready(outcome) == [1, 2, 2]


def test_a_removed_worker_is_not_replaced_after_a_failure() -> None:
    fault = crash_at(worker="mock-1", at_us=10 * S, back_us=100 * S)
    outcome = planned(fleet(2, LifeCycleSettings(faults=(fault,))), planning(), *wave(1, 1, 1, 1, 1, 1))
    assert sizes(outcome) == [1, 1, 1, 1, 1]
    assert ready(outcome) == [1, 1, 1, 1, 1]


def test_a_failed_worker_without_replacement_is_started_again_by_the_planner() -> None:
    fault = crash_at(worker="mock-1", at_us=10 * S)
    outcome = planned(fleet(2, LifeCycleSettings(faults=(fault,))), planning(), *wave(2, 2, 2, 2, 2))
    assert ready(outcome) == [1, 1, 2, 2]


def test_advisory_decisions_change_nothing() -> None:
    outcome = planned(fleet(1), planning(advisory=True), *wave(1, 4, 4))
    assert sizes(outcome) == [1, 1]
    assert outcome.planned[-1].decisions[-1].pools[0].to_size == 4


def test_load_scaling_follows_the_reported_load() -> None:
    planner = planning(method="load", min_observations=1, ttft_ms=200.0, pool={"startup_s": 1.0})
    outcome = planned(fleet(1, sizes=SLOW), planner, *wave(*[8] * 3, prompt=4_000))
    assert sizes(outcome)[-1] > 1
    assert len(outcome.planned[0].observed[0].workers) == 1


def test_prefill_and_decode_pools_are_sized_apart() -> None:
    planner = disaggregated(planning(), max_size=2)
    outcome = planned(split(1, 1), planner, *wave(1, 4, 4, 4))
    assert sizes(outcome, "prefill") == [1, 4, 4]
    assert sizes(outcome) == [1, 1, 1]
    assert outcome.requests.failures == {}


def test_gpus_of_draining_workers_are_not_used_twice() -> None:
    planner = disaggregated(planning(gpu_budget=6))
    long = [turn(at, 200, 12_000, at_us=at * S) for at in range(20)]  # decode workers drain for minutes
    short = [turn(20 + at, 2_000, 2, at_us=(60 + at) * S // 2) for at in range(200)]
    outcome = planned(split(1, 5), planner, *long, *short)
    gpu_s = [0.0, *(interval.gpu_s for interval in outcome.planned)]
    assert max(after - before for before, after in pairwise(gpu_s)) <= 6 * INTERVAL_S + 1e-6
    assert max(sizes(outcome, "prefill")) > 1
    assert any(interval.observed[1].draining for interval in outcome.planned)
    assert outcome.requests.failures == {}


@given(rates=st.lists(st.integers(0, 6), min_size=1, max_size=6), startup_s=st.sampled_from([0.0, 1.0, 45.0]),
       method=st.sampled_from(["throughput", "load", "both"]), seed=st.integers(0, 3))  # fmt: skip
@examples(0.25)
def test_equal_runs_are_equal_and_no_request_is_lost(
    rates: list[int], startup_s: float, method: str, seed: int
) -> None:
    planner = planning(method=method, min_observations=2, pool={"startup_s": startup_s, "max_size": 4})
    life = LifeCycleSettings(mtbf_s=100.0, repair_s=5.0, cold_start_s=2.0)
    turns = wave(*rates) or [turn(0)]
    first, second = (planned(fleet(2, life, seed=seed), planner, *turns) for _ in range(2))
    assert comparable(first) == comparable(second)
    assert first.planned == second.planned
    assert all(1 <= size <= 4 for size in sizes(first))
    assert len(first.requests) == len(turns)
    assert all(one.failure or one.last_us for one in first.requests)


@pytest.mark.parametrize(
    ("system", "planner"),
    [
        (fleet(1), planning(pool={"pool": "other"})),
        (fleet(1), planning(pool={"role": "decode"})),
        (fleet(1), planning(pool={"max_size": 5_000})),
        (fleet(1, LifeCycleSettings(starts=(start_at(at_us=1),))), planning()),
    ],
)
def test_a_planner_that_does_not_fit_the_fleet_is_rejected(system: Settings, planner: Planning) -> None:
    with pytest.raises(SettingsUnusable):
        Simulation(system, policy("kv"), planning=planner)


# Sessions that need more cache than one worker has


IN_TURN = 1.2  # round-robin returns every session to its worker from the first turn on, so no policy does much better


def measured(pressure: Pressure, name: str) -> tuple[float, float]:
    """Return prefix reuse and mean TTFT in milliseconds."""
    fleet = one_pool(pressure.workers, engine_config(kv_blocks=pressure.kv_blocks))
    outcome = Simulation(fleet, policy(name)).run(played(pressure.rows(seed=2), 1.0), lambda _: None)
    found = summary(outcome, pressure.workers)
    return found["prefix_reuse"], found["ttft_ms"]["mean"]


@pytest.mark.parametrize(
    "pressure",
    [
        Pressure(gap_ms=1_000, turns=24, kv_blocks=1_100),
        Pressure(gap_ms=1_000, turns=24, kv_blocks=1_100, warm=100),
        Pressure(sessions=6, turns=24, shared=16, order="shuffled", gap_ms=2_000, workers=4, kv_blocks=1_000),
        PRESSURES["5 sessions, 3 workers, every 300 ms"],
    ],
    ids=["in turn", "in turn, after other prompts", "long system prompt", "concurrent"],
)
def test_sessions_leave_a_worker_whose_cache_is_too_small(pressure: Pressure) -> None:
    reuse, ttft_ms = measured(pressure, "kv")
    in_turn_reuse, in_turn_ttft_ms = measured(pressure, "round-robin")
    thrashing_reuse, thrashing_ttft_ms = measured(pressure, "kv:eviction_weight=0")
    assert reuse > in_turn_reuse - 0.05
    assert ttft_ms < in_turn_ttft_ms * IN_TURN
    assert reuse > thrashing_reuse + 0.02
    assert ttft_ms < thrashing_ttft_ms * 0.8


def test_a_workload_that_fits_one_worker_is_routed_as_without_evictions() -> None:
    pressure = Pressure(sessions=4, turns=12, gap_ms=500)
    rows = played(pressure.rows(seed=2), 1.0)
    fleet = one_pool(4, engine_config(kv_blocks=pressure.kv_blocks))
    runs = [Simulation(fleet, policy(name)).run(rows, lambda _: None) for name in ("kv", "kv:eviction_weight=0")]
    assert [one.worker for one in runs[0].requests] == [one.worker for one in runs[1].requests]
