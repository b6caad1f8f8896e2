"""`forebay replay`: questions to a recorded log."""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from forebay.cli.errors import explained
from forebay.replay.verify import Report, verify
from forebay.transport.sqlite_log import SqliteLog

app = typer.Typer(help="Derive recorded decisions again.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Derive recorded decisions again."""


@app.command("verify")
def verify_command(
    log: Annotated[Path, typer.Argument(help="A log file of `forebay up`; it may be in use.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Derive every routing decision again; exit 1 at the first that the events do not lead to."""
    console = Console(stderr=True)
    with explained():
        recording = SqliteLog.open(log, readonly=True)
        try:
            with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task("deriving decisions", total=None)
                report = asyncio.run(
                    verify(recording, 0, lambda done, total: progress.update(task, completed=done, total=total))
                )
        finally:
            recording.close()
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)
    if report.divergence is not None:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    typer.echo(f"decisions  {report.decisions}, verified {report.verified}")
    typer.echo(f"journal    {report.records} records, {report.claims} owners, {report.snapshots} snapshots")
    typer.echo(f"events     {report.events}")
    typer.echo(f"digest     {report.digest} (decisions), {report.state} (state)")
    if report.divergence is not None:
        typer.echo(f"DIVERGENCE at journal offset {report.divergence['offset']}: {report.divergence['reason']}")
        for name, values in report.divergence["differs"].items():
            typer.echo(f"  {name}: recorded {values['recorded']}, derived {values['derived']}")
