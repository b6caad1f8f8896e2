"""Pareto optima: the runs that no other run dominates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 3  # differences below 0.1 % are not significant for a single workload
RATES = ("goodput_per_s", "capacity_per_s")  # metrics of which more is better


def metric_at(metrics: Mapping[str, Any], path: str) -> float | None:
    """Return the metric of a run at a path such as `ttft_ms.p90`; None if the run has no such metric."""
    found: Any = metrics
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def costs(metrics: Mapping[str, Any], objectives: Sequence[str]) -> tuple[float, ...]:
    """Return the cost of a run in each objective, rounded to three significant digits. Lower is better.

    A metric that the run lacks costs infinity. A failed request counts as an infinite latency, so a percentile costs
    infinity if the share of failed requests is larger than the share above the percentile.
    """
    found = ((_metric_with_failures(metrics, path), -1 if path in RATES else 1) for path in objectives)
    return tuple(math.inf if value is None else sign * _rounded(value) for value, sign in found)


def optimal(points: Sequence[Sequence[float]]) -> list[bool]:
    """Return for each tuple of costs whether no other one dominates it. Equal tuples do not dominate each other."""
    # A dominating point sorts before the point it dominates, and at least one dominating point is itself optimal.

    order = sorted(range(len(points)), key=lambda at: tuple(points[at]))
    best: list[Sequence[float]] = []
    kept = [False] * len(points)
    for at in order:
        kept[at] = not any(_dominates(one, points[at]) for one in best)
        if kept[at]:
            best.append(points[at])
    return kept


def _metric_with_failures(metrics: Mapping[str, Any], path: str) -> float | None:
    name, _, of = path.rpartition(".p")
    failed = metrics.get("failed", 0)
    if name and failed * 100 > (failed + metrics["requests"]) * (100 - int(of)):
        return None
    return metric_at(metrics, path)


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(mine <= yours for mine, yours in pairs) and any(mine < yours for mine, yours in pairs)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS - 1}e}")
