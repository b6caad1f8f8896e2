"""Explanations of requests, for every course and outcome."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.core import dispatch
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueClass, QueueConfig
from forebay.events.fleet import OwnershipAnnounced, WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.progress import FirstTokenEmitted, OutputGrown, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RouterOverride, RoutingHints
from forebay.replay.explain.find import UnknownRequest
from tests.core.worlds import PROMPTS, joined, pool, query, request
from tests.replay.recorder import Recorder, ending_of, first_token_of, fleet, submission_of, words

SHORT, LONG = PROMPTS[0][:2], PROMPTS[1]
DAY_US = 86_400_000_000


class Broken:
    """Policy that raises an exception."""

    def decide(self, world: Any, request: Any) -> int:
        raise KeyError("nothing")


async def test_timeline_from_submission_to_finish() -> None:
    made = fleet(track_output_blocks=True)
    made.stored("b", SHORT)
    made("requests", request("r", [*SHORT, 7], at_us=1_000))
    made.progress("r", FirstTokenEmitted, after_us=400, cached_tokens=8, at_us=1_500)
    made.progress("r", OutputGrown, output_tokens=4)
    made.progress("r", OutputGrown, output_tokens=8)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=9, at_us=2_000)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", "routed", "first_token", "output_grown", "finished"]
    assert (explanation.kind, explanation.state, explanation.output_tokens, explanation.earlier_uses) == (
        "request",
        "finished",
        9,
        0,
    )
    assert (
        submission_of(explanation).prompt_tokens,
        submission_of(explanation).full_blocks,
        submission_of(explanation).offset,
    ) == (
        14,
        3,
        0,
    )
    assert (first_token_of(explanation).ttft_us, first_token_of(explanation).wall_ttft_us) == (400, 500)
    assert (first_token_of(explanation).cached_tokens, first_token_of(explanation).predicted_tokens) == (8, 8)
    assert (ending_of(explanation).reason, ending_of(explanation).duration_us) == ("stop", 430)
    (routing,) = explanation.routings
    assert (routing.attempt, routing.reason) == (1, "lowest_cost")
    assert routing.candidates[routing.winner].seen.worker_id == "b"
    assert routing.runner_up == 0
    assert [one.seen.device_overlap for one in routing.candidates] == [0, 2, 0]
    assert [one.seen.device_blocks for one in routing.candidates] == [0, 2, 0]
    assert routing.left_out == ()
    assert routing.why == (
        "lowest cost of 3 candidates: 4.5, 2 less than a "
        "(2 less to prefill; 2 blocks of the prompt are cached on b, 0 on a)"
    )
    assert [moment.after_us for moment in explanation.timeline] == [0, 0, 400, 420, 430]


async def test_a_queued_request_is_routed_when_capacity_is_available() -> None:
    made = fleet("a", "b", queue=QueueConfig(threshold=0.25))
    for name in ("x", "y"):
        made("requests", request(name, LONG))
    made("requests", request("r", SHORT))
    made("requests", request("s", SHORT))
    waits = await made.explain("s")
    assert (waits.state, waits.routings) == ("queued", ())
    assert waits.timeline[-1].text.startswith("held in queue class default, 1 requests ahead: ")
    made.progress("x", FirstTokenEmitted, after_us=500)
    explanation = await made.explain("r")
    assert explanation.state == "prefill"
    assert words(explanation) == ["submitted", "held", "routed"]
    assert explanation.timeline[1].text == (
        "held in queue class default, 0 requests ahead: a/0, the least loaded rank, has 34 tokens to prefill, limit 16;"
        " 10 prompt tokens are not cached on any rank"
    )
    (routing,) = explanation.routings
    assert (routing.waited_us, routing.after_us, routing.config["queue_threshold"]) == (510, 510, 0.25)


async def test_id_reused_while_queued_and_policy_error_when_dequeued() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    for name, blocks in (("x", LONG), ("r", SHORT), ("s", SHORT)):
        made("requests", request(name, blocks))
    made("requests", request("r", LONG))
    made.progress("x", FirstTokenEmitted)
    made("control", pool(mode=f"{__name__}.Broken"))
    routed, failed = await made.explain("r"), await made.explain("s")
    assert words(routed) == ["submitted", "held", "duplicate_refused", "routed"]
    assert (words(failed), failed.state) == (["submitted", "held", "routed"], "prefill")
    assert (routed.earlier_uses, failed.earlier_uses) == (0, 0)
    made("requests", request("t", LONG, routing=RoutingHints(override=RouterOverride(mode="kv"))))
    made("control", pool(queue=QueueConfig(threshold=0.25)))
    made("requests", request("u", SHORT))
    made("control", pool(mode=f"{__name__}.Broken"))
    explanation = await made.explain("u")
    assert (words(explanation), explanation.earlier_uses) == (["submitted", "held", "rejected"], 0)
    assert (ending_of(explanation).reason, ending_of(explanation).left_out) == ("policy_failed", ())


async def test_a_lost_worker_and_the_next_attempt() -> None:
    made = fleet()
    made("requests", request("r", LONG))
    first = made.world.requests.get("r")
    assert first is not None
    lost, epoch = first.worker_id, first.worker_epoch
    made("fleet", WorkerSuspect(owner_epoch=0, worker_id=lost, worker_epoch=epoch, reason="late"))
    late = made.of("r", RequestFinished, finish_reason="stop")
    made("fleet", WorkerLost(owner_epoch=0, worker_id=lost, worker_epoch=epoch, reason="closed"), after_us=100)
    made("progress", late)
    made.progress("r", FirstTokenEmitted)
    made.progress("r", RequestFailed, error="out of memory")
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation) == [
        "submitted",
        "routed",
        "worker_suspect",
        "worker_lost",
        "routed",
        "outdated",
        "first_token",
        "failed",
    ]
    assert [one.counted for one in explanation.timeline].index(False) == 5
    assert [one.attempt for one in explanation.routings] == [1, 2]
    assert lost not in [one.seen.worker_id for one in explanation.routings[1].candidates]
    assert (ending_of(explanation).state, ending_of(explanation).text, ending_of(explanation).attempt) == (
        "failed",
        "out of memory",
        2,
    )


async def test_time_to_first_token_ends_with_the_first_attempt_that_produced_a_token() -> None:
    made = fleet()
    made("requests", request("r", LONG, at_us=1_000))
    first = made.world.requests.get("r")
    assert first is not None
    lost, epoch = first.worker_id, first.worker_epoch
    made.progress("r", FirstTokenEmitted, after_us=400, at_us=1_500)
    made("fleet", WorkerLost(owner_epoch=0, worker_id=lost, worker_epoch=epoch, reason="closed"), after_us=5_000)
    made.progress("r", FirstTokenEmitted, after_us=2_000, at_us=9_000)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", "routed", "first_token", "worker_lost", "routed", "first_token"]
    token = first_token_of(explanation)
    assert (token.attempt, token.worker_id, token.ttft_us, token.wall_ttft_us) == (1, lost, 400, 500)


async def test_no_worker_left_until_attempts_are_exhausted() -> None:
    made = fleet("a")
    made("requests", request("r", SHORT))
    for life in range(3):
        made("fleet", WorkerLost(owner_epoch=0, worker_id="a", worker_epoch=made.epoch("a")))
        if life == 0:
            made.seal()
            assert (await made.explain("r")).state == "waiting"
        made("fleet", joined("a"))
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", *["routed", "worker_lost"] * 3, "aborted"]
    assert (ending_of(explanation).reason, ending_of(explanation).attempt) == ("attempts_exhausted", 3)


def no_workers() -> Recorder:
    made = fleet("a", "b")
    made("fleet", WorkerDraining(owner_epoch=0, worker_id="a", worker_epoch=made.epoch("a")))
    made("fleet", WorkerDraining(owner_epoch=0, worker_id="b", worker_epoch=made.epoch("b")))
    return made


def busy() -> Recorder:
    made = fleet("a", "b", busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    thresholds = BusyThresholds(active_prefill_tokens_threshold=10, active_prefill_tokens_threshold_frac=0.5)
    for name in ("x", "y"):
        made("requests", request(name, LONG))
    made("control", BusyThresholdsSet(model="m", thresholds=thresholds))
    return made


def shared_cache() -> Recorder:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", 0, salts_cache=False))
    return made


def full() -> Recorder:
    classes = (QueueClass(requests_per_worker_max=1),)
    made = fleet("a", queue=QueueConfig(threshold=0.1, classes=classes))
    for name in ("x", "y"):
        made("requests", request(name, LONG))
    return made


@pytest.mark.parametrize(
    ("make", "changes", "reason", "kept_out"),
    [
        (Recorder, {}, "no_workers", []),
        (no_workers, {}, "no_workers", [("draining",), ("draining",)]),
        (fleet, {"model": "other"}, "wrong_model", []),
        (
            busy,
            {},
            "busy",
            [("busy",), ("busy",)],
        ),
        (full, {}, "queue_full", []),
        (fleet, {"routing": RoutingHints(worker_id="z")}, "unknown_worker", [("not_pinned",)] * 3),
        (fleet, {"routing": RoutingHints(rank=1)}, "contradictory_routing", []),
        (
            fleet,
            {"routing": RoutingHints(required_taints=("t",), allowed_workers=("a",)), "lora_name": "l"},
            "no_eligible_worker",
            [("missing_taint", "missing_adapter"), *[("not_allowed", "missing_taint", "missing_adapter")] * 2],
        ),
        (shared_cache, {"cache_namespace": "tenant"}, "no_eligible_worker", [("shared_cache",)]),
        (lambda: fleet(mode=f"{__name__}.Broken"), {}, "policy_failed", []),
    ],
)
async def test_each_rejection_lists_excluded_ranks_with_reasons(
    make: Callable[[], Recorder], changes: dict[str, Any], reason: str, kept_out: list[tuple[str, ...]]
) -> None:
    made = make()
    made("requests", request("r", SHORT, **changes))
    explanation = await made.explain("r")
    assert (explanation.state, explanation.routings, words(explanation)) == ("rejected", (), ["submitted", "rejected"])
    assert ending_of(explanation).reason == reason
    assert [one.reasons for one in ending_of(explanation).left_out] == kept_out
    assert all(one.text for one in ending_of(explanation).left_out)


async def test_exceeded_thresholds_are_reported_with_values() -> None:
    made = busy()
    made("requests", request("r", SHORT))
    explanation = await made.explain("r")
    text = "it is busy: 34 tokens to prefill, limit 10, 34 tokens to prefill, limit 32"
    assert [one.text for one in ending_of(explanation).left_out] == [text, text]
    made("control", pool(busy=BusyThresholds(active_decode_blocks_threshold=0.1)))
    made("requests", request("s", SHORT))
    explanation = await made.explain("s")
    assert ending_of(explanation).left_out[0].text == "it is busy: 8 decode blocks, limit 6.4"


async def test_too_many_active_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ACTIVE_REQUESTS_MAX", 1)
    made = fleet()
    for name in ("x", "r"):
        made("requests", request(name, SHORT))
    explanation = await made.explain("r")
    assert ending_of(explanation).reason == "overloaded"


async def test_redeliveries_and_other_requests_with_the_same_id() -> None:
    made = fleet()
    made("requests", request("r", SHORT, nonce=1))
    made("requests", request("r", SHORT, nonce=1))
    made("requests", request("r", LONG, nonce=2))
    made.progress("r", RequestFinished, finish_reason="stop")
    made("requests", request("r", LONG, nonce=3))
    made("requests", request("r", SHORT, nonce=1))
    made("requests", RequestCancelled(request_id="r"))
    made("requests", request("s", SHORT))
    explanation = await made.explain("r")
    assert words(explanation) == [
        "submitted",
        "routed",
        "submitted_again",
        "duplicate_refused",
        "finished",
        "duplicate_refused",
    ]
    assert (explanation.state, explanation.earlier_uses) == ("finished", 0)
    assert [one.counted for one in explanation.timeline] == [True, True, False, False, True, False]


async def test_stale_events_have_no_effect() -> None:
    """Output before the first token, and a worker loss reported by an owner of another group, are ignored."""
    made = fleet("a", "b")
    made("requests", request("r", SHORT))
    made.progress("r", OutputGrown, output_tokens=3)
    home = made.world.requests.get("r")
    assert home is not None
    made("fleet", OwnershipAnnounced(owner_epoch=5))
    lost = WorkerLost(owner_epoch=4, worker_id=home.worker_id, worker_epoch=made.epoch(home.worker_id))
    made("fleet", lost)
    made.progress("r", FirstTokenEmitted)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", "routed", "outdated", "worker_lost", "first_token"]
    assert [one.counted for one in explanation.timeline] == [True, True, False, False, True]
    assert (explanation.state, explanation.output_tokens, len(explanation.routings)) == ("decode", None, 1)


async def test_a_search_that_misses_the_submission_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.replay.explain.find.PAGE_RECORDS", 1)
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    made("requests", request("x", LONG))
    made("requests", request("r", SHORT))
    made.snapshot()
    made.progress("x", FirstTokenEmitted)
    explanation = await made.explain("r", thorough=False)
    assert words(explanation) == ["submitted", "held", "routed"]


async def test_a_reused_id_is_explained_by_its_last_request() -> None:
    made = fleet()
    for number in range(3):
        made("requests", request("r", PROMPTS[number], nonce=number))
        made.progress("r", RequestFinished, finish_reason="stop")
        made.wait(DAY_US)
        made("requests", request(f"between{number}", SHORT))
    explanation = await made.explain("r")
    assert explanation.earlier_uses == 2
    assert (submission_of(explanation).offset, len(explanation.routings)) == (4, 1)
    live = await made.explain("r", thorough=False)
    assert live == msgspec.structs.replace(explanation, earlier_uses=None, others=None)


async def test_an_id_of_the_client_finds_its_last_routed_request() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    made("requests", request("r", LONG))
    made("requests", request("r~1", SHORT))
    made("requests", request("r~2", SHORT))
    made("requests", request("r2~1", SHORT))
    made.progress("r", RequestFinished, finish_reason="stop")
    made.seal()
    explanation = await made.explain("r")
    assert (explanation.request_id, explanation.others) == ("r~2", ("r~1", "r"))
    exact = await made.explain("r~1")
    assert (exact.request_id, exact.others) == ("r~1", ())
    live = await made.explain("r", thorough=False)
    assert live == msgspec.structs.replace(explanation, earlier_uses=None, others=None)


async def test_the_id_of_a_whole_request_finds_its_parts() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    for part in ("a~1f-0", "a~1f-1", "b~kafka-0", "a~kafka-0", "a~kafka-1", "a~2f"):
        made("requests", request(part, SHORT))
    made.seal()
    http, kafka, both = [await made.explain(name) for name in ("a~1f", "a~kafka", "a")]
    assert (http.request_id, http.others) == ("a~1f-1", ("a~1f-0",))
    assert (kafka.request_id, kafka.others) == ("a~kafka-1", ("a~kafka-0",))
    assert (both.request_id, both.others) == ("a~2f", ("a~kafka-1", "a~kafka-0", "a~1f-1", "a~1f-0"))


@pytest.mark.parametrize("held", [False, True])
async def test_expired_and_cancelled_requests(held: bool) -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.1 if held else None))
    made("requests", request("x", LONG))
    made("requests", request("r", SHORT, timeout_us=1_000))
    made("requests", request("s", SHORT))
    made.wait(2_000)
    made("requests", RequestCancelled(request_id="s", reason="closed"))
    given_up, left = await made.explain("r"), await made.explain("s")
    route = "held" if held else "routed"
    assert (words(given_up), words(left)) == (
        ["submitted", route, "aborted"],
        ["submitted", route, "cancel_requested", "aborted"],
    )
    assert (ending_of(given_up).reason, ending_of(left).reason) == (
        "queue_deadline" if held else "deadline",
        "cancelled",
    )
    assert ending_of(left).text == "closed"
    assert (ending_of(given_up).duration_us, given_up.timeline[-1].after_us) == (2_010, 2_010)


async def test_unjournaled_events_are_marked() -> None:
    made = fleet()
    made("requests", request("r", SHORT, at_us=5))
    routed = await made.explain("r")
    made("fleet", joined("d", 3))
    made.progress("r", FirstTokenEmitted, at_us=25)
    made("requests", request("late", SHORT), journalled=False)
    made("requests", query("unanswered", SHORT), journalled=False)
    explanation = await made.explain("r")
    assert (routed.state, explanation.state) == ("prefill", "decode")
    assert words(explanation) == ["submitted", "routed", "first_token"]
    assert (first_token_of(explanation).ttft_us, first_token_of(explanation).wall_ttft_us) == (None, 20)
    assert (explanation.timeline[-1].now_us, explanation.timeline[-1].after_us) == (None, None)
    late, unanswered = await made.explain("late"), await made.explain("unanswered")
    assert (late.state, late.kind, words(late)) == ("submitted", "request", ["submitted"])
    assert (unanswered.state, unanswered.kind, unanswered.routings) == ("submitted", "query", ())
    assert (submission_of(late).now_us, submission_of(late).offset) == (None, 1)


async def test_unknown_id_lists_similar_ids() -> None:
    made = fleet()
    for number in range(9):
        made("requests", request(f"chat-{number}", SHORT))
    with pytest.raises(UnknownRequest, match=r"unknown request 'chat-'; did you mean chat-8 or chat-7 or chat-6[?]$"):
        await made.explain("chat-")
    with pytest.raises(UnknownRequest, match=r"unknown request 'other'; check the ID$"):
        await made.explain("other", thorough=False)
    with pytest.raises(UnknownRequest):
        await Recorder().explain("r")


async def test_route_query_is_explained() -> None:
    made = fleet("a", "b", queue=QueueConfig(threshold=0.1))
    made("requests", query("q1", SHORT))
    for name in ("x", "y"):
        made("requests", request(name, LONG))
    made("requests", query("q2", SHORT))
    made("requests", query("q3", SHORT, routing=RoutingHints(worker_id="z")))
    free, waits, refused = [await made.explain(name) for name in ("q1", "q2", "q3")]
    assert [one.kind for one in (free, waits, refused)] == ["query"] * 3
    assert [one.state for one in (free, waits, refused)] == ["answered", "answered", "rejected"]
    assert [one.routings[0].would_wait for one in (free, waits)] == [False, True]
    assert free.routings[0].attempt == 0
    assert [one.reasons for one in ending_of(refused).left_out] == [("not_pinned",)] * 2
    assert words(refused) == ["submitted", "answered"]
