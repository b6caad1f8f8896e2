"""What the planner observes of a group: demand, latency, sizes and load per interval."""

from itertools import permutations
from typing import Any

import pytest

from forebay.events.base import Event
from forebay.events.decisions import CostTerms
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
from forebay.events.requests import Sampling
from forebay.events.scaling import PoolObserved
from tests.core.scaling.observing import (
    DISAGGREGATED,
    LONG,
    Group,
    finish,
    prompt_tokens,
    routed,
    scaled,
    serve,
)
from tests.core.worlds import BLOCK, PREFILLED, request

# One pool


def test_a_pool_without_events_has_no_requests_and_no_means() -> None:
    assert Group().pool() == PoolObserved(group="m", pool="default", ready=0)


def test_requests_and_means_of_one_interval() -> None:
    group = Group()
    group.join("a")
    serve(group, "r1", "a", ttft_ms=30, itl_ms=5, blocks=2)
    serve(group, "r2", "a", ttft_ms=50, itl_ms=7, blocks=4)
    seen = group.pool()
    assert (seen.requests, seen.isl, seen.osl) == (2, (prompt_tokens(2) + prompt_tokens(4)) / 2, 11)
    assert (seen.ttft_ms, seen.itl_ms) == (40, 6)
    assert (seen.workers[0].ttft_ms, seen.workers[0].itl_ms) == (40, 6)
    again = group.pool()
    assert (again.requests, again.isl, again.osl, again.ttft_ms, again.itl_ms) == (0, None, None, None, None)


def test_inter_token_latency_weighs_tokens_not_requests() -> None:
    group = Group()
    group.join("a")
    for name, tokens, ms in (("r1", 2, 100), ("r2", 100, 99)):
        group.submit(name, sampling=LONG)
        group.route(name, "a")
        group.emit(FirstTokenEmitted, name, "a")
        finish(group, name, "a", ms, output_tokens=tokens)
    assert group.pool().itl_ms == pytest.approx(199 / 100)


def test_reported_output_measures_a_response_that_goes_on() -> None:
    group = Group()
    group.join("a")
    group.submit("r", sampling=LONG)
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a", 10)
    group.emit(OutputGrown, "r", "a", 40, output_tokens=5)
    assert group.pool().itl_ms == 10
    group.emit(OutputGrown, "r", "a", 40, output_tokens=5)
    assert group.pool().itl_ms is None
    group.emit(OutputGrown, "r", "a", 40, output_tokens=3)
    finish(group, "r", "a", 40, output_tokens=11)
    assert group.pool().itl_ms == 20


def test_a_time_to_first_token_counts_once() -> None:
    group = Group()
    group.join("a")
    serve(group, "r1", "a", ttft_ms=30)
    group.submit("r2", sampling=LONG)
    group.route("r2", "a")
    group.emit(FirstTokenEmitted, "r2", "a", 50)
    assert group.pool().ttft_ms == 40


def test_a_request_counts_once_however_often_it_is_submitted_and_routed() -> None:
    group = Group()
    group.join("a")
    group.join("b")
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
    group = Group()
    group.join("a")
    group.join("b")
    group.submit("r", sampling=LONG)
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a", 30)
    group.route("r", "b", attempt=2)
    finish(group, "r", "a", 10)
    assert group.pool().osl is None
    group.emit(OutputGrown, "r", "b", 500, attempt=2, output_tokens=20)
    finish(group, "r", "b", 40, attempt=2, output_tokens=24)
    seen = group.pool()
    assert (seen.osl, seen.itl_ms) == (24, 10)


def test_hit_rate_is_the_share_of_prompt_tokens_that_the_router_found_cached() -> None:
    group = Group()
    group.join("a")
    group.submit("r1", blocks=4)
    group.route("r1", "a", overlap=2)
    group.submit("r2", blocks=2)
    group.route("r2", "a", overlap=0)
    assert group.pool().kv_hit_rate == 2 * BLOCK / (prompt_tokens(4) + prompt_tokens(2))
    assert group.pool().kv_hit_rate is None


def test_an_overlap_beyond_the_prompt_counts_as_the_whole_prompt() -> None:
    group = Group()
    group.join("a")
    group.submit("r", blocks=1)
    terms = CostTerms(
        cost=0, prefill_blocks=0, overlap_credit=0, decode_blocks=0, active_requests=0, device_overlap=1, host_overlap=9
    )
    group.route("r", "a", terms=terms)
    seen = group.pool()
    assert seen.kv_hit_rate == 1
    assert seen.workers[0].prefill_tokens == 0


def test_a_response_that_an_earlier_attempt_had_completed_has_no_length() -> None:
    group = Group()
    group.join("a")
    group.submit("r")
    group.route("r", "a")
    finish(group, "r", "a", output_tokens=0)
    assert group.pool().osl is None


def test_an_embedding_has_no_output_tokens() -> None:
    group = Group()
    group.join("a")
    group.submit("r", task="embed")
    group.route("r", "a")
    finish(group, "r", "a", output_tokens=0)
    assert group.pool().osl == 0


def test_output_beyond_what_was_requested_is_cut() -> None:
    group = Group()
    group.join("a")
    group.submit("r", sampling=Sampling(max_tokens=5))
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a")
    finish(group, "r", "a", 40, output_tokens=1 << 60)
    seen = group.pool()
    assert (seen.osl, seen.itl_ms) == (5, 10)


def test_requests_that_end_without_a_response_count_as_arrivals_only() -> None:
    group = Group()
    group.join("a")
    for name in ("failed", "aborted"):
        group.submit(name)
        group.route(name, "a")
    group.emit(RequestFailed, "failed", "a", error="")
    group.abort("aborted")
    seen = group.pool()
    assert (seen.requests, seen.osl, seen.workers[0].prefill_tokens) == (2, None, 0)


# Queue and rejections


def test_queued_requests_are_counted_until_they_are_routed_or_end() -> None:
    group = Group()
    group.join("a")
    for name in ("r1", "r2", "r3"):
        group.submit(name)
        group.hold(name)
    assert (seen := group.pool()).queued == 3
    assert seen.requests == 3
    group.route("r1", "a")
    group.abort("r2")
    assert (seen := group.pool()).queued == 1
    assert seen.requests == 0


@pytest.mark.parametrize("reason", ["no_workers", "overloaded", "busy", "queue_full", "pool_full"])
def test_a_request_rejected_for_lack_of_workers_is_demand(reason: str) -> None:
    group = Group()
    group.submit("r")
    group.reject("r", reason)
    seen = group.pool()
    assert (seen.requests, seen.isl) == (1, prompt_tokens(2))


@pytest.mark.parametrize("reason", ["wrong_model", "unknown_worker", "contradictory_routing", "policy_failed"])
def test_a_request_rejected_for_its_own_fault_is_not_demand(reason: str) -> None:
    group = Group()
    group.submit("r")
    group.reject("r", reason)
    assert group.pool().requests == 0


def test_a_rejected_duplicate_id_does_not_end_the_request_with_this_id() -> None:
    group = Group()
    group.join("a")
    group.submit("r", sampling=LONG)
    group.route("r", "a")
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
    group = Group(scaled("prefillers", "prefill"))
    group.join("p", "prefillers", "prefill")
    group.submit("rejected")
    group.reject("rejected", "no_workers")
    group.submit("routed")
    group.route("routed", "p", pool="prefillers", stage="prefill")
    assert group.observe()["prefillers"].requests == 1


# Disaggregation


def disaggregated() -> Group:
    group = Group(*DISAGGREGATED)
    group.join("p", "prefillers", "prefill")
    group.join("d", "decoders", "decode")
    return group


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
    group = Group(scaled(), scaled("encoders", "encode"))
    group.join("a")
    group.join("e", "encoders", "encode")
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
    group = Group(scaled("decoders", "decode"))
    group.join("p", "prefillers", "prefill")
    group.join("d", "decoders", "decode")
    group.submit("r", sampling=LONG)
    group.hold("r", "other")
    group.route("r", "p", pool="prefillers", stage="prefill")
    group.emit(PrefillFinished, "r", "p", prefilled=PREFILLED)
    group.route("r", "d", pool="decoders", stage="decode")
    group.emit(FirstTokenEmitted, "r", "d")
    finish(group, "r", "d", 50)
    (seen,) = group.observe().values()
    assert (seen.pool, seen.queued, seen.ttft_ms, seen.itl_ms) == ("decoders", 0, None, 5)


# The order of events across topics


def test_events_of_different_topics_may_arrive_in_any_order() -> None:
    def events() -> list[tuple[int, Event]]:
        ids: dict[str, Any] = {"request_id": "r", "attempt": 1, "worker_id": "a", "worker_epoch": 0, "owner_epoch": 0}
        return [
            (0, request("r", range(2), sampling=LONG)),
            (1, routed("r", "a", overlap=1)),
            (2, FirstTokenEmitted(**ids)),
            (3, RequestFinished(**ids, finish_reason="stop", output_tokens=11)),
        ]

    def is_possible(order: tuple[int, ...]) -> bool:
        return order.index(2) < order.index(3)  # one topic

    for order in permutations(range(4)):
        if is_possible(order):
            group = Group()
            group.join("a")
            for at in order:
                group(events()[at][1])
            seen = group.pool()
            assert (seen.requests, seen.isl, seen.osl) == (1, prompt_tokens(2), 11), order
            assert seen.kv_hit_rate == BLOCK / prompt_tokens(2), order
            assert seen.ttft_ms == 0, order
            assert seen.workers[0].prefill_tokens == 0, order


def test_a_late_routing_to_prefill_does_not_leave_its_prompt_pending() -> None:
    group = disaggregated()
    group.submit("r")
    group.emit(PrefillFinished, "r", "p", prefilled=PREFILLED)
    group.route("r", "p", pool="prefillers", stage="prefill")
    assert group.observe()["prefillers"].workers[0].prefill_tokens == 0


def test_a_late_routing_does_not_leave_its_prompt_pending() -> None:
    group = Group()
    group.join("a")
    group.submit("r")
    group.emit(FirstTokenEmitted, "r", "a")
    group.route("r", "a")
    assert group.pool().workers[0].prefill_tokens == 0


def test_a_late_routing_of_an_ended_request_does_not_occupy_its_worker() -> None:
    group = Group()
    group.join("a")
    serve(group, "r", "a")
    group.route("r", "a", attempt=2)
    group.pool(1_000)
    assert len(group.pool(1_000).workers) == 1


def test_a_first_token_that_is_reported_twice_counts_once() -> None:
    group = Group()
    group.join("a")
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
    group = Group()
    group.join("a")
    group.submit("r", sampling=LONG)
    group.route("r", "a")
    group.emit(FirstTokenEmitted, "r", "a", -500)
    finish(group, "r", "a", 500 + 100)
    seen = group.pool()
    assert (seen.ttft_ms, seen.itl_ms) == (0, 10)
