"""Comparison with an alternative: no difference for equal configurations, exact until the fork, no request lost."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import restore
from forebay.core.routing.counterfactual import Alternative
from forebay.core.routing.policies import BUILT_IN
from forebay.core.step import claim
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.control import BusyThresholds, BusyThresholdsSet, PolicySet, QueueConfig
from forebay.events.decisions import OwnerClaimed, RequestHeld, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFinished, RequestProgress
from forebay.events.requests import NO_HINTS, RoutingHints
from forebay.events.topics import DECISIONS
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.diff.comparison import Comparison, RequestDecision
from forebay.replay.diff.diff import diff
from forebay.replay.diff.report import DiffReport
from forebay.replay.diff.span import span_of
from forebay.replay.observed import observe_history
from forebay.replay.walk import Start, Walk
from forebay.transport.base import Log
from tests.core.worlds import CONFIGS, PROMPTS, Driver, actions, ids_of, perform_all, pool, query, request
from tests.depth import examples
from tests.replay.recorded import MemoryLog, log_of
from tests.replay.recorder import altered


def compared(drive: Driver, alter: Alternative) -> DiffReport:
    report = asyncio.run(diff(log_of(drive), 0, alter))
    assert report.divergence is None
    return report


def require_conservation(report: DiffReport) -> None:
    for side in (report.history, report.other):
        assert side.sent + side.unsent + side.still_held == report.requests


def require_all_progress_counted(report: DiffReport, drive: Driver) -> None:
    """Require that every progress event that history accepted is accounted for in the alternative."""
    progress_events = sum(isinstance(event, RequestProgress) for _, event, _ in drive.applied)
    became = msgspec.to_builtins(report.progress)
    del became["unknown_end"]  # of requests
    assert sum(became.values()) == progress_events - drive.world.counts["stale_progress"]


def driver_of(history: list[Any], **router: Any) -> Driver:
    """Return a driver that applied a history with three workers."""
    drive = Driver().fleet("a", "b", "c", **router)
    return perform_all(drive, history, 10)


owners = st.lists(actions(), min_size=40, max_size=120)


@examples(0.5)
@given(owners, st.sampled_from(CONFIGS))
def test_an_alternative_equal_to_history_has_no_differences(history: list[Any], router: dict[str, Any]) -> None:
    report = compared(driver_of(history, **router), lambda pool: pool)
    assert report.identical
    assert report.fork is None
    assert report.state == report.other_state
    assert report.history == report.other
    assert all(rank.history == rank.alternative for rank in report.ranks)
    assert report.moved.moved == report.moved.otherwise == report.queries_otherwise == 0
    progress = report.progress
    assert progress.moved == progress.late == progress.gone == progress.void == progress.to_come == 0
    require_conservation(report)


@examples(0.5)
@given(owners, st.sampled_from(CONFIGS), st.sampled_from(CONFIGS))
def test_every_request_is_accounted_for_under_any_alternative(
    history: list[Any], router: dict[str, Any], other: dict[str, Any]
) -> None:
    drive = driver_of(history, **router)
    report = compared(drive, altered(**other))
    require_conservation(report)
    require_all_progress_counted(report, drive)
    if report.fork is not None:
        assert report.fork.offset > 0
        assert report.fork.history != report.fork.alternative
        if report.fork.history.decision != "nothing":
            before = drive.decided[: report.fork.offset - 1]  # after the owner's claim
            assert report.fork.decisions_before == sum(isinstance(one, RequestDecision) for one in before)
    else:
        assert report.moved.moved == 0
        assert report.history.routed == report.other.routed


# Single histories


def routed(decided: list[Any]) -> RequestRouted:
    (one,) = decided
    assert isinstance(one, RequestRouted)
    return one


def begin(drive: Driver, one: RequestRouted, after_us: int = 10) -> None:
    drive("progress", FirstTokenEmitted(**ids_of(one)), after_us)


def end(drive: Driver, one: RequestRouted, after_us: int = 10) -> None:
    drive("progress", RequestFinished(**ids_of(one), finish_reason="length", output_tokens=2), after_us)


def test_a_cache_blind_policy_moves_requests_and_loses_their_overlap() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("a", PROMPTS[0])
    for number in range(4):
        one = routed(drive("requests", request(f"r{number}", PROMPTS[0])))
        assert one.worker_id == "a"
        begin(drive, one)
        end(drive, one)
    report = compared(drive, altered(mode="round-robin"))
    fork = report.fork
    assert fork is not None
    assert (fork.request_id, fork.decisions_before, report.before_fork) == ("r1", 1, 0.25)
    assert (fork.history.worker_id, fork.alternative.worker_id) == ("a", "b")
    assert fork.history.terms is not None
    assert fork.history.terms.device_overlap == len(PROMPTS[0])
    assert fork.alternative.there is not None
    assert fork.alternative.there.device_overlap == len(PROMPTS[0])
    assert report.moved.moved == report.moved.by_choice == 2
    assert report.overlap.lost.device == 2 * len(PROMPTS[0])
    assert report.overlap.won.device == 0
    assert [one.request_id for one in report.most] == ["r1", "r3"]
    assert {one.gain for one in report.most} == {-len(PROMPTS[0])}
    assert report.progress.moved == report.progress.in_place == 4
    assert (report.history.landed, report.other.landed) == (1.0, 0.5)
    assert [rank.alternative.requests for rank in report.ranks] == [2, 2]
    assert report.other.reuse < report.history.reuse


def test_the_fork_names_the_journal_record_of_historys_decision() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("a", PROMPTS[0])
    for number in range(3):
        drive("requests", request(f"r{number}", PROMPTS[0]))
    report = compared(drive, altered(overlap_score_credit=0.0))
    assert report.fork is not None
    decision = drive.decided[report.fork.offset - 1]  # the claim is the first record
    assert isinstance(decision, RequestRouted)
    assert decision.request_id == report.fork.request_id


def test_a_fork_can_be_the_second_decision_of_an_event() -> None:
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.25))
    here, there = (RoutingHints(worker_id=name) for name in ("a", "b"))
    end(drive, routed(drive("requests", request("before", PROMPTS[0], routing=here))))
    for name, hints in (("x", here), ("y", there), ("r1", here), ("r2", NO_HINTS)):
        drive("requests", request(name, PROMPTS[1], routing=hints))
    one, two = drive("control", pool())
    assert (one.worker_id, two.worker_id) == ("a", "b")
    report = compared(drive, altered(mode="round-robin"))
    assert report.fork is not None
    assert (report.fork.request_id, report.fork.alternative.worker_id) == ("r2", "a")
    assert report.fork.decisions_before == report.history.decisions - 1 == 6


def test_progress_is_delayed_like_its_request() -> None:
    drive = Driver().fleet("a")
    first = routed(drive("requests", request("r1", PROMPTS[0])))
    second = routed(drive("requests", request("r2", PROMPTS[1])))
    begin(drive, second, 100)
    end(drive, second, 100)
    begin(drive, first, 1_000)  # releases r2 in the alternative
    end(drive, first, 20)
    drive("requests", request("r3", PROMPTS[2]), 150)  # r2 started 100 µs after its dispatch and ends after 200 µs
    report = compared(drive, altered(queue=QueueConfig(threshold=0.25)))
    assert report.other.held == report.moved.held == 1
    assert report.other.wait_ms["max"] == 1.2
    assert report.progress.late == 1
    assert report.progress.to_come == 1
    assert (report.overlap.later, report.overlap.later_won) == (1, 0)
    require_conservation(report)


def test_own_blocks_of_a_later_request_are_counted_separately() -> None:
    drive = Driver().fleet("a")
    first = routed(drive("requests", request("r1", PROMPTS[0])))
    second = routed(drive("requests", request("r2", PROMPTS[1])))
    blocks = len(PROMPTS[1])
    drive.stored("a", PROMPTS[1])  # computed in history while the request is queued in the alternative
    begin(drive, first, 1_000)
    end(drive, first, 20)
    begin(drive, second, 100)
    end(drive, second, 100)
    report = compared(drive, altered(queue=QueueConfig(threshold=0.25)))
    assert (report.overlap.later, report.overlap.later_won) == (1, blocks)
    assert report.overlap.won.device == blocks
    assert any(note.startswith("Sent later than in history: 1 requests") for note in report.notes)


def test_request_rejected_only_in_history_has_unknown_end() -> None:
    busy = BusyThresholds(active_prefill_tokens_threshold=10)
    drive = Driver().fleet("a", busy=busy)
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[1]))
    report = compared(drive, altered(busy=BusyThresholds()))
    assert report.history.rejected == {"busy": 1}
    assert report.other.rejected == {}
    assert report.progress.unknown_end == 1
    assert report.fork is not None
    assert (report.fork.history.decision, report.fork.alternative.decision) == ("rejected", "routed")
    assert any("were sent to a worker only by the alternative" in note for note in report.notes)


@pytest.mark.parametrize(("altered_busy", "rejected"), [(None, 1), (BusyThresholds(), 1), (10**6, 0)])
def test_operator_thresholds_apply_unless_the_alternative_overrides_them(altered_busy: Any, rejected: int) -> None:
    drive = Driver().fleet("a")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10)))
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[1]))
    if isinstance(altered_busy, int):
        altered_busy = BusyThresholds(active_prefill_tokens_threshold=altered_busy)
    alter = altered(temperature=0.0) if altered_busy is None else altered(busy=altered_busy)
    report = compared(drive, alter)
    assert sum(report.other.rejected.values()) == rejected


@pytest.mark.parametrize(
    ("alternative", "undone"),
    [({"temperature": 0.0}, []), ({"mode": "kv"}, ["mode"]), ({"mode": "round-robin"}, [])],
    ids=str,
)
def test_an_operators_policy_applies_unless_the_alternative_names_one(
    alternative: dict[str, Any], undone: list[str]
) -> None:
    drive = Driver().fleet("a", "b")
    drive("control", PolicySet(model="m", pool="gone", mode="random"))
    drive("control", PolicySet(model="m", pool="default", mode="round-robin"))
    sent = [routed(drive("requests", request(f"r{at}", [] if at else PROMPTS[0]))) for at in range(4)]
    assert [(one.worker_id, one.mode) for one in sent] == [("a", "round-robin"), ("b", "round-robin")] * 2
    report = compared(drive, altered(**alternative))
    assert (report.undone, report.stages_kept) == (undone, False)
    assert report.identical == (not undone)


CUSTOM = {"mine.Policy": BUILT_IN["round-robin"]}


@pytest.mark.parametrize(("allowed", "mode"), [((), "kv"), (("mine.Policy",), "mine.Policy")])
def test_a_takeover_ends_an_operators_policy_if_it_did_in_history(allowed: tuple[str, ...], mode: str) -> None:
    drive = Driver(custom=CUSTOM).fleet("a", "b")
    drive("control", PolicySet(model="m", pool="default", mode="mine.Policy"))
    routed(drive("requests", request("r", PROMPTS[0])))
    taken_over = 1 + len(drive.decided)
    claim(drive.world, taken_over, allowed, EVENTS_VERSION)
    assert {routed(drive("requests", request(f"s{at}", []))).mode for at in range(4)} == {mode}
    log = log_of(drive, policies=("mine.Policy",))
    claimed = OwnerClaimed(owner_id="p", core_version=CORE_VERSION, events_version=EVENTS_VERSION, policies=allowed)
    log.topics[DECISIONS.name].insert(taken_over, encode(DECISIONS, claimed))
    report = compared_with_policies(log, altered())
    assert (report.undone, report.identical) == ([], True)


def test_a_policy_that_history_refused_is_refused() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", PolicySet(model="m", pool="default", mode="mine.Policy"))
    sent = [routed(drive("requests", request(f"r{at}", [] if at else PROMPTS[0]))) for at in range(4)]
    assert {one.mode for one in sent} == {"kv"}
    assert compared_with_policies(log_of(drive), altered()).identical


def compared_with_policies(log: Log, alter: Alternative) -> DiffReport:
    """Compare a log in a process that may run the policies `CUSTOM`."""

    async def compare() -> DiffReport:
        return await diff(log, 0, alter, span=await span_of(log, 0, custom=CUSTOM))

    report = asyncio.run(compare())
    assert report.divergence is None
    return report


def test_an_operators_policy_is_input_of_a_simulator() -> None:
    drive = Driver().fleet("a")
    drive("control", PolicySet(model="m", pool="default", mode="round-robin"))
    drive("requests", request("r"))
    history = asyncio.run(observe_history(log_of(drive), 0))
    assert [type(event) for _, event in history.external_events].count(PolicySet) == 1


def test_rejected_request_resubmitted_while_history_holds_it() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.25))
    routed(drive("requests", request("x", PROMPTS[1])))
    (held,) = drive("requests", request("r", PROMPTS[0], nonce=1))
    assert isinstance(held, RequestHeld)
    drive("requests", request("r", PROMPTS[0], nonce=2))
    report = compared(drive, altered(queue=QueueConfig(), busy=BusyThresholds(active_prefill_tokens_threshold=1)))
    assert (report.requests, report.other.sent, report.other.unsent) == (2, 1, 1)
    assert (report.history.rejected, report.other.rejected) == ({"duplicate_id": 1}, {"busy": 2})
    require_conservation(report)


def test_requests_charged_by_the_recorded_rule_are_counted() -> None:
    drive = Driver().fleet("a", "b")
    for number in range(6):
        drive("requests", request(f"r{number}", PROMPTS[number % 2]))
    report = compared(drive, altered(track_prefill_tokens=False, mode="random"))
    assert report.booked == ["track_prefill_tokens"]
    assert any("The effect of track_prefill_tokens shows there only in part" in note for note in report.notes)


def test_a_worker_is_lost_in_history_and_alternative() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("a", PROMPTS[0])
    for number in range(2):
        routed(drive("requests", request(f"r{number}", PROMPTS[0])))
    again = drive("fleet", WorkerLost(owner_epoch=0, worker_id="a", worker_epoch=drive.epoch("a")))
    for one in again:
        begin(drive, one)
        end(drive, one)
    report = compared(drive, altered(mode="round-robin"))
    assert (report.history.routed, report.other.routed) == (4, 3)
    assert report.progress.moved == 0  # progress comes from b, which has every request in both
    assert report.progress.in_place == 4
    require_conservation(report)


def test_route_queries_with_another_result_are_counted() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("b", PROMPTS[0])
    drive.stored("a", PROMPTS[1])
    drive("requests", query("q1", PROMPTS[0]))
    drive("requests", query("q2", PROMPTS[1]))
    report = compared(drive, altered(mode="round-robin"))
    assert (report.queries, report.queries_otherwise) == (2, 1)
    assert report.identical


def test_the_alternative_inherits_queued_requests_at_the_start() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.25))
    drive("requests", request("r1", PROMPTS[0]))
    held = drive("requests", request("r2", PROMPTS[1]))
    assert isinstance(held[0], RequestHeld)
    drive.world.take_consumed()
    start = Start(restore(drive.world.snapshot()), len(drive.decided) + 1)
    first = drive.decided[0]
    assert isinstance(first, RequestRouted)
    begin(drive, first, 1_000)
    log = log_of(drive)
    report = asyncio.run(from_start(log, start, altered(queue=QueueConfig())))
    assert report.fork is not None
    assert report.fork.history.decision == "nothing"
    assert (report.fork.alternative.request_id, report.fork.offset) == ("r2", start.offset)
    assert (report.history.sent, report.other.sent, report.requests) == (1, 1, 1)
    assert report.moved.compared == 1
    same = asyncio.run(from_start(log, Start(restore(start.world.snapshot()), start.offset), lambda pool: pool))
    assert same.identical
    assert same.state == same.other_state


async def from_start(log: MemoryLog, start: Start, alter: Alternative) -> DiffReport:
    world = restore(start.world.snapshot())
    walk = Walk(log, 0, Start(world, start.offset), await log.end("decisions", 0))
    comparison = Comparison(walk, alter)
    async for step in walk:
        assert step.divergence is None
        comparison.follow(step.offset, step.record)
    return comparison.finish()


def test_a_divergence_of_history_ends_the_comparison() -> None:
    drive = Driver().fleet("a", "b")
    for number in range(3):
        drive("requests", request(f"r{number}", PROMPTS[0]))
    one = drive.decided[1]
    drive.decided[1] = msgspec.structs.replace(one, rank=7)
    report = asyncio.run(diff(log_of(drive), 0, altered(mode="random")))
    assert report.divergence is not None
    assert report.divergence.offset == 2
    assert "journal offset 2" in report.notes[0]
