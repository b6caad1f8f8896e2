"""`forebay simulate`: one workload under several policies, in virtual time."""

import json as jsonlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from forebay.cli.common.errors import BROKEN, complain, fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.terminal import in_markup, printable, results
from forebay.cli.simulate.against_options import AgainstOptions
from forebay.cli.simulate.options import (
    US_PER_S,
    AttainOption,
    FleetOptions,
    JsonOption,
    OptionalWorkloadArgument,
    PoliciesOption,
    ShapeOptions,
    SloOption,
    echo,
    in_full,
    policies_of,
    require_apart,
    require_possible,
    require_routers,
    router_of,
    settings_of,
    slo_of,
    workload_options,
)
from forebay.cli.simulate.report.file import ReportOption, require_report, write_report
from forebay.cli.simulate.simulations import Job, Run, Work, reason, run_all, run_of
from forebay.events.control import RouterConfig
from forebay.ingress.errors import Unusable
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Settings
from forebay.simulate.slo import Slo
from forebay.simulate.workload import Survey, WorkloadOptions, WorkloadUnusable

SHOWN = ("mean", "p50", "p99")
TIMES = {"ttft_ms": ".0f", "itl_ms": ".1f", "e2e_ms": ".0f"}
FAILURES_PRINTED = 5


@spread
def simulate(
    fleet: FleetOptions,
    shape: ShapeOptions,
    recorded: AgainstOptions,
    workload: OptionalWorkloadArgument = None,
    policies: PoliciesOption = None,
    slo: SloOption = None,
    attain: AttainOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Play a workload through the live router and modelled engines, in virtual time.

    Exit 1 unless every request was answered, and promises were kept where --attain asks for it. With --against, a
    recording is played instead, and held against what was lived: exit 1 if that was another history than its log says,
    or where --fail-above asks for it.
    """
    if recorded.against is not None:
        from forebay.cli.simulate.fidelity_command import held_against  # noqa: PLC0415 - half a second, for recordings alone

        others = {
            "a workload": workload is not None,
            "--slo": slo is not None,
            "--attain": attain is not None,
            "--report": report is not None,
        }
        held_against(recorded, fleet, shape, policies or (), others, json=json)
        return
    if not workload:
        fail("give a workload, or --against a recording")
    if recorded != AgainstOptions():
        fail("--speedup, --repeat and --fail-above belong to --against")
    if report is not None:
        require_report(report)
    began_s = time.monotonic()
    asked = _asked(workload, fleet, shape, policies, (slo, attain))
    runs = _played(asked, whole=report is not None)
    took_s = time.monotonic() - began_s
    result = _result(asked, runs)
    if json:
        typer.echo(jsonlib.dumps(result))
    else:
        _show(asked, result)
    tell_survey(asked.survey)
    for note in _unlived(asked.settings, runs):
        complain(note)
    counted = f"{asked.survey.requests} requests under {len(runs)} {'policy' if len(runs) == 1 else 'policies'}"
    Console(stderr=True).print(f"{counted} in {took_s:.1f} s", highlight=False)
    if report is not None:
        said = list(_told(asked.survey))
        write_report(report, runs, workload=asked.name, slo=asked.slo, digest=result["digest"], said=said)
    least = attain or 0.0
    short = [one for one in runs if least and one.summary["attained"] < least]
    for one in short:
        complain(f"{one.name} keeps the promises for {100 * one.summary['attained']:.6g}%, less than {100 * least:g}%")
    if short or any(one.summary["failed"] for one in runs):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be simulated. `name` is the workload's."""

    name: str
    survey: Survey
    settings: Settings
    options: WorkloadOptions
    routers: Mapping[str, RouterConfig]
    slo: Slo | None
    jobs: Sequence[Job]


def _asked(
    workload: Sequence[str],
    fleet: FleetOptions,
    shape: ShapeOptions,
    policies: Sequence[str] | None,
    promise: tuple[str | None, float | None],
) -> _Asked:
    """`promise` is what --slo and --attain say. Ends the command for what cannot be simulated."""
    try:
        settings, slo = settings_of(fleet), slo_of(*promise)
        options = workload_options(shape, fleet.seed, models=settings.models)
        routers = {name: router_of(name) for name in policies_of(policies, settings)}
        require_routers(routers.values(), settings.pools)
        for name, router in routers.items():
            require_apart(name, router, settings.pools)
        opened = open_workload(workload, options)
        survey = opened.survey()
        require_possible(opened, settings)
    except (WorkloadUnusable, Unusable, ValueError) as error:
        fail(str(error))
    jobs = [
        Job(
            name=name,
            settings=settings,
            router=router,
            workload=tuple(workload),
            options=options,
            requests=survey.requests,
        )
        for name, router in routers.items()
    ]
    return _Asked(opened.name, survey, settings, options, routers, slo, jobs)


def _played(asked: _Asked, *, whole: bool) -> list[Run]:
    """All of them; what came of single requests only if the `whole` is asked for.

    Ends the command where one dies of what a user can mend; raises what else it died of.
    """
    ended = run_all([Work(job.name, job.requests, partial(run_of, job, asked.slo, whole)) for job in asked.jobs])
    runs: list[Run] = []
    for one in ended:
        if isinstance(one, WorkloadUnusable | BrokenProcessPool):
            complain(reason(one))
            raise typer.Exit(BROKEN)
        if isinstance(one, Exception):
            raise one
        runs.append(one)
    return runs


def _result(asked: _Asked, runs: Sequence[Run]) -> dict[str, Any]:
    """What JSON prints."""
    return {
        "policies": {run.name: run.summary for run in runs},
        "digest": sha256("".join(run.summary["digest"] for run in runs).encode()).hexdigest(),
        "skipped": asked.survey.skipped,
        "notes": asked.survey.notes,
        "settings": {
            **echo(asked.settings, asked.options, asked.name),
            "policies": {name: in_full(router) for name, router in asked.routers.items()},
            "slo": in_full(asked.slo),
        },
    }


def _unlived(settings: Settings, runs: Sequence[Run]) -> Iterator[str]:
    """The deaths that were to come after the end of runs."""
    for fault in settings.life.faults:
        at_s = fault.at_us / US_PER_S
        over = [f"{run.name} after {run.summary['lasted_s']:.1f} s" for run in runs if run.summary["lasted_s"] < at_s]
        if over:
            yield f"{fault.worker} did not die at {at_s:g} s, for this was over before: {', '.join(over)}"


def tell_survey(survey: Survey) -> None:
    """Say on stderr what was left out of a workload, and what else there is to know of it."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for line in _told(survey):
        console.print(printable(line))


def _told(survey: Survey) -> Iterator[str]:
    yield from survey.notes
    yield from (f"skipped: {row}" for row in survey.reasons)
    if survey.skipped > len(survey.reasons):
        yield f"skipped: {survey.skipped - len(survey.reasons)} more rows"


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


def _show(asked: _Asked, result: Mapping[str, Any]) -> None:
    title = f"{asked.name}, {_fleet(asked.settings)}; milliseconds as mean/p50/p99"
    table = Table(title=in_markup(title), box=SIMPLE, padding=(0, 0, 0, 1))
    columns = ["policy", "failed", "reuse", "max/mean", "TTFT", "ITL", "E2E"]
    split = any("prefilled_remotely" in one for one in result["policies"].values())
    columns += ["remote", "transfer"] if split else []
    for column in [*columns, *(("SLO kept", "goodput/s") if asked.slo else ())]:
        table.add_column(column, justify="left" if column == "policy" else "right", overflow="fold")
    for name, one in result["policies"].items():
        times = [_times(one[key], width) for key, width in TIMES.items()]
        kept = [f"{one['attained']:.2%}", f"{one['goodput_per_s']:.3f}"] if asked.slo else []
        reuse, balance = f"{one['prefix_reuse']:.4f}", f"{one['load_max_over_mean']:.3f}"
        moved = [str(one["prefilled_remotely"]), _times(one["transfer_ms"], ".1f")] if split else []
        table.add_row(in_markup(name), str(one["failed"]), reuse, balance, *times, *moved, *kept)
    results().print(table)
    for name, one in result["policies"].items():
        for failure in one["failures"][:FAILURES_PRINTED]:
            typer.echo(f"{name}: request {failure['request']} failed: {printable(failure['reason'])}")
        if one["failed"] > FAILURES_PRINTED:
            typer.echo(f"{name}: and {one['failed'] - FAILURES_PRINTED} more")
    typer.echo(f"digest {result['digest']}")
