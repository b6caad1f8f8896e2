"""Messages between simulated components take seeded delays and keep their order."""

import hashlib
import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.delays import Draws, Hop, exponential
from forebay.simulate.outcome import SimulationOutcome
from forebay.simulate.settings import DELAYS, Delay, Delays, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.workload import Turn
from tests.simulate.fleets import Turns, fleet, turn
from tests.simulate.policies import CUSTOM

S = 1_000_000
PROMPT = 640
SAME = tuple(range(1, 11))


def run(delays: Delays, *turns: Turn, router: str = "kv", workers: int = 2) -> SimulationOutcome:
    return Simulation(fleet(workers, delays=delays), policy(router), CUSTOM).run(Turns(*turns), lambda _: None)


def test_draws_are_exponentially_distributed() -> None:
    draws = Draws(7, "x")
    values = sorted(draws.next(1_000_000) for _ in range(40_000))
    assert statistics.fmean(values) == pytest.approx(1e6, rel=0.02)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert values[int(share * len(values))] == pytest.approx(-math.log(1 - share) * 1e6, rel=0.05)


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
    hop = Hop(Delay(fixed_us=fixed, jitter_us=jitter), 0, "a")
    times = list(itertools.accumulate(sent))
    arrived = [hop.arrives(now_us) for now_us in times]
    assert arrived == sorted(arrived)
    assert all(at_us >= now_us + fixed for at_us, now_us in zip(arrived, times, strict=True))


def test_latency_includes_every_hop_of_a_request() -> None:
    delays = Delays(submit=Delay(fixed_us=1_000), work=Delay(fixed_us=200), tokens=Delay(fixed_us=30))
    [one] = run(delays, turn(0, PROMPT, 3, at_us=S)).requests
    assert one.arrived_us == S
    assert one.first_us == S + 1_230 + prefill_us(PROMPT)
    assert one.last_us == one.first_us + 2 * decode_us(11, 16_384)


def test_a_rejection_includes_every_hop() -> None:
    delays = Delays(submit=Delay(fixed_us=1_000), work=Delay(fixed_us=200), tokens=Delay(fixed_us=30))
    follower = turn(1, after=(0,), delay_us=5)
    rejected, after = run(delays, turn(0, 16_385 * 64), follower).requests
    assert "need 16386 KV blocks" in rejected.failure
    assert after.arrived_us == 1_000 + 200 + 30 + 5


def test_kv_events_reach_the_index_after_their_delay() -> None:
    turns = [turn(number, PROMPT, at_us=number * S, block_ids=SAME) for number in range(3)]
    at_once, later = (
        [decision.terms.device_overlap for decision in run(delays, *turns, workers=1).routed.values()]
        for delays in (Delays(), Delays(kv_events=Delay(fixed_us=1_500_000)))
    )
    assert (at_once, later) == ([0, 10, 10], [0, 0, 10])


def test_routed_load_falls_when_progress_is_received() -> None:
    # As long as the first prompt counts as pending, the second request goes to the other worker.
    turns = [turn(0, PROMPT, 1, block_ids=SAME), turn(1, PROMPT, 1, at_us=S, block_ids=SAME)]
    for delay_us, workers in ((0, 1), (2 * S, 2)):
        found = run(Delays(progress=Delay(fixed_us=delay_us)), *turns).requests
        assert len({one.worker for one in found}) == workers


def test_load_reports_are_delayed() -> None:
    def workers(delays: Delays) -> list[int | None]:
        turns = [turn(0, 1_024, 200), turn(1, 64, at_us=S // 2), turn(2, 64, at_us=9 * S)]
        return [one.worker for one in run(delays, *turns, router="tests.simulate.policies.LeastUsed").requests]

    assert workers(Delays()) == [0, 1, 0]
    assert workers(Delays(metrics=Delay(fixed_us=S))) == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(DELAYS))
def test_measured_delays_match_the_configured_ones(name: str) -> None:
    turns = [turn(number, 408, at_us=number * S) for number in range(2_000)]
    found = run(DELAYS[name], *turns, workers=4).requests
    extra_ms = sorted((one.first_us - one.arrived_us - prefill_us(408)) / 1e3 for one in found)
    # TTFT at one connection, as measured with zero-latency engines.
    assert extra_ms[1_000] == pytest.approx({"none": 0.0, "embedded": 1.37, "kafka": 9.0}[name], abs=0.5)


def test_a_run_lasts_until_the_last_response_is_received() -> None:
    slow = Delays(tokens=Delay(jitter_us=S))
    turns = [turn(number, at_us=number * 10_000) for number in range(20)]
    outcome = run(slow, *turns, workers=20, router="round-robin")
    last_us = [one.last_us for one in outcome.requests]
    assert outcome.lasted_us == max(last_us) > last_us[-1]


def test_other_seeds_draw_other_delays() -> None:
    turns = [turn(number, 408, at_us=number * S) for number in range(20)]
    runs = [
        Simulation(fleet(1, delays=DELAYS["kafka"], seed=seed), policy("kv")).run(Turns(*turns), lambda _: None)
        for seed in (0, 0, 1)
    ]
    assert list(runs[0].requests) == list(runs[1].requests) != list(runs[2].requests)
