"""Simulated latencies match hand-computed values, runs are reproducible, and messages take seeded delays."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineLoad, EngineModel
from forebay.engine_model.timing import decode_us, prefill_us
from forebay.events.control import QueueClass, QueueConfig, RouterConfig
from forebay.runtime.errors import ConfigError
from forebay.simulate.delays import Draws, Hop, exponential
from forebay.simulate.outcome import FAILURES_SHOWN, RequestOutcome, SimulationOutcome, UtilizationTimeline, summary
from forebay.simulate.rank import LOAD_INTERVAL_US, EngineRank
from forebay.simulate.settings import DELAYS, Delays, Settings, engine_config, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.timeline import BINS_MAX, FIRST_BIN_US, Recorder
from forebay.simulate.workload import Survey, Turn
from forebay.simulate.workloads.rows import MooncakeRow
from tests.core.worlds import spec
from tests.simulate.scene import CUSTOM, conversations, fleet, latency, one_pool, played, routed, run, served, turn


def simulated(
    trace: list[MooncakeRow], policy_name: str = "kv", workers: int = 3, speed: float = 1.0, seed: int = 0, **sizes: Any
) -> SimulationOutcome:
    chosen = one_pool(workers, engine_config(**sizes), seed=seed)
    return Simulation(chosen, policy(policy_name), CUSTOM).run(played(trace, speed), lambda _: None)


def metrics(trace: list[MooncakeRow], policy_name: str = "kv", **settings: Any) -> dict[str, Any]:
    return summary(simulated(trace, policy_name, **settings), settings.get("workers", 3))


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
    outcome = simulation.run(played(trace), lambda _: None)
    assert [bool(served.failure) for served in outcome.requests] == [False] + [True] * number


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


def test_queued_request_is_dispatched_when_a_prefill_ends() -> None:
    trace = [MooncakeRow(0, 64, 1, [number]) for number in range(3)]
    together = simulated(trace, "kv", workers=1)
    assert {served.first_us for served in together.requests} == {prefill_us(3 * 64)}
    one_by_one = simulated(trace, "kv:queue.threshold=0", workers=1)
    assert [served.first_us for served in one_by_one.requests] == [prefill_us(64) * turn for turn in (1, 2, 3)]


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
    with pytest.raises(ConfigError, match=reason):
        policy(name)


# Arrivals after the responses that a turn depends on


S = 1_000_000


def by_number(system: Settings, *turns: Turn) -> dict[int, RequestOutcome]:
    return {one.number: one for one in served(system, *turns, router="round-robin")}


def test_a_turn_arrives_its_think_time_after_its_dependency() -> None:
    found = by_number(fleet(), turn(0), turn(1, after=(0,), delay_us=S), turn(2, after=(1,)), turn(3, at_us=9 * S))
    assert found[1].arrived_us == found[0].last_us + S
    assert found[2].arrived_us == found[1].last_us


def test_a_turn_arrives_after_all_dependencies_and_not_before_its_own_time() -> None:
    both, late = turn(2, after=(0, 1), delay_us=7), turn(3, after=(0,), at_us=5 * S)
    found = by_number(fleet(), turn(0), turn(1, output=50), both, late)
    assert found[1].last_us > found[0].last_us
    assert found[2].arrived_us == found[1].last_us + 7
    assert found[3].arrived_us == 5 * S


def test_dependent_request_arrives_after_a_failed_dependency() -> None:
    found = by_number(fleet(), turn(0, 16_385 * 64, at_us=S), turn(1, after=(0,), delay_us=4))
    assert (bool(found[0].failure), found[1].failure, found[1].arrived_us) == (True, "", S + 4)


def test_a_turn_read_after_its_dependency_completed_counts_from_the_completion() -> None:
    found = by_number(fleet(), turn(0), turn(1, at_us=S), turn(2, after=(0,), delay_us=30 * S), turn(3, at_us=2 * S))
    assert found[2].arrived_us == found[0].last_us + 30 * S


def test_a_turn_read_too_late_arrives_at_once() -> None:
    found = by_number(fleet(), turn(0), turn(1, at_us=9 * S), turn(2, after=(0,)), turn(3, at_us=9 * S))
    assert [one.arrived_us for one in found.values()] == [0, 9 * S, 9 * S, 9 * S]


def test_simultaneous_turns_arrive_in_file_order() -> None:
    answer_us = prefill_us(64)
    turns = turn(0), turn(1, after=(0,), delay_us=S - answer_us), turn(2, at_us=S), turn(3, after=(0,), at_us=S)
    assert [(one.number, one.arrived_us) for one in served(fleet(), *turns)] == [(0, 0), (1, S), (2, S), (3, S)]


def test_engine_steps_end_before_dependent_arrivals() -> None:
    # Both start decoding together. The turn that depends on the short response goes to the engine of the long one.
    found = by_number(fleet(), turn(0, output=60), turn(1, output=2), turn(2, after=(1,)))
    assert found[2].worker == 0
    decode, prefill = decode_us(2, 16_384), prefill_us(64)
    assert found[2].arrived_us == found[1].last_us == prefill + decode
    assert found[2].first_us == prefill + decode + prefill + decode


def test_error_names_turn_with_missing_dependency() -> None:
    with pytest.raises(ConfigError, match="request 1 depends on request 7, which does not come before it"):
        by_number(fleet(), turn(0), turn(1, after=(7,)))


class Sessions:
    """Sessions of three turns each. Counts the turns that were read and have not arrived yet."""

    name, block_tokens = "sessions", 64

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self.read = self.arrived = self.ahead = 0

    def survey(self) -> Survey:
        return Survey(requests=self._sessions * 3)

    def turns(self) -> Iterator[Turn]:
        for number in range(0, self._sessions * 3, 3):
            yield self._one(turn(number, at_us=number * S))
            yield self._one(turn(number + 1, after=(number,), delay_us=S // 2))
            yield self._one(turn(number + 2, after=(number + 1,), delay_us=S // 2))

    def on_arrived(self, arrived: int) -> None:
        self.arrived = arrived

    def _one(self, one: Turn) -> Turn:
        self.read += 1
        self.ahead = max(self.ahead, self.read - self.arrived)
        return one


def test_a_workload_is_read_incrementally() -> None:
    sessions = Sessions(200)
    outcome = Simulation(fleet(), policy("kv")).run(sessions, sessions.on_arrived)
    assert len(outcome.requests) == 600
    assert sessions.ahead <= 4


# Delays of messages


PROMPT = 640
SAME = tuple(range(1, 11))


def delayed(delays: Delays, *turns: Turn, router: str = "kv", workers: int = 2) -> SimulationOutcome:
    return run(fleet(workers, delays=delays), *turns, router=router)


def test_draws_are_the_same_on_every_machine() -> None:
    draws = Draws(7, "x")
    text = " ".join(str(draws.next(1_000_000)) for _ in range(1_000))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "04f177767d9b4a86"


@given(draw=st.integers(0, (1 << 64) - 1), mean=st.integers(0, 10**12))
def test_a_draw_is_the_logarithm_of_its_bits(draw: int, mean: int) -> None:
    rest, step = draw & ((1 << 54) - 1), draw >> 54
    uniform = 2.0 ** (rest.bit_length() - 55) * (1 + (step + 0.5) / 1024)
    assert exponential(draw, mean) == pytest.approx(-math.log(uniform) * mean, rel=1e-6, abs=1)


def test_each_name_and_seed_has_its_own_draws() -> None:
    draws = [Draws(seed, name) for seed, name in ((0, "a"), (0, "b"), (1, "a"))]
    assert len({tuple(one.next(1_000_000) for _ in range(3)) for one in draws}) == 3


@given(sent=st.lists(st.integers(0, 5_000), max_size=30), fixed=st.integers(0, 9_000), jitter=st.integers(0, 9_000))
def test_records_of_a_hop_never_overtake_each_other(sent: list[int], fixed: int, jitter: int) -> None:
    hop = Hop(latency(fixed_us=fixed, jitter_us=jitter), 0, "a")
    times = list(itertools.accumulate(sent))
    arrived = [hop.arrives(now_us) for now_us in times]
    assert arrived == sorted(arrived)
    assert all(at_us >= now_us + fixed for at_us, now_us in zip(arrived, times, strict=True))


def test_latency_includes_every_hop_of_a_request() -> None:
    delays = Delays(submit=latency(fixed_us=1_000), work=latency(fixed_us=200), tokens=latency(fixed_us=30))
    [one] = delayed(delays, turn(0, PROMPT, 3, at_us=S)).requests
    assert one.arrived_us == S
    assert one.first_us == S + 1_230 + prefill_us(PROMPT)
    assert one.last_us == one.first_us + 2 * decode_us(11, 16_384)


def test_a_rejection_includes_every_hop() -> None:
    delays = Delays(submit=latency(fixed_us=1_000), work=latency(fixed_us=200), tokens=latency(fixed_us=30))
    follower = turn(1, after=(0,), delay_us=5)
    rejected, after = delayed(delays, turn(0, 16_385 * 64), follower).requests
    assert "need 16386 KV blocks" in rejected.failure
    assert after.arrived_us == 1_000 + 200 + 30 + 5


def test_kv_events_reach_the_index_after_their_delay() -> None:
    turns = [turn(number, PROMPT, at_us=number * S, block_ids=SAME) for number in range(3)]
    at_once, later = (
        [decision.terms.device_overlap for decision in routed(fleet(1, delays=delays), *turns).values()]
        for delays in (Delays(), Delays(kv_events=latency(fixed_us=1_500_000)))
    )
    assert (at_once, later) == ([0, 10, 10], [0, 0, 10])


def test_routed_load_falls_when_progress_is_received() -> None:
    # As long as the first prompt counts as pending, the second request goes to the other worker.
    turns = [turn(0, PROMPT, 1, block_ids=SAME), turn(1, PROMPT, 1, at_us=S, block_ids=SAME)]
    for delay_us, workers in ((0, 1), (2 * S, 2)):
        found = delayed(Delays(progress=latency(fixed_us=delay_us)), *turns).requests
        assert len({one.worker for one in found}) == workers


def test_load_reports_are_delayed() -> None:
    def workers(delays: Delays) -> list[int | None]:
        turns = [turn(0, 1_024, 200), turn(1, 64, at_us=S // 2), turn(2, 64, at_us=9 * S)]
        return [one.worker for one in delayed(delays, *turns, router="tests.simulate.scene.LeastUsed").requests]

    assert workers(Delays()) == [0, 1, 0]
    assert workers(Delays(metrics=latency(fixed_us=S))) == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(DELAYS))
def test_measured_delays_match_the_configured_ones(name: str) -> None:
    turns = [turn(number, 408, at_us=number * S) for number in range(2_000)]
    found = delayed(DELAYS[name], *turns, workers=4).requests
    extra_ms = sorted((one.first_us - one.arrived_us - prefill_us(408)) / 1e3 for one in found)
    # TTFT at one connection, as measured with zero-latency engines.
    assert extra_ms[1_000] == pytest.approx({"none": 0.0, "embedded": 1.37, "kafka": 9.0}[name], abs=0.5)


def test_a_run_lasts_until_the_last_response_is_received() -> None:
    slow = Delays(tokens=latency(jitter_us=S))
    turns = [turn(number, at_us=number * 10_000) for number in range(20)]
    outcome = delayed(slow, *turns, workers=20, router="round-robin")
    last_us = [one.last_us for one in outcome.requests]
    assert outcome.lasted_us == max(last_us) > last_us[-1]


# Timelines


def ranks(count: int) -> list[EngineRank]:
    return [EngineRank(number, spec(f"w{number}"), 0, 0, EngineModel(engine_config())) for number in range(count)]


@given(gaps=st.lists(st.sampled_from([0, 3_000, 9_999, 10_000, 77_000, 5 * S, 300 * S]), max_size=120))
def test_bins_match_the_list_of_all_events(gaps: list[int]) -> None:
    recorder, [rank] = Recorder(), ranks(1)
    now_us = 0
    events: list[int] = []
    for number, gap_us in enumerate(gaps):
        now_us += gap_us
        if now_us >= recorder.end_us:
            recorder.advance(now_us, len(events), 1, {0: rank})
        recorder.arrived += 1
        recorder.count_prompt(0, number + 10, number)
        events.append(now_us)
        rank.load = EngineLoad(len(events), 0, 0, 1)
    found: UtilizationTimeline = recorder.end(len(events), 1, {0: rank})
    width = found.bin_us
    assert width % FIRST_BIN_US == 0
    assert len(found.arrived) == now_us // width + 1 <= BINS_MAX
    assert now_us >= BINS_MAX // 2 * width or width == FIRST_BIN_US
    places = [at_us // width for at_us in events]
    bins = range(len(found.arrived))
    assert found.arrived == [places.count(at) for at in bins]
    assert found.prompt_tokens == [sum(n + 10 for n, place in enumerate(places) if place == at) for at in bins]
    assert found.cached_tokens == [sum(number for number, place in enumerate(places) if place == at) for at in bins]
    assert found.computed == [[10 * count for count in found.arrived]]
    so_far = [sum(place <= at for place in places) for at in bins]
    assert (found.queued, found.running) == (so_far, [so_far])


def test_a_worker_is_idle_before_it_joins() -> None:
    recorder, both = Recorder(), ranks(2)
    recorder.advance(3 * FIRST_BIN_US, 0, 1, {0: both[0]})
    recorder.count_prompt(1, 5, 2)
    found = recorder.end(0, 2, dict(enumerate(both)))
    assert (found.computed, found.workers) == ([[0, 0, 0, 0], [0, 0, 0, 3]], [1, 1, 1, 2])


def test_timeline_of_a_run_shows_running_and_waiting_requests() -> None:
    turns = [turn(number, 6_400, 1_000, block_ids=tuple(range(100))) for number in range(4)]
    system = fleet(1, sizes={"max_num_seqs": 2})
    found = run(system, *turns).timeline
    assert sum(found.arrived) == 4
    assert sum(found.prompt_tokens) == 4 * 6_400
    assert sum(found.prompt_tokens) - sum(found.cached_tokens) == sum(found.computed[0])
    assert (max(found.running[0]), max(found.waiting[0])) == (2, 2)
    assert (found.running[0][-1], found.queued[-1]) == (0, 0)


def test_requests_held_by_the_router_are_shown() -> None:
    turns = [turn(number, 6_400) for number in range(4)]
    outcome = run(fleet(1), *turns, router="kv:queue.threshold=0")
    assert max(outcome.timeline.queued) == 3
