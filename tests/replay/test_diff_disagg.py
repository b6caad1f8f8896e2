"""Comparison with disaggregation: where each prompt would have been prefilled."""

from typing import Any

import pytest

from forebay.core.routing.counterfactual import Alternative
from forebay.events.control import DisaggConfig, DisaggPolicy, DisaggregationSet
from forebay.replay.diff.diff import diff
from forebay.replay.diff.report import DiffReport
from forebay.replay.observed import observe_history
from tests.core.worlds import PROMPTS
from tests.replay.disagg_history import COUNT, history
from tests.replay.recorder import Recorder, altered


def rule(policy: DisaggPolicy, **limits: Any) -> Alternative:
    return altered(disagg=DisaggConfig(policy=policy, **limits))


async def compared(made: Recorder, alter: Alternative) -> DiffReport:
    log = await made.log()
    try:
        report = await diff(log, 0, alter)
    finally:
        log.close()
    assert report.divergence is None
    assert report.progress.to_come == 0
    assert (report.history.sent, report.history.unsent) == (report.other.sent, report.other.unsent) == (COUNT, 0)
    return report


@pytest.mark.parametrize("policy", ["always", "never", "classic"])
async def test_an_equal_configuration_has_no_differences(policy: DisaggPolicy) -> None:
    report = await compared(history(policy), lambda pool: pool)
    assert report.identical
    assert report.moved.moved == report.moved.otherwise == 0
    assert report.state == report.other_state


@pytest.mark.parametrize(("ours", "theirs"), [("always", "never"), ("never", "always")])
async def test_alternative_moves_prefills(ours: DisaggPolicy, theirs: DisaggPolicy) -> None:
    report = await compared(history(ours), rule(theirs))
    fork = report.fork
    assert fork is not None
    assert (fork.request_id, fork.decisions_before) == ("r0", 0)
    computed = {
        policy: {rank.worker_id for rank in report.ranks if side(rank, policy, ours)} for policy in (ours, theirs)
    }
    assert computed == {"always": {"p", "q"}, "never": {"d", "e"}}
    assert report.other.aborted == report.history.aborted == {}


def side(rank: Any, policy: str, ours: str) -> bool:
    return bool((rank.history if policy == ours else rank.alternative).requests)


async def test_operator_changes_apply_unless_the_alternative_overrides_them() -> None:
    made = history("never", by_hand="always")
    same = await compared(made, lambda pool: pool)
    assert same.identical
    harder = await compared(made, rule("never", enforce=True))
    assert harder.identical, "the alternative changes enforce, not the policy"
    local = await compared(history("always", by_hand="always"), rule("never"))
    assert not local.identical


async def test_observed_history_names_the_decode_workers() -> None:
    made = history("never", by_hand="always")
    log = await made.log()
    found = await observe_history(log, 0)
    log.close()
    assert found.divergence is None
    assert [type(event) for _, event in found.external_events].count(DisaggregationSet) == 1
    assert {one.worker[0] for one in found.requests if one.worker is not None} <= {"d", "e"}
    assert all(one.first_us and one.last_us for one in found.requests)


async def test_progress_of_a_missing_stage_is_counted_separately() -> None:
    report = await compared(history("always"), rule("never"))
    assert (report.progress.void, report.progress.other_stage) == (0, COUNT + 2)  # one transfer failed
    assert any("does not have in the alternative" in note for note in report.notes)
    assert not any("a worker that was lost" in note for note in report.notes)


@pytest.mark.parametrize(("ours", "theirs"), [("always", "never"), ("never", "always")])
@pytest.mark.parametrize("cached_by", ["p", "pqde"])
async def test_overlap_changes_are_counted_at_the_prefill_worker(
    ours: DisaggPolicy, theirs: DisaggPolicy, cached_by: str
) -> None:
    report = await compared(history(ours, cached_by=cached_by), rule(theirs))
    found, found_there = report.history.overlap.device, report.other.overlap.device
    assert max(found, found_there) == COUNT // 2 * len(PROMPTS[0])
    assert (found == found_there) == (cached_by == "pqde")
    assert report.overlap.won.device == max(0, found_there - found)
    assert report.overlap.lost.device == max(0, found - found_there)
    assert report.overlap.later == 0
