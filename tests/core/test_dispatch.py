"""Requests that wait in the router, queries that book nothing, caches taken for granted, and what load does to them."""

from typing import Any

import pytest

from forebay.core.dispatch import DRAIN_MAX
from forebay.core.state.queue import OFFERS_PER_LINE_MAX
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueClass, QueueConfig
from forebay.events.decisions import (
    CacheResyncRequested,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.kv import BlocksStored, CacheCleared
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, OutputGrown
from forebay.events.requests import RoutingHints
from tests.core.worlds import PROMPTS, Driver, ids_of, joined, pool, query, request

ONE_STEP = QueueConfig(threshold=0.5)  # of 64 tokens: a prompt of eight blocks is more


def big(drive: Driver, name: str, **hints: Any) -> Any:
    return drive("requests", request(name, PROMPTS[0], routing=RoutingHints(**hints), timeout_us=10**9))[-1]


def first_token(drive: Driver, routed: RequestRouted) -> list[str]:
    made = drive.emit(FirstTokenEmitted, routed)
    return [one.request_id for one in made if isinstance(one, RequestRouted)]


def test_requests_are_queued_while_all_ranks_exceed_the_prefill_threshold() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    first, second = big(drive, "r1"), big(drive, "r2")
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    held = [big(drive, name) for name in ("r3", "r4")]
    assert [(one.queue_class, one.ahead, one.uncached_tokens) for one in held] == [
        ("default", 0, 34),
        ("default", 1, 34),
    ]
    assert all(isinstance(one, RequestHeld) for one in held)
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
    assert [type(big(drive, f"b{at}", policy_class="batch")) for at in range(3)] == [
        RequestHeld,
        RequestHeld,
        RequestRejected,
    ]
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


def test_a_request_may_be_cancelled_while_it_waits_and_one_that_ends_lets_another_go() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    big(drive, "r0")
    big(drive, "r1")
    big(drive, "r2")
    (gone,) = drive.cancel("r1")
    assert (gone.request_id, gone.worker_id) == ("r1", "")
    made = drive.cancel("r0")
    assert [(type(one), one.request_id) for one in made] == [(RequestAborted, "r0"), (RequestRouted, "r2")]


def test_a_queue_is_emptied_by_a_new_worker_and_by_a_new_configuration() -> None:
    drive = Driver().fleet("a", queue=ONE_STEP)
    big(drive, "r0")
    big(drive, "r1")
    big(drive, "r2")
    made = drive("fleet", joined("b", 1))
    assert [(one.request_id, one.worker_id) for one in made] == [("r1", "b")]
    made = drive("control", pool())
    assert [one.request_id for one in made] == ["r2"]


def test_requests_of_a_lost_worker_go_first_without_queueing() -> None:
    drive = Driver().fleet("a", "b", queue=ONE_STEP)
    first = big(drive, "r1")
    big(drive, "r2")
    big(drive, "r3")
    made = drive.lose(first.worker_id)
    assert [(one.request_id, one.attempt, one.waited_us) for one in made] == [("r1", 2, 0)]


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
    running = big(drive, "r1", worker_id="a")
    drive.emit(FirstTokenEmitted, running)
    big(drive, "r2", worker_id="a")
    assert isinstance(big(drive, "r3", worker_id="a"), RequestHeld)
    elsewhere = big(drive, "r4", worker_id="b")
    made = drive.lose("a")
    reason = ("pinned_worker_lost", "worker a was lost, and the request is pinned to it", "")
    assert [(one.request_id, one.attempt, one.reason, one.message, one.worker_id) for one in made] == [
        ("r1", 1, *reason), ("r2", 1, *reason), ("r3", 0, *reason),
    ]  # fmt: skip
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r4"], "b is still there"
    assert [load.active_requests for load in drive.world.load.ranks()] == [1]
    assert elsewhere.worker_id == "b"
    assert not drive.world.queues.waiting("default")
    assert drive.world.counts["aborted_pinned_worker_lost"] == 3
    assert big(drive, "r5", worker_id="a").reason == "unknown_worker", "a new one is refused at once"


@pytest.mark.parametrize("fact", [WorkerLost, WorkerSuspect, WorkerDraining])
def test_losing_a_worker_releases_its_session_requests(
    fact: type[WorkerLost | WorkerSuspect | WorkerDraining],
) -> None:
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


def test_blocks_that_an_engine_gave_back_let_a_request_go() -> None:
    busy = BusyThresholds(active_decode_blocks_threshold=0.5)
    drive = Driver().fleet("a", queue=ONE_STEP, busy=busy)
    running = big(drive, "r1")
    big(drive, "r2")
    load: dict[str, Any] = {"worker_id": "a", "worker_epoch": drive.epoch("a"), "running": 1, "waiting": 0}
    load["kv_blocks_total"] = 64
    assert drive("metrics", LoadReported(**load, kv_blocks_used=33)) == []
    assert first_token(drive, running) == []
    assert drive("metrics", LoadReported(**load, kv_blocks_used=34)) == []
    assert [one.request_id for one in drive("metrics", LoadReported(**load, kv_blocks_used=32))] == ["r2"]


def test_thresholds_of_a_model_that_nobody_serves_are_counted() -> None:
    drive = Driver().fleet("a")
    for model in ("m", "another"):
        drive("control", BusyThresholdsSet(model=model, thresholds=BusyThresholds(active_prefill_tokens_threshold=1)))
    assert drive.world.counts["unknown_model"] == 1


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


# Queries


def machine_state(world: World) -> Any:
    return [chunk for chunk in world.snapshot_small() if type(chunk).__name__ != "WorldState"], dict(world.turns)


def test_a_route_query_returns_the_table_and_changes_nothing() -> None:
    drive = Driver().fleet("a", "b", "c")
    drive.stored("b", PROMPTS[0][:5])
    drive.world.take_consumed()
    before = machine_state(drive.world)
    (response,) = drive("requests", query("q", PROMPTS[0]))
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
    assert drive("requests", query("q1"))[0].reason == "no_workers"
    drive.fleet("a", queue=ONE_STEP)
    assert drive("requests", query("q2", model="other"))[0].reason == "wrong_model"
    refused = drive("requests", query("q3", routing=RoutingHints(worker_id="x")))[0]
    assert (refused.reason, refused.message) == ("unknown_worker", "the pool default has no worker x")
    big(drive, "r0")
    assert drive("requests", query("q4"))[0].would_wait


# Caches that nobody reports


def overlap_of(drive: Driver, name: str, blocks: list[int], **hints: Any) -> dict[str, int]:
    (response,) = drive("requests", query(name, blocks, routing=RoutingHints(**hints)))
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
    stored: dict[str, Any] = {"worker_id": "b", "worker_epoch": drive.epoch("b")}
    drive("kv-events", BlocksStored(**stored, seq=1, sequence_hashes=pack_u64(PROMPTS[0][:2])))
    drive("kv-events", BlocksStored(**stored, seq=2, sequence_hashes=pack_u64(PROMPTS[0][2:]), tier="host"))
    assert overlap_of(drive, "q2", PROMPTS[0]) == {"a": 0, "b": 8}, "the most that either says"
    drive("requests", request("short", PROMPTS[1][:1], routing=RoutingHints(worker_id="b")))
    drive("kv-events", BlocksStored(**stored, seq=3, sequence_hashes=pack_u64(PROMPTS[1])))
    assert overlap_of(drive, "q5", PROMPTS[1]) == {"a": 0, "b": 8}
    drive.now_us += 1_000
    (response,) = drive("requests", query("q3", PROMPTS[0]))
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
    stored: dict[str, Any] = {"worker_id": "a", "worker_epoch": drive.epoch("a")}
    drive("kv-events", BlocksStored(**stored, seq=1, sequence_hashes=pack_u64(PROMPTS[0][:2])))
    drive("kv-events", BlocksStored(**stored, seq=2, sequence_hashes=pack_u64(PROMPTS[0][2:5]), tier="host"))
    drive("kv-events", BlocksStored(**stored, seq=3, sequence_hashes=pack_u64(PROMPTS[0][5:]), tier="disk"))
    drive("requests", request("r", PROMPTS[0][:4]))
    (response,) = drive("requests", query("q", PROMPTS[0]))
    terms = response.candidates[0].terms
    assert (terms.device_overlap, terms.host_overlap, terms.disk_overlap) == (4, 1, 3)


# Load


def test_output_blocks_count_where_they_are_tracked() -> None:
    for tracked in (False, True):
        drive = Driver().fleet("a", track_output_blocks=tracked)
        routed = big(drive, "r1", expected_output_tokens=16)
        before = drive.world.load.rank_load("a", 0).decode_blocks
        fields = ids_of(routed)
        drive("progress", OutputGrown(**fields, output_tokens=4))
        assert drive.world.counts["stale_progress"] == 1, "nothing grows before the first token"
        drive("progress", FirstTokenEmitted(**fields))
        drive("progress", OutputGrown(**fields, output_tokens=4))
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


# Missing KV events


def test_a_gap_requests_one_resync_until_the_cache_is_reannounced() -> None:
    drive = Driver().fleet("a", "b")
    fields: dict[str, Any] = {"worker_id": "b", "worker_epoch": drive.epoch("b")}

    def store(seq: int) -> list[Any]:
        return drive("kv-events", BlocksStored(**fields, seq=seq, sequence_hashes=pack_u64(PROMPTS[0][:seq])))

    assert store(1) == []
    (resync,) = store(4)
    assert isinstance(resync, CacheResyncRequested)
    assert (resync.worker_id, resync.worker_epoch, resync.rank, resync.slot) == ("b", drive.epoch("b"), 0, 1)
    assert (resync.expected_seq, resync.found_seq, resync.pool) == (2, 4, "default")
    assert store(8) == [], "the re-announcement was requested already"
    assert overlap_of(drive, "q1", PROMPTS[0])["b"] == 8, "what comes is used meanwhile"
    drive("kv-events", CacheCleared(**fields, seq=9))
    assert overlap_of(drive, "q2", PROMPTS[0])["b"] == 0
    assert len(store(11)) == 1


def test_an_empty_prompt_is_routed_like_any_other() -> None:
    drive = Driver().fleet("a", "b", overlap_score_credit_decay=1.0)
    big(drive, "r1", worker_id="a")
    (routed,) = drive("requests", request("r2", token_ids=b""))
    assert (routed.worker_id, routed.terms.prefill_blocks) == ("b", 0.0)
