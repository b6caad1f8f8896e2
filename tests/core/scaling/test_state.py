"""The state of the planner: which records have an effect, and which sizes are in force."""

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.core.scaling.state import PlannerState, overdue
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    DemandForecast,
    PlannerPaused,
    PlannerStopped,
    PoolSizeSet,
    ScalingEvent,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from tests.core.scaling.records import GROUP, POOL, Journal, S, applied, claimed, decided, observed, refused

KEY = (GROUP, POOL)


def test_a_decision_is_in_force_until_the_actuator_replies_and_after_it() -> None:
    journal = Journal()
    epoch = journal.claim()
    journal.add(observed(epoch, ready=2))
    (pool,) = journal.state.settings.pools  # type: ignore[union-attr]
    assert journal.state.size(pool) == 2
    assert journal.add(decided(epoch, 1, 2, 6)) == "applied"
    assert (journal.state.size(pool), set(journal.state.open)) == (6, {KEY})
    assert journal.add(applied(decision=2, size=5)) == "applied"
    assert (journal.state.size(pool), journal.state.open) == (5, {})
    assert journal.add(applied(decision=2, size=6)) == "stale", "a decision is executed once"


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([*range(10), "stale", "failed"]))
def test_a_reply_falls_short_until_the_next_observation(from_size: int, to_size: int, reply: int | str) -> None:
    assume(from_size != to_size)
    journal = Journal()
    epoch = journal.claim()
    journal.add(observed(epoch, ready=from_size))
    journal.add(decided(epoch, 1, from_size, to_size))
    assert not journal.state.fell_short
    if isinstance(reply, int):
        journal.add(applied(decision=2, size=reply))
        assert journal.state.fell_short == (reply != to_size)
    else:
        journal.add(msgspec.structs.replace(refused(2), reason=reply))
        assert journal.state.fell_short == (reply != "stale")
    journal.add(observed(epoch, ready=from_size))
    assert not journal.state.fell_short


def test_a_decision_without_a_change_needs_no_reply() -> None:
    journal = Journal()
    epoch = journal.claim()
    journal.add(observed(epoch, ready=2))
    assert journal.add(decided(epoch, 1, 2, 2)) == "applied"
    assert (journal.state.open, journal.state.sizes) == ({}, {})
    changed = decided(epoch, 2, 2, 3)
    unchanged = msgspec.structs.replace(changed.pools[0], pool="other", from_size=1, to_size=1)
    journal.add(msgspec.structs.replace(changed, pools=(*changed.pools, unchanged)))
    journal.add(refused(3))
    assert journal.state.sizes == {KEY: 2}


def test_a_manual_size_between_the_state_and_the_decision_makes_it_stale() -> None:
    journal = Journal()
    epoch = journal.claim()
    journal.add(observed(epoch, ready=2))
    journal.add(PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
    assert journal.add(decided(epoch, 1, 2, 6)) == "stale"
    assert journal.state.sizes == {}
    assert journal.add(decided(epoch, 2, 2, 3)) == "applied"


def two_pools(journal: Journal) -> None:
    """Add a decision about the pool, from 2 to 6 workers, and another one, from 1 to 3, at offset 2."""
    epoch = journal.claim(action_timeout_s=60)
    journal.add(observed(epoch, ready=2))
    first = decided(epoch, 1, 2, 6)
    second = msgspec.structs.replace(first.pools[0], pool="other", from_size=1, to_size=3)
    journal.add(msgspec.structs.replace(first, pools=(*first.pools, second)))


def test_a_pool_without_an_actuator_is_overdue_while_the_other_one_goes_on() -> None:
    journal = Journal()
    two_pools(journal)
    other = (GROUP, "other")
    journal.add(refused(2))
    assert (journal.state.sizes, set(journal.state.open)) == ({KEY: 2, other: 3}, {other})
    epoch = journal.state.epoch
    assert journal.add(decided(epoch, journal.state.effective, 2, 4)) == "applied"
    journal.add(observed(epoch, ready=2, at_us=60 * S))
    assert overdue(journal.state) == {KEY, other}
    journal.add(decided(epoch, journal.state.effective, 2, 5))
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
    journal = Journal()
    epoch = journal.claim(action_timeout_s=60)
    journal.add(observed(epoch, ready=2, at_us=S))
    journal.add(decided(epoch, 1, 2, 6))
    journal.add(observed(epoch, ready=2, at_us=61 * S))
    journal.add(decided(epoch, 3, 2, 4))
    assert journal.state.sizes == {KEY: 4}
    assert journal.state.open[KEY].decision == 4
    assert journal.add(applied(decision=2, size=6)) == "stale"


def test_advisory_decisions_have_no_effect_on_sizes() -> None:
    journal = Journal()
    epoch = journal.claim(advisory=True)
    journal.add(observed(epoch, ready=2))
    journal.add(msgspec.structs.replace(decided(epoch, 1, 2, 6), advisory=True))
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
    journal = Journal()
    epoch = journal.claim()
    journal.add(observed(epoch, ready=2))
    journal.add(decided(epoch, 1, 2, 6))
    journal.add(applied(2, 6))
    journal.add(PlannerStopped(planner_epoch=epoch))
    assert (journal.state.claim, journal.state.settings, journal.state.sizes) == (None, None, {KEY: 6})
    assert journal.add(observed(epoch, ready=6)) == "stale"


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
