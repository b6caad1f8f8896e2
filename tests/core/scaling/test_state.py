"""The state of the planner, decisions that are derived again from the topic, and a planner in virtual time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.core.scaling.decide import decide
from forebay.core.scaling.rederive import WAITING_MAX, ScalingRederivation
from forebay.core.scaling.state import PlannerState, overdue
from forebay.core.scaling.virtual_planner import VirtualPlanner
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    DecodePoint,
    DemandForecast,
    PlannerPaused,
    PlannerSettings,
    PlannerStopped,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    PrefillPoint,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from tests.core.scaling.scene import (
    GROUP,
    POOL,
    Journal,
    Loop,
    S,
    applied,
    claimed,
    decided,
    observed,
    refused,
    reversals,
    worker,
)
from tests.harness.scaling_decisions import decisions_of

KEY = (GROUP, POOL)


def test_a_decision_is_in_force_until_the_actuator_replies_and_after_it() -> None:
    journal = observing()
    (pool,) = journal.state.settings.pools  # type: ignore[union-attr]
    assert journal.state.size(pool) == 2
    assert journal.add(decided(0, 1, 2, 6)) == "applied"
    assert (journal.state.size(pool), set(journal.state.open)) == (6, {KEY})
    assert journal.add(applied(decision=2, size=5)) == "applied"
    assert (journal.state.size(pool), journal.state.open) == (5, {})
    assert journal.add(applied(decision=2, size=6)) == "stale", "a decision is executed once"


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([*range(10), "stale", "failed"]))
def test_a_reply_falls_short_until_the_next_observation(from_size: int, to_size: int, reply: int | str) -> None:
    assume(from_size != to_size)
    journal = observing(from_size)
    journal.add(decided(0, 1, from_size, to_size))
    assert not journal.state.fell_short
    if isinstance(reply, int):
        journal.add(applied(decision=2, size=reply))
        assert journal.state.fell_short == (reply != to_size)
    else:
        journal.add(msgspec.structs.replace(refused(2), reason=reply))
        assert journal.state.fell_short == (reply != "stale")
    journal.add(observed(0, ready=from_size))
    assert not journal.state.fell_short


def test_a_decision_without_a_change_needs_no_reply() -> None:
    journal = observing()
    assert journal.add(decided(0, 1, 2, 2)) == "applied"
    assert (journal.state.open, journal.state.sizes) == ({}, {})
    journal.add(with_other(decided(0, 2, 2, 3), 1, 1))
    journal.add(refused(3))
    assert journal.state.sizes == {KEY: 2}


def test_a_manual_size_between_the_state_and_the_decision_makes_it_stale() -> None:
    journal = observing()
    journal.add(PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
    assert journal.add(decided(0, 1, 2, 6)) == "stale"
    assert journal.state.sizes == {}
    assert journal.add(decided(0, 2, 2, 3)) == "applied"


def observing(ready: int = 2, at_us: int = 0, **settings: Any) -> Journal:
    """Return a journal with a claim and an observation of the pool."""
    journal = Journal()
    journal.add(observed(journal.claim(**settings), ready, at_us))
    return journal


def with_other(decision: ScalingDecided, from_size: int, to_size: int) -> ScalingDecided:
    """Return the decision with a second one, about the pool `other`."""
    second = msgspec.structs.replace(decision.pools[0], pool="other", from_size=from_size, to_size=to_size)
    return msgspec.structs.replace(decision, pools=(*decision.pools, second))


def test_a_pool_without_an_actuator_is_overdue_while_the_other_one_goes_on() -> None:
    journal = observing(action_timeout_s=60)
    journal.add(with_other(decided(0, 1, 2, 6), 1, 3))
    other = (GROUP, "other")
    journal.add(refused(2))
    assert (journal.state.sizes, set(journal.state.open)) == ({KEY: 2, other: 3}, {other})
    assert journal.add(decided(0, journal.state.effective, 2, 4)) == "applied"
    journal.add(observed(0, ready=2, at_us=60 * S))
    assert overdue(journal.state) == {KEY, other}
    journal.add(decided(0, journal.state.effective, 2, 5))
    assert (journal.state.sizes, set(journal.state.open)) == ({KEY: 5}, {KEY})


def test_records_of_a_replaced_planner_have_no_effect() -> None:
    journal = Journal()
    old = journal.claim("p1")
    new = journal.claim("p2")
    assert journal.add(observed(old, ready=9)) == "stale"
    assert journal.add(decided(old, 1, 2, 6)) == "stale"
    assert journal.add(PlannerStopped(planner_epoch=old)) == "stale"
    assert journal.add(observed(new, ready=2)) == "applied"
    assert journal.add(decided(new, journal.state.effective, 2, 3)) == "applied", "stale records do not count"


def test_an_overdue_decision_is_undone_by_the_next_one() -> None:
    journal = observing(at_us=S, action_timeout_s=60)
    journal.add(decided(0, 1, 2, 6))
    journal.add(observed(0, ready=2, at_us=61 * S))
    journal.add(decided(0, 3, 2, 4))
    assert journal.state.sizes == {KEY: 4}
    assert journal.state.open[KEY].decision == 4
    assert journal.add(applied(decision=2, size=6)) == "stale"


def test_advisory_decisions_have_no_effect_on_sizes() -> None:
    journal = observing(advisory=True)
    journal.add(msgspec.structs.replace(decided(0, 1, 2, 6), advisory=True))
    assert (journal.state.sizes, journal.state.open) == ({}, {})


def test_forecasts_and_simulations_are_those_of_the_newest_planner() -> None:
    journal = Journal()
    epoch = journal.claim()
    forecast = DemandForecast(planner_epoch=epoch, predictor="constant", observed=0, pools=())
    simulated = SizesSimulated(planner_epoch=epoch, forecast=1, target=0.99, sizes=())
    journal.add(forecast)
    journal.add(simulated)
    assert (journal.state.forecast, journal.state.simulated) == ((1, forecast), simulated)
    journal.claim("p2")
    assert (journal.state.forecast, journal.state.simulated) == (None, None)


def test_nothing_overdue_without_a_planner_or_a_decision() -> None:
    journal = Journal()
    assert not overdue(journal.state)
    epoch = journal.claim(action_timeout_s=60)
    assert not overdue(journal.state)
    journal.add(observed(epoch, ready=2))
    journal.add(decided(epoch, 1, 2, 6))
    assert not overdue(journal.state)
    journal.add(observed(epoch, ready=2, at_us=60 * S))
    assert overdue(journal.state)
    journal.add(PlannerStopped(planner_epoch=epoch))
    assert not overdue(journal.state)


def test_operators_set_and_release_sizes_and_pause() -> None:
    journal = Journal()
    journal.claim()
    journal.add(PoolSizeSet(group=GROUP, pool=POOL, size=3))
    journal.add(PlannerPaused(paused=True))
    assert (journal.state.manual, journal.state.paused) == ({KEY: 3}, True)
    journal.add(PoolSizeSet(group=GROUP, pool=POOL, size=None))
    journal.add(PoolSizeSet(group=GROUP, pool=POOL, size=None))
    journal.add(PlannerPaused(paused=False))
    assert (journal.state.manual, journal.state.paused) == ({}, False)


def test_a_stopped_planner_leaves_the_sizes_in_force() -> None:
    journal = observing()
    journal.add(decided(0, 1, 2, 6))
    journal.add(applied(2, 6))
    journal.add(PlannerStopped(planner_epoch=0))
    assert (journal.state.claim, journal.state.settings, journal.state.sizes) == (None, None, {KEY: 6})
    assert journal.add(observed(0, ready=6)) == "stale"


def test_an_undecodable_record_is_passed_over() -> None:
    journal = Journal()
    journal.claim()
    journal.state.skip(1)
    assert (journal.state.end, journal.state.effective, journal.state.stale) == (2, 0, 1)


EVENTS = st.one_of(
    st.builds(claimed, st.sampled_from(["p1", "p2"])),
    st.builds(observed, st.integers(-1, 6), st.integers(0, 4), st.integers(0, 9)),
    st.builds(decided, st.integers(-1, 6), st.integers(0, 12), st.integers(0, 4), st.integers(0, 4)),
    st.builds(applied, st.integers(0, 12), st.integers(0, 4)),
    st.builds(refused, st.integers(0, 12)),
    st.builds(PoolSizeSet, group=st.just(GROUP), pool=st.just(POOL), size=st.none() | st.integers(0, 4)),
    st.builds(PlannerPaused, paused=st.booleans()),
    st.builds(PlannerStopped, planner_epoch=st.integers(-1, 6)),
)


@given(st.lists(EVENTS, max_size=40))
def test_ineffective_records_can_be_left_out(events: list[ScalingEvent]) -> None:
    everything, effective = PlannerState(), PlannerState()
    for offset, event in enumerate(events):
        if everything.apply(offset, decode(SCALING, encode(SCALING, event))) == "applied":
            assert effective.apply(offset, event) == "applied"
    assert everything.end == len(events)
    everything.end, everything.stale = effective.end, effective.stale
    assert everything == effective


# Recorded decisions, derived again


def test_each_decision_has_its_result_and_reply() -> None:
    records: list[ScalingEvent] = [claimed(), observed(0, 2), PoolSizeSet(group=GROUP, pool=POOL, size=4)]
    state = PlannerState()
    for offset, event in enumerate(records):
        state.apply(offset, event)
    decision = decide(state)
    assert decision is not None
    records += [msgspec.structs.replace(decision, at_us=7), applied(3, 4), applied(3, 4), applied(0, 4)]
    records += [decided(0, 1, 2, 9), decided(9, 4, 2, 9), decided(0, 4, 4, 9)]
    right, stale, foreign, wrong = decisions_of(enumerate(records))
    assert (right.is_verified, right.has_own_rules, right.outcome, right.replies) == (
        True,
        True,
        "applied",
        [records[4]],
    )
    assert (stale.outcome, stale.derived) == ("stale", None)
    assert (foreign.claim, foreign.has_own_rules, foreign.derived) == (None, False, None)
    assert (wrong.outcome, wrong.is_verified) == ("applied", False)


def test_decisions_of_other_rules_are_not_derived() -> None:
    records: list[ScalingEvent] = [msgspec.structs.replace(claimed(), rules_version=99), decided(0, 0, 2, 3)]
    (only,) = decisions_of(enumerate(records))
    assert (only.outcome, only.derived, only.has_own_rules, only.observed, only.forecast) == (
        "applied", None, False, None, None,
    )  # fmt: skip


def test_a_decision_is_equal_different_stale_or_of_other_rules() -> None:
    rederivation = ScalingRederivation()
    records: list[ScalingEvent] = [claimed(), observed(0, 2)]
    assert [rederivation.apply(offset, event) for offset, event in enumerate(records)] == [None, None]
    found = []
    for offset, event in enumerate([decided(0, 1, 2, 2), decided(0, 0, 2, 9), decided(7, 2, 2, 2)], 2):
        right = decide(rederivation.state)
        assert right is not None
        decision = rederivation.apply(offset, right if offset == 2 else event)
        assert decision is not None
        found.append(decision)
    last = rederivation.apply(5, decided(0, 2, 2, 9))
    assert last is not None
    assert [one.verification for one in (*found, last)] == ["equal", "stale", "stale", "different"]
    rederivation.apply(6, msgspec.structs.replace(claimed(), rules_version=99))
    other = rederivation.apply(7, decided(6, 6, 2, 2))
    assert other is not None
    assert other.verification == "other_rules"


def test_a_reply_without_an_effect_is_not_the_reply_of_a_decision() -> None:
    rederivation = ScalingRederivation()
    rederivation.apply(0, claimed())
    hold = rederivation.apply(1, decided(0, 0, 2, 2))
    rederivation.apply(2, applied(1, 2))
    assert hold is not None
    assert (hold.outcome, hold.replies) == ("applied", [])


def test_a_reply_belongs_to_one_of_the_newest_decisions() -> None:
    rederivation = ScalingRederivation()
    rederivation.apply(0, claimed())
    stale = [rederivation.apply(offset, decided(9, 0, 2, 3)) for offset in range(1, WAITING_MAX + 1)]
    last = rederivation.apply(WAITING_MAX + 1, decided(0, 0, 2, 3))
    end = WAITING_MAX + 2
    replies: list[ScalingEvent] = [refused(1), refused(2), refused(end - 1), applied(end - 1, 3)]
    for offset, reply in enumerate(replies, end):
        rederivation.apply(offset, reply)
    found = [one.replies if one is not None else None for one in (*stale[:3], last)]
    assert found == [[], [refused(2)], [], [refused(end - 1)]]


# Limits hold at every instant, and a constant load leaves the size alone


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
    described: dict[str, Any] = {"group": GROUP, "pool": name, "role": role, "startup_s": 10.0, **fields}
    return PoolScaling(prefill=ONE_PER_S, decode=DECODES if role == "decode" else (), **described)


def last_value(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    last = history[-1]
    pools = tuple(
        PoolDemand(
            group=one.group,
            pool=one.pool,
            requests_per_s=one.requests / last.interval_s,
            isl=one.isl or 0,
            osl=one.osl or 0,
        )
        for one in last.pools
    )
    return DemandForecast(predictor="constant", observed=observed, pools=pools)


rates = st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.0, 7.0, 12.0])
intervals = st.lists(st.tuples(rates, rates, st.integers(0, 3), st.integers(1, 6)), max_size=14)


limits = st.tuples(
    st.sampled_from([4, 8, 9]), st.sampled_from([1, 2]), st.sampled_from([1, 3, 8]), st.sampled_from([2, 5, 64])
)


@given(intervals, limits, st.integers(1, 2), st.integers(1, 2))
def test_workers_that_drain_or_start_count_in_every_limit(
    intervals: list[tuple[float, float, int, int]], limits: tuple[int, int, int, int], first: int, second: int
) -> None:
    budget, gpus, max_change, max_size = limits
    assume(first * gpus + second <= budget)
    scalings = (
        scaled("prefill", "prefill", max_size=max_size, gpus_per_worker=gpus),
        scaled("decode", "decode", max_size=max_size),
    )
    settings = PlannerSettings(pools=scalings, gpu_budget=budget, max_change=max_change, **FAST)
    planner = VirtualPlanner(settings, last_value)
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
    planner = VirtualPlanner(PlannerSettings(pools=scalings, gpu_budget=8, **FAST), last_value)
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
    loop = Loop(PlannerSettings(pools=(scaled("a", max_size=8), scaled("b", max_size=8)), gpu_budget=8, **FAST))
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
    planner = VirtualPlanner(PlannerSettings(pools=(pool,), **options), last_value)
    found, size = [], start
    for number, count in enumerate(requests, 1):
        seen = PoolObserved(group=GROUP, pool="default", ready=size, requests=max(1, count), isl=1_000)
        planner.plan((seen,), number * 10 * S)
        size = planner.state.size(pool) or 0
        found.append(size)
    return found


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
    planner = VirtualPlanner(PlannerSettings(pools=(pool,), **FAST), last_value)
    planner.plan((PoolObserved(group=GROUP, pool="default", ready=5),), 10 * S)
    assert planner.state.size(pool) == 1


PREFILL = (PrefillPoint(isl=100, ttft_ms=10, tokens_per_s=1_000),)


def planner(simulate: Any = None, **fields: object) -> VirtualPlanner:
    """Return a planner of one prefill pool that expects the last value of the demand."""
    pool = PoolScaling(group=GROUP, pool=POOL, role="prefill", prefill=PREFILL)
    settings: dict[str, Any] = {"pools": (pool,), "gpu_budget": 0, "interval_s": 10.0, **fields}
    return VirtualPlanner(PlannerSettings(**settings), last_value, simulate=simulate)


def idle(ready: int) -> tuple[PoolObserved, ...]:
    workers = (worker(running=0, ttft_ms=5.0),) * ready
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

    assert sizes_decided(planner(simulate, method="simulate").plan(busy(600, 1), 10 * S)) == [3, 3]
    assert rates == [60.0], "one forecast per interval"
    with pytest.raises(ValueError, match="method simulate"):
        planner(method="simulate")


def test_a_change_that_is_limited_per_decision_continues() -> None:
    limited = planner(max_change=2)
    assert sizes_decided(limited.plan(busy(600, 1), 10 * S)) == [3, 5, 6, 6]
    assert sizes_decided(limited.plan(busy(80, 6), 20 * S)) == [4, 2, 1, 1]
    assert limited.state.open == {}


def test_a_load_leads_to_one_reduction() -> None:
    by_load = planner(method="load", min_observations=1)
    assert sizes_decided(by_load.plan(idle(4), 10 * S)) == [3, 3]
    assert sizes_decided(by_load.plan(idle(3), 20 * S)) == [2, 2]


def test_an_advisory_decision_is_not_executed() -> None:
    advisory = planner(advisory=True)
    assert sizes_decided(advisory.plan(busy(600, 1), 10 * S)) == [6]
    assert sizes_decided(advisory.plan(busy(600, 1), 20 * S)) == [6]
