"""The steps of a decision: numbers of the methods, limits, guards and the GPU budget."""

import pytest

from forebay.core.scaling.decide import PoolSizing, decide, derive, gpus_before_budget
from forebay.core.scaling.proposal import DecodeNeed, LoadSignal, PrefillNeed, SimulatedAttainment
from forebay.core.scaling.state import PlannerState
from forebay.events.scaling import PlannerPaused, PoolScaling, SimulatedSize, SizesSimulated
from tests.core.scaling import profiles
from tests.core.scaling.loop import Loop
from tests.core.scaling.profiles import demand, observation, settings, worker
from tests.core.scaling.records import GROUP, POOL


def steps(planner: Loop) -> PoolSizing:
    """Return the steps of the first pool of the decision that follows."""
    derivation = derive(planner.state)
    assert derivation is not None
    assert derivation.decision == decide(planner.state)
    assert tuple(one.decided for one in derivation.sizings) == derivation.decision.pools
    return derivation.sizings[0]


def observed_loop(pool: PoolScaling, **fields: object) -> Loop:
    planner = Loop(settings(pool, **fields))
    planner.observe(observation(2, requests=10, isl=1_000.0, osl=200.0, ttft_ms=40.0, itl_ms=25.0))
    planner.forecast(demand(50))
    return planner


def test_without_a_planner_there_are_no_steps() -> None:
    assert derive(PlannerState()) is None


def test_the_numbers_of_throughput_are_those_of_the_formula() -> None:
    sizing = steps(observed_loop(profiles.pool(kv_tokens=20_000), ttft_ms=100.0, itl_ms=30.0))
    (one,) = sizing.proposals
    prefill, decode = one.proposal.basis
    assert isinstance(prefill, PrefillNeed)
    assert isinstance(decode, DecodeNeed)
    assert (prefill.isl, prefill.ttft_ms, prefill.tokens_per_s, prefill.worker_tokens_per_s) == (
        1_000, 80, 50_000, 12_500,
    )  # fmt: skip
    assert (decode.context, decode.itl_ms, decode.tokens_per_s) == (1_100, 30, 10_000)
    assert decode.concurrency_max == pytest.approx(18.18, abs=0.01)
    assert prefill.workers == 4
    assert decode.workers == decode.tokens_per_s / decode.worker_tokens_per_s
    assert (prefill.correction, decode.correction) == (1, 1)
    assert one.method == "throughput"
    assert one.proposal.size == sizing.decided.proposed == -(-(prefill.workers + decode.workers) // 1)
    assert sizing.demand == demand(50)


def test_corrections_follow_from_the_observation() -> None:
    planner = observed_loop(profiles.pool(role="prefill"), equations="corrected")
    (prefill,) = steps(planner).proposals[0].proposal.basis
    assert isinstance(prefill, PrefillNeed)
    assert (prefill.correction, prefill.tokens_per_s, prefill.workers) == (0.5, 25_000, 2)


def test_the_signals_of_load_have_target_and_estimates() -> None:
    planner = Loop(settings(profiles.pool(role="prefill"), method="both", min_observations=2, ttft_ms=300.0))
    for load in (1_000, 2_000, 3_000):
        workers = (worker(load, ttft_ms=load / 10), worker(load, ttft_ms=load / 10))
        planner.observe(observation(2, workers, requests=4, isl=1_000.0))
    planner.forecast(demand(50))
    sizing = steps(planner)
    assert [one.method for one in sizing.proposals] == ["throughput", "load"]
    (signal,) = sizing.proposals[1].proposal.basis
    assert isinstance(signal, LoadSignal)
    assert (signal.latency, signal.intervals, signal.known, signal.above, signal.below) == (
        "ttft",
        3,
        True,
        False,
        False,
    )
    assert (signal.target_ms, signal.shrink_below_ms) == (300, 240)
    assert signal.slope_ms == pytest.approx(0.1)
    assert signal.estimates_ms == pytest.approx((300, 300))
    assert signal.fewer_ms == pytest.approx((600, 600))
    assert (sizing.limited, sizing.decided.to_size) == (4, 4)


def test_the_signal_of_the_itl_has_its_own_limits() -> None:
    planner = Loop(settings(profiles.pool(role="decode"), method="load", min_observations=2, itl_ms=40.0))
    for load in (10_000, 20_000):
        planner.observe(observation(2, (worker(kv_tokens=load, itl_ms=load / 1_000),) * 2, requests=4, isl=1_000.0))
    (signal,) = steps(planner).proposals[0].proposal.basis
    assert isinstance(signal, LoadSignal)
    assert (signal.latency, signal.target_ms, signal.shrink_below_ms) == ("itl", 40, 32)
    assert signal.estimates_ms == pytest.approx((20, 20))
    assert signal.fewer_ms == pytest.approx((40, 40))
    assert (signal.above, signal.below) == (False, False)


def test_the_simulated_sizes_are_the_basis_of_simulate() -> None:
    planner = observed_loop(profiles.pool(), method="simulate")
    sizes = tuple(
        SimulatedSize(group=GROUP, pool=POOL, size=size, attained=share) for size, share in ((3, 0.9), (4, 1))
    )
    planner.add(SizesSimulated(planner_epoch=0, forecast=planner.state.end - 1, target=0.95, sizes=sizes))
    (one,) = steps(planner).proposals
    assert (one.method, one.proposal.size) == ("simulate", 4)
    assert one.proposal.basis == (SimulatedAttainment(0.95, ((3, 0.9), (4, 1))),)


def test_limits_guards_and_budget_are_separate_steps() -> None:
    pool = profiles.pool(role="prefill", max_size=12, gpus_per_worker=2)
    planner = observed_loop(pool, max_change=4, gpu_budget=10)
    planner.forecast(demand(1_000))
    sizing = steps(planner)
    assert sizing.proposals[0].proposal.size == 80
    assert (sizing.limited, sizing.guarded.to_size, sizing.guarded.reason) == (6, 6, "limited")
    assert (sizing.decided.to_size, sizing.decided.reason, gpus_before_budget(sizing)) == (5, "gpu_budget", 12)


def test_a_pool_that_keeps_its_size_has_no_proposal() -> None:
    planner = observed_loop(profiles.pool())
    planner.add(PlannerPaused(paused=True))
    sizing = steps(planner)
    assert (sizing.proposals, sizing.limited, sizing.decided.reason) == ((), None, "paused")
