"""Requests that wait in the router, queries that book nothing, assumed caches, and the room of ranks."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.dispatch import DRAIN_MAX
from forebay.core.phases import Phase
from forebay.core.state.queue import OFFERS_PER_LINE_MAX
from forebay.core.world import World
from forebay.events.control import DisaggConfig, QueueClass, QueueConfig
from forebay.events.decisions import (
    CacheResyncRequested,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.kv import CacheCleared
from forebay.events.progress import FirstTokenEmitted, OutputGrown
from forebay.events.requests import RoutingHints
from forebay.events.versions import CALLS_SINCE, TENANTS_SINCE
from tests.core.worlds import PROMPTS, Driver, ids_of, joined, pool, prefill_pool, request

ONE_STEP = QueueConfig(threshold=0.5)  # of 64 tokens: a prompt of eight blocks is more


def big(drive: Driver, name: str, **hints: Any) -> Any:
    return drive.ask(name, timeout_us=10**9, **hints)


def first_token(drive: Driver, routed: RequestRouted) -> list[str]:
    made = drive.emit(FirstTokenEmitted, routed)
    return [one.request_id for one in made if isinstance(one, RequestRouted)]


def test_requests_are_queued_while_all_ranks_exceed_the_prefill_threshold() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    first, second = big(drive, "r1"), big(drive, "r2")
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    held = [big(drive, name) for name in ("r3", "r4")]
    assert all(isinstance(one, RequestHeld) for one in held)
    assert [(one.queue_class, one.ahead, one.uncached_tokens) for one in held] == [("default", at, 34) for at in (0, 1)]
    (routed,) = drive("progress", FirstTokenEmitted(**ids_of(second)), after_us=500)
    assert isinstance(routed, RequestRouted)
    assert (routed.request_id, routed.worker_id, routed.attempt) == ("r3", second.worker_id, 1)
    assert routed.waited_us == 510, "from its submission, two events before"
    assert first_token(drive, first) == ["r4"]
    assert drive.world.queues.waiting("default") == 0


def test_at_the_threshold_nobody_waits_yet() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=34 / 64))
    assert isinstance(big(drive, "r1"), RequestRouted)
    assert isinstance(big(drive, "r2"), RequestRouted), "34 tokens are not more than the threshold"
    assert isinstance(big(drive, "r3"), RequestHeld)


def test_what_is_cached_is_looked_at_again_when_a_request_leaves_the_queue() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    on_a, on_b = big(drive, "r1", worker_id="a"), big(drive, "r2", worker_id="b")
    assert big(drive, "r3").uncached_tokens == 34
    drive.stored("b", PROMPTS[0])
    drive.finish(on_b)
    routed = next(one for one in drive.decided if isinstance(one, RequestRouted) and one.request_id == "r3")
    assert (routed.worker_id, routed.terms.device_overlap) == ("b", 8)
    assert on_a.worker_id == "a"


def test_strict_priority_then_time_less_the_priority_then_order() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    running = big(drive, "r0")
    big(drive, "late")
    big(drive, "early", priority=5)
    big(drive, "first", strict_priority=1)
    order = []
    while drive.world.queues.waiting("default"):
        order += first_token(drive, running)
        running = next(one for one in reversed(drive.decided) if isinstance(one, RequestRouted))
    assert order == ["first", "early", "late"]


def test_a_full_class_refuses_at_once_and_another_still_takes() -> None:
    classes = (QueueClass(requests_per_worker_max=1), QueueClass(name="batch", requests_per_worker_max=2))
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.5, classes=classes))
    big(drive, "r0")
    assert isinstance(big(drive, "r1"), RequestHeld)
    refused = big(drive, "r2")
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.message) == ("queue_full", "the queue class default is full: 1 requests are queued")
    batch = [type(big(drive, f"b{at}", policy_class="batch")) for at in range(3)]
    assert batch == [RequestHeld, RequestHeld, RequestRejected]
    assert big(drive, "u", policy_class="unheard of").reason == "queue_full", "an unknown class is the default one"
    assert drive.world.counts["unknown_queue_class"] == 1
    assert drive.world.counts["rejected_queue_full"] == 3
    assert drive.world.requests.get("r2") is None


def test_a_deadline_in_the_queue_has_its_own_reason() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    big(drive, "r0")
    drive("requests", request("r1", PROMPTS[0], timeout_us=900))
    (gone,) = drive.wait(2_500)
    assert isinstance(gone, RequestAborted)
    assert (gone.request_id, gone.reason, gone.worker_id, gone.attempt) == ("r1", "queue_deadline", "", 0)
    assert "router's queue" in gone.message
    assert drive.world.counts["aborted_queue_deadline"] == 1
    assert drive.world.queues.waiting("default") == 0


def test_a_policy_that_fails_in_the_queue_refuses_the_request() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    big(drive, "r0")
    big(drive, "r1")
    made = drive("control", pool(mode="no.such.Policy"))
    assert [(type(one), one.request_id, one.reason) for one in made] == [(RequestRejected, "r1", "policy_failed")]
    assert drive.world.requests.get("r1") is None


def test_a_lost_worker_ends_the_requests_that_are_for_it_alone() -> None:
    """Those that it runs, and those that wait for it."""
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    drive("control", msgspec.structs.replace(pool(queue=ONE_STEP), attempts_max=1))
    running = big(drive, "r1", worker_id="a")
    drive.emit(FirstTokenEmitted, running)
    big(drive, "r2", worker_id="a")
    assert isinstance(big(drive, "r3", worker_id="a"), RequestHeld)
    big(drive, "r4", worker_id="b")
    made = drive.lose("a")
    assert [(one.request_id, one.attempt, one.worker_id) for one in made] == [
        ("r1", 1, ""),
        ("r2", 1, ""),
        ("r3", 0, ""),
    ]
    assert {one.reason for one in made} == {"pinned_worker_lost"}
    assert {one.message for one in made} == {"worker a was lost, and the request is pinned to it"}
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r4"], "b is still there"
    assert [load.active_requests for load in drive.world.load.ranks()] == [1]
    assert not drive.world.queues.waiting("default")
    assert drive.world.counts["aborted_pinned_worker_lost"] == 3
    assert big(drive, "r5", worker_id="a").reason == "unknown_worker", "a new one is refused at once"


@pytest.mark.parametrize("fact", [WorkerLost, WorkerSuspect, WorkerDraining])
def test_losing_a_worker_releases_its_session_requests(fact: Any) -> None:
    drive = Driver().fleet("a", "b", "c", queue=ONE_STEP, session_ttl_s=100.0)
    began = big(drive, "r1", session_id="s")
    mine = began.worker_id
    drive.finish(began)
    big(drive, "other", worker_id=mine)
    assert isinstance(big(drive, "r2", session_id="s"), RequestHeld)
    made = drive.fact(fact, mine)
    assert [one.request_id for one in made if isinstance(one, RequestRouted)] == ["r2"]
    assert made[-1].worker_id != mine


def test_any_number_of_requests_for_one_worker_hold_up_nobody_else() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    big(drive, "ra", worker_id="a")
    on_b = big(drive, "rb", worker_id="b")
    for number in range(2 * OFFERS_PER_LINE_MAX):
        big(drive, f"pinned{number}", worker_id="a")
    assert isinstance(big(drive, "free"), RequestHeld)
    assert first_token(drive, on_b) == ["free"]


def test_one_event_lets_a_bounded_number_go_and_their_progress_the_rest() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    running = big(drive, "r")
    for number in range(2 * DRAIN_MAX + 1):
        big(drive, f"r{number}")
    made = drive("control", pool())
    assert [one.request_id for one in made] == [f"r{number}" for number in range(DRAIN_MAX)]
    assert len(first_token(drive, running)) == DRAIN_MAX
    assert len(first_token(drive, made[0])) == 1
    assert drive.world.queues.waiting("default") == 0


def test_another_configuration_lets_stranded_requests_go() -> None:
    drive = Driver().fleet("a", "b")
    lost = big(drive, "r1").worker_id
    drive("control", pool(mode="no.such.Policy"))
    assert drive.lose(lost) == []
    assert [(one.request_id, one.attempt) for one in drive("control", pool())] == [("r1", 2)]


def test_an_expired_session_does_not_block_its_requests() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP, session_ttl_s=0.002)
    mine = big(drive, "r1", session_id="s").worker_id
    big(drive, "r2", session_id="s")
    drive("requests", request("r3", timeout_us=5_000))
    made = drive.wait(10_000)
    assert [(type(one), one.request_id) for one in made] == [(RequestAborted, "r3"), (RequestRouted, "r2")]
    assert made[1].worker_id != mine


def test_an_id_that_is_used_again_for_another_adapter_or_tenant_is_refused() -> None:
    drive = Driver().fleet("a")
    big(drive, "r1")
    for other in ({"lora_name": "x"}, {"cache_namespace": "x"}):
        (refused,) = drive("requests", request("r1", PROMPTS[0], **other))
        assert refused.reason == "duplicate_id"


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        ((QueueClass(name="a"),), "missing queue class: 'default'"),
        (tuple(QueueClass(uncached_tokens_min=floor) for floor in range(257)), "257, the maximum is 256"),
        ((QueueClass(), QueueClass(quantum=5)), "duplicate queue class"),
        ((QueueClass(), QueueClass(name="a", uncached_tokens_min=5)), "missing queue class: 'a' with"),
    ],
)
def test_queue_classes_must_take_everybody(classes: tuple[QueueClass, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        QueueConfig(classes=classes)


def machine_state(world: World) -> Any:
    return [chunk for chunk in world.snapshot_small() if type(chunk).__name__ != "WorldState"], dict(world.turns)


def test_a_route_query_returns_the_table_and_changes_nothing() -> None:
    drive = Driver().fleet("a", "b", "c")
    drive.stored("b", PROMPTS[0][:5])
    drive.world.take_consumed()
    before = machine_state(drive.world)
    response = drive.query("q", PROMPTS[0])
    assert isinstance(response, RouteAnswered)
    assert response.choice is not None
    assert (response.choice.worker_id, response.choice.terms.device_overlap, response.reply_slot) == ("b", 5, 1)
    assert [one.worker_id for one in response.candidates] == ["a", "b", "c"]
    assert [one.terms.device_overlap for one in response.candidates] == [0, 5, 0]
    assert (response.mode, response.pool, response.ties, response.would_wait) == ("kv", "default", 1, False)
    drive.world.take_consumed()
    assert machine_state(drive.world) == before
    (routed,) = drive("requests", request("r", PROMPTS[0], tie_seed=sum(b"q")))
    assert (routed.worker_id, routed.terms, routed.table_digest) == ("b", response.choice.terms, response.table_digest)


def test_a_route_query_returns_rejections_and_would_wait() -> None:
    drive = Driver()
    assert drive.query("q1").reason == "no_workers"
    drive.fleet("a", queue=ONE_STEP)
    assert drive.query("q2", model="other").reason == "wrong_model"
    refused = drive.query("q3", routing=RoutingHints(worker_id="x"))
    assert (refused.reason, refused.message) == ("unknown_worker", "the pool default has no worker x")
    big(drive, "r0")
    assert drive.query("q4").would_wait


def overlap_of(drive: Driver, name: str, blocks: list[int], **hints: Any) -> dict[str, int]:
    response = drive.query(name, blocks, routing=RoutingHints(**hints))
    return {one.worker_id: one.terms.device_overlap for one in response.candidates}


@pytest.mark.parametrize("said_by", ["worker", "pool"])
def test_without_kv_events_routed_prompts_are_assumed_cached(said_by: str) -> None:
    drive = Driver()
    drive("control", pool(ttl_s=1.0, use_kv_events=said_by != "pool"))
    drive("fleet", joined("a", 0, kv_events=said_by != "worker"))
    drive("fleet", joined("b", 1, kv_events=said_by != "worker"))
    assert big(drive, "r1", worker_id="b").worker_id == "b"
    assert overlap_of(drive, "q1", PROMPTS[0]) == {"a": 0, "b": 8}
    drive.now_us += 999_970
    assert overlap_of(drive, "q2", PROMPTS[0][:3]) == {"a": 0, "b": 3}
    drive.now_us += 10
    assert overlap_of(drive, "q3", PROMPTS[0]) == {"a": 0, "b": 0}


def test_a_pool_without_kv_events_does_not_look_at_them() -> None:
    drive = Driver().fleet("a", use_kv_events=False)
    drive.stored("a", PROMPTS[0])
    assert overlap_of(drive, "q", PROMPTS[0]) == {"a": 0}


def test_a_prediction_holds_until_the_kv_events_or_its_end_or_a_clear() -> None:
    drive = Driver().fleet("a", "b", predicted_ttl_s=0.001)
    big(drive, "r1", worker_id="b")
    assert overlap_of(drive, "q1", PROMPTS[0]) == {"a": 0, "b": 8}
    drive.stored("b", PROMPTS[0][:2])
    drive.stored("b", PROMPTS[0][2:], seq=2, tier="host")
    assert overlap_of(drive, "q2", PROMPTS[0]) == {"a": 0, "b": 8}, "the most that either says"
    drive("requests", request("short", PROMPTS[1][:1], routing=RoutingHints(worker_id="b")))
    drive.stored("b", PROMPTS[1], seq=3)
    assert overlap_of(drive, "q5", PROMPTS[1]) == {"a": 0, "b": 8}
    drive.now_us += 1_000
    response = drive.query("q3", PROMPTS[0])
    assert [one.terms.host_overlap for one in response.candidates] == [0, 6]
    big(drive, "r2", worker_id="a")
    drive("kv-events", CacheCleared(worker_id="a", worker_epoch=drive.epoch("a"), seq=1))
    assert overlap_of(drive, "q4", PROMPTS[0])["a"] == 0
    big(drive, "r3", worker_id="a")
    for epoch in (drive.epoch("a"), 99):
        drive("kv-events", CacheCleared(worker_id="a", worker_epoch=epoch, seq=1))
    drive("kv-events", CacheCleared(worker_id="nobody", worker_epoch=0, seq=1))
    assert overlap_of(drive, "q6", PROMPTS[0])["a"] == 8, "redelivered, of another epoch, of nobody"


def test_a_prediction_reduces_overlaps_of_slower_tiers() -> None:
    drive = Driver().fleet("a", predicted_ttl_s=1.0)
    drive.stored("a", PROMPTS[0][:2])
    drive.stored("a", PROMPTS[0][2:5], seq=2, tier="host")
    drive.stored("a", PROMPTS[0][5:], seq=3, tier="disk")
    drive("requests", request("r", PROMPTS[0][:4]))
    response = drive.query("q", PROMPTS[0])
    terms = response.candidates[0].terms
    assert (terms.device_overlap, terms.host_overlap, terms.disk_overlap) == (4, 1, 3)


def test_output_blocks_count_where_they_are_tracked() -> None:
    for tracked in (False, True):
        drive = Driver().fleet("a", track_output_blocks=tracked)
        routed = big(drive, "r1", expected_output_tokens=16)
        before = drive.world.load.rank_load("a", 0).decode_blocks
        drive.emit(OutputGrown, routed, output_tokens=4)
        assert drive.world.counts["stale_progress"] == 1, "nothing grows before the first token"
        drive.emit(FirstTokenEmitted, routed)
        drive.emit(OutputGrown, routed, output_tokens=4)
        after = drive.world.load.rank_load("a", 0).decode_blocks
        assert after == ((8 + 1) * 0.75 if tracked else before)


def test_load_that_is_not_tracked_is_not_booked() -> None:
    drive = Driver().fleet("a", track_prefill_tokens=False, track_active_blocks=False)
    routed = big(drive, "r1")
    load = drive.world.load.rank_load("a", 0)
    assert (load.prefill_tokens, load.decode_blocks, load.active_requests) == (0, 0.0, 1)
    assert (routed.terms.prefill_blocks, routed.terms.decode_blocks) == (0.0, 0.0)


def test_requests_that_do_not_share_blocks_count_each_in_full() -> None:
    drive = Driver().fleet("a", assume_kv_reuse=False)
    big(drive, "r1")
    assert big(drive, "r2").terms.decode_blocks == 16.0
    assert drive.world.load.rank_load("a", 0).decode_blocks == 16.0


def test_a_choice_that_gives_up_overlap_is_counted() -> None:
    drive = Driver().fleet("a", "b", mode="round-robin")
    drive.stored("b", PROMPTS[0][:5])
    big(drive, "r1")
    big(drive, "r2")
    assert (drive.world.counts["non_max_overlap_selections"], drive.world.counts["overlap_blocks_lost"]) == (1, 5)


def test_a_gap_requests_one_resync_until_the_cache_is_reannounced() -> None:
    drive = Driver().fleet("a", "b")
    assert drive.stored("b", PROMPTS[0][:1]) == []
    (resync,) = drive.stored("b", PROMPTS[0][:4], seq=4)
    assert isinstance(resync, CacheResyncRequested)
    assert (resync.worker_id, resync.worker_epoch, resync.rank, resync.slot) == ("b", drive.epoch("b"), 0, 1)
    assert (resync.expected_seq, resync.found_seq, resync.pool) == (2, 4, "default")
    assert drive.stored("b", PROMPTS[0], seq=8) == [], "the re-announcement was requested already"
    assert overlap_of(drive, "q1", PROMPTS[0])["b"] == 8, "what comes is used meanwhile"
    drive("kv-events", CacheCleared(worker_id="b", worker_epoch=drive.epoch("b"), seq=9))
    assert overlap_of(drive, "q2", PROMPTS[0])["b"] == 0
    assert len(drive.stored("b", seq=11)) == 1


def test_an_empty_prompt_is_routed_like_any_other() -> None:
    drive = Driver().fleet("a", "b", overlap_score_credit_decay=1.0)
    big(drive, "r1", worker_id="a")
    (routed,) = drive("requests", request("r2", token_ids=b""))
    assert (routed.worker_id, routed.terms.prefill_blocks) == ("b", 0.0)


# The room of ranks


SEQS = 8  # of each worker of `tests.core.worlds`
LIMITED = QueueConfig(run_ahead=0.25, depth=2.0, timeout_s=0.5)
TIMEOUT_US = 500_000
HOUR_US = 3_600_000_000


def submit(drive: Driver, name: str, blocks: Iterable[int] = (), **changes: Any) -> Any:
    """Submit a request with a distant deadline; return its first decision."""
    return drive.ask(name, blocks, timeout_us=HOUR_US, **changes)


def submit_all(drive: Driver, count: int) -> list[Any]:
    return [submit(drive, f"r{at}") for at in range(count)]


def active(drive: Driver, worker: str) -> int:
    return drive.world.load.rank_load(worker, 0).active_requests


def disagg(queue: QueueConfig) -> Driver:
    drive = Driver().disagg(["p"], ["d"], queue=queue)
    drive("control", prefill_pool(queue=queue))
    return drive


def test_a_rank_gets_up_to_its_limit_and_the_next_request_when_one_ends() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    made = submit_all(drive, 21)
    assert [type(one) for one in made] == [RequestRouted] * 20 + [RequestHeld]
    assert (active(drive, "a"), active(drive, "b")) == (10, 10), "8 sequences and a quarter more"
    ended = next(one for one in made if isinstance(one, RequestRouted) and one.worker_id == "b")
    (sent,) = drive.finish(ended.request_id)
    assert (sent.request_id, sent.worker_id, active(drive, "b")) == ("r20", "b", 10)


def test_without_a_limit_a_rank_gets_every_request() -> None:
    drive = Driver().fleet("a")
    assert all(isinstance(submit(drive, f"r{at}"), RequestRouted) for at in range(50))
    assert active(drive, "a") == 50


def test_an_engine_with_waiting_requests_gets_no_more_until_it_runs_them() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    submit_all(drive, 6)
    drive.report("a", 3, 3)
    assert isinstance(submit(drive, "held"), RequestHeld), "three wait there, and the run-ahead is two"
    (sent,) = drive.report("a", 3, 2)
    assert sent.request_id == "held"


def test_an_old_report_of_waiting_requests_keeps_nothing_from_an_engine_that_has_ended_them() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    submit_all(drive, 6)
    drive.report("a", 3, 6)
    assert isinstance(submit(drive, "held"), RequestHeld)
    sent = [one.request_id for at in range(4) for one in drive.finish(f"r{at}")]
    assert sent == ["held"]


def test_the_queue_of_a_pool_is_bounded_by_what_its_ranks_run_and_a_small_one_takes_a_burst() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    made = submit_all(drive, 10 + 64 + 1)
    assert [type(one) for one in made[10:]] == [RequestHeld] * 64 + [RequestRejected]
    assert made[-1].reason == "pool_full"
    assert made[-1].message == "every worker is full, and so is the queue: 64 requests are queued"
    deep = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=10.0))
    assert [type(submit(deep, f"r{at}")) for at in range(8 + 80 + 1)][8:] == [RequestHeld] * 80 + [RequestRejected]


def test_a_full_queue_takes_each_tenant_up_to_its_equal_part() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    made = [submit(drive, f"a{at}", tenant="a") for at in range(10 + 64 + 1)]
    assert [type(one) for one in made[10:]] == [RequestHeld] * 64 + [RequestRejected]
    made = [submit(drive, f"b{at}", tenant="b") for at in range(33)]
    assert [type(one) for one in made] == [RequestHeld] * 32 + [RequestRejected]
    assert made[-1].reason == "pool_full"
    one_each = QueueConfig(threshold=0.1, classes=(QueueClass(requests_per_worker_max=2),))
    drive = Driver().fleet("a", queue=one_each)
    made = [submit(drive, f"r{at}", PROMPTS[0], tenant=tenant) for at, tenant in enumerate("aaaabbc")]
    assert [getattr(one, "reason", "") for one in made] == ["", "", "", "queue_full", "", "queue_full", ""]


def test_tenants_are_served_by_weight() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, classes=(QueueClass(quantum=2),)))
    submit_all(drive, 8)
    for at in range(9):
        submit(drive, f"a{at}", tenant="a", weight=1)
    for at in range(9):
        submit(drive, f"b{at}", tenant="b", weight=3)
    sent = [
        drive.finish(drive.world.requests.of_worker("a", drive.epoch("a"))[0].submitted.request_id)[0] for _ in range(8)
    ]
    assert "".join(one.request_id[0] for one in sent) == "abbbabbb"


def test_what_a_topic_holds_is_neither_refused_nor_timed_out() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=0.0, timeout_s=0.5))
    submit_all(drive, 8)
    assert isinstance(submit(drive, "from a topic", patient=True), RequestHeld)
    assert isinstance(submit(drive, "from a client"), RequestRejected)
    assert drive.wait(10 * TIMEOUT_US) == []
    (sent,) = drive.finish("r0")
    assert sent.request_id == "from a topic"


def test_with_no_depth_nobody_waits() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=0.0))
    assert submit_all(drive, 9)[-1].message == "every worker is full, and the pool queues no requests"


def test_a_request_waits_as_long_as_the_limit_and_the_owner_wakes_for_it() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    submit_all(drive, 12)
    held = drive.active("r10")
    due_us = held.queued_at_us + TIMEOUT_US
    assert drive.world.next_due_us() == due_us == held.queue_due_us
    assert drive.wait(due_us - drive.now_us - 1) == []
    (gone,) = drive.wait(1)
    assert (gone.request_id, gone.reason, gone.worker_id) == ("r10", "queue_timeout", "")
    assert gone.message == "no worker had room for the request within the queue timeout of 0.5 s"
    assert drive.world.counts["aborted_queue_timeout"] == 1
    (sent,) = drive.finish("r0")
    assert sent.request_id == "r11", "the other was in time"
    assert drive.wait(2 * TIMEOUT_US) == [], "a request that was sent has no limit any more"


@pytest.mark.parametrize(("timeout_s", "due_us"), [(None, TIMEOUT_US), (0.1, 100_000), (0.0, None)])
def test_a_queue_class_may_have_a_timeout_of_its_own(timeout_s: float | None, due_us: int | None) -> None:
    batch = QueueClass(name="batch", timeout_s=timeout_s)
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, timeout_s=0.5, classes=(QueueClass(), batch)))
    submit_all(drive, 8)
    submit(drive, "held", policy_class="batch")
    held = drive.active("held")
    assert held.queue_due_us == (0 if due_us is None else held.queued_at_us + due_us)
    submit(drive, "from a topic", policy_class="batch", patient=True)
    assert drive.active("from a topic").queue_due_us == 0
    gone = drive.wait(2 * TIMEOUT_US)
    assert [one.request_id for one in gone] == ([] if due_us is None else ["held"])
    assert all(f"queue timeout of {(due_us or 0) / 1e6:g} s" in one.message for one in gone)


def test_an_owner_of_an_older_version_does_not_know_timeouts_of_classes() -> None:
    drive = Driver()
    drive.world.owner_events = TENANTS_SINCE - 1
    drive.fleet("a", queue=QueueConfig(timeout_s=0.5, classes=(QueueClass(timeout_s=0.1),)))
    assert drive.world.pools["default"].router.queue == QueueConfig(timeout_s=0.5)


def test_an_owner_of_an_older_version_does_not_know_tenants() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0))
    submit_all(drive, 8)
    drive("requests", request("new", tenant="acme", weight=3))
    drive.world.owner_events = TENANTS_SINCE - 1
    drive("requests", request("old", tenant="acme", weight=3))
    known = [(drive.active(name).submitted.tenant, drive.active(name).submitted.weight) for name in ("new", "old")]
    assert known == [("acme", 3), ("", 1)]


def test_an_owner_of_an_older_version_does_not_know_calls() -> None:
    drive = Driver().fleet("a")
    drive.world.owner_events = CALLS_SINCE - 1
    assert drive("requests", request("call", task="call")) == []
    assert drive.world.requests.known_content("call") is None


def test_a_deadline_before_the_queue_timeout_is_reported_as_deadline() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    submit_all(drive, 10)
    drive("requests", request("short", timeout_us=1_000))
    assert [one.reason for one in drive.wait(TIMEOUT_US)] == ["queue_deadline"]


def test_without_a_timeout_a_request_waits_for_its_deadline() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0))
    submit_all(drive, 9)
    assert drive.wait(HOUR_US // 2) == []


def test_a_request_of_a_lost_worker_is_not_queued_again() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    submit_all(drive, 20)
    moved = drive.lose("a")
    assert [type(one) for one in moved] == [RequestRouted] * 10
    assert active(drive, "b") == 20, "accepted requests are served, also beyond the limit"


def test_what_is_prefilled_has_its_room_at_the_worker_that_decodes() -> None:
    drive = disagg(LIMITED)
    for at in range(10):
        assert submit(drive, f"r{at}").stage == "prefill"
    assert isinstance(submit(drive, "held"), RequestHeld), "the prefill worker is full"
    for at in range(6):
        drive.prefilled(f"r{at}")
    assert (active(drive, "p"), active(drive, "d")) == (4, 6)
    assert isinstance(submit(drive, "too"), RequestHeld), "four are promised the rest of the decode worker"
    assert drive.world.requests.count_before_response("default") == 4
    drive.emit(FirstTokenEmitted, "r0")
    (sent,) = drive.finish("r0")
    assert (sent.request_id, sent.stage) == ("held", "prefill")
    assert drive.world.requests.count_before_response("default") == 5


@pytest.mark.parametrize("policy", ["always", "prefill_load"])
def test_a_full_prefill_worker_is_no_candidate_even_if_the_disaggregation_policy_compared_its_load(policy: Any) -> None:
    drive = Driver().disagg("pq", "d", disagg=DisaggConfig(policy=policy, prefill_busy_threshold=100.0))
    drive("control", prefill_pool(queue=LIMITED))
    drive.stored("p", PROMPTS[0])
    assert [submit(drive, f"r{at}", PROMPTS[0]).worker_id for at in range(4)] == ["p"] * 4
    drive.report("p", 3, 4)
    sent = submit(drive, "last", PROMPTS[0])
    assert (sent.worker_id, sent.candidates, sent.prefill.remote) == ("q", 1, True)


moves = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 6 + ["finish"] * 3 + ["cancel", "wait", "report", "lose"]), st.integers(0, 99)
    ),
    max_size=150,
)
configs = st.builds(
    QueueConfig,
    run_ahead=st.sampled_from([0.0, 0.25, 2.0]),
    depth=st.sampled_from([0.0, 0.5, 9.0]),
    timeout_s=st.sampled_from([0.0, 0.001, 0.5]),
)


def move(drive: Driver, kind: str, number: int, at: int) -> list[Any]:
    under_way = drive.world.requests.active()
    one = under_way[number % len(under_way)].submitted.request_id if under_way else "nobody"
    sent = [each.submitted.request_id for each in under_way if each.on_worker]
    match kind:
        case "submit":
            return drive("requests", request(f"r{at}", timeout_us=HOUR_US, nonce=at))
        case "finish" if sent:
            return drive.finish(sent[number % len(sent)])
        case "cancel":
            return drive.cancel(one)
        case "wait":
            return drive.wait(number * 5_000)
        case "report":
            return drive.report("ab"[number % 2], 3, number % 12) if drive.epoch("ab"[number % 2]) else []
        case "lose" if drive.epoch("a") and number < 20:
            return drive.lose("a")
        case _:
            return []


@given(config=configs, history=moves)
def test_bounds_hold_nothing_is_lost_and_nobody_waits_past_the_limit(
    config: QueueConfig, history: list[tuple[str, int]]
) -> None:
    drive = Driver().fleet("a", "b", queue=config)
    submitted: set[str] = set()
    ended_requests: set[str] = set()
    lost = False
    for at, (kind, number) in enumerate(history):
        ended = {one.submitted.request_id for one in drive.world.requests.active()}
        made = move(drive, kind, number, at)
        submitted |= {f"r{at}"} if kind == "submit" else set()
        ended_requests |= {one.request_id for one in made if isinstance(one, RequestRejected | RequestAborted)}
        under_way = {one.submitted.request_id: one for one in drive.world.requests.active()}
        if kind == "finish":
            ended_requests |= ended - set(under_way)
        assert submitted == set(under_way) | ended_requests, "each request is under way or has ended"
        lost = lost or kind == "lose"
        assert_bounds(drive, config, moved=lost)
    while drive.world.requests.active():
        sent = [one.submitted.request_id for one in drive.world.requests.active() if one.on_worker]
        if sent:
            drive.finish(sent[0])
        else:
            assert drive.world.next_due_us() is not None
            drive.wait(HOUR_US)
    assert drive.world.queues.waiting("default") == 0


def assert_bounds(drive: Driver, config: QueueConfig, *, moved: bool) -> None:
    world = drive.world
    limit = round(SEQS * (1 + (config.run_ahead or 0)))
    for load in world.load.ranks():
        assert moved or load.active_requests <= limit
    depth = config.depth or 0.0
    assert moved or world.queues.waiting("default") <= (2 * max(64, int(depth * SEQS)) if depth else 0)
    for one in world.requests.queued():
        assert one.phase is Phase.QUEUED
        assert not config.timeout_s or one.queued_at_us + round(config.timeout_s * 1e6) > drive.now_us
