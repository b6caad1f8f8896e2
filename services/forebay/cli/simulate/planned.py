"""Metrics of a simulation with a planner: sizes, GPU hours and SLO attainment of each interval."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forebay.cli.planner.planner_file import PlannerFile, read_planner_file
from forebay.events.scaling import DemandForecast, ScalingDecided, SimulatedSize
from forebay.planner.predictors import predictor
from forebay.planner.simulation import simulated_sizes
from forebay.runtime.errors import prefixed
from forebay.simulate.outcome import SimulationOutcome
from forebay.simulate.planned import Planning, require_plannable
from forebay.simulate.settings import Settings
from forebay.simulate.slo import Slo, meets

S_PER_HOUR = 3600
US_PER_S = 1e6


def read_planner(path: Path, settings: Settings) -> PlannerFile:
    """Read the file of a planner. Raises ConfigError if it is invalid, or cannot scale the fleet."""
    planner = read_planner_file(path)
    with prefixed(f"--planner {path}"):
        require_plannable(planner.settings, settings)
    return planner


def planning_of(planner: PlannerFile | None) -> Planning | None:
    """Return the planner of a simulation with its predictor, None for no planner."""
    if planner is None:
        return None
    settings, engines = planner.settings, planner.engines

    def simulate(forecast: DemandForecast, target: float) -> Iterator[SimulatedSize]:
        return simulated_sizes(forecast, settings, engines, target)

    return Planning(settings, predictor(settings.predictor), simulate)


def targets_of(planner: PlannerFile | None) -> Slo | None:
    """Return the targets of a planner as SLO, None without a planner."""
    return None if planner is None else Slo(ttft_ms=planner.settings.ttft_ms, itl_ms=planner.settings.itl_ms)


def planned_metrics(outcome: SimulationOutcome, slo: Slo) -> dict[str, Any]:
    """Return what the planner of a run did, as printed in JSON.

    Requests belong to the interval in which they arrive. Those after the last full interval are in none.
    """
    ends_us = [one.at_us for one in outcome.planned]
    requests, met = [0] * len(ends_us), [0] * len(ends_us)
    arrived_us = outcome.requests.column("arrived_us")
    for at_us, is_met in zip(arrived_us, meets(outcome, slo), strict=True):
        at = bisect_left(ends_us, at_us)
        if at < len(ends_us):
            requests[at] += 1
            met[at] += is_met
    changes, reversals = size_changes(one.decisions for one in outcome.planned)
    return {
        "changes": changes,
        "reversals": reversals,
        "intervals": [
            {
                "end_s": one.at_us / US_PER_S,
                "requests": requests[at],
                "attained": met[at] / requests[at] if requests[at] else None,
                "gpu_hours": one.gpu_s / S_PER_HOUR,
                "pools": {
                    pool.pool: {
                        "workers": one.sizes[pool.pool],
                        "ready": next((seen.ready for seen in one.observed if seen.pool == pool.pool), 0),
                        "reason": pool.reason,
                    }
                    for pool in one.decisions[0].pools
                },
            }
            for at, one in enumerate(outcome.planned)
        ],
    }


def size_changes(intervals: Iterable[Iterable[ScalingDecided]]) -> tuple[int, int]:
    """Return how often the decisions change the size of a pool, and how often a change reverses the previous one.

    Decisions of one interval continue each other, so they count as one.
    """
    changes = reversals = 0
    grew: dict[tuple[str, str], bool] = {}
    for decisions in intervals:
        sizes: dict[tuple[str, str], tuple[int, int]] = {}
        for decided in decisions:
            for pool in decided.pools:
                key = pool.group, pool.pool
                first, _ = sizes.get(key, (pool.from_size, 0))
                sizes[key] = first, pool.to_size
        for key, (first, last) in sizes.items():
            if first != last:
                changes += 1
                reversals += grew.get(key, last > first) != (last > first)
                grew[key] = last > first
    return changes, reversals
