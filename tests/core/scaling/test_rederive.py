"""Recorded decisions are derived again from the topic alone."""

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.rederive import WAITING_MAX, ScalingRederivation
from forebay.core.scaling.state import PlannerState
from forebay.events.scaling import PoolSizeSet, ScalingEvent
from tests.core.scaling.records import GROUP, POOL, applied, claimed, decided, observed, refused
from tests.harness.scaling_decisions import decisions_of


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
