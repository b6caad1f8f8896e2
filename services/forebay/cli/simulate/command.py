"""Options of `forebay simulate`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.simulate.options import (
    AgainstOptions,
    AttainOption,
    FleetOptions,
    JsonOption,
    OptionalWorkloadArgument,
    PoliciesOption,
    ShapeOptions,
    SloOption,
)

ReportOption = Annotated[
    Path | None, typer.Option("--report", dir_okay=False, help="Write a self-contained HTML report to this path.")
]
PlannerOption = Annotated[
    Path | None,
    typer.Option(help="TOML file of a planner that sizes the pools, as of `forebay planner run`. See docs/scaling.md."),
]


@spread
def simulate(
    fleet: FleetOptions,
    shape: ShapeOptions,
    recorded: AgainstOptions,
    workload: OptionalWorkloadArgument = None,
    policies: PoliciesOption = None,
    slo: SloOption = None,
    attain: AttainOption = None,
    planner: PlannerOption = None,
    report: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate a workload on modelled engines with the live routing code, in virtual time.

    Exits 1 if a request failed, or if a policy misses the SLO attainment given by --attain. With --against, simulates
    a recording and compares the result with the recorded latencies. Then exits 1 if the recording does not verify, or
    if an error exceeds a bound of --fail-above.
    """
    from forebay.cli.simulate.run import run_simulate  # noqa: PLC0415

    run_simulate(
        fleet=fleet,
        shape=shape,
        recorded=recorded,
        workload=workload,
        policies=policies,
        slo=slo,
        attain=attain,
        planner=planner,
        report=report,
        json=json,
    )
