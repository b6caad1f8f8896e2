"""The planner's decision about all pools."""

import msgspec
import pytest

from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import PlannerState
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    PlannerPaused,
    PlannerStopped,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    Reason,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from tests.core.scaling import profiles
from tests.core.scaling.loop import Loop
from tests.core.scaling.profiles import demand, observation, settings, worker
from tests.core.scaling.records import GROUP, POOL, applied

OTHER = "other"
KEY = (GROUP, POOL)


def pool(**fields: object) -> PoolScaling:
    """Return a prefill pool of which a worker carries 12.5 requests per second."""
    return profiles.pool(**{"role": "prefill", **fields})


def of(name: str, one: PoolObserved) -> PoolObserved:
    return msgspec.structs.replace(one, pool=name)


def loop(*pools: PoolScaling, **fields: object) -> Loop:
    return Loop(settings(*(pools or (pool(),)), **fields))


def outcome(planner: Loop) -> list[tuple[int, int, int, Reason]]:
    """Let the planner decide, and return sizes and reason of each pool."""
    return [(one.from_size, one.proposed, one.to_size, one.reason) for one in planner.decide().pools]


def round_of(planner: Loop, ready: int, wanted: PoolDemand | None) -> tuple[int, int, int, Reason]:
    """Observe one pool, forecast, decide, and let the actuator reply."""
    planner.observe(observation(ready))
    planner.forecast(*([wanted] if wanted else []))
    (found,) = outcome(planner)
    planner.reply()
    return found


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


def test_the_forecast_determines_the_size() -> None:
    planner = loop()
    assert round_of(planner, 2, demand(50)) == (2, 4, 4, "scale_up")
    assert round_of(planner, 4, demand(50)) == (4, 4, 4, "hold")
    assert round_of(planner, 4, demand(13)) == (4, 2, 2, "scale_down")
    assert round_of(planner, 2, None) == (2, 2, 2, "no_demand")


def test_a_forecast_that_does_not_know_the_newest_observation_is_not_used() -> None:
    planner = loop()
    planner.observe(observation(2))
    planner.forecast(demand(50))
    planner.observe(observation(2))
    assert outcome(planner) == [(2, 2, 2, "no_demand")]
    planner.forecast(demand(50))
    assert outcome(planner) == [(2, 4, 4, "scale_up")]


def test_a_forecast_for_another_pool_is_not_used() -> None:
    planner = loop()
    assert round_of(planner, 2, msgspec.structs.replace(demand(50), pool=OTHER)) == (2, 2, 2, "no_demand")


def test_sizes_and_changes_are_limited() -> None:
    planner = loop(pool(max_size=6, min_size=2), gpu_budget=0, max_change=3)
    assert round_of(planner, 2, demand(1_000)) == (2, 80, 5, "limited")
    assert round_of(planner, 5, demand(1_000)) == (5, 80, 6, "limited")
    assert round_of(planner, 6, demand(0)) == (6, 2, 3, "limited")
    assert round_of(planner, 3, demand(0)) == (3, 2, 2, "scale_down")


def test_the_smallest_size_may_exceed_the_largest_change_and_needs_no_forecast() -> None:
    planner = loop(pool(min_size=6), max_change=2)
    assert round_of(planner, 0, None) == (0, 0, 6, "limited")


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
    planner.observe(observation(2), of(OTHER, observation(1)))
    planner.forecast(demand(50), msgspec.structs.replace(demand(50), pool=OTHER))
    assert outcome(planner) == [(2, 4, 4, "scale_up"), (1, 4, 4, "scale_up")]
    decision = planner.state.open[KEY].decision
    planner.add(applied(decision, 4))
    planner.set_size(pool(), 1)
    planner.set_size(pool(pool=OTHER), 1)
    assert outcome(planner) == [(4, 1, 1, "manual"), (4, 4, 4, "in_progress")]
    planner.reply()
    assert outcome(planner) == [(1, 1, 1, "manual"), (4, 1, 1, "manual")]


def test_a_change_is_in_progress_until_its_reply() -> None:
    planner = loop(pool(), pool(pool=OTHER))
    planner.observe(observation(2), of(OTHER, observation(1)))
    planner.forecast(demand(50), msgspec.structs.replace(demand(1), pool=OTHER))
    assert outcome(planner) == [(2, 4, 4, "scale_up"), (1, 1, 1, "hold")]
    planner.set_size(pool(), 7)
    assert outcome(planner) == [(4, 4, 4, "in_progress"), (1, 1, 1, "hold")]
    planner.reply()
    assert outcome(planner) == [(4, 7, 7, "manual"), (1, 1, 1, "hold")]


def test_an_overdue_decision_counts_as_failed_and_the_observed_size_counts() -> None:
    planner = loop(action_timeout_s=20.0)
    planner.observe(observation(2))
    planner.forecast(demand(50))
    assert outcome(planner) == [(2, 4, 4, "scale_up")]
    for ready, found in [(2, (4, 4, 4, "in_progress")), (3, (3, 4, 4, "scale_up"))]:
        planner.observe(observation(ready))
        planner.forecast(demand(50))
        assert outcome(planner) == [found]
    assert planner.state.sizes == {KEY: 4}


def test_a_refused_decision_is_made_again_and_a_partial_one_is_continued() -> None:
    planner = loop()
    planner.observe(observation(2))
    planner.forecast(demand(50))
    assert outcome(planner) == [(2, 4, 4, "scale_up")]
    planner.refuse()
    assert outcome(planner) == [(2, 4, 4, "scale_up")]
    planner.reply({KEY: 3})
    assert outcome(planner) == [(3, 4, 4, "scale_up")]


def test_a_manual_size_comes_before_limits_pause_and_budget_and_is_kept() -> None:
    planner = loop(pool(max_size=4), gpu_budget=3, cooldown_s=1e6)
    assert round_of(planner, 2, demand(30)) == (2, 3, 3, "scale_up")
    planner.add(PlannerPaused(paused=True))
    planner.set_size(pool(), 9)
    assert round_of(planner, 3, demand(1)) == (3, 9, 9, "manual")
    planner.set_size(pool(), 1)
    assert round_of(planner, 9, demand(90)) == (9, 1, 1, "manual")
    planner.set_size(pool(), None)
    assert round_of(planner, 1, demand(90)) == (1, 1, 1, "paused")
    planner.add(PlannerPaused(paused=False))
    assert round_of(planner, 1, demand(90)) == (1, 8, 1, "cooldown")


def test_a_paused_planner_changes_nothing_even_beyond_the_budget() -> None:
    planner = loop(gpu_budget=1, min_gpus=1)
    planner.add(PlannerPaused(paused=True))
    assert round_of(planner, 4, demand(1)) == (4, 4, 4, "paused")


def test_a_change_is_not_reversed_during_the_cool_down() -> None:
    planner = loop(cooldown_s=30.0)
    assert round_of(planner, 2, demand(50)) == (2, 4, 4, "scale_up")
    assert round_of(planner, 4, demand(60)) == (4, 5, 5, "scale_up"), "the same direction"
    for _ in range(2):
        assert round_of(planner, 5, demand(1)) == (5, 1, 5, "cooldown")
    assert round_of(planner, 5, demand(1)) == (5, 1, 1, "scale_down")
    assert round_of(planner, 1, demand(50)) == (1, 4, 1, "cooldown")


def test_the_limits_do_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(cooldown_s=30.0)
    assert round_of(planner, 2, demand(50)) == (2, 4, 4, "scale_up")
    planner.claim("p2", pools=(pool(max_size=3),), cooldown_s=30.0)
    assert round_of(planner, 4, demand(50)) == (4, 4, 4, "cooldown")


def test_the_budget_does_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(pool(), pool(pool=OTHER), cooldown_s=30.0)

    def decide_again(ready: int, other: int) -> list[tuple[int, int, int, Reason]]:
        planner.observe(observation(ready), of(OTHER, observation(other)))
        planner.forecast(demand(50), msgspec.structs.replace(demand(50), pool=OTHER))
        found = outcome(planner)
        planner.reply()
        return found

    assert decide_again(2, 4) == [(2, 4, 4, "scale_up"), (4, 4, 4, "hold")]
    planner.set_size(pool(pool=OTHER), 6)
    assert decide_again(4, 4) == [(4, 4, 4, "budget_below_minimum"), (4, 6, 6, "manual")]
    assert decide_again(4, 6)[0] == (4, 4, 4, "budget_below_minimum")
    assert decide_again(4, 6)[0] == (4, 4, 2, "gpu_budget")


def test_workers_that_start_are_not_stopped_and_their_load_is_awaited() -> None:
    planner = loop(pool(startup_s=25.0))
    assert round_of(planner, 2, demand(50)) == (2, 4, 4, "scale_up")
    assert round_of(planner, 3, demand(1)) == (4, 1, 4, "starting")
    assert round_of(planner, 3, demand(60)) == (4, 5, 5, "scale_up"), "a forecast counts the workers that start"
    assert round_of(planner, 5, demand(1)) == (5, 1, 1, "scale_down"), "all have started"
    planner = loop(pool(startup_s=25.0))
    round_of(planner, 2, demand(50))
    for reason in ("starting", "starting", "scale_down"):
        assert round_of(planner, 3, demand(1))[-1] == reason


def busy(ready: int, load: int = 4_200) -> PoolObserved:
    workers = tuple(worker(prefill_tokens=load * i, ttft_ms=100 + load * i / 10) for i in (1, 2)) * (ready // 2)
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
    ("load", "requests_per_s", "found"),
    [
        (4_200, 20, (2, 3, 3, "scale_up")),
        (4_200, 50, (2, 4, 4, "scale_up")),
        (4_200, None, (2, 3, 3, "scale_up")),
        (100, 20, (2, 2, 2, "hold")),
        (100, 1, (2, 1, 1, "scale_down")),
        (100, None, (2, 1, 1, "scale_down")),
        (0, 1, (2, 1, 1, "scale_down")),
    ],
)
def test_both_methods_scale_by_load_above_the_size_for_the_forecast(
    load: int, requests_per_s: float | None, found: tuple[int, int, int, Reason]
) -> None:
    planner = loop(method="both", min_observations=1)
    planner.observe(busy(2, load))
    planner.forecast(*([demand(requests_per_s)] if requests_per_s else []))
    assert outcome(planner) == [found]


def test_both_methods_do_not_scale_down_by_the_forecast_alone() -> None:
    planner = loop(method="both")
    planner.observe(observation(4))
    planner.forecast(demand(1))
    assert outcome(planner) == [(4, 4, 4, "insufficient_data")]
    planner.forecast(demand(80))
    assert outcome(planner) == [(4, 7, 7, "scale_up")]


def test_method_simulate_takes_the_smallest_size_that_attains_the_target() -> None:
    planner = loop(method="simulate", gpu_budget=0)

    def simulated(*attained: float, name: str = POOL) -> None:
        sizes = tuple(
            SimulatedSize(group=GROUP, pool=name, size=size, attained=share)
            for size, share in enumerate(attained, start=1)
        )
        epoch = planner.state.epoch
        planner.add(SizesSimulated(planner_epoch=epoch, forecast=0, target=0.99, sizes=sizes))

    planner.observe(observation(2))
    assert outcome(planner) == [(2, 2, 2, "no_demand")]
    simulated(1.0, name=OTHER)
    assert outcome(planner) == [(2, 2, 2, "no_demand")]
    simulated(0.2, 0.5, 0.99, 1.0)
    assert outcome(planner) == [(2, 3, 3, "scale_up")]
    planner.reply()
    planner.observe(observation(3))
    simulated(0.2, 0.5, 0.5, 0.4)
    assert outcome(planner) == [(3, 2, 2, "target_unattainable")]


@pytest.mark.parametrize(
    ("attained", "found"), [(0.99, (3, 3, 3, "consolidation_refused")), (1.0, (3, 2, 2, "scale_down"))]
)
def test_method_simulate_shrinks_only_by_a_margin(attained: float, found: tuple[int, int, int, Reason]) -> None:
    planner = loop(method="simulate", gpu_budget=0)
    planner.observe(observation(3))
    shares = enumerate((0.2, attained, 1.0), start=1)
    sizes = tuple(SimulatedSize(group=GROUP, pool=POOL, size=size, attained=share) for size, share in shares)
    planner.add(SizesSimulated(planner_epoch=planner.state.epoch, forecast=0, target=0.99, sizes=sizes))
    assert outcome(planner) == [found]


def pair(planner: Loop, first: PoolObserved, second: PoolObserved, *rates: float) -> list[tuple[int, int, int, Reason]]:
    """Observe two pools, forecast, and decide."""
    planner.observe(first, of(OTHER, second))
    names = (POOL, OTHER)
    planner.forecast(
        *(msgspec.structs.replace(demand(rate), pool=name) for name, rate in zip(names, rates, strict=True))
    )
    return outcome(planner)


def test_the_budget_shrinks_all_proposals_by_the_same_share() -> None:
    planner = loop(pool(), pool(pool=OTHER), gpu_budget=8, max_change=100)
    assert pair(planner, observation(1), observation(1), 150, 50) == [(1, 12, 6, "gpu_budget"), (1, 4, 2, "gpu_budget")]


def test_a_manual_size_counts_in_the_budget() -> None:
    planner = loop(pool(), pool(pool=OTHER, gpus_per_worker=2), gpu_budget=8)
    planner.set_size(pool(pool=OTHER), 3)
    assert pair(planner, observation(1), observation(1), 50, 0) == [(1, 4, 2, "gpu_budget"), (1, 3, 3, "manual")]


def test_a_pool_without_an_observation_counts_in_the_budget() -> None:
    planner = loop(pool(), pool(pool=OTHER, min_size=3), gpu_budget=8)
    planner.observe(observation(1))
    planner.forecast(demand(100))
    assert outcome(planner) == [(1, 8, 5, "gpu_budget"), (0, 0, 0, "no_observation")]


def test_a_budget_below_the_minimum_grows_nothing_and_stops_nothing() -> None:
    planner = loop(pool(min_size=3), pool(pool=OTHER, min_size=3), gpu_budget=5)
    assert pair(planner, observation(3), observation(4), 100, 0) == [
        (3, 8, 3, "budget_below_minimum"),
        (4, 3, 3, "scale_down"),
    ]
    planner = loop(pool(min_size=3), gpu_budget=2)
    assert round_of(planner, 1, demand(1)) == (1, 3, 1, "budget_below_minimum")


def test_the_lowest_number_of_gpus_is_reached() -> None:
    planner = loop(pool(), pool(pool=OTHER), gpu_budget=0, min_gpus=6)
    assert pair(planner, observation(1), observation(1), 1, 1) == [(1, 1, 3, "gpu_budget"), (1, 1, 3, "gpu_budget")]


def test_the_lowest_number_of_gpus_does_not_reverse_a_change_during_the_cool_down() -> None:
    planner = loop(gpu_budget=0, min_gpus=3, cooldown_s=1e6)
    planner.set_size(pool(), 2)
    assert round_of(planner, 4, None) == (4, 2, 2, "manual")
    planner.set_size(pool(), None)
    assert round_of(planner, 2, demand(1)) == (2, 1, 2, "gpu_budget")
