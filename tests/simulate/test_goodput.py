"""SLO attainment and goodput, the search for a capacity, and Pareto-optimal points."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.analysis.runs import DOUBLINGS_MAX, TOLERANCE, Capacity, SpeedTrial, search
from forebay.runtime.errors import ConfigError
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome
from forebay.simulate.pareto import costs, optimal
from forebay.simulate.slo import Slo, goodput, parse_slo, requests_per_s


def served(ttft_ms: float, itl_ms: float, output_tokens: int = 11, arrived_us: int = 0) -> RequestOutcome:
    first_us = arrived_us + round(ttft_ms * 1e3)
    last_us = first_us + round(itl_ms * 1e3 * (output_tokens - 1))
    return RequestOutcome(arrived_us, 100, output_tokens, worker=0, first_us=first_us, last_us=last_us)


def test_attainment_counts_failed_requests_as_missed() -> None:
    requests = [
        served(100, 10),  # meets both objectives, to the microsecond
        served(101, 10),
        served(100, 11),
        served(100, 0, output_tokens=1, arrived_us=900_000),  # a single token has no ITL
        RequestOutcome(1_000_000, 100, 5, failure="nobody was there"),
    ]
    found = goodput(SimulationOutcome(RequestOutcomes(requests)), Slo(ttft_ms=100, itl_ms=10))
    assert found == {
        "attained": 2 / 5,
        "attained_each": {"ttft": 3 / 5, "itl": 3 / 5},
        "goodput_per_s": 2.0,  # from 0 to 1 s
    }


def test_slo_with_only_e2e() -> None:
    requests = [served(100, 10), served(100, 11)]
    found = goodput(SimulationOutcome(RequestOutcomes(requests)), Slo(e2e_ms=200))
    assert (found["attained"], found["attained_each"]) == (0.5, {"e2e": 0.5})


def test_goodput_of_empty_and_failed_runs_is_zero() -> None:
    assert goodput(SimulationOutcome(), Slo(ttft_ms=1))["attained"] == 0.0
    refused = SimulationOutcome(RequestOutcomes([RequestOutcome(5_000, 1, 1, failure="no")]))
    assert goodput(refused, Slo(ttft_ms=1))["goodput_per_s"] == 0.0


def test_the_rate_is_computed_from_interarrival_times() -> None:
    for arrivals, rate in (((500, 1_000_500, 2_000_500), 1.0), ((0, 0), 0.0), ((), 0.0)):
        requests = RequestOutcomes([served(1, 1, arrived_us=at) for at in arrivals])
        assert requests_per_s(SimulationOutcome(requests)) == rate


def test_slo_levels_round_trip() -> None:
    assert parse_slo("ttft=500,itl=20.5") == Slo(ttft_ms=500.0, itl_ms=20.5)
    assert parse_slo("e2e=1e4") == Slo(e2e_ms=10_000.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "invalid objective") for text in ("", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf")),
        ("ttft=5,", "invalid objective"),
        ("tpot=5", "unknown objective 'tpot'; objectives are: ttft, itl, e2e"),
        ("ttft=5,itl=3,ttft=6", "duplicate objective ttft"),
    ],
)
def test_invalid_slo_is_rejected(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_slo(text)


# The capacity search


def found(breaks_at: float, start: float = 1.0, tolerance: float = TOLERANCE) -> Capacity:
    """Search the capacity of a service that meets its SLO at every speed up to `breaks_at`."""

    def measure(speed: float) -> SpeedTrial:
        holds = speed <= breaks_at
        return SpeedTrial(speed=speed, requests_per_s=3 * speed, attained=1.0 if holds else 0.5, holds=holds)

    return search(measure, start, tolerance)


@given(st.floats(0.002, 900.0), st.floats(0.001, 0.3))
def test_capacity_is_found_to_the_tolerance_in_few_trials(breaks_at: float, tolerance: float) -> None:
    capacity = found(breaks_at, tolerance=tolerance)
    assert capacity.answer == "found"
    assert capacity.step is not None
    assert capacity.step.speed <= breaks_at < capacity.step.speed * (1 + tolerance)
    assert capacity.step in capacity.steps
    assert capacity.step.holds
    assert len(capacity.steps) <= DOUBLINGS_MAX + 3 + 10
    assert len({step.speed for step in capacity.steps}) == len(capacity.steps), "no speed is tried twice"
    assert capacity.monotone


def test_search_starts_at_nearly_zero_load_and_the_given_speed() -> None:
    speeds = [step.speed for step in found(breaks_at=40.0, start=10.0).steps]
    assert speeds[:5] == [10.0 / 1024, 10.0, 20.0, 40.0, 80.0]


def test_search_brackets_from_the_given_speed_down_to_nearly_zero_load() -> None:
    low = found(breaks_at=0.0015, start=1.0)
    assert low.answer == "found"
    assert [step.speed for step in low.steps[:12]] == [0.5**10, *(0.5**halving for halving in range(10)), 3 * 0.5**11]


def test_search_reports_unlimited_and_zero_capacity() -> None:
    always = found(breaks_at=1e9)
    assert (always.answer, always.step) == ("always", always.steps[-1])
    assert always.steps[-1].speed == 2.0**DOUBLINGS_MAX
    never = found(breaks_at=0.0)
    assert (never.answer, never.step) == ("never", None)
    assert [step.speed for step in never.steps] == [0.5**DOUBLINGS_MAX]


@pytest.mark.parametrize(("dip", "monotone"), [(0.7, True), (0.6, False)])
def test_search_detects_non_monotone_attainment(dip: float, monotone: bool) -> None:
    def measure(speed: float) -> SpeedTrial:
        attained = 1.0 if speed <= 1.0 else dip if speed < 1.3 else 0.65
        return SpeedTrial(speed=speed, requests_per_s=speed, attained=attained, holds=attained >= 0.9)

    capacity = search(measure, 1.0)
    assert capacity.step is not None
    assert capacity.step.speed == 1.0
    assert capacity.monotone is monotone


# Pareto-optimal points


SOME = st.integers(0, 4).map(float)  # few values, so that ties and equal points occur
POINTS = st.integers(1, 4).flatmap(
    lambda objectives: st.lists(st.lists(SOME, min_size=objectives, max_size=objectives), max_size=30)
)


@given(POINTS)
def test_optimal_points_are_exactly_the_undominated_ones(points: list[list[float]]) -> None:
    def dominated(point: list[float]) -> bool:
        return any(
            all(mine <= yours for mine, yours in zip(other, point, strict=True)) and other != point for other in points
        )

    assert optimal(points) == [not dominated(point) for point in points]


def test_costs_are_minimised_and_gains_maximised_to_three_digits() -> None:
    metrics = {"requests": 9, "ttft_ms": {"p90": 1234.5}, "goodput_per_s": 0.0123456, "failed": 0}
    assert costs(metrics, ["ttft_ms.p90", "goodput_per_s", "failed"]) == (1230.0, -0.0123, 0.0)


def run_metrics(requests: int = 1, failed: int = 0, **metrics: Any) -> dict[str, Any]:
    return {"requests": requests, "failed": failed, **metrics}


def test_failed_requests_make_percentiles_infinite() -> None:
    ttft_ms = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0}
    objectives = ["ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99"]
    assert costs(run_metrics(90, 10, ttft_ms=ttft_ms), objectives) == (1.0, 2.0, math.inf)
    assert costs(run_metrics(89, 11, ttft_ms=ttft_ms), objectives) == (1.0, math.inf, math.inf)
    assert costs(run_metrics(0, 5, ttft_ms={}), objectives) == (math.inf,) * 3


def test_missing_metric_costs_infinity() -> None:
    points = [costs(metrics, ["itl_ms.p90"]) for metrics in (run_metrics(itl_ms={}), run_metrics(itl_ms={"p90": 9e9}))]
    assert optimal(points) == [False, True]
