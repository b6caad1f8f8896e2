"""Comparison with an alternative: no difference for equal configurations, exact until the fork, no request lost."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import restore
from forebay.core.routing.policies import BUILT_IN
from forebay.core.selection.counterfactual import Alternative
from forebay.core.step import claim
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggPolicy,
    DisaggregationSet,
    PolicySet,
    QueueConfig,
)
from forebay.events.decisions import CostTerms, OwnerClaimed, RequestHeld, RequestRouted
from forebay.events.progress import FirstTokenEmitted, RequestProgress
from forebay.events.topics import DECISIONS
from forebay.events.versions import EVENTS_VERSION
from forebay.journal.reader import JournalReader
from forebay.journal.start import Start
from forebay.replay.diff.comparison import Comparison, RequestDecision
from forebay.replay.diff.diff import diff, span_of
from forebay.replay.diff.report import DiffReport, MovedRequest
from forebay.replay.diff.tally import (
    INTERVAL_FIRST_US,
    INTERVALS_MAX,
    MOST,
    PairTally,
    Series,
    WorldTally,
    max_over_mean,
)
from forebay.replay.observed_history import observe_history
from forebay.transport.base import Log
from tests.core.worlds import CONFIGS, PROMPTS, Driver, actions, perform_all, pool
from tests.depth import examples
from tests.replay.disagg_history import COUNT, history
from tests.replay.recorded import MemoryLog, log_of
from tests.replay.recorder import Recorder, altered

ROUTES: dict[str, Any] = {"mode": "round-robin"}


def compared(drive: Driver, alter: Alternative | None = None, **router: Any) -> DiffReport:
    """Return the comparison of a driver's history with another router configuration."""
    report = asyncio.run(diff(log_of(drive), 0, alter or altered(**router)))
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
    return perform_all(Driver().fleet("a", "b", "c", **router), history, 10)


owners = st.lists(actions(), min_size=40, max_size=120)


@examples(0.4)
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
    report = compared(drive, **other)
    require_conservation(report)
    require_all_progress_counted(report, drive)
    if report.fork is None:
        assert report.moved.moved == 0
        assert report.history.routed == report.other.routed
        return
    assert report.fork.offset > 0
    assert report.fork.history != report.fork.alternative
    if report.fork.history.decision != "nothing":
        before = drive.decided[: report.fork.offset - 1]  # after the owner's claim
        assert report.fork.decisions_before == sum(isinstance(one, RequestDecision) for one in before)


# Single histories


def begin(drive: Driver, one: RequestRouted, after_us: int = 10) -> None:
    drive.now_us += after_us - 10
    drive.emit(FirstTokenEmitted, one)


def end(drive: Driver, one: RequestRouted, after_us: int = 10) -> None:
    drive.now_us += after_us - 10
    drive.finish(one, finish_reason="length", output_tokens=2)


def run(drive: Driver, one: RequestRouted, after_us: int = 10) -> None:
    begin(drive, one, after_us)
    end(drive, one, after_us)


def test_a_cache_blind_policy_moves_requests_and_loses_their_overlap() -> None:
    drive, blocks = Driver().fleet("a", "b"), len(PROMPTS[0])
    drive.stored("a")
    for number in range(4):
        one = drive.ask(f"r{number}")
        assert one.worker_id == "a"
        run(drive, one)
    report = compared(drive, **ROUTES)
    fork = report.fork
    assert fork is not None
    assert (fork.request_id, fork.decisions_before, report.before_fork) == ("r1", 1, 0.25)
    assert (fork.history.worker_id, fork.alternative.worker_id) == ("a", "b")
    assert fork.history.terms is not None
    assert fork.alternative.there is not None
    assert fork.history.terms.device_overlap == fork.alternative.there.device_overlap == blocks
    assert report.moved.moved == report.moved.by_choice == 2
    assert (report.overlap.lost.device, report.overlap.won.device) == (2 * blocks, 0)
    assert [(one.request_id, one.gain) for one in report.most] == [("r1", -blocks), ("r3", -blocks)]
    assert report.progress.moved == report.progress.in_place == 4
    assert (report.history.landed, report.other.landed) == (1.0, 0.5)
    assert [rank.alternative.requests for rank in report.ranks] == [2, 2]
    assert report.other.reuse < report.history.reuse


def test_the_fork_names_the_journal_record_of_historys_decision() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("a")
    for number in range(3):
        drive.ask(f"r{number}")
    fork = compared(drive, overlap_score_credit=0.0).fork
    assert fork is not None
    decision = drive.decided[fork.offset - 1]  # the claim is the first record
    assert isinstance(decision, RequestRouted)
    assert decision.request_id == fork.request_id


def test_a_fork_can_be_the_second_decision_of_an_event() -> None:
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.25))
    end(drive, drive.ask("before", worker_id="a"))
    for name, hints in (("x", {"worker_id": "a"}), ("y", {"worker_id": "b"}), ("r1", {"worker_id": "a"}), ("r2", {})):
        drive.ask(name, PROMPTS[1], **hints)
    assert [one.worker_id for one in drive("control", pool())] == ["a", "b"]
    report = compared(drive, **ROUTES)
    assert report.fork is not None
    assert (report.fork.request_id, report.fork.alternative.worker_id) == ("r2", "a")
    assert report.fork.decisions_before == report.history.decisions - 1 == 6


def test_progress_is_delayed_like_its_request() -> None:
    drive = Driver().fleet("a")
    first, second = drive.ask("r1"), drive.ask("r2", PROMPTS[1])
    run(drive, second, 100)
    begin(drive, first, 1_000)  # releases r2 in the alternative
    end(drive, first, 20)
    drive.now_us += 140
    drive.ask("r3", PROMPTS[2])  # r2 started 100 µs after its dispatch and ends after 200 µs
    report = compared(drive, queue=QueueConfig(threshold=0.25))
    assert report.other.held == report.moved.held == 1
    assert report.other.wait_ms["max"] == 1.2
    assert (report.progress.late, report.progress.to_come) == (1, 1)
    assert (report.overlap.later, report.overlap.later_won) == (1, 0)
    require_conservation(report)


def test_own_blocks_of_a_later_request_are_counted_separately() -> None:
    drive = Driver().fleet("a")
    first, second = drive.ask("r1"), drive.ask("r2", PROMPTS[1])
    drive.stored("a", PROMPTS[1])  # computed in history while the request is queued in the alternative
    begin(drive, first, 1_000)
    end(drive, first, 20)
    run(drive, second, 100)
    report = compared(drive, queue=QueueConfig(threshold=0.25))
    assert (report.overlap.later, report.overlap.later_won) == (1, len(PROMPTS[1]))
    assert report.overlap.won.device == len(PROMPTS[1])
    assert any(note.startswith("Sent later than in history: 1 requests") for note in report.notes)


def test_request_rejected_only_in_history_has_unknown_end() -> None:
    drive = Driver().fleet("a", busy=BusyThresholds(active_prefill_tokens_threshold=10))
    for name in ("r1", "r2"):
        drive.ask(name)
    report = compared(drive, busy=BusyThresholds())
    assert (report.history.rejected, report.other.rejected) == ({"busy": 1}, {})
    assert report.progress.unknown_end == 1
    assert report.fork is not None
    assert (report.fork.history.decision, report.fork.alternative.decision) == ("rejected", "routed")
    assert any("were sent to a worker only by the alternative" in note for note in report.notes)


@pytest.mark.parametrize(
    ("router", "rejected"),
    [
        ({"temperature": 0.0}, 1),
        ({"busy": BusyThresholds()}, 1),
        ({"busy": BusyThresholds(active_prefill_tokens_threshold=10**6)}, 0),
    ],
    ids=["another setting", "none", "others"],
)
def test_operator_thresholds_apply_unless_the_alternative_overrides_them(router: dict[str, Any], rejected: int) -> None:
    drive = Driver().fleet("a")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10)))
    for name in ("r1", "r2"):
        drive.ask(name)
    assert sum(compared(drive, **router).other.rejected.values()) == rejected


@pytest.mark.parametrize(
    ("alternative", "undone"), [({"temperature": 0.0}, []), ({"mode": "kv"}, ["mode"]), (ROUTES, [])], ids=str
)
def test_an_operators_policy_applies_unless_the_alternative_names_one(
    alternative: dict[str, Any], undone: list[str]
) -> None:
    drive = Driver().fleet("a", "b")
    for name, mode in (("gone", "random"), ("default", "round-robin")):
        drive("control", PolicySet(model="m", pool=name, mode=mode))
    sent = [drive.ask(f"r{at}", [] if at else PROMPTS[0]) for at in range(4)]
    assert [(one.worker_id, one.mode) for one in sent] == [("a", "round-robin"), ("b", "round-robin")] * 2
    report = compared(drive, **alternative)
    assert (report.undone, report.stages_kept, report.identical) == (undone, False, not undone)
    observed = asyncio.run(observe_history(log_of(drive), 0))
    assert [type(event) for _, event in observed.external_events].count(PolicySet) == 2, "input of a simulator"


CUSTOM = {"mine.Policy": BUILT_IN["round-robin"]}


@pytest.mark.parametrize(("allowed", "mode"), [((), "kv"), (("mine.Policy",), "mine.Policy")])
def test_a_takeover_ends_an_operators_policy_if_it_did_in_history(allowed: tuple[str, ...], mode: str) -> None:
    drive = Driver(custom=CUSTOM).fleet("a", "b")
    drive("control", PolicySet(model="m", pool="default", mode="mine.Policy"))
    drive.ask("r")
    taken_over = 1 + len(drive.decided)
    claim(drive.world, taken_over, allowed, EVENTS_VERSION)
    assert {drive.ask(f"s{at}", []).mode for at in range(4)} == {mode}
    log = log_of(drive, policies=("mine.Policy",))
    claimed = OwnerClaimed(owner_id="p", core_version=CORE_VERSION, events_version=EVENTS_VERSION, policies=allowed)
    log.topics[DECISIONS.name].insert(taken_over, encode(DECISIONS, claimed))
    report = compared_with_policies(log)
    assert (report.undone, report.identical) == ([], True)


def test_a_policy_that_history_refused_is_refused() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", PolicySet(model="m", pool="default", mode="mine.Policy"))
    assert {drive.ask(f"r{at}", [] if at else PROMPTS[0]).mode for at in range(4)} == {"kv"}
    assert compared_with_policies(log_of(drive)).identical


def compared_with_policies(log: Log) -> DiffReport:
    """Compare a log with itself in a process that may run the policies `CUSTOM`."""

    async def compare() -> DiffReport:
        return await diff(log, 0, altered(), span=await span_of(log, 0, custom=CUSTOM))

    report = asyncio.run(compare())
    assert report.divergence is None
    return report


def test_rejected_request_resubmitted_while_history_holds_it() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.25))
    drive.ask("x", PROMPTS[1])
    assert isinstance(drive.ask("r", nonce=1), RequestHeld)
    drive.ask("r", nonce=2)
    report = compared(drive, queue=QueueConfig(), busy=BusyThresholds(active_prefill_tokens_threshold=1))
    assert (report.requests, report.other.sent, report.other.unsent) == (2, 1, 1)
    assert (report.history.rejected, report.other.rejected) == ({"duplicate_id": 1}, {"busy": 2})
    require_conservation(report)


def test_requests_charged_by_the_recorded_rule_are_counted() -> None:
    drive = Driver().fleet("a", "b")
    for number in range(6):
        drive.ask(f"r{number}", PROMPTS[number % 2])
    report = compared(drive, track_prefill_tokens=False, mode="random")
    assert report.booked == ["track_prefill_tokens"]
    assert any("The effect of track_prefill_tokens shows there only in part" in note for note in report.notes)


def test_a_worker_is_lost_in_history_and_alternative() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("a")
    for number in range(2):
        drive.ask(f"r{number}")
    for one in drive.lose("a"):
        run(drive, one)
    report = compared(drive, **ROUTES)
    assert (report.history.routed, report.other.routed) == (4, 3)
    # Progress comes from b, which has every request in both.
    assert (report.progress.moved, report.progress.in_place) == (0, 4)
    require_conservation(report)


def test_route_queries_with_another_result_are_counted() -> None:
    drive = Driver().fleet("a", "b")
    for worker, blocks in (("b", PROMPTS[0]), ("a", PROMPTS[1])):
        drive.stored(worker, blocks)
    for name, blocks in (("q1", PROMPTS[0]), ("q2", PROMPTS[1])):
        drive.query(name, blocks)
    report = compared(drive, **ROUTES)
    assert (report.queries, report.queries_otherwise, report.identical) == (2, 1, True)


def test_the_alternative_inherits_queued_requests_at_the_start() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.25))
    first = drive.ask("r1")
    assert isinstance(drive.ask("r2", PROMPTS[1]), RequestHeld)
    drive.world.take_consumed()
    start = Start(restore(drive.world.snapshot()), len(drive.decided) + 1)
    begin(drive, first, 1_000)
    log = log_of(drive)
    report = asyncio.run(from_start(log, start, altered(queue=QueueConfig())))
    assert report.fork is not None
    assert report.fork.history.decision == "nothing"
    assert (report.fork.alternative.request_id, report.fork.offset) == ("r2", start.offset)
    assert (report.history.sent, report.other.sent, report.requests, report.moved.compared) == (1, 1, 1, 1)
    same = asyncio.run(from_start(log, start, lambda pool: pool))
    assert same.identical
    assert same.state == same.other_state


async def from_start(log: MemoryLog, start: Start, alter: Alternative) -> DiffReport:
    world = restore(start.world.snapshot())
    reader = JournalReader(log, 0, Start(world, start.offset), await log.end("decisions", 0))
    comparison = Comparison(reader, alter)
    async for step in reader:
        assert step.divergence is None
        comparison.follow(step.offset, step.record)
    return comparison.finish()


def test_a_divergence_of_history_ends_the_comparison() -> None:
    drive = Driver().fleet("a", "b")
    for number in range(3):
        drive.ask(f"r{number}")
    drive.decided[1] = msgspec.structs.replace(drive.decided[1], rank=7)
    report = asyncio.run(diff(log_of(drive), 0, altered(mode="random")))
    assert report.divergence is not None
    assert report.divergence.offset == 2
    assert "journal offset 2" in report.notes[0]


# Disaggregation: where each prompt would have been prefilled

ALWAYS_AND_NEVER = pytest.mark.parametrize(("ours", "theirs"), [("always", "never"), ("never", "always")])


async def compared_rules(made: Recorder, policy: DisaggPolicy | None = None, **limits: Any) -> DiffReport:
    """Return the comparison with another rule for prefill places, or with no change."""
    log = await made.log()
    try:
        report = await diff(log, 0, altered(disagg=DisaggConfig(policy=policy, **limits)) if policy else altered())
    finally:
        log.close()
    assert report.divergence is None
    assert report.progress.to_come == 0
    assert (report.history.sent, report.history.unsent) == (report.other.sent, report.other.unsent) == (COUNT, 0)
    return report


@pytest.mark.parametrize("policy", ["always", "never", "classic"])
async def test_an_equal_rule_has_no_differences(policy: DisaggPolicy) -> None:
    report = await compared_rules(history(policy))
    assert report.identical
    assert report.moved.moved == report.moved.otherwise == 0
    assert report.state == report.other_state


@ALWAYS_AND_NEVER
async def test_alternative_moves_prefills(ours: DisaggPolicy, theirs: DisaggPolicy) -> None:
    report = await compared_rules(history(ours), theirs)
    assert report.fork is not None
    assert (report.fork.request_id, report.fork.decisions_before) == ("r0", 0)
    computed = {
        ours: {rank.worker_id for rank in report.ranks if rank.history.requests},
        theirs: {rank.worker_id for rank in report.ranks if rank.alternative.requests},
    }
    assert computed == {"always": {"p", "q"}, "never": {"d", "e"}}
    assert report.other.aborted == report.history.aborted == {}


async def test_operator_changes_apply_unless_the_alternative_overrides_them() -> None:
    made = history("never", by_hand="always")
    assert (await compared_rules(made)).identical
    enforced = await compared_rules(made, "never", enforce=True)
    assert enforced.identical, "the alternative changes enforce, not the policy"
    assert not (await compared_rules(history("always", by_hand="always"), "never")).identical
    log = await made.log()
    found = await observe_history(log, 0)
    log.close()
    assert found.divergence is None
    assert [type(event) for _, event in found.external_events].count(DisaggregationSet) == 1
    assert {one.worker[0] for one in found.requests if one.worker is not None} <= {"d", "e"}
    assert all(one.first_us and one.last_us for one in found.requests)


async def test_progress_of_a_missing_stage_is_counted_separately() -> None:
    report = await compared_rules(history("always"), "never")
    assert (report.progress.void, report.progress.other_stage) == (0, COUNT + 2)  # one transfer failed
    assert any("does not have in the alternative" in note for note in report.notes)
    assert not any("a worker that was lost" in note for note in report.notes)


@ALWAYS_AND_NEVER
@pytest.mark.parametrize("cached_by", ["p", "pqde"])
async def test_overlap_changes_are_counted_at_the_prefill_worker(
    ours: DisaggPolicy, theirs: DisaggPolicy, cached_by: str
) -> None:
    report = await compared_rules(history(ours, cached_by=cached_by), theirs)
    found, found_there = report.history.overlap.device, report.other.overlap.device
    assert max(found, found_there) == COUNT // 2 * len(PROMPTS[0])
    assert (found == found_there) == (cached_by == "pqde")
    assert report.overlap.won.device == max(0, found_there - found)
    assert report.overlap.lost.device == max(0, found - found_there)
    assert report.overlap.later == 0


# Totals, which are bounded and complete


def terms(device: int, host: int = 0, disk: int = 0, store: int = 0) -> CostTerms:
    overlaps = {"device_overlap": device, "host_overlap": host, "disk_overlap": disk, "store_overlap": store}
    return CostTerms(cost=0.0, prefill_blocks=0.0, overlap_credit=0.0, decode_blocks=0.0, active_requests=0, **overlaps)


def moved(number: int, gain: int) -> MovedRequest:
    history: dict[str, Any] = {"worker_id": "a", "rank": 0, "overlap": 1_000}
    other: dict[str, Any] = {"other_worker_id": "b", "other_rank": 0, "other_overlap": 1_000 + gain}
    return MovedRequest(
        request_id=f"r{number}", at_us=number, prompt_tokens=1, blocks=1, by_choice=False, **history, **other
    )


@pytest.mark.parametrize("count", [1, INTERVALS_MAX, INTERVALS_MAX + 1, 5 * INTERVALS_MAX])
def test_time_bins_widen_without_losing_events(count: int) -> None:
    series = Series(7)
    for number in range(count):
        for side, (worker, cached) in enumerate((("a", 4), ("b", 5))):
            series.route(side, 7 + number * INTERVAL_FIRST_US, (worker, 0), 10, cached)
    intervals = series.intervals([("a", 0), ("b", 0)])
    assert len(intervals) <= INTERVALS_MAX
    shown = {(one.reuse, one.other_reuse, one.max_over_mean, one.other_max_over_mean) for one in intervals}
    assert shown == {(0.4, 0.5, 2.0, 2.0)}
    assert [one.after_s for one in intervals] == [number * series.width_us / 1e6 for number in range(len(intervals))]


def test_a_gap_in_time_leaves_empty_bins() -> None:
    series = Series(0)
    for at_us in (0, 1 << 40):
        series.route(0, at_us, ("a", 0), 10, 5)
    intervals = series.intervals([("a", 0)])
    assert len(intervals) <= INTERVALS_MAX
    assert (intervals[0].reuse, intervals[-1].reuse, intervals[1].reuse) == (0.5, 0.5, None)
    assert intervals[1].max_over_mean is intervals[0].other_reuse is None


def test_gained_and_lost_overlap_is_summed_by_tier() -> None:
    sums = PairTally()
    sums.add(terms(5, 1, 0), terms(2, 4, 0), later=True)
    sums.add(terms(1, 0, 7), terms(9, 0, 0), later=True)
    overlap = sums.overlap()
    assert (overlap.won.device, overlap.won.host, overlap.won.disk) == (8, 3, 0)
    assert (overlap.lost.device, overlap.lost.host, overlap.lost.disk) == (3, 0, 7)
    assert (overlap.later, overlap.later_won) == (2, 1)
    for store in (6, 1):
        sums.add(terms(1, store=4), terms(1, store=store), later=False)
    assert (sums.overlap().won.store, sums.overlap().lost.store) == (2, 3)


def test_the_most_moved_requests_are_kept_and_ties_go_to_the_earlier() -> None:
    sums = PairTally()
    for number in range(3 * MOST):
        sums.move(moved(number, (-1) ** number * (number // 2)))
    most = sums.most()
    largest = sorted((number // 2 for number in range(2 * MOST, 3 * MOST)), reverse=True)
    assert [abs(one.gain) for one in most] == largest
    assert [one.request_id for one in most][:2] == [f"r{3 * MOST - 2}", f"r{3 * MOST - 1}"]


def test_waits_are_reported_in_milliseconds() -> None:
    tally = WorldTally()
    tally.waits_us.extend([0, 1_000, 1_001, 2_000, 2_001, 64_000])
    side = tally.side([], 0, None)
    assert (side.wait_ms["max"], side.wait_ms["p50"]) == (64.0, 1.001)


def test_a_comparison_without_requests() -> None:
    assert max_over_mean([0, 0]) is max_over_mean([]) is None
    assert max_over_mean([3, 1]) == 1.5
