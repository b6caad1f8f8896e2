"""Routing reasons in every mode, with sessions, pins, ties, sampling and excluded ranks."""

from typing import Any

import pytest

from forebay.events.base import pack_u64
from forebay.events.control import BusyThresholds, QueueConfig
from forebay.events.fleet import WorkerLost
from forebay.events.kv import BlocksRemoved
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints, TaintWeight
from tests.core.worlds import PROMPTS, joined, pool, request
from tests.replay.recorder import Recorder, ending_of, fleet

SHORT, LONG = PROMPTS[0][:2], PROMPTS[1]


class First:
    """Custom policy that selects the first candidate."""

    def decide(self, world: Any, request: Any) -> int:
        return 0


CUSTOM = {f"{__name__}.First": First}


async def routing_of(made: Recorder, hints: RoutingHints = NO_HINTS, blocks: list[int] = LONG) -> Any:
    made("requests", request("r", blocks, routing=hints))
    explanation = await made.explain("r", custom=made.world.custom)
    return explanation.routings[0]


@pytest.mark.parametrize(
    ("router", "reason", "text"),
    [
        ({}, "tie_seed", "3 of 3 candidates have the lowest cost, 16.5; the request's tie seed selected this one"),
        ({"temperature": 1.0}, "drawn", "drawn at temperature 1 with probability 33.3 %; it has the lowest cost"),
        ({"mode": "round-robin"}, "round_robin", "its turn: request number 1 of the pool, over 3 candidates"),
        ({"mode": "random"}, "random", "drawn by the request's tie seed from 3 equally likely candidates"),
        ({"mode": "power-of-two"}, "power_of_two", "with 0 and 0 active requests: equal, so the first"),
        (
            {"mode": "least-loaded"},
            "least_loaded",
            "3 candidates have the fewest active requests, 0; the request's tie seed",
        ),
        (
            {"mode": f"{__name__}.First"},
            "policy",
            f"the policy {__name__}.First selected it, which also has the lowest",
        ),
    ],
)
async def test_reason_of_each_mode_with_equal_costs(router: dict[str, Any], reason: str, text: str) -> None:
    routing = await routing_of(fleet(custom=CUSTOM, **router))
    assert (routing.mode, routing.reason) == (router.get("mode", "kv"), reason)
    assert text in routing.why


@pytest.mark.parametrize(
    ("router", "reason", "text"),
    [
        ({}, "lowest_cost", "lowest cost of 3 candidates: 8.5, 8 less than c (8 less to prefill; 8 blocks"),
        (
            {"selection_policy": "lmetric"},
            "lowest_cost",
            "0.5 blocks to prefill times 9, against 8.5 times 9; 8 blocks",
        ),
        (
            {"track_prefill_tokens": False},
            "lowest_cost",
            "0, 8 less than c (8 less of decode blocks that are not cached",
        ),
        ({"temperature": 0.5}, "drawn", "drawn at temperature 0.5 with probability"),
        ({"mode": "power-of-two"}, "power_of_two", "active requests"),
        ({"mode": "least-loaded"}, "least_loaded", "2 candidates have the fewest active requests, 0"),
        ({"mode": f"{__name__}.First"}, "policy", "selected it, which also has the lowest cost, 8.5"),
    ],
)
async def test_reason_of_each_mode_with_different_costs(router: dict[str, Any], reason: str, text: str) -> None:
    made = fleet(custom=CUSTOM, **router)
    made.stored("a", LONG)
    made("requests", request("x", SHORT, routing=RoutingHints(worker_id="b")))
    made.progress("x", FirstTokenEmitted)
    routing = await routing_of(made)
    assert routing.reason == reason
    assert text in routing.why


async def test_reasons_of_further_selections() -> None:
    made = fleet("a", "b", mode="least-loaded")
    made("requests", request("x", SHORT, routing=RoutingHints(worker_id="a")))
    assert (await routing_of(made)).why == "fewest active requests: 0"
    made = fleet("a", "b", mode="power-of-two")
    made("requests", request("x", SHORT, routing=RoutingHints(worker_id="a")))
    assert (await routing_of(made)).why.endswith("active requests: the smaller number")
    made = fleet("a", "b", custom=CUSTOM, mode=f"{__name__}.First")
    made.stored("b", LONG)
    why = "First selected it, although 1 of 2 candidates cost less: 16.5 against 8.5 of b"
    assert (await routing_of(made)).why.endswith(why)


async def test_blocks_in_lower_tiers_are_listed_separately() -> None:
    made = fleet("a", "b")
    made.stored("a", LONG)
    made.stored("a", LONG[2:], seq=2, tier="host")
    removed = BlocksRemoved(
        worker_id="a", worker_epoch=made.epoch("a"), seq=3, sequence_hashes=pack_u64(LONG[2:]), tier="device"
    )
    made("kv-events", removed)
    routing = await routing_of(made)
    assert routing.why.endswith(
        f"2 blocks of the prompt are cached on a and {len(LONG) - 2} in its host memory, 0 on b)"
    )


async def test_tie_goes_to_the_rank_with_fewest_computed_tokens() -> None:
    made = fleet("a", "b", "c")
    for number in range(2):
        made("requests", request(f"x{number}", PROMPTS[number]))
        made.progress(f"x{number}", RequestFinished, finish_reason="stop")
    made("requests", request("y", PROMPTS[2][:1], routing=RoutingHints(worker_id=least_computed(made))))
    made.progress("y", RequestFinished, finish_reason="stop")
    routing = await routing_of(made, blocks=[99])
    assert routing.reason == "tie_computed_tokens"
    assert routing.why.endswith("this one was sent the fewest tokens to compute so far: 6, the next 34")
    assert routing.candidates[routing.winner].seen.computed_tokens == 6
    made = fleet("a", "b", "c")
    made("requests", request("x", LONG))
    made.progress("x", RequestFinished, finish_reason="stop")
    routing = await routing_of(made, blocks=[99])
    assert routing.reason == "tie_seed"
    assert "2 of them were sent the fewest tokens to compute" in routing.why


async def test_ties_of_cost_and_computed_tokens() -> None:
    made = fleet()
    for name, blocks in zip("abc", PROMPTS, strict=False):
        made("requests", request(f"to-{name}", blocks, routing=RoutingHints(worker_id=name)))
        made.progress(f"to-{name}", RequestFinished, finish_reason="stop")
    routing = await routing_of(made, blocks=[7_001, 7_002])
    assert routing.reason == "tie_seed"
    assert ", and were sent the same number of tokens to compute; the request's tie seed selected" in routing.why


def least_computed(made: Recorder) -> str:
    return min(made.world.load.ranks(), key=lambda load: load.computed_tokens).worker_id


async def test_pinned_to_a_worker_or_one_of_its_ranks() -> None:
    made = Recorder()
    made("control", pool())
    for slot, name in enumerate(("a", "b")):
        made("fleet", joined(name, slot, dp_size=2))
    one = await routing_of(made, RoutingHints(worker_id="b", rank=1))
    assert (one.reason, one.why) == ("pinned", "the request is pinned to it")
    assert [left.text for left in one.left_out] == ["the request is pinned to rank 1 of b"] * 3
    made("requests", request("two", LONG, routing=RoutingHints(worker_id="a")))
    two = (await made.explain("two")).routings[0]
    assert two.why.startswith(
        "among the 2 ranks of a, to which the request is pinned: 2 of 2 candidates have the lowest cost"
    )
    made(
        "requests", request("three", LONG, routing=RoutingHints(worker_id="b", override=RouterOverride(mode="direct")))
    )
    three = (await made.explain("three")).routings[0]
    assert (three.mode, three.reason, three.overridden) == ("direct", "lowest_cost", ("mode",))
    four = fleet("a", "b", mode="direct")
    assert (await routing_of(four, RoutingHints(worker_id="a"))).reason == "pinned"
    five = Recorder()
    five("control", pool(mode="direct"))
    five("fleet", joined("a", dp_size=2))
    assert (await routing_of(five, RoutingHints(worker_id="a"))).reason == "tie_seed"


@pytest.mark.parametrize("mode", ["hard", "soft"])
async def test_a_session_keeps_its_worker(mode: str) -> None:
    hints = RoutingHints(session_id="s")
    busy = BusyThresholds(active_decode_blocks_threshold=0.2)
    made = fleet(session_ttl_s=600.0, session_mode=mode, busy=busy)
    made("requests", request("first", SHORT, routing=hints))
    home = made.world.requests.get("first")
    assert home is not None
    others = [name for name in ("a", "b", "c") if name != home.worker_id]
    made("requests", request("x", PROMPTS[0], routing=RoutingHints(worker_id=others[0])))
    made("requests", request("y", PROMPTS[2], routing=RoutingHints(worker_id=others[0])))
    routing = await routing_of(made, hints)
    assert (routing.reason, routing.why) == ("session", f"the session s is bound to it ({mode} affinity)")
    kept_out = {one.seen.worker_id: one.reasons for one in routing.left_out}
    assert kept_out == {others[0]: ("other_session",) if mode == "hard" else ("busy",), others[1]: ("other_session",)}
    assert routing.config["session_mode"] == mode
    alone = fleet("a", session_ttl_s=600.0)
    alone("requests", request("first", SHORT, routing=hints))
    assert (await routing_of(alone, hints)).reason == "only_candidate"


async def test_a_hard_session_on_a_busy_worker_is_rejected() -> None:
    hints = RoutingHints(session_id="s")
    made = fleet("a", "b", session_ttl_s=600.0, busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    made("requests", request("first", LONG, routing=hints))
    made("requests", request("r", SHORT, routing=hints))
    explanation = await made.explain("r", custom=made.world.custom)
    assert sorted(one.reasons for one in ending_of(explanation).left_out) == [("busy",), ("other_session",)]


async def test_costs_include_taints_overrides_and_routed_load() -> None:
    made = Recorder()
    made("control", pool(use_kv_events=False, decode_active_request_weight=2.0))
    made("fleet", joined("a", 0, taints=("fast",)))
    made("fleet", joined("b", 1))
    made("requests", request("x", LONG))
    hints = RoutingHints(
        preferred_taints=(TaintWeight(taint="fast", weight=1.0),), override=RouterOverride(overlap_score_credit=0.5)
    )
    routing = await routing_of(made, hints)
    assert (routing.overridden, routing.config["overlap_score_credit"]) == (("overlap_score_credit",), 0.5)
    assert (routing.config["ttl_s"], routing.config["decode_active_request_weight"]) == (120.0, 2.0)
    assert routing.candidates[0].taint_factor == pytest.approx(0.467, abs=0.001)
    assert [one.seen.assumed_overlap for one in routing.candidates] == [8, 0]
    assert "taint factor" in routing.why


async def test_preferred_taints_multiply_each_part_of_a_cost() -> None:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", 0, taints=("fast",)))
    made("fleet", joined("b", 1))
    routing = await routing_of(made, RoutingHints(preferred_taints=(TaintWeight(taint="fast", weight=1.0),)))
    assert routing.why == (
        "lowest cost of 2 candidates: 7.7, 8.8 less than b (4.53 less to prefill; 4.26 less of decode blocks; "
        "taint factor 0.467, against 1.000)"
    )


async def test_second_attempt_ignores_session_and_thresholds() -> None:
    """A retry is not bound by its session or by the busy thresholds."""
    made = fleet("a", "b", "c", session_ttl_s=600.0, busy=BusyThresholds(active_prefill_tokens_threshold=1))
    hints = RoutingHints(session_id="s", allowed_workers=("a", "b"))
    made("requests", request("r", LONG, routing=hints))
    home = made.world.requests.get("r")
    assert home is not None
    other = "b" if home.worker_id == "a" else "a"
    made("requests", request("x", SHORT, routing=RoutingHints(worker_id="c")))
    lost = WorkerLost(owner_epoch=0, worker_id=home.worker_id, worker_epoch=made.epoch(home.worker_id))
    made("fleet", lost)
    again = (await made.explain("r")).routings[1]
    assert (again.attempt, again.why) == (2, "it was the only candidate")
    assert again.candidates[0].seen.worker_id == other
    assert [(one.seen.worker_id, one.reasons) for one in again.left_out] == [("c", ("not_allowed",))]


async def test_pinned_rank_is_excluded_only_by_missing_requirements() -> None:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", dp_size=2))
    made("requests", request("r", SHORT, routing=RoutingHints(worker_id="a", rank=1, required_taints=("fast",))))
    explanation = await made.explain("r", custom=made.world.custom)
    assert [one.reasons for one in ending_of(explanation).left_out] == [
        ("not_pinned", "missing_taint"),
        ("missing_taint",),
    ]


async def test_sampling_probabilities_sum_to_one() -> None:
    made = fleet("a", "b", "c", temperature=0.7, predicted_ttl_s=1.0)
    made.stored("a", LONG)
    routing = await routing_of(made)
    chances = [one.probability for one in routing.candidates]
    assert sum(chances) == pytest.approx(1.0)
    assert chances[0] > chances[1] == chances[2]
    assert routing.config["predicted_ttl_s"] == 1.0


async def test_full_ranks_are_reported_with_values_and_end_of_wait() -> None:
    made = fleet("a", "b", queue=QueueConfig(run_ahead=0.0, timeout_s=0.5))
    for at in range(15):
        made("requests", request(f"x{at}", SHORT))
    free = next(name for name in "ab" if made.world.load.rank_load(name, 0).active_requests < 8)
    full = "b" if free == "a" else "a"
    made("requests", request("r", SHORT))
    made("requests", request("late", SHORT))
    made.wait(500_000)
    explanation = await made.explain("r", custom=made.world.custom)
    assert explanation.routings[0].config["queue_run_ahead"] == 0.0
    assert [(one.seen.worker_id, one.reasons) for one in explanation.routings[0].left_out] == [(full, ("full",))]
    assert explanation.routings[0].left_out[0].text == "it is full: 8 active requests, maximum 8"
    late = await made.explain("late")
    assert "the least loaded rank, is full with 8 active requests; " in late.timeline[1].text
    assert (late.state, ending_of(late).reason) == ("aborted", "queue_timeout")


async def test_rank_with_waiting_engine_requests_is_full() -> None:
    made = fleet("a", "b", queue=QueueConfig(run_ahead=0.0))
    for at in range(6):
        made("requests", request(f"x{at}", SHORT, routing=RoutingHints(worker_id="a")))
    epoch = made.epoch("a")
    report = LoadReported(worker_id="a", worker_epoch=epoch, running=4, waiting=2, kv_blocks_used=1, kv_blocks_total=64)
    made("metrics", report)
    made("requests", request("r", SHORT))
    explanation = await made.explain("r", custom=made.world.custom)
    assert [one.text for one in explanation.routings[0].left_out] == [
        "it is full: 2 requests wait in its engine, maximum 0"
    ]
