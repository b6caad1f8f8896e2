"""Simulations of workloads under policies of users, and their metrics as printed in JSON."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec

from forebay.events.control import RouterConfig
from forebay.events.scaling import ScalingDecided
from forebay.replay.policies import load_policies
from forebay.simulate.outcome import SimulationOutcome, summary
from forebay.simulate.planned import Planning
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Settings
from forebay.simulate.simulation import Simulation
from forebay.simulate.slo import Slo, goodput, meets, requests_per_s
from forebay.simulate.workload import WorkloadOptions

S_PER_HOUR = 3600
US_PER_S = 1e6

OnDone = Callable[[int], object]
TOLERANCE = 0.01
DOUBLINGS_MAX = 10  # from the first speed, up or down: a factor of about 1,000

Answer = Literal["found", "never", "always"]


class SpeedTrial(msgspec.Struct, frozen=True):
    """One factor by which arrival times were divided. `holds`: whether `attained` is high enough for the caller."""

    speed: float
    requests_per_s: float
    attained: float
    holds: bool


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the search for the highest speed that meets the SLO."""

    answer: Answer  # `found`, `never` (nearly zero load misses the SLO) or `always` (every tried speed meets the SLO)
    step: SpeedTrial | None  # the highest tried speed that meets the SLO; None if `answer` is `never`
    steps: tuple[SpeedTrial, ...]  # all tried speeds, in the order of the trials
    monotone: bool  # whether attainment never rose with the speed, as the search assumes


def search(measure: Callable[[float], SpeedTrial], start: float, tolerance: float = TOLERANCE) -> Capacity:
    """Find the highest speed at which the service still meets its SLO. The second trial is at the speed `start`.

    The first trial is at nearly zero load, a thousandth of `start`. If it misses the SLO, it is the only trial. The
    search stops when the gap between the highest speed that meets the SLO and the lowest that misses it is at most the
    share `tolerance` of the speed. It assumes that attainment falls monotonically with speed. Speeds are halved,
    doubled and averaged in pairs. These operations do not round, so every machine tries the same speeds.
    """
    idle = measure(start * 0.5**DOUBLINGS_MAX)
    if not idle.holds:
        return _capacity("never", [idle])
    steps = [idle, measure(start)]
    if steps[-1].holds:
        while steps[-1].holds:
            if len(steps) == DOUBLINGS_MAX + 2:
                return _capacity("always", steps)
            steps.append(measure(steps[-1].speed * 2.0))
        low, high = steps[-2].speed, steps[-1].speed
    else:
        while not steps[-1].holds and steps[-1].speed > 2.0 * idle.speed:
            steps.append(measure(steps[-1].speed * 0.5))
        low, high = (steps[-1].speed, steps[-2].speed) if steps[-1].holds else (idle.speed, steps[-1].speed)
    while high > low * (1.0 + tolerance):
        steps.append(measure((low + high) / 2))
        low, high = (steps[-1].speed, high) if steps[-1].holds else (low, steps[-1].speed)
    return _capacity("found", steps)


def _capacity(answer: Answer, steps: list[SpeedTrial]) -> Capacity:
    by_speed = sorted(steps, key=lambda step: step.speed)
    pairs = pairwise(by_speed)
    return Capacity(
        answer=answer,
        step=max((step for step in steps if step.holds), key=lambda step: step.speed, default=None),
        steps=tuple(steps),
        monotone=all(slow.attained >= fast.attained for slow, fast in pairs),
    )


class Job(msgspec.Struct, frozen=True):
    """One simulation to run, by the process that opens its workload. `requests` are expected, for the progress.

    `planning` returns the planner of the fleet. It is picklable, and called by the process that simulates.
    """

    name: str
    settings: Settings
    router: RouterConfig
    workload: str
    options: WorkloadOptions = WorkloadOptions()
    requests: int = 0
    planning: Callable[[], Planning] | None = None


@dataclass(frozen=True, slots=True)
class SimulationRun:
    name: str
    settings: Settings
    router: RouterConfig
    outcome: SimulationOutcome  # outcome of every request; empty if `simulate_run` was called without `whole`
    summary: dict[str, Any]  # metrics of the run, as `--json` prints them


def play(job: Job, on_done: OnDone) -> SimulationOutcome:
    """Run a simulation in this process. `on_done` is called with the number of requests that have arrived."""
    routers = [job.router, *(pool.router for pool in job.settings.pools if pool.router is not None)]
    custom = load_policies(router.mode for router in routers)
    planning = None if job.planning is None else job.planning()
    simulation = Simulation(job.settings, job.router, custom, planning)
    return simulation.run(open_workload(job.workload, job.options), on_done)


def run_metrics(outcome: SimulationOutcome, slo: Slo | None) -> dict[str, Any]:
    """Return the metrics of a simulation as printed in JSON."""
    statistics = summary(outcome, len(outcome.workers))
    statistics["retried"] = sum(attempts > 1 for attempts in outcome.requests.column("attempts"))
    statistics["lasted_s"] = outcome.lasted_us / US_PER_S
    statistics["gpu_hours"] = outcome.gpu_s / S_PER_HOUR
    if slo is not None and outcome.planned:
        statistics["planner"] = planned_metrics(outcome, slo)
    return statistics if slo is None else {**statistics, **goodput(outcome, slo)}


def simulate_metrics(job: Job, slo: Slo | None, on_done: OnDone) -> dict[str, Any]:
    return run_metrics(play(job, on_done), slo)


def simulate_run(job: Job, slo: Slo | None, whole: bool, on_done: OnDone) -> SimulationRun:
    """Run a simulation in this process. The outcomes of single requests are kept only if `whole` is true."""
    outcome = play(job, on_done)
    return SimulationRun(
        job.name, job.settings, job.router, outcome if whole else SimulationOutcome(), run_metrics(outcome, slo)
    )


def capacity_metrics(job: Job, slo: Slo, attain: float, on_done: OnDone) -> dict[str, Any]:
    """Return the metrics at the highest rate that meets the SLO, or at nearly zero load if no rate does."""
    tried: dict[float, dict[str, Any]] = {}

    def measure(speed: float) -> SpeedTrial:
        at_speed = msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, speed=speed))
        before = len(tried) * job.requests
        outcome = play(at_speed, lambda done: on_done(before + done))
        tried[speed] = run_metrics(outcome, slo)
        attained = tried[speed]["attained"]
        return SpeedTrial(speed, requests_per_s(outcome), attained, holds=attained >= attain)

    found = search(measure, job.options.speed)
    best = found.step
    return {
        **tried[min(tried) if best is None else best.speed],
        "capacity_per_s": 0.0 if best is None else best.requests_per_s,
        "capacity": {**msgspec.to_builtins(found), "attain": attain},
    }


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
