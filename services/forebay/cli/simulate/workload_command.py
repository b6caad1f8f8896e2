"""Options of `forebay workload`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.simulate.options import INT_MAX, JsonOption, ShapeOptions, WorkloadArgument

SeedOption = Annotated[int, typer.Option(min=0, max=INT_MAX, help="Random seed for sampling.")]


app = typer.Typer(name="workload", help="Inspect and convert workloads.", no_args_is_help=True)


@app.command("show")
@spread
def show(workload: WorkloadArgument, shape: ShapeOptions, seed: SeedOption = 0, json: JsonOption = False) -> None:
    """Show requests, rate, lengths, sessions, and the prefix reuse of an unbounded cache."""
    from forebay.cli.simulate.workload import run_show  # noqa: PLC0415

    run_show(name=workload, shape=shape, seed=seed, json=json)


@app.command("convert")
@spread
def convert(
    workload: WorkloadArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the file to write.")],
    shape: ShapeOptions,
    seed: SeedOption = 0,
) -> None:
    """Write a workload, transformed by the options, to a file in forebay's own format."""
    from forebay.cli.simulate.workload import run_convert  # noqa: PLC0415

    run_convert(name=workload, out=out, shape=shape, seed=seed)
