"""`forebay simulate`: simulate one workload under several policies, in virtual time."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from forebay.analysis.runs import Job, SimulationRun, simulate_run
from forebay.cli.common.errors import BROKEN, explained, fail
from forebay.cli.common.survey import print_survey, survey_lines
from forebay.cli.common.tables import in_markup, print_result, results, table
from forebay.cli.common.terminal import printable
from forebay.cli.planner.planner_file import PlannerFile, read_planner_file
from forebay.cli.simulate.command import SimulateCommand
from forebay.cli.simulate.options import (
    AgainstOptions,
    FleetOptions,
    ShapeOptions,
    policies_of,
    require_disaggregation,
    require_routers,
    require_servable,
    router_of,
    settings_json,
    settings_of,
    slo_of,
    to_json,
    workload_options,
)
from forebay.cli.simulate.report.page import require_report, write_report
from forebay.cli.simulate.simulations import Work, reason, run_all
from forebay.events.control import RouterConfig
from forebay.events.scaling import DemandForecast, SimulatedSize
from forebay.planner.predictors import predictor
from forebay.planner.simulation import simulated_sizes
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.planned import Planning, require_plannable
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Settings
from forebay.simulate.slo import Slo
from forebay.simulate.workload import Survey, WorkloadOptions

SHOWN = ("mean", "p50", "p99")
TIMES = {"ttft_ms": ".0f", "itl_ms": ".1f", "e2e_ms": ".0f"}
FAILURES_PRINTED = 5


def run_simulate(options: SimulateCommand) -> None:
    if options.recorded.against is not None:
        from forebay.cli.simulate.against import compare_with_recording  # noqa: PLC0415 - takes 0.5 s, rarely needed

        others = {
            "a workload": options.workload is not None,
            "--policy": options.policies is not None,
            "--slo": options.slo is not None,
            "--attain": options.attain is not None,
            "--planner": options.planner is not None,
            "--report": options.report is not None,
        }
        compare_with_recording(options.recorded, options.fleet, options.shape, others, json=options.json)
        return
    if not options.workload:
        fail("no workload given; give one, or a recording with --against")
    if options.recorded != AgainstOptions():
        fail("--speedup, --fail-above and --allow-policy require --against")
    if options.report is not None:
        require_report(options.report)
    began_s = time.monotonic()
    plan = _plan(
        options.workload, options.fleet, options.shape, options.policies, (options.slo, options.attain), options.planner
    )
    runs = _run_jobs(plan, whole=options.report is not None)
    took_s = time.monotonic() - began_s
    result = _result(plan, runs)
    print_result(result, options.json, lambda: _show(plan, result))
    print_survey(plan.survey)
    for note in _unreached_faults(plan.settings, runs):
        complain(note)
    counted = f"{plan.survey.requests} requests under {len(runs)} {'policy' if len(runs) == 1 else 'policies'}"
    Console(stderr=True).print(f"{counted} in {took_s:.1f} s", highlight=False)
    if options.report is not None:
        notes = list(survey_lines(plan.survey))
        write_report(
            options.report, runs, workload=plan.name, slo=plan.slo, digest=result["digest"], survey_notes=notes
        )
    least = options.attain or 0.0
    short = [one for one in runs if least and one.summary["attained"] < least]
    for one in short:
        complain(f"{one.name}: SLO attainment {100 * one.summary['attained']:.6g}% is below --attain {100 * least:g}%")
    if short or any(one.summary["failed"] for one in runs):
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Validated inputs of the command. Without limits given by the user, `slo` has the targets of the planner."""

    name: str
    survey: Survey
    settings: Settings
    options: WorkloadOptions
    routers: Mapping[str, RouterConfig]
    slo: Slo | None
    jobs: Sequence[Job]
    planner: PlannerFile | None = None


def _plan(
    workload: str,
    fleet: FleetOptions,
    shape: ShapeOptions,
    policies: Sequence[str] | None,
    slo_options: tuple[str | None, float | None],
    planner_file: Path | None,
) -> _Plan:
    """Validate the inputs. Exits with an error message if the workload cannot be simulated."""
    with explained():
        settings = settings_of(fleet)
        planner = None if planner_file is None else _read_planner(planner_file, settings)
        slo = slo_of(*slo_options)
        if planner is not None and slo is None:
            slo = Slo(ttft_ms=planner.settings.ttft_ms, itl_ms=planner.settings.itl_ms)
        options = workload_options(shape, fleet.seed, models=settings.models)
        routers = {name: router_of(name) for name in policies_of(policies, settings)}
        require_routers(routers.values(), settings.pools)
        for name, router in routers.items():
            require_disaggregation(name, router, settings.pools)
        opened = open_workload(workload, options)
        survey = opened.survey()
        require_servable(opened, settings)
    planning = None if planner is None else partial(_planning_of, planner)
    jobs = [
        Job(name, settings, router, workload, options, survey.requests, planning) for name, router in routers.items()
    ]
    return _Plan(opened.name, survey, settings, options, routers, slo, jobs, planner)


def _read_planner(path: Path, settings: Settings) -> PlannerFile:
    """Read the file of a planner. Raises ConfigError if it is invalid, or cannot scale the fleet."""
    planner = read_planner_file(path)
    with prefixed(f"--planner {path}"):
        require_plannable(planner.settings, settings)
    return planner


def _planning_of(planner: PlannerFile) -> Planning:
    settings, engines = planner.settings, planner.engines

    def simulate(forecast: DemandForecast, target: float) -> Iterator[SimulatedSize]:
        return simulated_sizes(forecast, settings, engines, target)

    return Planning(settings, predictor(settings.predictor), simulate)


def _run_jobs(plan: _Plan, *, whole: bool) -> list[SimulationRun]:
    """Run all simulations. Exits if one fails with a user error; raises any other error."""
    ended = run_all([Work(job.requests, partial(simulate_run, job, plan.slo, whole)) for job in plan.jobs])
    runs: list[SimulationRun] = []
    for one in ended:
        if isinstance(one, ConfigError | BrokenProcessPool):
            complain(reason(one))
            raise click.exceptions.Exit(BROKEN)
        if isinstance(one, Exception):
            raise one
        runs.append(one)
    return runs


def _result(plan: _Plan, runs: Sequence[SimulationRun]) -> dict[str, Any]:
    return {
        "policies": {run.name: run.summary for run in runs},
        "digest": sha256("".join(run.summary["digest"] for run in runs).encode()).hexdigest(),
        "skipped": plan.survey.skipped,
        "notes": plan.survey.notes,
        "settings": {
            **settings_json(plan.settings, plan.options, plan.name),
            "policies": {name: to_json(router) for name, router in plan.routers.items()},
            "slo": to_json(plan.slo),
            **({} if plan.planner is None else {"planner": to_json(plan.planner.settings)}),
        },
    }


def _unreached_faults(settings: Settings, runs: Sequence[SimulationRun]) -> Iterator[str]:
    """Yield a note for each configured crash that lies after the end of a run."""
    for fault in settings.life.faults:
        ended = [(run.name, run.summary["lasted_s"]) for run in runs if run.summary["lasted_s"] < fault.at_s]
        if ended:
            over = [f"{name} after {lasted_s:.1f} s" for name, lasted_s in ended]
            yield f"{fault.worker} did not die at {fault.at_s:g} s, because these runs ended earlier: {', '.join(over)}"


def _times(one: Mapping[str, float], width: str) -> str:
    return "/".join(f"{one[of]:{width}}" for of in SHOWN if one)


def _fleet(settings: Settings) -> str:
    roles = [(pool.role, sum(group.count for group in pool.groups)) for pool in settings.pools]
    if all(role == "aggregated" for role, _ in roles):
        return f"{settings.workers} workers"
    counts = Counter[str]()
    for role, count in roles:
        counts[role] += count
    return " and ".join(f"{count} {role} workers" for role, count in counts.items())


def _pool_table(policies: Mapping[str, Any]) -> Table:
    """Return a table of the pools that generate responses, under each policy."""
    shown = table("pools", ("policy", "pool", "requests", "reuse", "TTFT"), left=2)
    for name, one in policies.items():
        for pool, part in one.get("pools", {}).items():
            reuse, ttft = f"{part['prefix_reuse']:.4f}", _times(part["ttft_ms"], TIMES["ttft_ms"])
            shown.add_row(in_markup(name), in_markup(pool), str(part["requests"]), reuse, ttft)
    return shown


def _tier_table(policies: Mapping[str, Any]) -> Table:
    """Return a table of where the KV of prompt tokens came from, under each policy."""
    columns = ("policy", "device", "host", "disk", "store", "computed", "loads", "load")
    shown = table("prompt tokens by tier", columns)
    for name, one in policies.items():
        if (tiers := one.get("tiers")) is not None:
            shares = [f"{share:.4f}" for share in tiers["shares"].values()]
            shown.add_row(in_markup(name), *shares, str(tiers["loads"]), _times(tiers["load_ms"], ".1f"))
    return shown


def _scaled(one: Mapping[str, Any]) -> str:
    """Return what the planner of a run did, in one line."""
    planner = one["planner"]
    sizes = [sum(pool["workers"] for pool in interval["pools"].values()) for interval in planner["intervals"]]
    changes = f"{planner['changes']} changes, {planner['reversals']} of them reversals"
    return f"{min(sizes)} to {max(sizes)} workers, {changes}, {one['gpu_hours']:.4g} GPU hours"


def _show(plan: _Plan, result: Mapping[str, Any]) -> None:
    columns = ["policy", "failed", "reuse", "max/mean", "TTFT", "ITL", "E2E"]
    split = any("prefilled_remotely" in one for one in result["policies"].values())
    columns += ["remote", "transfer"] if split else []
    columns += ["attained", "goodput/s"] if plan.slo else []
    shown = table(f"{plan.name}, {_fleet(plan.settings)}; milliseconds as mean/p50/p99", columns)
    for name, one in result["policies"].items():
        times = [_times(one[key], width) for key, width in TIMES.items()]
        attained = [f"{one['attained']:.2%}", f"{one['goodput_per_s']:.3f}"] if plan.slo else []
        reuse, balance = f"{one['prefix_reuse']:.4f}", f"{one['load_max_over_mean']:.3f}"
        moved = [str(one["prefilled_remotely"]), _times(one["transfer_ms"], ".1f")] if split else []
        shown.add_row(in_markup(name), str(one["failed"]), reuse, balance, *times, *moved, *attained)
    for one in (shown, _pool_table(result["policies"]), _tier_table(result["policies"])):
        if one.rows:
            results().print(one)
    for name, one in result["policies"].items():
        if "planner" in one:
            click.echo(f"{name}: {_scaled(one)}")
        for failure in one["failures"][:FAILURES_PRINTED]:
            click.echo(f"{name}: request {failure['request']} failed: {printable(failure['reason'])}")
        if one["failed"] > FAILURES_PRINTED:
            click.echo(f"{name}: and {one['failed'] - FAILURES_PRINTED} more")
    click.echo(f"digest of all decisions, equal for equal runs: {result['digest']}")
