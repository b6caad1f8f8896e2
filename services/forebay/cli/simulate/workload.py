"""`forebay workload show` and `convert`: what a workload is like, and any workload as a file of our own format."""

import contextlib
import json as jsonlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forebay.cli.common.errors import fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.terminal import bar, in_markup, results
from forebay.cli.simulate.command import tell_survey
from forebay.cli.simulate.options import INT_MAX, JsonOption, ShapeOptions, workload_options
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Survey, Turn, Workload, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.rows import Header
from forebay.simulate.workloads.statistics import Figures, figures
from forebay.simulate.workloads.writing import written

SPREADS = ("prompt_tokens", "output_tokens", "delay_s")
SHOWN = ("mean", "p50", "p90", "p99", "max")

SourcesArgument = Annotated[
    list[str], typer.Argument(help="A file, a folder of runs, several runs, or synthetic:SETTINGS.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=INT_MAX, help="Of whatever is drawn.")]

app = typer.Typer(name="workload", help="Workloads: what they are like, and as files.", no_args_is_help=True)


@app.command("show")
@spread
def show(sources: SourcesArgument, shape: ShapeOptions, seed: SeedOption = 0, json: JsonOption = False) -> None:
    """Requests, rate, lengths, sessions, and what an unbounded cache would find of the prompts."""
    with _explained():
        workload, survey = _opened(sources, workload_options(shape, seed))
        found = figures(_watched(workload, survey.requests, "read"), workload.block_tokens)
    tell_survey(survey)
    if json:
        told = {"name": workload.name, "block_tokens": workload.block_tokens, **msgspec.to_builtins(found)}
        typer.echo(jsonlib.dumps({**told, "skipped": survey.skipped}))
    else:
        _show(workload.name, found)


@app.command("convert")
@spread
def convert(
    sources: SourcesArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write it.")],
    shape: ShapeOptions,
    seed: SeedOption = 0,
) -> None:
    """Write a workload, as the options make it, into one file of forebay's own format."""
    options = workload_options(shape, seed)
    if output.exists() and not output.is_file():  # a device would be replaced by a file
        fail(f"{output}: is no plain file; choose another name")
    with _explained():
        workload, survey = _opened(sources, options)
        # Without a name: tables call it by that of its file, however that is renamed.
        header = Header(block_tokens=workload.block_tokens, source=_source(sources, options))
        part = output.with_name(f"{output.name}.part")
        try:
            with part.open("wb") as file:
                file.writelines(written(_watched(workload, survey.requests, "written"), header))
            part.replace(output)
        except OSError as error:
            fail(f"{output}: cannot be written ({error.strerror})")
        finally:
            part.unlink(missing_ok=True)
    tell_survey(survey)
    typer.echo(f"{output}: {survey.requests} requests", err=True)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except WorkloadUnusable as error:
        fail(str(error))


def _opened(sources: list[str], options: WorkloadOptions) -> tuple[Workload, Survey]:
    workload = open_workload(sources, options)
    return workload, workload.survey()


def _watched(workload: Workload, total: int, done: str) -> Iterable[Turn]:
    """Its requests, with a bar on stderr that tells how many were read."""
    with bar(TextColumn(done), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        yield from progress.track(workload.turns(), total=total)


def _source(sources: list[str], options: WorkloadOptions) -> str:
    """What a file was made of, for people: names without their folders, and the options that are no defaults."""
    plain = WorkloadOptions()
    changed = {
        name: value for name in options.__struct_fields__ if (value := getattr(options, name)) != getattr(plain, name)
    }
    names = [one if one.startswith("synthetic:") else Path(one).name for one in sources]
    return " ".join([*names, *(f"{name}={value}" for name, value in changed.items())])


def _show(name: str, found: Figures) -> None:
    reuse = found.ideal_reuse
    bound = "" if reuse.whole else ", at least: there were too many blocks to remember them all"
    table = Table(title=in_markup(name), box=SIMPLE, show_header=False, title_justify="left")
    table.add_row("requests", f"{found.requests}, {found.requests - found.own_times} of them after answers")
    table.add_row("sessions", str(found.sessions))
    table.add_row("duration", f"{found.duration_s:.1f} s{' if answers took no time' if found.delay_s else ''}")
    table.add_row("rate", f"{found.rate_per_s:.3f}/s, at most {found.most_in_a_second} in a second")
    table.add_row("dispersion", f"{found.dispersion:.2f} (Poisson: 1)")
    table.add_row("ideal reuse", f"{reuse.tokens:.4f} of tokens, {reuse.blocks:.4f} of blocks{bound}")
    table.add_row("blocks", f"{reuse.distinct_blocks} different ones")
    results().print(table)
    lengths = Table(box=SIMPLE)
    for column in ("", *SHOWN):
        lengths.add_column(column, justify="right" if column else "left")
    for spread_of in SPREADS:
        if values := getattr(found, spread_of):
            lengths.add_row(spread_of, *(f"{values[one]:,.1f}".removesuffix(".0") for one in SHOWN))
    results().print(lengths)
