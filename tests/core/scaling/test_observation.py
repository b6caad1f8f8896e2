"""What the planner observes of a group: demand, latency, sizes and load per interval."""

from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay.core.scaling import observation as module
from forebay.core.scaling.observation import ORPHAN_US, GroupObservation
from forebay.events.codec import decode, encode
from forebay.events.control import QueueConfig
from forebay.events.decisions import Advanced, OwnerClaimed, RequestHeld
from forebay.events.fleet import IngressJoined, OwnershipAnnounced, WorkerDraining
from forebay.events.media import Encoded
from forebay.events.progress import (
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, Sampling
from forebay.events.scaling import PoolObserved, PoolScaling, ScalingObserved
from forebay.events.topics import SCALING
from tests.core.scaling.scene import (
    DISAGGREGATED,
    DISAGGREGATED_DEFAULT,
    LONG,
    MS,
    POOLS,
    Group,
    finish,
    prompt_tokens,
    routed,
    scaled,
    serve,
    terms,
)
from tests.core.worlds import (
    BLOCK,
    MEDIA,
    PREFILLED,
    PROMPTS,
    Driver,
    histories,
    ids_of,
    perform_all,
    prefilled_by,
    request,
)
from tests.depth import examples

# One pool


def test_requests_and_means_of_one_interval() -> None:
    group = Group().join("a")
    serve(group, "r1", "a", ttft_ms=30, itl_ms=5, blocks=2)
    serve(group, "r2", "a", ttft_ms=50, itl_ms=7, blocks=4)
    seen = group.pool()
    assert (seen.requests, seen.isl, seen.osl) == (2, (prompt_tokens(2) + prompt_tokens(4)) / 2, 11)
    assert (seen.ttft_ms, seen.itl_ms) == (40, 6)
    assert (seen.workers[0].ttft_ms, seen.workers[0].itl_ms) == (40, 6)
    again = group.pool()
    assert (again.requests, again.isl, again.osl, again.ttft_ms, again.itl_ms) == (0, None, None, None, None)


def test_inter_token_latency_weighs_tokens_not_requests() -> None:
    group = Group().join("a")
    for name, tokens, ms in (("r1", 2, 100), ("r2", 100, 99)):
        group.send(name, "a", sampling=LONG)
        group.emit(FirstTokenEmitted, name, "a")
        finish(group, name, "a", ms, output_tokens=tokens)
    assert group.pool().itl_ms == pytest.approx(199 / 100)


def test_reported_output_measures_a_response_that_goes_on() -> None:
    group = Group().join("a")
    group.send("r", "a", sampling=LONG)
    group.emit(FirstTokenEmitted, "r", "a", 10)
    group.emit(OutputGrown, "r", "a", 40, output_tokens=5)
    assert group.pool().itl_ms == 10
    group.emit(OutputGrown, "r", "a", 40, output_tokens=5)
    assert group.pool().itl_ms is None
    group.emit(OutputGrown, "r", "a", 40, output_tokens=3)
    finish(group, "r", "a", 40, output_tokens=11)
    assert group.pool().itl_ms == 20


def test_a_request_counts_once_however_often_it_is_submitted_and_routed() -> None:
    group = Group().join("a").join("b")
    group.submit("r")
    group.submit("r", after_ms=5)
    group.hold("r")
    group.route("r", "a", after_ms=15)
    group.fact("lose", "a")
    group.route("r", "b", attempt=2)
    group.emit(FirstTokenEmitted, "r", "b", 30, attempt=2)
    finish(group, "r", "b", 400, attempt=2, output_tokens=2)
    seen = group.pool()
    assert (seen.requests, seen.osl, seen.ttft_ms) == (1, 2, 50)
    assert seen.itl_ms is None, "the time of the last token of the first attempt is unknown"


def test_a_worker_that_was_declared_lost_no_longer_counts_for_the_request() -> None:
    group = Group().join("a").join("b")
    group.send("r", "a", sampling=LONG)
    group.emit(FirstTokenEmitted, "r", "a", 30)
    group.route("r", "b", attempt=2)
    finish(group, "r", "a", 10)
    assert group.pool().osl is None
    group.emit(OutputGrown, "r", "b", 500, attempt=2, output_tokens=20)
    finish(group, "r", "b", 40, attempt=2, output_tokens=24)
    seen = group.pool()
    assert (seen.osl, seen.itl_ms) == (24, 10)


def test_hit_rate_is_the_share_of_prompt_tokens_that_the_router_found_cached() -> None:
    group = Group().join("a")
    group.submit("r1", blocks=4)
    group.route("r1", "a", overlap=2)
    group.submit("r2", blocks=2)
    group.route("r2", "a", overlap=0)
    assert group.pool().kv_hit_rate == 2 * BLOCK / (prompt_tokens(4) + prompt_tokens(2))
    assert group.pool().kv_hit_rate is None


def test_an_overlap_beyond_the_prompt_counts_as_the_whole_prompt() -> None:
    group = Group().join("a")
    group.submit("r", blocks=1)
    group.route("r", "a", terms=terms(device=1, host=9))
    seen = group.pool()
    assert seen.kv_hit_rate == 1
    assert seen.workers[0].prefill_tokens == 0


@pytest.mark.parametrize(
    ("task", "osl"), [("generate", None), ("embed", 0)], ids=["an earlier attempt completed it", "an embedding"]
)
def test_a_response_without_output_tokens(task: str, osl: float | None) -> None:
    group = Group().join("a")
    group.send("r", "a", task=task)
    finish(group, "r", "a", output_tokens=0)
    assert group.pool().osl == osl


def test_output_beyond_what_was_requested_is_cut() -> None:
    group = Group().join("a")
    group.send("r", "a", sampling=Sampling(max_tokens=5))
    group.emit(FirstTokenEmitted, "r", "a")
    finish(group, "r", "a", 40, output_tokens=1 << 60)
    seen = group.pool()
    assert (seen.osl, seen.itl_ms) == (5, 10)


def test_requests_that_end_without_a_response_count_as_arrivals_only() -> None:
    group = Group().join("a")
    for name in ("failed", "aborted"):
        group.send(name, "a")
    group.emit(RequestFailed, "failed", "a", error="")
    group.abort("aborted")
    seen = group.pool()
    assert (seen.requests, seen.osl, seen.workers[0].prefill_tokens) == (2, None, 0)


def test_queued_requests_are_counted_until_they_are_routed_or_end() -> None:
    group = Group().join("a")
    for name in ("r1", "r2", "r3"):
        group.submit(name)
        group.hold(name)
    seen = group.pool()
    assert (seen.queued, seen.requests) == (3, 3)
    group.route("r1", "a")
    group.abort("r2")
    seen = group.pool()
    assert (seen.queued, seen.requests) == (1, 0)


@pytest.mark.parametrize(
    ("reason", "is_demand"),
    [
        *((name, True) for name in ("no_workers", "overloaded", "busy", "queue_full", "pool_full")),
        *((name, False) for name in ("wrong_model", "unknown_worker", "contradictory_routing", "policy_failed")),
    ],
)
def test_a_request_rejected_for_lack_of_workers_is_demand(reason: str, is_demand: bool) -> None:
    group = Group()
    group.submit("r")
    group.reject("r", reason)
    seen = group.pool()
    assert (seen.requests, seen.isl) == ((1, prompt_tokens(2)) if is_demand else (0, None))


def test_a_rejected_duplicate_id_does_not_end_the_request_with_this_id() -> None:
    group = Group().join("a")
    group.send("r", "a", sampling=LONG)
    group.reject("r", "duplicate_id")
    group.emit(FirstTokenEmitted, "r", "a", 30)
    finish(group, "r", "a")
    seen = group.pool()
    assert (seen.requests, seen.ttft_ms, seen.osl) == (1, 30, 11)


def test_a_rejected_request_counts_in_the_pool_with_ready_workers() -> None:
    group = Group(scaled("long"), scaled("short"), scaled("vision", "encode"))
    group.submit("r1")
    group.reject("r1", "no_workers")
    group.join("a", pool="short")
    group.submit("r2")
    group.reject("r2", "pool_full")
    seen = group.observe()
    assert {name: one.requests for name, one in seen.items()} == {"long": 1, "short": 1, "vision": 0}


def test_requests_of_a_prefill_pool_whose_decode_pool_is_not_observed() -> None:
    group = Group(scaled("prefillers", "prefill")).join("p", "prefillers", "prefill")
    group.submit("rejected")
    group.reject("rejected", "no_workers")
    group.submit("routed")
    group.route("routed", "p", pool="prefillers", stage="prefill")
    assert group.observe()["prefillers"].requests == 1


# Disaggregation


def disaggregated() -> Group:
    return Group(*DISAGGREGATED).join("p", "prefillers", "prefill").join("d", "decoders", "decode")


def test_prefill_pool_sees_ttft_and_decode_pool_sees_itl() -> None:
    group = disaggregated()
    group.submit("r", blocks=4, sampling=LONG)
    group.route("r", "p", pool="prefillers", stage="prefill", overlap=1)
    before = group.observe(5)
    assert before["prefillers"].workers[0].prefill_tokens == prompt_tokens(4) - BLOCK
    assert [one.requests for one in before.values()] == [1, 1], "both pools need room for the request"
    group.report("p", running=0)
    group.emit(PrefillFinished, "r", "p", 20, prefilled=PREFILLED)
    assert group.observe()["prefillers"].workers[0].prefill_tokens == 0
    group.route("r", "d", pool="decoders", stage="decode")
    group.emit(FirstTokenEmitted, "r", "d", 10)
    finish(group, "r", "d", 100)
    seen = group.observe()
    prefill, decode = seen["prefillers"], seen["decoders"]
    assert (prefill.ttft_ms, prefill.itl_ms, prefill.workers[0].prefill_tokens) == (35, None, 0)
    assert (decode.ttft_ms, decode.itl_ms, decode.workers[0].itl_ms) == (None, 10, 10)
    assert (prefill.osl, decode.osl) == (11, 11)
    assert (prefill.requests, decode.requests) == (0, 0)
    assert before["prefillers"].kv_hit_rate == BLOCK / prompt_tokens(4)
    assert before["decoders"].kv_hit_rate is None


def test_a_prompt_that_the_decode_worker_computes_counts_for_its_pool() -> None:
    group = disaggregated()
    group.submit("r", sampling=LONG)
    group.route("r", "d", pool="decoders")
    assert group.observe()["decoders"].workers[0].prefill_tokens == prompt_tokens(2)
    group.report("d", running=1)
    group.emit(FirstTokenEmitted, "r", "d", 30)
    seen = group.observe()
    assert (seen["decoders"].ttft_ms, seen["prefillers"].ttft_ms) == (30, None)
    assert seen["decoders"].workers[0].prefill_tokens == 0


def test_queue_of_a_decode_pool_counts_for_the_prefill_pool_too() -> None:
    group = disaggregated()
    group.submit("r1")
    group.hold("r1", "decoders")
    group.submit("r2")
    group.reject("r2", "queue_full")
    seen = group.observe()
    assert {name: (one.queued, one.requests) for name, one in seen.items()} == {
        "decoders": (1, 2),
        "prefillers": (1, 2),
    }


def test_a_failed_transfer_is_computed_again_without_counting_again() -> None:
    group = disaggregated()
    group.join("p2", "prefillers", "prefill")
    group.submit("r", sampling=LONG)
    group.route("r", "p", pool="prefillers", stage="prefill")
    group.emit(PrefillFinished, "r", "p", 20, prefilled=PREFILLED)
    group.route("r", "d", pool="decoders", stage="decode")
    group.emit(TransferFailed, "r", "d", error="")
    group.route("r", "p2", pool="prefillers", stage="prefill", attempt=2)
    seen = group.observe()
    assert [one.requests for one in seen.values()] == [1, 1]
    assert [one.prefill_tokens for one in seen["prefillers"].workers] == [0, prompt_tokens(2)]


def test_images_are_encoded_before_the_request_reaches_the_other_pools() -> None:
    group = Group(scaled(), scaled("encoders", "encode")).join("a").join("e", "encoders", "encode")
    group.submit("r", sampling=LONG)
    group.route("r", "e", pool="encoders", stage="encode")
    encoded = Encoded(descriptor=b"", shape=(4, 8), dtype="float32", checksum="0" * 16)
    group.emit(EncodeFinished, "r", "e", 10, encoded=encoded)
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a", 20)
    seen = group.observe()
    assert {name: (one.requests, one.ttft_ms) for name, one in seen.items()} == {
        "default": (1, 30),
        "encoders": (1, None),
    }


def test_other_pools_of_the_group_are_not_observed() -> None:
    group = Group(scaled("decoders", "decode")).join("p", "prefillers", "prefill").join("d", "decoders", "decode")
    group.submit("r", sampling=LONG)
    group.hold("r", "other")
    group.route("r", "p", pool="prefillers", stage="prefill")
    group.emit(PrefillFinished, "r", "p", prefilled=PREFILLED)
    group.route("r", "d", pool="decoders", stage="decode")
    group.emit(FirstTokenEmitted, "r", "d")
    finish(group, "r", "d", 50)
    (seen,) = group.observe().values()
    assert (seen.pool, seen.queued, seen.ttft_ms, seen.itl_ms) == ("decoders", 0, None, 5)


def test_events_of_different_topics_may_arrive_in_any_order() -> None:
    route = routed("r", "a", overlap=1)
    first, end = (
        FirstTokenEmitted(**ids_of(route)),
        RequestFinished(**ids_of(route), finish_reason="stop", output_tokens=11),
    )
    for order in permutations((request("r", range(2), sampling=LONG), route, first, end)):
        if order.index(first) > order.index(end):
            continue  # they are on one topic
        group = Group().join("a")
        for event in order:
            group(event)
        seen = group.pool()
        assert (seen.requests, seen.isl, seen.osl, seen.ttft_ms) == (1, prompt_tokens(2), 11, 0), order
        assert seen.kv_hit_rate == BLOCK / prompt_tokens(2), order
        assert seen.workers[0].prefill_tokens == 0, order


def test_a_late_routing_to_prefill_does_not_leave_its_prompt_pending() -> None:
    group = disaggregated()
    group.submit("r")
    group.emit(PrefillFinished, "r", "p", prefilled=PREFILLED)
    group.route("r", "p", pool="prefillers", stage="prefill")
    assert group.observe()["prefillers"].workers[0].prefill_tokens == 0


def test_a_late_routing_of_an_ended_request_does_not_occupy_its_worker() -> None:
    group = Group().join("a")
    serve(group, "r", "a")
    group.route("r", "a", attempt=2)
    group.pool(1_000)
    assert len(group.pool(1_000).workers) == 1


def test_a_first_token_that_is_reported_twice_counts_once() -> None:
    group = Group().join("a")
    group.submit("r", sampling=LONG)
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a", 30)
    group.emit(FirstTokenEmitted, "r", "a", 50)
    finish(group, "r", "a", 50)
    seen = group.pool()
    assert (seen.ttft_ms, seen.itl_ms) == (30, 10)


def test_a_rejection_that_is_read_before_the_submission_counts() -> None:
    group = Group()
    group.reject("r", "queue_full")
    group.submit("r")
    assert group.pool().requests == 1


def test_a_clock_that_runs_backwards_stands_still() -> None:
    group = Group().join("a")
    group.send("r", "a", sampling=LONG)
    group.emit(FirstTokenEmitted, "r", "a", -500)
    finish(group, "r", "a", 500 + 100)
    seen = group.pool()
    assert (seen.ttft_ms, seen.itl_ms) == (0, 10)


def test_nothing_before_the_first_interval_counts() -> None:
    group = Group().join("a")
    group.send("r1", "a", sampling=LONG)
    group.send("r2", "a", sampling=LONG)
    group.emit(FirstTokenEmitted, "r2", "a", 20)
    group.observation.begin(group.now_us)
    group.emit(FirstTokenEmitted, "r1", "a", 500)
    finish(group, "r1", "a", 100)
    finish(group, "r2", "a", 100)
    seen = group.pool()
    assert (seen.requests, seen.isl, seen.kv_hit_rate) == (0, None, None)
    assert seen.ttft_ms is None, "the start of r1 was not seen as it happened"
    assert seen.itl_ms == 10, "only r1 got its first token in the interval"
    assert seen.osl == 11


def started(drive: Driver, *pools: PoolScaling) -> GroupObservation:
    """Return an observation that starts from a snapshot of this world."""
    drive.world.take_consumed()
    found = GroupObservation(pools or (scaled(),))
    found.restore(list(drive.world.snapshot()), 0)
    found.begin(0)
    return found


def restored(drive: Driver, *pools: PoolScaling) -> dict[str, PoolObserved]:
    """Return the first observation after the start from a snapshot."""
    return {one.pool: one for one in started(drive, *pools).observe(1)}


def test_a_snapshot_has_the_workers_and_their_load() -> None:
    drive = Driver().fleet("a", "b", "c")
    drive.fact(WorkerDraining, "c")
    drive.report("b", running=3, waiting=1, used=5)
    seen = restored(drive)["default"]
    assert (seen.ready, seen.draining, seen.requests) == (2, 1, 0)
    assert [(one.running, one.waiting, one.kv_tokens) for one in seen.workers] == [(0, 0, 0), (3, 1, 5 * BLOCK)]


def test_a_snapshot_has_the_requests_in_flight() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.4))
    drive.stored("a", PROMPTS[0][:3])
    (first,) = drive("requests", request("computing", PROMPTS[0][:5]))
    while not isinstance(drive("requests", request(f"r{len(drive.applied)}", PROMPTS[1]))[0], RequestHeld):
        pass
    pending = drive.world.load.rank_load("a", 0).prefill_tokens
    seen = restored(drive)["default"]
    assert (seen.queued, seen.requests) == (1, 0)
    assert first.terms.device_overlap == 3
    assert seen.workers[0].prefill_tokens == pending > 0
    drive.emit(FirstTokenEmitted, first)
    assert restored(drive)["default"].workers[0].prefill_tokens == pending - (prompt_tokens(5) - 3 * BLOCK)


def test_a_request_of_a_snapshot_continues_and_does_not_arrive_again() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    (first,) = drive("requests", request("r", PROMPTS[0], sampling=LONG))
    found = started(drive, *DISAGGREGATED_DEFAULT)
    _, prefill = found.observe(1)
    assert [one.prefill_tokens for one in prefill.workers] == [prompt_tokens(8), 0]
    kept = prefilled_by(first.worker_id, first.worker_epoch)
    prefilled = PrefillFinished(**ids_of(first), prefilled=kept)
    found.apply(prefilled, 0, 2)
    (second,) = drive("progress", prefilled)
    found.apply(second, 0, 2)
    found.apply(FirstTokenEmitted(**ids_of(second)), 1, 10_000)
    found.apply(RequestFinished(**ids_of(second), finish_reason="stop", output_tokens=3), 2, 30_000)
    decode, prefill = found.observe(30_000)
    assert (decode.requests, decode.osl, decode.itl_ms, decode.ttft_ms) == (0, 3, 10, None)
    assert (prefill.requests, prefill.osl, prefill.ttft_ms, prefill.workers[0].prefill_tokens) == (0, 3, None, 0)


@pytest.mark.parametrize(("after_us", "forgotten"), [(599_000, 0), (600_000, 1)])
def test_a_request_of_a_snapshot_is_forgotten_after_its_deadline(after_us: int, forgotten: int) -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", PROMPTS[0], timeout_us=1_000_000))
    drive("control", None, 400_000)
    found = started(drive)
    found.observe(after_us + ORPHAN_US)
    assert found.forgotten == forgotten


@pytest.mark.parametrize("phase", ["decode", "waiting", "encode"])
def test_requests_of_a_snapshot_without_a_prompt_to_compute(phase: str) -> None:
    drive = Driver().fleet("a").encoders("e")
    (routing,) = drive("requests", request("r", PROMPTS[0], media=(MEDIA,) if phase == "encode" else ()))
    if phase == "decode":
        drive.emit(FirstTokenEmitted, routing)
    if phase == "waiting":
        drive.lose("a")
    assert [str(one.phase) for one in drive.world.requests.active()] == [phase]
    seen = restored(drive, scaled(), scaled("encoders", "encode"))
    assert not any(worker.prefill_tokens for pool in seen.values() for worker in pool.workers)


def test_a_request_that_waits_for_a_decode_worker_does_not_occupy_its_prefill_worker() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (first,) = drive("requests", request("r", PROMPTS[0]))
    drive.fact(WorkerDraining, "d")
    assert drive.prefilled(first) == []
    found = started(drive, *DISAGGREGATED_DEFAULT)
    assert [one.worker_id for one in found.observe(2)[1].workers] == ["p"]


@examples(0.3)
@given(histories)
def test_any_history_gives_observations_that_can_be_encoded(history: list[tuple[str, Any]]) -> None:
    drive = perform_all(Driver().fleet("a", "b"), history)
    found = GroupObservation(POOLS)
    offsets: dict[str, int] = {}
    for topic, event, now_us in drive.applied:
        offset = offsets[topic] = offsets.get(topic, -1) + 1
        if event is not None:
            found.apply(event, offset, now_us)
    for offset, decision in enumerate(drive.decided):
        found.apply(decision, offset, drive.now_us)
    seen = ScalingObserved(interval_s=1, pools=found.observe(drive.now_us))
    assert decode(SCALING, encode(SCALING, seen)) == seen
    for pool in msgspec.to_builtins(seen)["pools"]:
        assert all(value >= 0 for value in pool.values() if isinstance(value, int | float))


def test_workers_are_counted_by_phase() -> None:
    group = Group()
    for name in ("a", "b", "c", "d"):
        group.join(name)
    group.fact("drain", "b")
    group.fact("suspect", "c")
    group.fact("lose", "d")
    seen = group.pool()
    assert (seen.ready, seen.draining) == (1, 1)
    assert [one.worker_id for one in seen.workers] == ["a"]
    group.fact("recover", "c")
    assert group.pool().ready == 2


def test_load_reports_of_all_ranks_add_up() -> None:
    group = Group().join("a", dp_size=2)
    group.report("a", running=3, waiting=1, blocks=10)
    group.report("a", running=2, waiting=0, blocks=5, rank=1)
    (worker,) = group.pool().workers
    assert (worker.running, worker.waiting) == (5, 1)
    assert (worker.kv_tokens, worker.kv_tokens_max) == (15 * BLOCK, 2 * 64 * BLOCK)


def test_the_newest_report_replaces_earlier_ones_and_impossible_values_are_limited() -> None:
    group = Group().join("a")
    group.report("a", running=3, waiting=1, blocks=10)
    group.report("a", running=1 << 60, waiting=1 << 60, blocks=1 << 60)
    (worker,) = group.pool().workers
    assert (worker.running, worker.waiting, worker.kv_tokens) == (8, 100_000, 64 * BLOCK)


def test_reports_of_unknown_workers_epochs_and_ranks_have_no_effect() -> None:
    group = Group()
    group.report("z", running=3)
    group.join("a")
    group.report("a", running=3, worker_epoch=99)
    group.report("a", running=3, rank=7)
    (worker,) = group.pool().workers
    assert worker.running == 0


def test_a_worker_that_comes_back_has_no_load_of_before() -> None:
    group = Group().join("a")
    group.report("a", running=3, blocks=9)
    group.fact("lose", "a")
    group.join("a")
    (worker,) = group.pool().workers
    assert (worker.running, worker.kv_tokens) == (0, 0)


def test_a_busy_worker_without_reports_is_missing() -> None:
    group = Group().join("a").join("b")
    group.report("a", running=1)
    group.send("r", "b")
    assert len(group.pool(1_000).workers) == 2, "both may have had no time to report"
    seen = group.pool(1_000)
    assert (seen.ready, seen.workers) == (2, ())
    group.report("a", running=0)
    group.report("b", running=1)
    assert len(group.pool(1_000).workers) == 2


def test_load_of_a_huge_worker_can_be_encoded() -> None:
    group = Group().join("a", kv_blocks_total=(1 << 31) - 1, dp_size=1024, block_size=(1 << 31) - 1)
    group.report("a", blocks=1 << 40)
    event = ScalingObserved(interval_s=1, pools=(group.pool(),))
    assert decode(SCALING, encode(SCALING, event)) == event


def test_decisions_of_a_replaced_owner_have_no_effect() -> None:
    group = Group().join("a")
    group.submit("r1")
    group.submit("r2")
    group(OwnerClaimed(owner_id="o2", core_version=1))
    group.route("r1", "a", owner_epoch=0)
    group.route("r2", "a", owner_epoch=group.offset - 2)
    group.route("r2", "a", owner_epoch=group.offset - 3)
    assert group.pool().requests == 1


def test_fleet_events_of_a_replaced_owner_have_no_effect() -> None:
    group = Group().join("a")
    group(OwnershipAnnounced(owner_epoch=5))
    group.fact("lose", "a")
    group(IngressJoined(owner_epoch=5, ingress_id="i", incarnation="1"))
    assert group.pool().ready == 1


def test_events_that_do_not_concern_the_observation_are_ignored() -> None:
    group = Group()
    group(Advanced(digest="0" * 16, owner_epoch=0))
    group(RequestCancelled(request_id="r"))
    assert group.pool() == PoolObserved(group="m", pool="default", ready=0)


def test_a_request_that_never_ends_is_forgotten_after_its_deadline() -> None:
    group = Group().join("a")
    group.send("r", "a", timeout_us=1_000 * MS)
    group.report("a", running=1)
    assert group.pool().workers[0].prefill_tokens == prompt_tokens(2)
    group.report("a", running=1)
    group.now_us += 1_000 * MS + ORPHAN_US
    assert group.pool().workers[0].prefill_tokens == 0
    assert group.observation.forgotten == 1


def test_events_of_unknown_requests_are_forgotten() -> None:
    group = Group().join("a")
    group.hold("r1")
    finish(group, "r2", "a")
    assert group.pool().queued == 1
    assert group.pool(ORPHAN_US / MS).queued == 0
    assert group.observation.forgotten == 1
    group.send("r2", "a")
    assert group.pool().requests == 1, "nothing of the earlier request with this id is left"


def test_a_response_without_a_decision_is_forgotten() -> None:
    group = Group().join("a")
    finish(group, "r", "a")
    group.submit("r", timeout_us=10 * ORPHAN_US)
    group.pool(ORPHAN_US / MS)
    group.route("r", "a")
    assert group.pool().requests == 0


def test_the_number_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACTIVE_REQUESTS_MAX", 10)
    monkeypatch.setattr(module, "DROPPED", 4)
    group = Group()
    for number in range(14):
        group.submit(f"r{number}")
        group.hold(f"r{number}")
    assert group.pool().queued == 10
    assert group.observation.forgotten == 4
