"""The planner's decision about all pools."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.decide import PoolSizing, decide, derive, gpus_before_budget
from forebay.core.scaling.proposal import DecodeNeed, LoadSignal, PrefillNeed, SimulatedAttainment
from forebay.core.scaling.state import HISTORY_MAX, PlannerState
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    PlannerPaused,
    PlannerSettings,
    PlannerStopped,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    Reason,
    ScalingDecided,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from tests.core.scaling import scene
from tests.core.scaling.scene import GROUP, POOL, Loop, S, applied, demand, observation, reversals, settings, worker
from tests.depth import examples

OTHER = "other"
KEY = (GROUP, POOL)
Found = tuple[int, int, int, Reason]


def pool(**fields: object) -> PoolScaling:
    """Return a prefill pool of which a worker carries 12.5 requests per second."""
    return scene.pool(**{"role": "prefill", **fields})


def loop(*pools: PoolScaling, **fields: object) -> Loop:
    return Loop(settings(*(pools or (pool(),)), **fields))


def outcome(planner: Loop) -> list[Found]:
    """Let the planner decide, and return sizes and reason of each pool."""
    return [(one.from_size, one.proposed, one.to_size, one.reason) for one in planner.decide().pools]


def round_of(planner: Loop, ready: int, rate: float | None) -> Found:
    """Observe one pool, forecast its requests per second, decide, and let the actuator reply."""
    planner.observe(observation(ready))
    planner.forecast(*([demand(rate)] if rate is not None else []))
    (found,) = outcome(planner)
    planner.reply()
    return found


def pair(planner: Loop, ready: int, other: int, rate: float, other_rate: float) -> list[Found]:
    """Observe two pools, forecast, and decide."""
    planner.observe(observation(ready), observation(other, pool=OTHER))
    planner.forecast(demand(rate), demand(other_rate, pool=OTHER))
    return outcome(planner)


def test_there_is_no_decision_without_a_planner() -> None:
    assert decide(PlannerState()) is None
    planner = loop()
    planner.add(PlannerStopped(planner_epoch=planner.state.epoch))
    assert decide(planner.state) is None


def test_a_decision_names_the_state_from_which_it_follows() -> None:
    planner = loop(advisory=True)
    planner.observe(observation(2))
    decision = planner.decide()
    assert (decision.planner_epoch, decision.after, decision.advisory) == (0, 1, True)
    assert decode(SCALING, encode(SCALING, decision)) == decision


UP: Found = (2, 4, 4, "scale_up")


@pytest.mark.parametrize(
    ("fields", "options", "rounds"),
    [
        pytest.param(
            {},
            {},
            [
                (2, 50, UP),
                (4, 50, (4, 4, 4, "hold")),
                (4, 13, (4, 2, 2, "scale_down")),
                (2, None, (2, 2, 2, "no_demand")),
            ],
            id="the forecast determines the size",
        ),
        pytest.param(
            {"max_size": 6, "min_size": 2},
            {"gpu_budget": 0, "max_change": 3},
            [
                (2, 1_000, (2, 80, 5, "limited")),
                (5, 1_000, (5, 80, 6, "limited")),
                (6, 0, (6, 2, 3, "limited")),
                (3, 0, (3, 2, 2, "scale_down")),
            ],
            id="sizes and changes are limited",
        ),
        pytest.param(
            {"min_size": 6},
            {"max_change": 2},
            [(0, None, (0, 0, 6, "limited"))],
            id="the smallest size may exceed the largest change and needs no forecast",
        ),
        pytest.param(
            {},
            {"cooldown_s": 30.0},
            [
                (2, 50, UP),
                (4, 60, (4, 5, 5, "scale_up")),  # the same direction
                *[(5, 1, (5, 1, 5, "cooldown"))] * 2,
                (5, 1, (5, 1, 1, "scale_down")),
                (1, 50, (1, 4, 1, "cooldown")),
            ],
            id="a change is not reversed during the cool-down",
        ),
        pytest.param(
            {"startup_s": 25.0},
            {},
            [
                (2, 50, UP),
                (3, 1, (4, 1, 4, "starting")),
                (3, 60, (4, 5, 5, "scale_up")),  # a forecast counts the workers that start
                (5, 1, (5, 1, 1, "scale_down")),  # all have started
            ],
            id="workers that start are not stopped",
        ),
        pytest.param(
            {"startup_s": 25.0},
            {},
            [(2, 50, UP), *[(3, 1, (4, 1, 4, "starting"))] * 2, (3, 1, (4, 1, 1, "scale_down"))],
            id="workers are awaited for their start-up time only",
        ),
        pytest.param(
            {"min_size": 3},
            {"gpu_budget": 2},
            [(1, 1, (1, 3, 1, "budget_below_minimum"))],
            id="a budget below the minimum grows nothing",
        ),
    ],
)
def test_rounds_of_one_pool(fields: Any, options: Any, rounds: list[tuple[int, float | None, Found]]) -> None:
    planner = loop(pool(**fields), **options)
    assert [round_of(planner, ready, rate) for ready, rate, _ in rounds] == [found for *_, found in rounds]


def test_a_forecast_that_does_not_know_the_newest_observation_is_not_used() -> None:
    planner = loop()
    planner.observe(observation(2))
    planner.forecast(demand(50))
    planner.observe(observation(2))
    assert outcome(planner) == [(2, 2, 2, "no_demand")]
    planner.forecast(demand(50, pool=OTHER))
    assert outcome(planner) == [(2, 2, 2, "no_demand")], "nor is one for another pool"
    planner.forecast(demand(50))
    assert outcome(planner) == [UP]


def test_a_pool_that_was_never_observed_is_left_alone_until_an_operator_sets_its_size() -> None:
    planner = loop()
    assert outcome(planner) == [(0, 0, 0, "no_observation")]
    planner.set_size(pool(), 3)
    assert outcome(planner) == [(0, 3, 3, "manual")]
    assert planner.decide().pools[0].to_size == 3
    assert outcome(planner) == [(3, 3, 3, "in_progress")]
    planner.reply()
    planner.set_size(pool(), None)
    assert outcome(planner) == [(3, 3, 3, "no_observation")]


def test_the_size_of_a_pool_that_was_never_observed_stays_unknown_after_a_refusal() -> None:
    planner = loop()
    planner.set_size(pool(), 3)
    planner.decide()
    planner.refuse()
    planner.set_size(pool(), None)
    assert outcome(planner) == [(0, 0, 0, "no_observation")]
    assert planner.state.size(pool()) is None
    planner.observe(observation(5))
    assert planner.state.size(pool()) == 5


def test_a_pool_that_is_missing_in_the_newest_observation_keeps_its_size() -> None:
    planner = loop()
    planner.observe(observation(2))
    planner.observe()
    planner.forecast(demand(50))
    assert outcome(planner) == [(2, 2, 2, "no_observation")]
    planner.set_size(pool(), 3)
    assert outcome(planner) == [(2, 3, 3, "manual")]


def test_each_pool_waits_for_the_reply_of_its_own_actuator() -> None:
    planner = loop(pool(), pool(pool=OTHER))
    assert pair(planner, 2, 1, 50, 50) == [UP, (1, 4, 4, "scale_up")]
    planner.add(applied(planner.state.open[KEY].decision, 4))
    planner.set_size(pool(), 1)
    planner.set_size(pool(pool=OTHER), 1)
    assert outcome(planner) == [(4, 1, 1, "manual"), (4, 4, 4, "in_progress")]
    planner.reply()
    assert outcome(planner) == [(1, 1, 1, "manual"), (4, 1, 1, "manual")]


def test_an_overdue_decision_counts_as_failed_and_the_observed_size_counts() -> None:
    planner = loop(action_timeout_s=20.0)
    rounds: list[tuple[int, Found]] = [(2, UP), (2, (4, 4, 4, "in_progress")), (3, (3, 4, 4, "scale_up"))]
    for ready, found in rounds:
        planner.observe(observation(ready))
        planner.forecast(demand(50))
        assert outcome(planner) == [found]
    assert planner.state.sizes == {KEY: 4}


def test_a_refused_decision_is_made_again_and_a_partial_one_is_continued() -> None:
    planner = loop()
    planner.observe(observation(2))
    planner.forecast(demand(50))
    assert outcome(planner) == [UP]
    planner.refuse()
    assert outcome(planner) == [UP]
    planner.reply({KEY: 3})
    assert outcome(planner) == [(3, 4, 4, "scale_up")]


def test_a_manual_size_comes_before_limits_pause_and_budget_and_is_kept() -> None:
    planner = loop(pool(max_size=4), gpu_budget=3, cooldown_s=1e6)
    assert round_of(planner, 2, 30) == (2, 3, 3, "scale_up")
    planner.add(PlannerPaused(paused=True))
    planner.set_size(pool(), 9)
    assert round_of(planner, 3, 1) == (3, 9, 9, "manual")
    planner.set_size(pool(), 1)
    assert round_of(planner, 9, 90) == (9, 1, 1, "manual")
    planner.set_size(pool(), None)
    assert round_of(planner, 1, 90) == (1, 1, 1, "paused")
    planner.add(PlannerPaused(paused=False))
    assert round_of(planner, 1, 90) == (1, 8, 1, "cooldown")


def test_a_paused_planner_changes_nothing_even_beyond_the_budget() -> None:
    planner = loop(gpu_budget=1, min_gpus=1)
    planner.add(PlannerPaused(paused=True))
    assert round_of(planner, 4, 1) == (4, 4, 4, "paused")


def test_the_limits_do_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(cooldown_s=30.0)
    assert round_of(planner, 2, 50) == UP
    planner.claim("p2", pools=(pool(max_size=3),), cooldown_s=30.0)
    assert round_of(planner, 4, 50) == (4, 4, 4, "cooldown")


def test_the_budget_does_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(pool(), pool(pool=OTHER), cooldown_s=30.0)
    assert pair(planner, 2, 4, 50, 50) == [UP, (4, 4, 4, "hold")]
    planner.reply()
    planner.set_size(pool(pool=OTHER), 6)
    assert pair(planner, 4, 4, 50, 50) == [(4, 4, 4, "budget_below_minimum"), (4, 6, 6, "manual")]
    planner.reply()
    assert pair(planner, 4, 6, 50, 50)[0] == (4, 4, 4, "budget_below_minimum")
    assert pair(planner, 4, 6, 50, 50)[0] == (4, 4, 2, "gpu_budget")


def busy(ready: int, load: int = 4_200) -> PoolObserved:
    workers = tuple(worker(load * i, ttft_ms=100 + load * i / 10) for i in (1, 2)) * (ready // 2)
    return observation(ready, workers, requests=1)


@pytest.mark.parametrize("method", ["load", "both"])
def test_method_load_waits_for_workers_that_start(method: str) -> None:
    planner = loop(method=method, min_observations=1)
    planner.observe(busy(2))
    assert outcome(planner) == [(2, 3, 3, "scale_up")]
    planner.reply()
    planner.observe(busy(2))
    assert outcome(planner) == [(3, 4, 3, "starting")]


@pytest.mark.parametrize(
    ("load", "rate", "found"),
    [
        (4_200, 20, (2, 3, 3, "scale_up")),
        (4_200, 50, UP),
        (4_200, None, (2, 3, 3, "scale_up")),
        (100, 20, (2, 2, 2, "hold")),
        (100, 1, (2, 1, 1, "scale_down")),
        (100, None, (2, 1, 1, "scale_down")),
        (0, 1, (2, 1, 1, "scale_down")),
        (None, 1, (2, 2, 2, "insufficient_data")),  # not by the forecast alone
        (None, 50, UP),
    ],
)
def test_both_methods_scale_by_load_above_the_size_for_the_forecast(
    load: int | None, rate: float | None, found: Found
) -> None:
    planner = loop(method="both", min_observations=1)
    planner.observe(observation(2) if load is None else busy(2, load))
    planner.forecast(*([demand(rate)] if rate else []))
    assert outcome(planner) == [found]


@pytest.mark.parametrize(
    ("ready", "name", "attained", "found"),
    [
        (2, OTHER, (1.0,), (2, 2, 2, "no_demand")),
        (2, POOL, (0.2, 0.5, 0.99, 1.0), (2, 3, 3, "scale_up")),
        (3, POOL, (0.2, 0.5, 0.5, 0.4), (3, 2, 2, "target_unattainable")),
        (3, POOL, (0.2, 0.99, 1.0), (3, 3, 3, "consolidation_refused")),  # it shrinks only by a margin
        (3, POOL, (0.2, 1.0, 1.0), (3, 2, 2, "scale_down")),
    ],
)
def test_method_simulate_takes_the_smallest_size_that_attains_the_target(
    ready: int, name: str, attained: tuple[float, ...], found: Found
) -> None:
    planner = loop(method="simulate", gpu_budget=0)
    planner.observe(observation(ready))
    assert outcome(planner) == [(ready, ready, ready, "no_demand")]
    sizes = tuple(
        SimulatedSize(group=GROUP, pool=name, size=size, attained=share) for size, share in enumerate(attained, 1)
    )
    planner.add(SizesSimulated(planner_epoch=0, forecast=0, target=0.99, sizes=sizes))
    assert outcome(planner) == [found]


def test_the_budget_shrinks_all_proposals_by_the_same_share() -> None:
    planner = loop(pool(), pool(pool=OTHER), gpu_budget=8, max_change=100)
    assert pair(planner, 1, 1, 150, 50) == [(1, 12, 6, "gpu_budget"), (1, 4, 2, "gpu_budget")]


def test_a_manual_size_counts_in_the_budget() -> None:
    planner = loop(pool(), pool(pool=OTHER, gpus_per_worker=2), gpu_budget=8)
    planner.set_size(pool(pool=OTHER), 3)
    assert pair(planner, 1, 1, 50, 0) == [(1, 4, 2, "gpu_budget"), (1, 3, 3, "manual")]


def test_a_pool_without_an_observation_counts_in_the_budget() -> None:
    planner = loop(pool(), pool(pool=OTHER, min_size=3), gpu_budget=8)
    planner.observe(observation(1))
    planner.forecast(demand(100))
    assert outcome(planner) == [(1, 8, 5, "gpu_budget"), (0, 0, 0, "no_observation")]


def test_a_budget_below_the_minimum_stops_nothing() -> None:
    planner = loop(pool(min_size=3), pool(pool=OTHER, min_size=3), gpu_budget=5)
    assert pair(planner, 3, 4, 100, 0) == [(3, 8, 3, "budget_below_minimum"), (4, 3, 3, "scale_down")]


def test_the_lowest_number_of_gpus_is_reached() -> None:
    planner = loop(pool(), pool(pool=OTHER), gpu_budget=0, min_gpus=6)
    assert pair(planner, 1, 1, 1, 1) == [(1, 1, 3, "gpu_budget"), (1, 1, 3, "gpu_budget")]


def test_the_lowest_number_of_gpus_does_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(gpu_budget=0, min_gpus=3, cooldown_s=1e6)
    planner.set_size(pool(), 2)
    assert round_of(planner, 4, None) == (4, 2, 2, "manual")
    planner.set_size(pool(), None)
    assert round_of(planner, 2, 1) == (2, 1, 2, "gpu_budget")


# The steps of a decision


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
    sizing = steps(observed_loop(scene.pool(kv_tokens=20_000), ttft_ms=100.0, itl_ms=30.0))
    (one,) = sizing.proposals
    prefill, decode = one.proposal.basis
    assert isinstance(prefill, PrefillNeed)
    assert isinstance(decode, DecodeNeed)
    assert (prefill.isl, prefill.ttft_ms) == (1_000, 80)
    assert (prefill.tokens_per_s, prefill.worker_tokens_per_s) == (50_000, 12_500)
    assert (decode.context, decode.itl_ms, decode.tokens_per_s) == (1_100, 30, 10_000)
    assert decode.concurrency_max == pytest.approx(18.18, abs=0.01)
    assert prefill.workers == 4
    assert decode.workers == decode.tokens_per_s / decode.worker_tokens_per_s
    assert (prefill.correction, decode.correction) == (1, 1)
    assert one.method == "throughput"
    assert one.proposal.size == sizing.decided.proposed == -(-(prefill.workers + decode.workers) // 1)
    assert sizing.demand == demand(50)


def test_corrections_follow_from_the_observation() -> None:
    planner = observed_loop(scene.pool(role="prefill"), equations="corrected")
    (prefill,) = steps(planner).proposals[0].proposal.basis
    assert isinstance(prefill, PrefillNeed)
    assert (prefill.correction, prefill.tokens_per_s, prefill.workers) == (0.5, 25_000, 2)


def test_the_signals_of_load_have_target_and_estimates() -> None:
    planner = Loop(settings(scene.pool(role="prefill"), method="both", min_observations=2, ttft_ms=300.0))
    for load in (1_000, 2_000, 3_000):
        workers = (worker(load, ttft_ms=load / 10), worker(load, ttft_ms=load / 10))
        planner.observe(observation(2, workers, requests=4, isl=1_000.0))
    planner.forecast(demand(50))
    sizing = steps(planner)
    assert [one.method for one in sizing.proposals] == ["throughput", "load"]
    (signal,) = sizing.proposals[1].proposal.basis
    assert isinstance(signal, LoadSignal)
    assert (signal.latency, signal.intervals) == ("ttft", 3)
    assert (signal.known, signal.above, signal.below) == (True, False, False)
    assert (signal.target_ms, signal.shrink_below_ms) == (300, 240)
    assert signal.slope_ms == pytest.approx(0.1)
    assert signal.estimates_ms == pytest.approx((300, 300))
    assert signal.fewer_ms == pytest.approx((600, 600))
    assert (sizing.limited, sizing.decided.to_size) == (4, 4)


def test_the_signal_of_the_itl_has_its_own_limits() -> None:
    planner = Loop(settings(scene.pool(role="decode"), method="load", min_observations=2, itl_ms=40.0))
    for load in (10_000, 20_000):
        planner.observe(observation(2, (worker(kv_tokens=load, itl_ms=load / 1_000),) * 2, requests=4, isl=1_000.0))
    (signal,) = steps(planner).proposals[0].proposal.basis
    assert isinstance(signal, LoadSignal)
    assert (signal.latency, signal.target_ms, signal.shrink_below_ms) == ("itl", 40, 32)
    assert signal.estimates_ms == pytest.approx((20, 20))
    assert signal.fewer_ms == pytest.approx((40, 40))
    assert (signal.above, signal.below) == (False, False)


def test_the_simulated_sizes_are_the_basis_of_simulate() -> None:
    planner = observed_loop(scene.pool(), method="simulate")
    sizes = tuple(
        SimulatedSize(group=GROUP, pool=POOL, size=size, attained=share) for size, share in ((3, 0.9), (4, 1))
    )
    planner.add(SizesSimulated(planner_epoch=0, forecast=planner.state.end - 1, target=0.95, sizes=sizes))
    (one,) = steps(planner).proposals
    assert (one.method, one.proposal.size) == ("simulate", 4)
    assert one.proposal.basis == (SimulatedAttainment(0.95, ((3, 0.9), (4, 1))),)


def test_limits_guards_and_budget_are_separate_steps() -> None:
    pool = scene.pool(role="prefill", max_size=12, gpus_per_worker=2)
    planner = observed_loop(pool, max_change=4, gpu_budget=10)
    planner.forecast(demand(1_000))
    sizing = steps(planner)
    assert sizing.proposals[0].proposal.size == 80
    assert (sizing.limited, sizing.guarded.to_size, sizing.guarded.reason) == (6, 6, "limited")
    assert (sizing.decided.to_size, sizing.decided.reason, gpus_before_budget(sizing)) == (5, "gpu_budget", 12)


def test_a_pool_that_keeps_its_size_has_no_proposal() -> None:
    planner = observed_loop(scene.pool())
    planner.add(PlannerPaused(paused=True))
    sizing = steps(planner)
    assert (sizing.proposals, sizing.limited, sizing.decided.reason) == ((), None, "paused")


# Any settings and observations


SIZES_MAX = 12
RATE = st.floats(0, 400) | st.floats(0, 1e300)
TOKENS = st.floats(0, 20_000) | st.floats(0, 1e300)
LATENCY = st.none() | st.floats(0, 5_000) | st.floats(0, 1e300)
COUNT = st.integers(0, 5_000) | st.integers(0, (1 << 63) - 1)

POOLS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["prefill", "decode", "aggregated"]),
            "min_size": st.integers(0, 3),
            "max_size": st.integers(3, SIZES_MAX),
            "gpus_per_worker": st.sampled_from([1, 2, 4]),
            "startup_s": st.sampled_from([0.0, 25.0]),
        }
    ),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(scene.pool(pool=f"p{index}", **fields) for index, fields in enumerate(found)))

SETTINGS = st.builds(
    PlannerSettings,
    pools=POOLS,
    method=st.sampled_from(["throughput", "load", "both"]),
    equations=st.sampled_from(["plain", "corrected"]),
    ttft_ms=st.sampled_from([10.0, 200.0, 1_000.0]),
    itl_ms=st.sampled_from([5.0, 30.0, 60.0]),
    gpu_budget=st.sampled_from([0, 2, 7, 16]),
    min_gpus=st.sampled_from([0, 3, 9]),
    max_change=st.sampled_from([1, 4, 100]),
    min_observations=st.integers(1, 3),
    cooldown_s=st.sampled_from([0.0, 15.0, 40.0]),
    action_timeout_s=st.sampled_from([15.0, 1_000.0]),
)

WORKERS = st.lists(
    st.builds(
        scene.worker,
        prefill_tokens=COUNT,
        kv_tokens=COUNT,
        running=COUNT,
        waiting=COUNT,
        ttft_ms=LATENCY,
        itl_ms=LATENCY,
    ),
    max_size=3,
).map(tuple)


@dataclass
class Round:
    """What happens to each pool in one interval."""

    observed: list[PoolObserved | None]
    wanted: list[PoolDemand | None]
    manual: list[int | None]
    reached: int | None
    replies: bool


def pool_observed(ready: int, workers: tuple[object, ...], complete: bool, **fields: object) -> PoolObserved:
    return scene.observation(len(workers) if complete else ready, workers, **fields)  # type: ignore[arg-type]


OBSERVED = st.builds(
    pool_observed,
    st.integers(0, SIZES_MAX),
    WORKERS,
    st.booleans(),
    requests=COUNT,
    queued=COUNT,
    isl=LATENCY,
    osl=LATENCY,
    ttft_ms=LATENCY,
    itl_ms=LATENCY,
    kv_hit_rate=st.none() | st.floats(0, 1),
)
DEMAND = st.builds(scene.demand, RATE, TOKENS, TOKENS, st.floats(0, 1))
ROUNDS = st.builds(
    Round,
    st.lists(st.just(None) | OBSERVED | OBSERVED | OBSERVED, min_size=3, max_size=3),
    st.lists(st.none() | DEMAND | DEMAND | DEMAND, min_size=3, max_size=3),
    st.lists(st.sampled_from([None] * 9 + [0, 5, 20]), min_size=3, max_size=3),
    st.none() | st.none() | st.integers(0, SIZES_MAX),
    st.sampled_from([True, True, True, False]),
)


Record = TypeVar("Record", PoolObserved, PoolDemand)


def named(one: Record | None, pool: PoolScaling) -> list[Record]:
    return [] if one is None else [msgspec.structs.replace(one, pool=pool.pool)]


def play(loop: Loop, pools: tuple[PoolScaling, ...], one: Round) -> ScalingDecided:
    for pool, size in zip(pools, one.manual, strict=False):
        if (GROUP, pool.pool) in loop.state.manual or size is not None:
            loop.set_size(pool, size)
    loop.observe(*(found for pool, part in zip(pools, one.observed, strict=False) for found in named(part, pool)))
    loop.forecast(*(found for pool, part in zip(pools, one.wanted, strict=False) for found in named(part, pool)))
    decision = loop.decide()
    if one.replies:
        loop.reply({} if one.reached is None else {(GROUP, pools[0].pool): one.reached})
    return decision


@given(SETTINGS, st.lists(ROUNDS, max_size=8))
def test_decisions_respect_operators_limits_budget_and_cool_down(
    settings: PlannerSettings, rounds: list[Round]
) -> None:
    loop = Loop(settings)
    last: dict[str, tuple[bool, int]] = {}
    for each in rounds:
        decision = play(loop, settings.pools, each)
        gpus = 0
        grown = False
        for pool, one in zip(settings.pools, decision.pools, strict=True):
            manual = loop.state.manual.get((GROUP, pool.pool))
            if manual is not None and one.reason not in {"in_progress", "no_observation"}:
                assert (one.to_size, one.reason) == (manual, "manual")
            gpus += pool.gpus_per_worker * one.to_size
            if one.to_size == one.from_size:
                continue
            up = one.to_size > one.from_size
            if one.reason != "manual":
                grown = grown or up
                low, high = sorted([one.from_size, one.to_size])
                # The workers that an operator removed still have their GPUs, which may leave too few for the minimum.
                assert low <= pool.max_size and (pool.min_size <= high or one.reason == "gpu_budget")
                assert one.to_size <= pool.max_size if up else one.to_size >= pool.min_size
                if pool.pool in last and last[pool.pool][0] != up:
                    assert decision.at_us - last[pool.pool][1] >= settings.cooldown_s * S
            last[pool.pool] = (up, decision.at_us)
        assert not (grown and settings.gpu_budget) or gpus <= settings.gpu_budget
    assert_derived_from_records(loop)


def assert_derived_from_records(loop: Loop) -> None:
    """Assert that the decoded records alone lead to the same decisions and the same state."""
    again = PlannerState()
    for offset, event in enumerate(loop.records):
        if isinstance(event, ScalingDecided):
            derived = decide(again)
            assert derived is not None
            assert msgspec.structs.replace(derived, at_us=event.at_us) == event
        again.apply(offset, decode(SCALING, encode(SCALING, event)))
    assert again == loop.state


def settled(
    loop: Loop, pools: tuple[PoolScaling, ...], observe: Callable[[], list[PoolObserved]], wanted: list[PoolDemand]
) -> list[list[int]]:
    """Play rounds in which the workers follow the decisions at once. Return the sizes of each pool over time."""
    sizes = []
    for _ in range(HISTORY_MAX + 2 * SIZES_MAX):
        loop.observe(*observe())
        loop.forecast(*wanted)
        sizes.append([loop.state.size(pool) or 0 for pool in pools])
        loop.decide()
        loop.reply()
    return [list(one) for one in zip(*sizes, strict=True)]


@given(SETTINGS, st.lists(st.integers(0, SIZES_MAX), min_size=3, max_size=3), st.lists(DEMAND, min_size=3, max_size=3))
@examples(0.3)
def test_a_constant_forecast_ends_in_constant_sizes_with_one_reversal_at_most(
    settings: PlannerSettings, starts: list[int], wanted: list[PoolDemand]
) -> None:
    loop = Loop(msgspec.structs.replace(settings, method="throughput"))
    forecast = [found for pool, one in zip(settings.pools, wanted, strict=False) for found in named(one, pool)]
    ready = dict(zip([pool.pool for pool in settings.pools], starts, strict=False))

    def observe() -> list[PoolObserved]:
        sizes = [(pool.pool, loop.state.sizes.get((GROUP, pool.pool), ready[pool.pool])) for pool in settings.pools]
        return [PoolObserved(group=GROUP, pool=name, ready=size) for name, size in sizes]

    for sizes in settled(loop, settings.pools, observe, forecast):
        assert reversals(sizes) <= 1, sizes
        assert len(set(sizes[-SIZES_MAX:])) == 1, sizes


@given(SETTINGS, st.integers(1, SIZES_MAX), st.integers(0, 40_000), st.floats(1, 300), st.floats(0.0001, 1))
@examples(0.3)
def test_a_constant_load_ends_in_a_constant_size_with_one_reversal_at_most(
    settings: PlannerSettings, start: int, load: int, alone_ms: float, ms_per_token: float
) -> None:
    (first, *_) = settings.pools
    loop = Loop(msgspec.structs.replace(settings, pools=(first,), method="load", down_sensitivity=1.0))

    def observe() -> list[PoolObserved]:
        size = loop.state.sizes.get((GROUP, first.pool), start)
        tokens = load // max(size, 1)
        latency = alone_ms + ms_per_token * tokens
        one = scene.worker(prefill_tokens=tokens, kv_tokens=tokens, ttft_ms=latency, itl_ms=latency)
        return named(scene.observation(size, (one,) * size, requests=1), first)

    (sizes,) = settled(loop, (first,), observe, [])
    assert reversals(sizes) <= 1, sizes
    assert len(set(sizes[-SIZES_MAX:])) == 1, sizes
