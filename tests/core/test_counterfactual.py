"""Counterfactual selections in the recorded state: a configuration agrees with itself, and matches what it would do."""

from typing import Any

import msgspec

from forebay.core.routing.counterfactual import (
    Alternative,
    Counterfactual,
    changed_booking_fields,
    counterfactual,
    merge_runtime_settings,
)
from forebay.core.routing.plan import Plan
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import BusyThresholds, BusyThresholdsSet, PoolConfigured, QueueConfig
from forebay.events.decisions import RequestHeld
from forebay.events.fleet import WorkerLost
from forebay.events.requests import RouterOverride, RoutingHints
from tests.core.worlds import PROMPTS, Driver, pool, query, request

ONE_TOKEN = BusyThresholds(active_prefill_tokens_threshold=1)
Seen = tuple[SubmittedRequest, Counterfactual]


def same(one: PoolConfigured) -> PoolConfigured:
    return one


def looking(driver: Driver, alternative: Alternative) -> list[Seen]:
    """Have a driver's world tell an alternative of its choices; what that would have done."""
    seen: list[Seen] = []
    world: World = driver.world

    def on_plan(plan: Plan) -> None:
        seen.append((plan.request, counterfactual(world, alternative(plan.pool), plan)))

    world.on_plan = on_plan
    return seen


def changed(**router: Any) -> Alternative:
    def alternative(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, **router))

    return alternative


def test_another_weight_selects_another_rank_with_positive_regret() -> None:
    drive = Driver().fleet("a", "b", overlap_score_credit=0.0)
    drive.stored("b")
    seen = looking(drive, changed(overlap_score_credit=1.0))
    (routed,) = drive("requests", request("r", PROMPTS[0], tie_seed=_seed_for("a")))
    assert routed.worker_id == "a"
    [(_, found)] = seen
    assert not found.agrees
    assert (found.overlap_blocks, found.history_overlap_blocks) == (8, 0)
    assert found.regret_blocks == 8.0, "the blocks that history lets a compute again"


def _seed_for(worker: str) -> int:
    """A seed with which equal costs go to this one of two workers."""
    for seed in range(64):
        (routed,) = Driver().fleet("a", "b")("requests", request("r", PROMPTS[0], tie_seed=seed))
        if routed.worker_id == worker:
            return seed
    raise AssertionError("ties go to one side only")


def test_regret_is_below_zero_where_the_alternative_pays_more() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("b")
    seen = looking(drive, changed(mode="round-robin"))
    drive("requests", request("r", PROMPTS[0]))
    [(_, found)] = seen
    assert found.choice is not None
    assert found.choice.config.mode == "round-robin"
    assert not found.agrees
    assert found.regret_blocks == -8.0


def test_a_rejection_by_the_alternative_has_no_selection() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    seen = looking(drive, changed(busy=ONE_TOKEN))
    drive("requests", request("r2", PROMPTS[0]))
    [(_, found)] = seen
    assert found.refusal is not None
    assert found.refusal.reason == "busy"
    assert (found.choice, found.agrees, found.regret_blocks, found.overlap_blocks) == (None, False, None, 0)
    assert not found.would_hold


def test_the_recorded_rank_may_not_be_a_candidate() -> None:
    drive = Driver().fleet("a", "b")
    for name in ("r1", "r2"):
        drive("requests", request(name, PROMPTS[0], routing=RoutingHints(worker_id="b")))
    drive.stored("b")
    seen = looking(drive, changed(busy=ONE_TOKEN))
    (routed,) = drive("requests", request("r3", PROMPTS[0], routing=RoutingHints(override=cheapest_cache())))
    assert routed.worker_id == "b"
    [(_, found)] = seen
    assert found.choice is not None
    assert not found.agrees
    assert found.regret_blocks is None


def cheapest_cache() -> RouterOverride:
    """An override under which only what is cached counts: history follows the cache into a busy worker."""
    return RouterOverride(track_prefill_tokens=False, overlap_score_credit=100.0)


def test_an_alternative_may_queue_a_dispatched_request() -> None:
    drive = Driver().fleet("a")
    seen = looking(drive, changed(queue=QueueConfig(threshold=0.25)))
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[0]))
    drive("requests", query("q", PROMPTS[0]))
    assert [found.would_hold for _, found in seen] == [False, True, True]
    assert [found.agrees for _, found in seen] == [True, True, True]


def test_queued_requests_are_compared_like_new_ones() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.25))
    seen = looking(drive, same)
    (first,) = drive("requests", request("r1", PROMPTS[0], timeout_us=1_000))
    (held,) = drive("requests", request("r2", PROMPTS[0]))
    assert isinstance(held, RequestHeld)
    drive.wait(1_000)
    assert [request.request_id for request, _ in seen] == [first.request_id, held.request_id]
    assert all(found.agrees for _, found in seen)


def test_a_request_that_lost_its_worker_is_asked_about_as_it_is_routed_again() -> None:
    """Busy or not, in its session or not: thresholds and queues are for those who come first."""
    drive = Driver().fleet("a", "b")
    hints = RoutingHints(session_id="s")
    (routed,) = drive("requests", request("r1", PROMPTS[0], routing=hints))
    other = {"a": "b", "b": "a"}[routed.worker_id]
    drive("requests", request("r2", PROMPTS[1], routing=RoutingHints(worker_id=other)))
    strict = changed(busy=ONE_TOKEN, queue=QueueConfig(threshold=0.1), session_ttl_s=10.0)
    seen = looking(drive, strict)
    epoch = drive.epoch(routed.worker_id)
    (again,) = drive("fleet", WorkerLost(owner_epoch=0, worker_id=routed.worker_id, worker_epoch=epoch))
    assert (again.worker_id, again.attempt) == (other, 2)
    [(_, found)] = seen
    assert found.agrees
    assert not found.would_hold


def test_changed_booking_fields_are_listed() -> None:
    ours = pool()
    assert changed_booking_fields(ours, changed(temperature=1.0, mode="random")(ours)) == []
    booked = changed_booking_fields(ours, changed(use_kv_events=False, session_ttl_s=5.0)(ours))
    assert booked == ["use_kv_events", "session_ttl_s"]


def test_thresholds_set_by_hand_do_not_undo_those_of_the_alternative() -> None:
    drive = Driver().fleet("a")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10_000)))
    drive("requests", request("r1", PROMPTS[0]))
    seen = looking(drive, changed(busy=ONE_TOKEN))
    drive("requests", request("r2", PROMPTS[0]))
    looking_again = looking(drive, changed(temperature=0.5))
    drive("requests", request("r3", PROMPTS[0]))
    assert [found.refusal is None for _, found in (*seen, *looking_again)] == [False, True]


def test_only_what_the_alternative_changes_wins_over_thresholds_set_by_hand() -> None:
    recorded = BusyThresholds(active_decode_blocks_threshold=0.9)
    by_hand = BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=7)
    assert merge_runtime_settings(recorded, recorded, by_hand) == by_hand
    other = BusyThresholds(active_decode_blocks_threshold=0.9, active_prefill_tokens_threshold=1)
    stricter = BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=1)
    assert merge_runtime_settings(other, recorded, by_hand) == stricter
    assert merge_runtime_settings(BusyThresholds(), recorded, by_hand).active_decode_blocks_threshold is None
