"""Explanations of requests: every course and outcome, of any history, and from every starting point."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay.core import dispatch
from forebay.events.codec import decode, encode
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueClass, QueueConfig, RouterConfig
from forebay.events.decisions import RequestAborted, RequestRouted, RouteAnswered
from forebay.events.fleet import (
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerLost,
    WorkerSuspect,
)
from forebay.events.progress import AttemptMoved, FirstTokenEmitted, OutputGrown, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestResumed, RouterOverride, RoutingHints
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.journal.groups import groups_of
from forebay.journal.records import decode_journal, journal_records
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import CandidateCost, Explanation, Routing
from forebay.replay.explain.find import RequestRecord, UnknownRequest
from forebay.replay.states import States
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, histories, joined, perform, pool, query, request
from tests.depth import examples
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.replay.mutations import Trimmed
from tests.replay.recorder import Recorder, ending_of, first_token_of, fleet, outage, submission_of, words

SHORT, LONG = PROMPTS[0][:2], PROMPTS[1]
DAY_US = 86_400_000_000
SNAPSHOT_EVERY = 30  # actions
RECORDINGS = recordings.representative()
EVERY = 5  # requests of a golden recording


class Broken:
    """Policy that raises an exception."""

    def decide(self, world: Any, request: Any) -> int:
        raise KeyError("nothing")


BROKEN = f"{__name__}.Broken"


async def test_the_tenant_and_its_key_are_explained() -> None:
    made = fleet("a")
    trace = f"00-{1:032}-{2:016}-01"
    made.ask("r", SHORT, tenant="acme", key_id="abababababab", traceparent=trace)
    submission = submission_of(await made.explain("r"))
    assert (submission.tenant, submission.key_id, submission.traceparent) == ("acme", "abababababab", trace)


async def test_timeline_from_submission_to_finish() -> None:
    made = fleet(track_output_blocks=True)
    made.stored("b", SHORT)
    made.ask("r", [*SHORT, 7], at_us=1_000)
    made.progress("r", FirstTokenEmitted, after_us=400, cached_tokens=8, at_us=1_500)
    for output_tokens in (4, 8):
        made.progress("r", OutputGrown, output_tokens=output_tokens)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=9, at_us=2_000)
    made.seal()
    found = await made.explain("r")
    assert words(found) == ["submitted", "routed", "first_token", "output_grown", "finished"]
    assert (found.kind, found.state, found.output_tokens, found.earlier_uses) == ("request", "finished", 9, 0)
    submission, first, (routing,) = submission_of(found), first_token_of(found), found.routings
    assert (submission.prompt_tokens, submission.full_blocks, submission.offset) == (14, 3, 0)
    assert (first.ttft_us, first.wall_ttft_us, first.cached_tokens, first.predicted_tokens) == (400, 500, 8, 8)
    assert (ending_of(found).reason, ending_of(found).duration_us) == ("stop", 430)
    assert (routing.attempt, routing.reason, routing.runner_up, routing.left_out) == (1, "lowest_cost", 0, ())
    assert routing.candidates[routing.winner].seen.worker_id == "b"
    seen = [one.seen for one in routing.candidates]
    assert [one.device_overlap for one in seen] == [one.device_blocks for one in seen] == [0, 2, 0]
    assert routing.why == (
        "lowest cost of 3 candidates: 4.5, 2 less than a "
        "(2 less to prefill; 2 blocks of the prompt are cached on b, 0 on a)"
    )
    assert [moment.after_us for moment in found.timeline] == [0, 0, 400, 420, 430]


async def test_a_queued_request_is_routed_when_capacity_is_available() -> None:
    made = fleet("a", "b", queue=QueueConfig(threshold=0.25))
    for name, blocks in (("x", LONG), ("y", LONG), ("r", SHORT), ("s", SHORT)):
        made.ask(name, blocks)
    waits = await made.explain("s")
    assert (waits.state, waits.routings) == ("queued", ())
    assert waits.timeline[-1].text.startswith("held in queue class default, 1 requests ahead: ")
    made.progress("x", FirstTokenEmitted, after_us=500)
    found = await made.explain("r")
    assert (found.state, words(found)) == ("prefill", ["submitted", "held", "routed"])
    assert found.timeline[1].text == (
        "held in queue class default, 0 requests ahead: a/0, the least loaded rank, has 34 tokens to prefill, limit 16;"
        " 10 prompt tokens are not cached on any rank"
    )
    (routing,) = found.routings
    assert (routing.waited_us, routing.after_us, routing.config["queue.threshold"]) == (510, 510, 0.25)


async def test_a_queued_request_of_a_tenant_names_what_its_tenant_has_queued() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.1))
    for name, tenant in (("x", ""), ("r", "t"), ("s", ""), ("t", "t")):
        made.ask(name, LONG, tenant=tenant)
    assert "of its tenant" not in (await made.explain("s")).timeline[-1].text
    text = (await made.explain("t")).timeline[-1].text
    assert text.startswith("held in queue class default, 2 requests ahead: ")
    assert text.endswith("; 1 of the requests ahead are of its tenant")


async def test_id_reused_while_queued_and_policy_error_when_dequeued() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    for name, blocks in (("x", LONG), ("r", SHORT), ("s", SHORT), ("r", LONG)):
        made.ask(name, blocks)
    made.progress("x", FirstTokenEmitted)
    made("control", pool(mode=BROKEN))
    routed, failed = await made.explain("r"), await made.explain("s")
    assert words(routed) == ["submitted", "held", "duplicate_refused", "routed"]
    assert (words(failed), failed.state) == (["submitted", "held", "routed"], "prefill")
    assert (routed.earlier_uses, failed.earlier_uses) == (0, 0)
    made.ask("t", LONG, override=RouterOverride(mode="kv"))
    made("control", pool(queue=QueueConfig(threshold=0.25)))
    made.ask("u", SHORT)
    made("control", pool(mode=BROKEN))
    found = await made.explain("u")
    assert (words(found), found.earlier_uses) == (["submitted", "held", "rejected"], 0)
    assert (ending_of(found).reason, ending_of(found).left_out) == ("policy_failed", ())


async def test_a_lost_worker_and_the_next_attempt() -> None:
    made = fleet()
    lost = made.ask("r", LONG).worker_id
    made.fact(WorkerSuspect, lost, reason="late")
    late = made.of("r", RequestFinished, finish_reason="stop")
    made.lose(lost, reason="closed")
    made("progress", late)
    made.progress("r", FirstTokenEmitted)
    made.progress("r", RequestFailed, error="out of memory")
    made.seal()
    found = await made.explain("r")
    assert words(found) == [
        *("submitted", "routed", "worker_suspect", "worker_lost", "routed", "outdated", "first_token", "failed")
    ]
    assert [one.counted for one in found.timeline].index(False) == 5
    assert [one.attempt for one in found.routings] == [1, 2]
    assert lost not in [one.seen.worker_id for one in found.routings[1].candidates]
    ending = ending_of(found)
    assert (ending.state, ending.text, ending.attempt) == ("failed", "out of memory", 2)


async def test_a_gateway_that_used_another_server_is_shown_with_the_next_attempt() -> None:
    made = fleet("a", "b")
    for slot, name in enumerate("xy"):
        made("fleet", joined(name, 2 + slot, endpoint=f"{name}:1"))
    made.stored("x", SHORT)
    made.ask("r", SHORT, delivery="external")
    made.progress("r", AttemptMoved, endpoint="y:1")
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=9)
    made.seal()
    found = await made.explain("r")
    assert words(found) == ["submitted", "routed", "attempt_moved", "routed", "finished"]
    assert found.timeline[2].text == "x, attempt 1, not used: the gateway sent the request to y:1"
    assert [len(one.candidates) for one in found.routings] == [2, 1]


async def test_time_to_first_token_ends_with_the_first_attempt_that_produced_a_token() -> None:
    made = fleet()
    lost = made.ask("r", LONG, at_us=1_000).worker_id
    made.progress("r", FirstTokenEmitted, after_us=400, at_us=1_500)
    made.lose(lost)
    made.progress("r", FirstTokenEmitted, after_us=2_000, at_us=9_000)
    made.seal()
    found = await made.explain("r")
    assert words(found) == ["submitted", "routed", "first_token", "worker_lost", "routed", "first_token"]
    token = first_token_of(found)
    assert (token.attempt, token.worker_id, token.ttft_us, token.wall_ttft_us) == (1, lost, 400, 500)


async def test_no_worker_left_until_attempts_are_exhausted() -> None:
    made = fleet("a")
    made.ask("r", SHORT)
    for life in range(3):
        made.lose("a")
        if life == 0:
            made.seal()
            assert (await made.explain("r")).state == "waiting"
        made("fleet", joined("a"))
    found = await made.explain("r")
    assert words(found) == ["submitted", *["routed", "worker_lost"] * 3, "aborted"]
    assert (ending_of(found).reason, ending_of(found).attempt) == ("attempts_exhausted", 3)


def no_workers() -> Recorder:
    made = fleet("a", "b")
    for name in "ab":
        made.fact(WorkerDraining, name)
    return made


def busy() -> Recorder:
    made = fleet("a", "b", busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    for name in ("x", "y"):
        made.ask(name, LONG)
    thresholds = BusyThresholds(active_prefill_tokens_threshold=10, active_prefill_tokens_threshold_frac=0.5)
    made("control", BusyThresholdsSet(model="m", thresholds=thresholds))
    return made


def shared_cache() -> Recorder:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", 0, salts_cache=False))
    return made


def full() -> Recorder:
    made = fleet("a", queue=QueueConfig(threshold=0.1, classes=(QueueClass(requests_per_worker_max=1),)))
    for name in ("x", "y"):
        made.ask(name, LONG)
    return made


@pytest.mark.parametrize(
    ("make", "changes", "reason", "kept_out"),
    [
        (Recorder, {}, "no_workers", []),
        (no_workers, {}, "no_workers", [("draining",), ("draining",)]),
        (fleet, {"model": "other"}, "wrong_model", []),
        (busy, {}, "busy", [("busy",), ("busy",)]),
        (full, {}, "queue_full", []),
        (fleet, {"worker_id": "z"}, "unknown_worker", [("not_pinned",)] * 3),
        (fleet, {"rank": 1}, "contradictory_routing", []),
        (
            fleet,
            {"required_taints": ("t",), "allowed_workers": ("a",), "lora_name": "l"},
            "no_eligible_worker",
            [("missing_taint", "missing_adapter"), *[("not_allowed", "missing_taint", "missing_adapter")] * 2],
        ),
        (shared_cache, {"cache_namespace": "tenant"}, "no_eligible_worker", [("shared_cache",)]),
        (lambda: fleet(mode=BROKEN), {}, "policy_failed", []),
    ],
)
async def test_each_rejection_lists_excluded_ranks_with_reasons(
    make: Callable[[], Recorder], changes: dict[str, Any], reason: str, kept_out: list[tuple[str, ...]]
) -> None:
    made = make()
    made.ask("r", SHORT, **changes)
    found = await made.explain("r")
    assert (found.state, found.routings, words(found)) == ("rejected", (), ["submitted", "rejected"])
    assert ending_of(found).reason == reason
    assert [one.reasons for one in ending_of(found).left_out] == kept_out
    assert all(one.text for one in ending_of(found).left_out)


async def test_exceeded_thresholds_are_reported_with_values() -> None:
    made = busy()
    made.ask("r", SHORT)
    text = "it is busy: 34 tokens to prefill, limit 10, 34 tokens to prefill, limit 32"
    assert [one.text for one in ending_of(await made.explain("r")).left_out] == [text, text]
    made("control", pool(busy=BusyThresholds(active_decode_blocks_threshold=0.1)))
    made.ask("s", SHORT)
    assert ending_of(await made.explain("s")).left_out[0].text == "it is busy: 8 decode blocks, limit 6.4"


async def test_too_many_active_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ACTIVE_REQUESTS_MAX", 1)
    made = fleet()
    for name in ("x", "r"):
        made.ask(name, SHORT)
    assert ending_of(await made.explain("r")).reason == "overloaded"


async def test_redeliveries_and_other_requests_with_the_same_id() -> None:
    made = fleet()
    for blocks, nonce in ((SHORT, 1), (SHORT, 1), (LONG, 2)):
        made("requests", request("r", blocks, nonce=nonce))
    made.progress("r", RequestFinished, finish_reason="stop")
    for blocks, nonce in ((LONG, 3), (SHORT, 1)):
        made("requests", request("r", blocks, nonce=nonce))
    made.cancel("r")
    made.ask("s", SHORT)
    found = await made.explain("r")
    assert words(found) == [
        *("submitted", "routed", "submitted_again", "duplicate_refused", "finished", "duplicate_refused")
    ]
    assert (found.state, found.earlier_uses) == ("finished", 0)
    assert [one.counted for one in found.timeline] == [True, True, False, False, True, False]


async def test_stale_events_have_no_effect() -> None:
    """Output before the first token, and a worker loss reported by an owner of another group, are ignored."""
    made = fleet("a", "b")
    home = made.ask("r", SHORT).worker_id
    made.progress("r", OutputGrown, output_tokens=3)
    made("fleet", OwnershipAnnounced(owner_epoch=5))
    made("fleet", WorkerLost(owner_epoch=4, worker_id=home, worker_epoch=made.epoch(home)))
    made.progress("r", FirstTokenEmitted)
    made.seal()
    found = await made.explain("r")
    assert words(found) == ["submitted", "routed", "outdated", "worker_lost", "first_token"]
    assert [one.counted for one in found.timeline] == [True, True, False, False, True]
    assert (found.state, found.output_tokens, len(found.routings)) == ("decode", None, 1)


async def test_a_search_that_misses_the_submission_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.replay.explain.find.PAGE_RECORDS", 1)
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    made.ask("x", LONG)
    made.ask("r", SHORT)
    made.snapshot()
    made.progress("x", FirstTokenEmitted)
    assert words(await made.explain("r", thorough=False)) == ["submitted", "held", "routed"]


async def require_live(made: Recorder, name: str, thorough: Explanation) -> None:
    """Require that the ingress, which reads only the end of a log, explains a request like `thorough`."""
    live = await made.explain(name, thorough=False)
    assert live == msgspec.structs.replace(thorough, earlier_uses=None, others=None)


async def test_a_reused_id_is_explained_by_its_last_request() -> None:
    made = fleet()
    for number in range(3):
        made.ask("r", PROMPTS[number], nonce=number)
        made.progress("r", RequestFinished, finish_reason="stop")
        made.wait(DAY_US)
        made.ask(f"between{number}", SHORT)
    found = await made.explain("r")
    assert (found.earlier_uses, submission_of(found).offset, len(found.routings)) == (2, 4, 1)
    await require_live(made, "r", found)


async def test_an_id_of_the_client_finds_its_last_routed_request() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    for name, blocks in (("r", LONG), ("r~1", SHORT), ("r~2", SHORT), ("r2~1", SHORT)):
        made.ask(name, blocks)
    made.progress("r", RequestFinished, finish_reason="stop")
    made.seal()
    found, exact = await made.explain("r"), await made.explain("r~1")
    assert (found.request_id, found.others) == ("r~2", ("r~1", "r"))
    assert (exact.request_id, exact.others) == ("r~1", ())
    await require_live(made, "r", found)


async def test_the_id_of_a_whole_request_finds_its_parts() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.25))
    for part in ("a~1f-0", "a~1f-1", "b~kafka-0", "a~kafka-0", "a~kafka-1", "a~2f"):
        made.ask(part, SHORT)
    made.seal()
    http, kafka, both = [await made.explain(name) for name in ("a~1f", "a~kafka", "a")]
    assert (http.request_id, http.others) == ("a~1f-1", ("a~1f-0",))
    assert (kafka.request_id, kafka.others) == ("a~kafka-1", ("a~kafka-0",))
    assert (both.request_id, both.others) == ("a~2f", ("a~kafka-1", "a~kafka-0", "a~1f-1", "a~1f-0"))


@pytest.mark.parametrize(
    ("threshold", "route", "reason"), [(None, "routed", "deadline"), (0.1, "held", "queue_deadline")]
)
async def test_expired_and_cancelled_requests(threshold: float | None, route: str, reason: str) -> None:
    made = fleet("a", queue=QueueConfig(threshold=threshold))
    made.ask("x", LONG)
    made.ask("r", SHORT, timeout_us=1_000)
    made.ask("s", SHORT)
    made.wait(2_000)
    made("requests", RequestCancelled(request_id="s", reason="closed"))
    expired, cancelled = await made.explain("r"), await made.explain("s")
    assert words(expired) == ["submitted", route, "aborted"]
    assert words(cancelled) == ["submitted", route, "cancel_requested", "aborted"]
    assert (ending_of(expired).reason, ending_of(cancelled).reason) == (reason, "cancelled")
    assert ending_of(cancelled).text == "closed"
    assert ending_of(expired).duration_us == expired.timeline[-1].after_us == 2_010


async def test_a_repeated_request_names_the_earlier_one() -> None:
    made = fleet("a")
    made.ask("x", LONG)
    for name in ("r", "again"):
        made.ask(name, SHORT, idempotency_key=5)
    made.seal()
    found = await made.explain("again")
    text = "the request at requests offset 1 has the same idempotency key"
    assert (found.state, words(found), ending_of(found).text) == ("repeated", ["submitted", "repeated"], text)
    assert found.timeline[-1].text == f"not run: {text}"
    await require_live(made, "again", found)


async def test_a_resumed_request_is_cancelled_by_its_last_ingress() -> None:
    made = fleet("a")
    made("fleet", IngressJoined(owner_epoch=0, ingress_id="i", incarnation="one"))
    made.ask("r", SHORT, ingress_incarnation="one")
    for name in ("two", "three"):
        made("requests", RequestResumed(request_id="r", ingress_incarnation=name))
    made("requests", RequestCancelled(request_id="r", ingress_incarnation="two"))
    made("fleet", IngressLost(owner_epoch=0, ingress_id="i", incarnation="one"))
    made("requests", RequestCancelled(request_id="r", ingress_incarnation="three"))
    found = await made.explain("r")
    assert words(found)[2:] == ["resumed", "resumed", "cancel_requested", "cancel_requested", "aborted"]
    assert [one.counted for one in found.timeline[2:]] == [True, True, False, True, True]


async def test_unjournaled_events_are_marked() -> None:
    made = fleet()
    made.ask("r", SHORT, at_us=5)
    routed = await made.explain("r")
    made("fleet", joined("d", 3))
    made.progress("r", FirstTokenEmitted, at_us=25)
    made("requests", request("late", SHORT), journalled=False)
    made("requests", query("unanswered", SHORT), journalled=False)
    found = await made.explain("r")
    assert (routed.state, found.state) == ("prefill", "decode")
    assert words(found) == ["submitted", "routed", "first_token"]
    assert (first_token_of(found).ttft_us, first_token_of(found).wall_ttft_us) == (None, 20)
    assert (found.timeline[-1].now_us, found.timeline[-1].after_us) == (None, None)
    late, unanswered = await made.explain("late"), await made.explain("unanswered")
    assert (late.state, late.kind, words(late)) == ("submitted", "request", ["submitted"])
    assert (unanswered.state, unanswered.kind, unanswered.routings) == ("submitted", "query", ())
    assert (submission_of(late).now_us, submission_of(late).offset) == (None, 1)


async def test_unknown_id_lists_similar_ids() -> None:
    made = fleet()
    for number in range(9):
        made.ask(f"chat-{number}", SHORT)
    with pytest.raises(UnknownRequest, match=r"unknown request 'chat-'; did you mean chat-8 or chat-7 or chat-6[?]$"):
        await made.explain("chat-")
    with pytest.raises(UnknownRequest, match=r"unknown request 'other'; check the ID$"):
        await made.explain("other", thorough=False)
    with pytest.raises(UnknownRequest):
        await Recorder().explain("r")


async def test_route_query_is_explained() -> None:
    made = fleet("a", "b", queue=QueueConfig(threshold=0.1))
    made.query("q1", SHORT)
    for name in ("x", "y"):
        made.ask(name, LONG)
    made.query("q2", SHORT)
    made.query("q3", SHORT, routing=RoutingHints(worker_id="z"))
    free, waits, refused = [await made.explain(name) for name in ("q1", "q2", "q3")]
    assert [one.kind for one in (free, waits, refused)] == ["query"] * 3
    assert [one.state for one in (free, waits, refused)] == ["answered", "answered", "rejected"]
    assert [one.routings[0].would_wait for one in (free, waits)] == [False, True]
    assert free.routings[0].attempt == 0
    assert [one.reasons for one in ending_of(refused).left_out] == [("not_pinned",)] * 2
    assert words(refused) == ["submitted", "answered"]


# Any history


def cost_of(one: CandidateCost, config: RouterConfig) -> float:
    """Return the cost computed from the reported terms, as in `forebay.core.routing.cost`."""
    left = max(one.prefill_blocks - one.overlap_credit, 0.0) + one.eviction_cost
    if config.selection_policy == "lmetric":
        cost = left * (one.decode_blocks + 1.0)
    elif config.track_prefill_tokens or not config.overlap_score_credit:
        cost = config.prefill_load_scale * left + one.decode_blocks
    else:
        cost = max(one.decode_blocks - one.overlap_credit, 0.0) + one.eviction_cost
    if config.selection_policy != "lmetric" and config.decode_active_request_weight:
        cost += config.decode_active_request_weight * one.active_requests
    return cost * one.taint_factor


def check_routing(routing: Routing, recorded: RequestRouted | RouteAnswered) -> None:
    known = {name: value for name, value in routing.config.items() if name in RouterConfig.__struct_fields__}
    config = msgspec.structs.replace(RouterConfig(), **known)
    assert [one.cost for one in routing.candidates] == [cost_of(one, config) for one in routing.candidates]
    winner = routing.candidates[routing.winner]
    choice: Any = recorded if isinstance(recorded, RequestRouted) else recorded.choice
    terms = choice.terms
    assert (winner.seen.worker_id, winner.seen.rank, winner.cost) == (choice.worker_id, choice.rank, terms.cost)
    assert (winner.seen.device_overlap, winner.overlap_credit) == (terms.device_overlap, terms.overlap_credit)
    assert routing.table_digest == recorded.table_digest
    assert all(one.reasons and one.text for one in routing.left_out)
    seen = [*(one.seen for one in routing.candidates), *(one.seen for one in routing.left_out)]
    assert len(seen) == len({(one.worker_id, one.rank) for one in seen})
    assert routing.why
    if isinstance(recorded, RequestRouted) and recorded.runner_up is not None:
        assert routing.runner_up is not None
        assert routing.candidates[routing.runner_up].seen.worker_id == recorded.runner_up.worker_id


def same(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation without journal offsets and the start of the derivation."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            kept = value if value.get("topic") != "decisions" else {**value, "offset": None}
            return {name: without(one) for name, one in kept.items() if name not in ("derived_from", "derived_to")}
        return [without(one) for one in value] if isinstance(value, list) else value

    plain = without(msgspec.to_builtins(explanation))
    for part in plain["routings"]:
        part["offset"] = None
    return dict(plain)


def check_routings(explanation: Explanation, name: str, journal: Sequence[Any]) -> None:
    """Check the routings of an explanation, newest first, because the ID may have been used before."""
    found = [one for one in reversed(journal) if isinstance(one, RequestRouted | RouteAnswered)]
    recorded = [one for one in found if one.request_id == name and one.table_digest is not None]
    for routing, one in zip(reversed(explanation.routings), recorded, strict=False):
        check_routing(routing, one)


@given(histories)
@examples(0.4)
def test_explanations_from_the_beginning_and_from_snapshots_are_equal(history: list[Any]) -> None:
    plain, sealed = Recorder(), Recorder()
    for made in (plain, sealed):
        made.fleet("a", "b")
        for number, action in enumerate(history):
            perform(made, number, action)
            if made is sealed and number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
                made.snapshot()
        made.seal()
    asyncio.run(check_all(plain, sealed))


async def check_all(plain: Recorder, sealed: Recorder) -> None:
    logs = [await made.log() for made in (plain, sealed)]
    for name in dict.fromkeys(one.request_id for one in plain.decided if hasattr(one, "request_id")):
        explanation, again = [await explain(States(log, 0), name) for log in logs]
        assert same(explanation) == same(again)
        assert explanation.divergence is None
        recorded = [one for one in plain.decided if getattr(one, "request_id", None) == name]
        check_routings(explanation, name, recorded)
        in_flight = plain.world.requests.get(name)
        assert (explanation.ending is None) == (in_flight is not None)
        if in_flight is not None:
            assert (explanation.state, len(explanation.routings)) == (in_flight.phase, in_flight.attempt)
        if isinstance(recorded[-1], RequestAborted):
            assert ending_of(explanation).reason == recorded[-1].reason
    for log in logs:
        log.close()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
async def test_golden_recordings_are_explained(path: Path) -> None:
    log = SqliteLog.open(path, readonly=True)
    ((_, partition),) = (await groups_of(log)).items()
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    journal = [decode_journal(record) async for record in journal_records(log, partition, begin, end)]
    for name in list(dict.fromkeys(one.request_id for one in journal if isinstance(one, RequestRecord)))[::EVERY]:
        explanation = await explain(States(log, partition, CUSTOM), name)
        assert explanation.divergence is None
        assert explanation.ending is not None
        check_routings(explanation, name, journal)
    log.close()


async def test_divergence_ends_the_explanation() -> None:
    def recording() -> Recorder:
        made = fleet("a", "b")
        made.ask("x", SHORT)
        made.progress("x", FirstTokenEmitted)
        made.stored("a", PROMPTS[2])
        made.ask("r", PROMPTS[2])
        made.progress("r", RequestFinished, finish_reason="stop")
        made.ask("y", SHORT)
        return made

    fine, before, within = (recording() for _ in range(3))
    whole = await fine.explain("r")
    assert (whole.divergence, whole.state) == (None, "finished")
    at = next(at for at, draft in enumerate(within.drafts) if draft.topic == KV_EVENTS.name)
    lie = msgspec.structs.replace(decode(KV_EVENTS, within.drafts[at].value), sequence_hashes=bytes(64))
    within.drafts[at] = Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, lie))
    found = await within.explain("r")
    assert found.divergence is not None
    assert (found.divergence.offset, "table_digest" in found.divergence.reason) == (2, True)
    assert (found.state, found.routings, found.submitted) == ("unknown", (), None)
    before.journal[1] = msgspec.structs.replace(before.journal[1], candidates=7)
    found = await before.explain("r")
    assert found.divergence is not None
    assert (found.divergence.offset, found.timeline, found.derived_to) == (1, (), 1)
    late = await before.explain("x")
    assert (late.divergence == found.divergence, late.state) == (True, "unknown")


async def test_a_divergence_between_two_attempts_ends_the_explanation() -> None:
    made = fleet("a", "b")
    made.ask("r", SHORT)
    made.ask("x", SHORT)
    made.progress("r", RequestFinished, finish_reason="stop")
    made.ask("y", SHORT)
    made.journal[2] = msgspec.structs.replace(made.journal[2], ties=9)
    found = await made.explain("r")
    assert (found.state, words(found), len(found.routings)) == ("unknown", ["submitted", "routed"], 1)
    assert found.divergence is not None
    assert found.divergence.offset == 2


async def test_takeover_makes_events_of_the_previous_owner_stale() -> None:
    made = fleet("a", "b")
    made.ask("r", SHORT)
    made.take_over("second")
    made.journal.append(msgspec.structs.replace(made.journal[1], seq=1, consumed=(), attempt=1))
    made.progress("r", RequestFinished, finish_reason="stop")
    made.seal()
    for thorough, uses in ((True, 0), (False, None)):
        found = await made.explain("r", thorough=thorough)
        assert words(found) == ["submitted", "routed", "owner_claimed", "finished"]
        assert found.timeline[2].text == "router second takes over the group"
        assert found.earlier_uses == uses


@pytest.mark.parametrize(("seal", "kind"), [(-1, "an outage of up to"), (3, "a planned hand-over of")])
async def test_an_outage_has_a_length_and_late_events_say_when_they_were_written(seal: int, kind: str) -> None:
    made, claimed_us = outage(seal)
    found = await made.explain("r")
    assert words(found) == ["submitted", "routed", "outage", "owner_claimed", "first_token", "finished"]
    _, routed, gap, claimed, first, finished = found.timeline
    assert gap.text == f"no router owns the group: {kind} 2.000 s, which delayed 2 requests"
    assert (gap.now_us, gap.outage_us, gap.delayed) == (claimed_us - 2_000_000, 2_000_000, 2)
    assert claimed.now_us == claimed_us
    assert first.text.endswith("; written at +0.050 s, before the takeover")
    assert (first.written_us, finished.written_us, routed.written_us) == (claimed_us - 2_950_000, None, None)
    found = await made.explain("late")
    assert words(found) == ["outage", "owner_claimed", "submitted", "routed"]
    assert [one.after_us for one in found.timeline[:3]] == [-2_000_530, -530, 0]
    assert "; written at -1.001 s, before the takeover" in found.timeline[2].text


async def test_a_request_older_than_the_log() -> None:
    made = fleet("a", "b")
    for name in ("ended", "r"):
        made.ask(name, SHORT, tenant="acme", key_id="abababababab")
    made.progress("ended", RequestFinished, finish_reason="stop")
    made.snapshot()
    log = Trimmed.open(None)
    log.begins = {**made.world.view, "decisions": len(made.journal) - 1, "snapshots": 0}
    made.ask("x", SHORT)
    made.progress("r", FirstTokenEmitted)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=3)
    made.seal()
    made.ask("r", PROMPTS[1])  # rejected, because the id is remembered
    await log.append(made.records())
    found = await explain(States(log, 0), "r")
    log.close()
    assert words(found) == ["taken_up", "first_token", "finished", "duplicate_refused"]
    submission = submission_of(found)
    assert (submission.now_us, submission.prompt_tokens, submission.offset) == (None, 10, 1)
    assert (submission.tenant, submission.key_id) == ("acme", "")
    assert (ending_of(found).duration_us, ending_of(found).output_tokens) == (None, 3)
    assert first_token_of(found).predicted_tokens is None
