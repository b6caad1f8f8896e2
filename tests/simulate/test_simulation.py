"""Simulated latencies match hand-computed values, and runs are reproducible."""

from dataclasses import replace
from typing import Any

import pytest

from forebay.core.routing.policies import BUILT_IN
from forebay.engine_model.timing import decode_us, prefill_us
from forebay.events.base import unpack_u64
from forebay.events.control import QueueClass, QueueConfig, RouterConfig
from forebay.simulate.outcome import FAILURES_SHOWN, SimulationOutcome, summary
from forebay.simulate.rank import LOAD_INTERVAL_US
from forebay.simulate.settings import PolicySpecUnusable, engine_config, one_pool, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.workload import sequence_hashes
from forebay.simulate.workloads.rows import BLOCK_TOKENS, MooncakeRow
from tests.simulate.policies import CUSTOM
from tests.simulate.traces import Rows, conversations, turn_of


def simulated(
    trace: list[MooncakeRow], policy_name: str = "kv", workers: int = 3, speed: float = 1.0, seed: int = 0, **sizes: Any
) -> SimulationOutcome:
    chosen = one_pool(workers, engine_config(**sizes), seed=seed)
    return Simulation(chosen, policy(policy_name), CUSTOM).run(Rows(trace, speed), lambda _: None)


def metrics(trace: list[MooncakeRow], policy_name: str = "kv", **settings: Any) -> dict[str, Any]:
    return summary(simulated(trace, policy_name, **settings), settings.get("workers", 3))


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    tokens, outputs = 10_000, 3
    [served] = simulated([MooncakeRow(7.0, tokens, outputs, list(range(20)))]).requests
    first_us = prefill_us(8192) + prefill_us(tokens - 8192)
    assert served.arrived_us == 7_000
    assert served.first_us - served.arrived_us == first_us
    assert served.last_us - served.first_us == (outputs - 1) * decode_us(157, 16_384)


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    early, late = simulated([MooncakeRow(0, 64, 2, [1]), MooncakeRow(1, 64, 1, [2])], workers=1).requests
    assert early.first_us == prefill_us(64)
    assert late.first_us == early.first_us + prefill_us(64) + decode_us(2, 16_384) == early.last_us


def test_simultaneous_requests_share_a_step_in_trace_order() -> None:
    trace = [MooncakeRow(5, 512, 1, [number]) for number in range(4)]
    outcome = simulated(trace, "round-robin", workers=2)
    assert [served.worker for served in outcome.requests] == [0, 1, 0, 1]
    assert {served.first_us for served in outcome.requests} == {5_000 + prefill_us(1024)}


def test_a_queue_of_oversized_requests_drains() -> None:
    number = 1_000
    trace = [MooncakeRow(0, 512, 1, [0]), *(MooncakeRow(1, 64 * 16 + 1, 1, [at, at, at]) for at in range(number))]
    queue = QueueConfig(threshold=0.01, classes=(QueueClass(requests_per_worker_max=number),))
    simulation = Simulation(one_pool(1, engine_config(kv_blocks=16)), RouterConfig(queue=queue))
    outcome = simulation.run(Rows(trace), lambda _: None)
    assert [bool(served.failure) for served in outcome.requests] == [False] + [True] * number


def test_speed_divides_arrival_times() -> None:
    outcome = simulated([MooncakeRow(0, 64, 1, [1]), MooncakeRow(1000, 64, 1, [2])], speed=4.0)
    assert [served.arrived_us for served in outcome.requests] == [0, 250_000]


def test_reuse_matches_an_unbounded_cache_for_sequential_requests() -> None:
    trace = conversations(sessions=3, turns=4, every_ms=60_000)
    held: set[int] = set()
    expected = []
    for row in trace:
        # Simultaneous requests are admitted together: the second matches the blocks that the first computes.
        blocks = unpack_u64(sequence_hashes(turn_of(row, 0), BLOCK_TOKENS, 64))
        hashes = blocks[: (row.input_length - 1) // 64]
        expected.append(64 * next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes)))
        held.update(blocks)
    outcome = simulated(trace, workers=1)
    assert [served.cached_tokens for served in outcome.requests] == expected
    assert 0 < sum(expected) < sum(row.input_length for row in trace)


def test_every_request_completes_and_is_counted_once() -> None:
    trace = conversations(sessions=8, turns=6)
    for name in ("kv", "round-robin"):
        one = metrics(trace, name, kv_blocks=400)
        assert (one["requests"], one["failed"]) == (len(trace), 0)
        assert one["output_tokens"] == sum(row.output_length for row in trace)
        computed = sum(worker["computed_tokens"] for worker in one["workers"])
        assert computed == pytest.approx(one["prompt_tokens"] * (1 - one["prefix_reuse"]))
        assert sum(worker["requests"] for worker in one["workers"]) == len(trace)
        most = max(worker["computed_tokens"] for worker in one["workers"])
        assert one["load_max_over_mean"] == pytest.approx(most * 3 / computed)
        for key in ("ttft_ms", "itl_ms", "e2e_ms"):
            assert 0 < one[key]["p50"] <= one[key]["p90"] <= one[key]["p99"]


def test_the_kv_policy_reuses_more_and_has_lower_ttft() -> None:
    trace = conversations(sessions=8, turns=6)
    kv, turns = metrics(trace), metrics(trace, "round-robin")
    assert kv["prefix_reuse"] > 1.5 * turns["prefix_reuse"]
    assert kv["ttft_ms"]["mean"] < turns["ttft_ms"]["mean"]


def test_digest_is_reproducible_and_depends_on_the_seed() -> None:
    trace = conversations(sessions=4, turns=4)
    assert len({simulated(trace).digest for _ in range(10)}) == 1
    assert len({simulated(trace, seed=seed).digest for seed in range(3)}) == 3


def test_an_oversized_request_fails_without_affecting_others() -> None:
    trace = conversations(sessions=4, turns=3)
    giant = MooncakeRow(trace[5].timestamp, 40 * 512, 9, list(range(9_000, 9_040)))
    with_giant = [*trace[:6], giant, *trace[6:]]
    outcome = simulated(with_giant, "round-robin", workers=1, kv_blocks=300)
    alone = simulated(trace, "round-robin", workers=1, kv_blocks=300)
    others = [served for at, served in enumerate(outcome.requests) if at != 6]
    assert [replace(served, number=at) for at, served in enumerate(others)] == list(alone.requests)
    [failure] = summary(outcome, 1)["failures"]
    assert failure["request"] == 7
    assert "need 321 KV blocks of 64 tokens, but the engine has 300" in failure["reason"]


def test_all_failures_are_counted_but_few_are_listed() -> None:
    trace = [MooncakeRow(at, 1024, 1, [at, at + 1]) for at in range(FAILURES_SHOWN + 5)]
    one = metrics(trace, kv_blocks=4)
    assert (one["requests"], one["failed"], len(one["failures"])) == (0, FAILURES_SHOWN + 5, FAILURES_SHOWN)
    assert (one["prefix_reuse"], one["load_max_over_mean"], one["ttft_ms"]) == (0.0, 0.0, {})


def test_more_workers_than_requests() -> None:
    one = metrics([MooncakeRow(0, 64, 1, [1])], workers=40)
    assert one["load_max_over_mean"] == 40
    assert one["itl_ms"] == {}, "one token has no gap"


def test_settings_of_a_policy_change_its_decisions() -> None:
    trace = conversations(sessions=6, turns=4)
    digests = [simulated(trace, name).digest for name in ("kv", "kv:temperature=0.9", "kv:overlap_score_credit=0")]
    assert len(set(digests)) == 3
    weighted = policy("kv:temperature=0.5,track_output_blocks=true")
    assert (weighted.mode, weighted.temperature, weighted.track_output_blocks) == ("kv", 0.5, True)


@pytest.mark.parametrize(
    "name",
    [
        *sorted(set(BUILT_IN) - {"direct"}),
        "tests.simulate.policies.LeastUsed",
        "kv:queue.threshold=0.5,queue.policy=wspt",
        "kv:session_ttl_s=5,predicted_ttl_s=1,track_output_blocks=true",
        "least-loaded:use_kv_events=false,ttl_s=1",
    ],
)
def test_every_policy_is_deterministic(name: str) -> None:
    trace = conversations(sessions=6, turns=4, every_ms=20)
    once, again = simulated(trace, name), simulated(trace, name)
    assert (list(once.requests), once.digest) == (list(again.requests), again.digest)
    assert [served.failure for served in once.requests] == [""] * len(trace)
    assert len({served.worker for served in once.requests}) == 3


def test_queued_request_is_dispatched_when_a_prefill_ends() -> None:
    trace = [MooncakeRow(0, 64, 1, [number]) for number in range(3)]
    together = simulated(trace, "kv", workers=1)
    assert {served.first_us for served in together.requests} == {prefill_us(3 * 64)}
    one_by_one = simulated(trace, "kv:queue.threshold=0", workers=1)
    assert [served.first_us for served in one_by_one.requests] == [prefill_us(64) * turn for turn in (1, 2, 3)]


def test_policy_sees_load_reports() -> None:
    trace = [MooncakeRow(0, 1024, 200, [1, 2]), MooncakeRow(500, 64, 1, [3]), MooncakeRow(9_000, 64, 1, [4])]
    outcome = simulated(trace, "tests.simulate.policies.LeastUsed", workers=2)
    assert [served.worker for served in outcome.requests] == [0, 1, 0]


def test_workers_that_report_many_used_blocks_are_busy_until_they_report_fewer() -> None:
    # The second and third requests wait for the first prompt. The second then uses a third of the blocks.
    trace = [
        MooncakeRow(0, 640, 2_000, [1, 2]),
        MooncakeRow(0, 20_000, 2, list(range(10, 50))),
        MooncakeRow(0, 64, 1, [3]),
    ]
    policy_name = "kv:queue.threshold=0,busy.active_decode_blocks_threshold=0.3"
    first, second, third = simulated(trace, policy_name, workers=1, kv_blocks=1_000).requests
    assert not first.failure + second.failure + third.failure
    assert third.first_us > second.last_us + prefill_us(64) + 2 * decode_us(400, 1_000)
    assert third.first_us < second.last_us + prefill_us(64) + 2 * decode_us(400, 1_000) + LOAD_INTERVAL_US


def test_a_request_is_rejected_when_every_worker_is_busy() -> None:
    trace = [MooncakeRow(0, 6_400, 2, list(range(13))), MooncakeRow(1, 64, 1, [90]), MooncakeRow(60_000, 64, 1, [91])]
    name = "kv:busy.active_prefill_tokens_threshold=6000"
    failures = [served.failure for served in simulated(trace, name, workers=1).requests]
    assert failures == ["", "every eligible worker of the pool default is busy", ""]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kw", "unknown router mode 'kw'; router modes are: kv, round-robin"),
        ("direct", "'direct' cannot be simulated: the requests of a workload name no workers"),
        ("kv:queue.size=1", "unknown setting 'queue.size'"),
        ("kv:queue.threshold=-1", "threshold"),
        ("kv:queue.classes=x", "queue.classes"),
        ("kv:busy=1", "busy"),
        ("kv:warmth=1", "unknown setting 'warmth'; settings are: selection_policy, overlap_score_credit, "),
        ("kv:temperatures=0.3", "unknown setting 'temperatures'; did you mean temperature[?]$"),
        ("kv:classes=1", "; did you mean queue.classes[?]$"),
        ("mine.py:Policy", "'mine.py:Policy': give a class as a dotted path, as in module.Class, not as a file$"),
        ("kv:temperature", "expected setting=value, got 'temperature'"),
        ("kv:mode=random", "unknown setting 'mode'"),
        ("kv:temperature=-1", "temperature"),
        ("kv:temperature=warm", "temperature"),
        ("kv:temperature=nan", "temperature"),
        ("kv:disagg.policy=rarely", "': disagg.policy: must be one of always, classic, isl_bounding, "),
        ("kv:disagg.enforce=maybe", "': disagg.enforce: must be true or false$"),
        ("kv:disagg.max_local_prefill_length=-1", "max_local_prefill_length: must be a whole number of at least 0$"),
    ],
)
def test_error_names_an_unknown_policy(name: str, reason: str) -> None:
    with pytest.raises(PolicySpecUnusable, match=reason):
        policy(name)


def test_a_long_queue_of_oversized_requests_fails_one_by_one() -> None:
    giants = [MooncakeRow(0, 1_024, 1, [2 * at, 2 * at + 1]) for at in range(1, 800)]
    one = metrics([MooncakeRow(0, 64, 1, [0]), *giants], "kv:queue.threshold=0", workers=1, kv_blocks=4)
    assert (one["requests"], one["failed"]) == (1, len(giants))
