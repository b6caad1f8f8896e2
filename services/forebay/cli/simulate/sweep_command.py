"""Options of `forebay sweep`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.simulate.options import (
    AttainOption,
    FleetOptions,
    JsonOption,
    PoliciesOption,
    ShapeOptions,
    SloOption,
    WorkloadArgument,
)


@spread
def sweep(
    workload: WorkloadArgument,
    fleet: FleetOptions,
    shape: ShapeOptions,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE,…", help="Try each value of a router setting or an option. Repeatable."
        ),
    ] = None,
    policies: PoliciesOption = None,
    slo: SloOption = None,
    attain: AttainOption = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Find the highest request rate that meets --slo.")
    ] = False,
    objectives: Annotated[
        list[str] | None,
        typer.Option("--objective", metavar="METRIC", help="Metric for Pareto optimality. Repeatable."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate every combination of settings, and mark the Pareto-optimal ones.

    Exits 1 if a run or a request failed, if no combination attains --attain with every seed, or if a capacity search
    found no rate.
    """
    from forebay.cli.simulate.sweep import run_sweep  # noqa: PLC0415

    run_sweep(
        workload=workload,
        fleet=fleet,
        shape=shape,
        sets=sets,
        policies=policies,
        slo=slo,
        attain=attain,
        find_capacity=find_capacity,
        objectives=objectives,
        json=json,
    )
