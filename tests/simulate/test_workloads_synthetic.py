"""Synthetic workloads follow their settings, are reproducible and are generated incrementally."""

import math
import random
import statistics
import tracemalloc
from hashlib import sha256
from itertools import islice, pairwise

import msgspec
import pytest

from forebay.cli.simulate.workload import workload_statistics
from forebay.runtime.errors import ConfigError
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, WorkloadOptions
from forebay.simulate.workloads.source import RowErrors
from forebay.simulate.workloads.synthetic import (
    Lengths,
    Synthetic,
    bursty,
    diurnal,
    exp,
    exponential,
    normal,
    poisson,
    wave,
)

SEED = 5
ALL = "synthetic:arrivals=bursty,cv=2,rate=9,requests=3000,prompt=300/2500,output=40/300,groups=7,depth=3,branches=3,"
ALL += "prefix=200/900,popularity=zipf,turns=4/15,think_s=3/20,context=6000"


def turns(name: str, **options: int) -> list[Turn]:
    return list(open_workload(name, WorkloadOptions(**options)).turns())  # type: ignore[arg-type]


def gaps_s(at_us: list[int]) -> list[float]:
    return [(b - a) / 1e6 for a, b in pairwise([0, *at_us])]


def test_draws_follow_their_named_distribution() -> None:
    rng = random.Random(SEED)
    one = [exponential(rng) for _ in range(40_000)]
    assert statistics.fmean(one) == pytest.approx(1, rel=0.02)
    assert statistics.pstdev(one) == pytest.approx(1, rel=0.03)
    assert sum(value > 3 for value in one) / len(one) == pytest.approx(math.exp(-3), rel=0.08)
    other = [normal(rng) for _ in range(40_000)]
    assert statistics.fmean(other) == pytest.approx(0, abs=0.02)
    assert statistics.pstdev(other) == pytest.approx(1, rel=0.02)
    assert sum(value > 1.96 for value in other) / len(other) == pytest.approx(0.025, rel=0.1)
    for power in (-30.0, -1.3, -0.2, 0.0, 0.34657, 1.0, 9.9, 40.0):
        assert exp(power) == pytest.approx(math.exp(power), rel=1e-14)


@pytest.mark.parametrize(("mean", "p99"), [(1000, 8000), (200, 250), (3, 40)])
def test_a_lognormal_length_has_its_mean_and_its_99th_percentile(mean: float, p99: float) -> None:
    rng, lengths = random.Random(SEED), Lengths(mean, p99)
    drawn = sorted(lengths.draw(rng) for _ in range(40_000))
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.06)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(p99, rel=0.08)


def test_arrivals_have_the_configured_rate_and_variation() -> None:
    steady = gaps_s(list(islice(poisson(random.Random(SEED), 4.0), 40_000)))
    assert statistics.fmean(steady) == pytest.approx(0.25, rel=0.02)
    assert statistics.pstdev(steady) / statistics.fmean(steady) == pytest.approx(1, rel=0.03)
    for cv in (1.0, 2.0, 5.0):
        gaps = gaps_s(list(islice(bursty(random.Random(SEED), 4.0, cv), 60_000)))
        assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.06)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)
    at_us = list(islice(diurnal(random.Random(SEED), 10.0, 1_000.0, 0.9), 40_000))
    assert at_us[-1] / 1e6 == pytest.approx(4_000, rel=0.03)
    phases = [(at % 1_000_000_000) / 1e9 for at in at_us]
    busy, quiet = (sum(start <= phase < start + 0.1 for phase in phases) for start in (0.2, 0.7))
    assert busy / quiet == pytest.approx((1 + 0.9 * 0.9867) / (1 - 0.9 * 0.9867), rel=0.3)
    assert [wave(phase) for phase in (0, 0.25, 0.5, 0.75)] == [0, 1, 0, -1]
    assert statistics.fmean(wave(at / 1_000) for at in range(1_000)) == pytest.approx(0, abs=1e-9)


def test_the_same_seed_gives_the_same_requests_on_every_machine() -> None:
    found = turns(ALL, seed=SEED)
    digest = sha256(msgspec.json.encode(found)).hexdigest()
    assert digest[:16] == "06f73376b2908370", "every bit of it is defined: this is no matter of libraries or machines"
    assert turns(ALL, seed=SEED) == found != turns(ALL, seed=SEED + 1)


def test_lengths_have_a_separate_random_stream() -> None:
    plain, long = (turns(f"synthetic:groups=4,prompt={prompt}", seed=SEED) for prompt in ("100", "900/2000"))
    assert [turn.at_us for turn in plain] == [turn.at_us for turn in long]
    assert [turn.block_ids[:32] for turn in plain] == [turn.block_ids[:32] for turn in long]


def test_a_session_grows_by_responses_and_new_text() -> None:
    found = turns("synthetic:turns=3,prompt=100,output=50,think_s=2,requests=8,rate=1,groups=2,prefix=128", seed=SEED)
    assert [turn.prompt_tokens - 128 for turn in found] == [100, 250, 400, 100, 250, 400, 100, 250]
    assert [turn.after for turn in found] == [(), (0,), (1,), (), (3,), (4,), (), (6,)]
    assert [turn.delay_us for turn in found] == [0, 2_000_000, 2_000_000] * 2 + [0, 2_000_000]
    assert [turn.session_id for turn in found] == ["s0"] * 3 + ["s1"] * 3 + ["s2"] * 2
    for before, turn in pairwise(found):
        if turn.after:
            assert turn.block_ids[: len(before.block_ids)] == before.block_ids
            assert turn.at_us == 0
    # The prefix has two whole blocks, shared within a group. The rest belongs to the session.
    assert len({turn.block_ids[:2] for turn in found}) == 2
    assert len({turn.block_ids[2] for turn in found}) == 3


def test_a_prefix_tree_has_the_configured_levels_and_popularity() -> None:
    text = "synthetic:groups=5,depth=3,branches=2,prefix=64,prompt=10,requests=4000"
    levels = [{turn.block_ids[: depth + 1] for turn in turns(text, seed=SEED)} for depth in range(4)]
    assert [len(level) for level in levels] == [5, 10, 20, 4_000]
    first: dict[int, int] = {}
    for turn in turns(f"{text},popularity=zipf", seed=SEED):
        first[turn.block_ids[0]] = first.get(turn.block_ids[0], 0) + 1
    most = sorted(first.values(), reverse=True)
    assert [count / 4_000 for count in most] == pytest.approx([60 / 137 / (at + 1) for at in range(5)], rel=0.15)


def test_a_session_ends_before_its_context_is_full() -> None:
    found = turns("synthetic:turns=50,prompt=1000,output=100,context=5000,requests=40", seed=SEED)
    assert max(turn.prompt_tokens + turn.output_tokens for turn in found) <= 5_000
    assert sum(not turn.after for turn in found) == 10
    [one] = turns("synthetic:prompt=9000,output=8000,context=5000,requests=1", seed=SEED)
    assert (one.prompt_tokens, one.output_tokens) == (1, 4_999)


def test_statistics_of_a_synthetic_workload_match_its_settings() -> None:
    text = "synthetic:rate=5,requests=6000,prompt=500/3000,output=100/400,groups=3,prefix=1024"
    found = workload_statistics(turns(text, seed=SEED), 64)
    assert found.rate_per_s == pytest.approx(5, rel=0.05)
    assert found.prompt_tokens["mean"] == pytest.approx(1_524, rel=0.05)
    assert found.output_tokens["p99"] == pytest.approx(400, rel=0.1)
    assert found.ideal_reuse.tokens == pytest.approx(1_024 / 1_524, rel=0.05)
    assert (found.requests, found.own_times) == (6_000, 6_000)


def test_ended_sessions_use_no_memory() -> None:
    coming = Synthetic("requests=1000000000,turns=3,groups=10,prompt=500/3000", SEED).turns(RowErrors(skip=False))
    for _ in islice(coming, 500):
        pass
    tracemalloc.start()
    try:
        for _ in islice(coming, 100):
            pass
        before = tracemalloc.get_traced_memory()[0]
        for _ in islice(coming, 5_000):
            pass
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("rate=0", "rate=0: Expected `float` > 0.0$"),
        ("rate=nan", "rate"),
        ("requests=x", "requests=x: Expected `int`, got `str`$"),
        ("speed=2", "unknown setting 'speed'; settings are: "),
        ("rate", "expected setting=value, got 'rate'"),
        ("rate=1,rate=2", "duplicate setting 'rate=2'"),
        ("arrivals=weekly", "arrivals=weekly: expected one of poisson, bursty, diurnal$"),
        ("popularity=even", "popularity=even: expected one of uniform, zipf$"),
        ("prompt=100/50", "prompt=100/50: expected a finite mean, and a 99th percentile at or above it"),
        ("prompt=1/20", "no lognormal distribution"),
        ("prompt=-5", "prompt=-5"),
        ("output=inf", "output=inf"),
        ("turns=many", "turns=many"),
        ("cv=0.5,arrivals=bursty", "cv"),
        ("context=1", "context"),
        ("period_s=0.0000001,arrivals=diurnal", "period_s"),
        ("think_s=1e300", "think_s=1e300: beyond 1e\\+12"),
        ("rate=0.0000000001,requests=100", "more than 100 years"),
    ],
)
def test_invalid_settings_are_rejected(settings: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"synthetic:.*{reason}"):
        turns(f"synthetic:{settings}")


def test_total_think_time_is_bounded_by_100_years() -> None:
    name = "synthetic:think_s=1e11,turns=4000,requests=4000,prompt=1,output=1"  # more than 64 bits of microseconds
    found = workload_statistics(iter(turns(name)), 64)
    assert found.delay_s["max"] == 3_155_760_000
    assert len(turns(name, duration_s=1)) == 1
