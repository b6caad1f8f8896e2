"""`forebay sweep`: simulate one workload on every combination of settings, and mark the Pareto-optimal runs."""

import json as jsonlib
import time
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import click
import msgspec
from rich.console import Console

from forebay.analysis.runs import Job, capacity_metrics, simulate_metrics
from forebay.cli.common.errors import explained
from forebay.cli.common.survey import print_survey
from forebay.cli.simulate.command import SweepCommand
from forebay.cli.simulate.options import (
    policies_of,
    require_disaggregation,
    require_routers,
    require_servable,
    settings_json,
    settings_of,
    slo_of,
    to_json,
    workload_options,
)
from forebay.cli.simulate.simulations import Work, reason, run_all
from forebay.cli.simulate.sweep_axes import Combination, axes_of, combinations
from forebay.cli.simulate.sweep_view import attaining, show
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.pareto import costs, optimal
from forebay.simulate.reading import open_workload
from forebay.simulate.slo import Slo
from forebay.simulate.workload import Survey, Workload, WorkloadOptions

STEPS_EXPECTED = 10  # simulations per capacity search, for progress
ATTAIN = 0.99
COSTS = ("failed", "gpu_hours", "ttft_ms.p90", "itl_ms.p90")
CAPACITY_COSTS = ("gpus", "capacity_per_s")

Metrics = dict[str, Any]


def run_sweep(options: SweepCommand) -> None:
    with explained():
        objectives_slo = slo_of(options.slo, options.attain)
        if options.find_capacity and objectives_slo is None:
            raise ConfigError("--find-capacity requires --slo")
        wanted = CAPACITY_COSTS if options.find_capacity else (*COSTS, *(("goodput_per_s",) if objectives_slo else ()))
        settings = settings_of(options.fleet)
        todo = combinations(
            policies_of(options.policies, settings), axes_of(options.sets or ()), options.fleet, options.shape
        )
        require_routers([one.router for one in todo], settings.pools)
        for combination in todo:
            require_disaggregation(combination.name, combination.router, combination.fleet.pools)
        jobs, survey, name = _jobs(options.workload, todo, options.find_capacity)
        base = settings_json(
            settings, workload_options(options.shape, options.fleet.seed, models=settings.models), name
        )
    began_s = time.monotonic()
    ended = run_all(
        [
            _work(job, objectives_slo, ATTAIN if options.attain is None else options.attain, options.find_capacity)
            for job in jobs
        ]
    )
    runs, dead = _runs(todo, jobs, ended, wanted)
    result = {
        "runs": runs,
        "dead": dead,
        "objectives": wanted,
        "digest": sha256("".join(one["digest"] for one in runs).encode()).hexdigest(),
        "skipped": survey.skipped,
        "notes": survey.notes,
        "settings": {**base, "slo": to_json(objectives_slo), "attain": options.attain},
    }
    if options.json:
        click.echo(jsonlib.dumps(result))
    else:
        show(name, result)
    print_survey(survey)
    for failed in dead:
        complain(f"{failed['name']}: {failed['error']}")
    Console(stderr=True).print(f"{len(todo)} runs in {time.monotonic() - began_s:.1f} s", highlight=False)
    if dead or not _succeeded(runs, options.attain, options.find_capacity):
        raise click.exceptions.Exit(1)


def _jobs(workload: str, todo: Sequence[Combination], find_capacity: bool) -> tuple[list[Job], Survey, str]:
    """Check every combination, and return the jobs, the survey of the first workload, and its name."""
    surveys: dict[WorkloadOptions, Survey] = {}
    possible: set[object] = set()
    jobs: list[Job] = []
    for one in todo:
        options = workload_options(one.shape, one.seed, models=one.fleet.models)
        opened = open_workload(workload, options)
        shape = msgspec.structs.replace(options, speed=1.0)  # the speed changes only arrival times
        if shape not in surveys:
            surveys[shape] = opened.survey()
            if find_capacity:
                surveys[shape].notes += _scalable(opened)
        groups = [(pool.model, group.engine) for pool in one.fleet.pools for group in pool.groups]
        fleet = tuple((model, engine.block_size, engine.kv_blocks_total) for model, engine in groups)
        if (shape, fleet) not in possible:
            with prefixed(one.name):
                require_servable(opened, one.fleet)
            possible.add((shape, fleet))
        requests = surveys[shape].requests
        jobs.append(Job(one.name, one.fleet, one.router, workload, options, requests))
    return jobs, next(iter(surveys.values())), opened.name


def _scalable(workload: Workload) -> list[str]:
    """Return notes on playing a workload at other speeds. Raises ConfigError if the speed does not change its rate."""
    times: set[int] = set()
    after = 0
    for turn in workload.turns():
        if turn.after:
            after += 1
        elif len(times) < 2:
            times.add(turn.at_us)
    if len(times) < 2:
        raise ConfigError(
            f"--find-capacity: all requests of {workload.name} with a fixed time arrive at one time, "
            "so the speed does not change the request rate"
        )
    if not after:
        return []
    return [f"{after} requests depend on responses: the speed changes when sessions start, not the think times"]


def _work(job: Job, slo: Slo | None, attain: float, find_capacity: bool) -> Work[Metrics]:
    if not find_capacity:
        return Work(job.requests, partial(simulate_metrics, job, slo))
    assert slo is not None
    return Work(job.requests * STEPS_EXPECTED, partial(capacity_metrics, job, slo, attain))


def _runs(
    todo: Sequence[Combination], jobs: Sequence[Job], ended: Sequence[Metrics | Exception], objectives: Sequence[str]
) -> tuple[list[Metrics], list[Metrics]]:
    """Return the completed runs, sorted by cost, and the failed runs."""
    runs: list[Metrics] = []
    dead: list[Metrics] = []
    for one, job, found in zip(todo, jobs, ended, strict=True):
        identity = {"name": one.name, "policy": one.policy, "set": dict(one.varied), "speed": job.options.speed}
        if isinstance(found, Exception):
            dead.append({**identity, "error": reason(found)})
            continue
        groups = [group for pool in job.settings.pools for group in pool.groups]
        size = {"workers": job.settings.workers, "gpus": sum(group.count * group.gpus for group in groups)}
        metrics = {name: value for name, value in found.items() if name != "workers"}  # `size` has their number
        runs.append({**identity, **size, **metrics})
    points = [costs(run, objectives) for run in runs]
    for run, best in zip(runs, optimal(points), strict=True):
        run["pareto"] = best
    order = sorted(range(len(runs)), key=lambda at: (points[at], at))
    return [runs[at] for at in order], dead


def _succeeded(runs: Sequence[Metrics], attain: float | None, find_capacity: bool) -> bool:
    """Return whether the sweep succeeded, so that the command exits 0."""
    if find_capacity:
        return all(run["capacity"]["answer"] != "never" for run in runs)
    if attain is not None and not attaining(runs, (), attain):
        return False
    return not any(run["failed"] for run in runs)
