"""Pareto-optimal points match the definition."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.pareto import costs, optimal

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
