"""Recorded decisions are derived again from the topic alone."""

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.rederive import decisions_of
from forebay.core.scaling.state import PlannerState
from forebay.events.scaling import PoolSizeSet, ScalingEvent
from tests.core.scaling.records import GROUP, POOL, applied, claimed, decided, observed


def test_each_decision_has_its_result_and_reply() -> None:
    records: list[ScalingEvent] = [claimed(), observed(0, 2), PoolSizeSet(group=GROUP, pool=POOL, size=4)]
    state = PlannerState()
    for offset, event in enumerate(records):
        state.apply(offset, event)
    decision = decide(state)
    assert decision is not None
    records += [msgspec.structs.replace(decision, at_us=7), applied(3, 4), applied(3, 4), applied(0, 4)]
    records += [decided(0, 1, 2, 9), decided(9, 4, 2, 9), decided(0, 4, 4, 9)]
    right, stale, foreign, wrong = decisions_of(enumerate(records), PlannerState())
    assert (right.is_verified, right.has_own_rules, right.outcome, right.reply) == (True, True, "applied", records[4])
    assert (stale.outcome, stale.derived) == ("stale", None)
    assert (foreign.claim, foreign.has_own_rules, foreign.derived) == (None, False, None)
    assert (wrong.outcome, wrong.is_verified) == ("applied", False)


def test_decisions_of_other_rules_are_not_derived() -> None:
    records: list[ScalingEvent] = [msgspec.structs.replace(claimed(), rules_version=99), decided(0, 0, 2, 3)]
    (only,) = decisions_of(enumerate(records), PlannerState())
    assert (only.outcome, only.derived, only.has_own_rules, only.observed, only.forecast) == (
        "applied", None, False, None, None,
    )  # fmt: skip
