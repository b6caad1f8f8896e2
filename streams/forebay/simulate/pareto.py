"""Which of many runs are worth looking at: those that no other is better than (Pareto optima)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 3  # less than one part in a thousand is nothing that one workload can tell
LESS, MORE = 1.0, -1.0

TIMES = {f"{name}.{of}": LESS for name in ("ttft_ms", "itl_ms", "e2e_ms") for of in ("mean", "p50", "p90", "p99")}
OBJECTIVES: Mapping[str, float] = {  # figures of a run, by their path, and whether less or more of one is better
    **TIMES,
    "failed": LESS,
    "gpus": LESS,
    "gpu_hours": LESS,
    "load_max_over_mean": LESS,
    "prefix_reuse": MORE,
    "attained": MORE,
    "goodput_per_s": MORE,
    "capacity_per_s": MORE,
}


def figure(figures: Mapping[str, Any], path: str) -> float | None:
    """One figure by its path, as `ttft_ms.p90`; None for one that this run does not have."""
    found: Any = figures
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def costs(figures: Mapping[str, Any], objectives: Sequence[str]) -> tuple[float, ...]:
    """What a run costs in each objective, less being better, to three digits.

    Without a figure that is all there is; and so is a percentile of a run in which more requests failed than are above
    it: who got no answer waited for ever.
    """
    found = ((_endured(figures, path), OBJECTIVES[path]) for path in objectives)
    return tuple(math.inf if value is None else sign * _rounded(value) for value, sign in found)


def optimal(points: Sequence[Sequence[float]]) -> list[bool]:
    """Whether nobody dominates each: is nowhere worse and somewhere better. Equal points stay together.

    Args:
        points: as many costs each; less is better.
    """
    # Whoever dominates a point comes before it, and one of these is optimal itself.
    order = sorted(range(len(points)), key=lambda at: tuple(points[at]))
    best: list[Sequence[float]] = []
    kept = [False] * len(points)
    for at in order:
        kept[at] = not any(_dominates(one, points[at]) for one in best)
        if kept[at]:
            best.append(points[at])
    return kept


def _endured(figures: Mapping[str, Any], path: str) -> float | None:
    name, _, of = path.rpartition(".p")
    failed = figures.get("failed", 0)
    if name and failed * 100 > (failed + figures["requests"]) * (100 - int(of)):
        return None
    return figure(figures, path)


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(mine <= yours for mine, yours in pairs) and any(mine < yours for mine, yours in pairs)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS - 1}e}")
