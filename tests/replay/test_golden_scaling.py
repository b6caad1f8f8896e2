"""Recorded decisions of planners are derived again by every later version."""

from typing import get_args

from forebay.core.scaling.rederive import ScalingRederivation
from forebay.core.scaling.state import RULES_VERSION
from forebay.events.scaling import Method, PlannerClaimed, Reason
from tests.logs.scaling import recorded_records, scaling_records

REWRITE = "raise RULES_VERSION if decisions change, and run `make golden`"


def test_recorded_scaling_decisions_are_derived_again() -> None:
    rederivation = ScalingRederivation()
    found = [rederivation.apply(offset, event) for offset, event in enumerate(recorded_records())]
    decisions = [one for one in found if one is not None]
    assert len(decisions) > 50
    assert [one.offset for one in decisions if one.verification != "equal"] == [], REWRITE


def test_the_records_have_every_method_and_reason() -> None:
    records = list(recorded_records())
    claims = [one for one in records if isinstance(one, PlannerClaimed)]
    assert {one.rules_version for one in claims} == {RULES_VERSION}, REWRITE
    assert {one.settings.method for one in claims} == set(get_args(Method))
    rederivation = ScalingRederivation()
    decisions = [rederivation.apply(offset, event) for offset, event in enumerate(records)]
    reasons = {pool.reason for one in decisions if one is not None for pool in one.decided.pools}
    assert set(get_args(Reason)) - reasons == set()


def test_the_same_history_leads_to_the_same_records() -> None:
    assert list(recorded_records()) == scaling_records(), REWRITE
