"""`forebay replay`: questions to a recorded log."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from forebay.cli.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption, kafka_settings
from forebay.cli.errors import explained, fail
from forebay.replay.verify import Report, verify
from forebay.transport.directory import Directory
from forebay.transport.kafka_log import KafkaLog
from forebay.transport.kafka_settings import KafkaSettings
from forebay.transport.sqlite_log import SqliteLog

app = typer.Typer(help="Derive recorded decisions again.", no_args_is_help=True)

OnProgress = Callable[[int, int], None]


@app.callback()
def _root() -> None:
    """Derive recorded decisions again."""


@app.command("verify")
def verify_command(
    log: Annotated[
        Path | None, typer.Argument(help="A log file of `forebay up`; it may be in use. Not with --kafka.")
    ] = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: Annotated[str, typer.Option(help="The model whose decisions are verified, if Kafka holds several.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Derive every routing decision again; exit 1 at the first that the events do not lead to."""
    if (log is None) == (kafka is None):
        fail("give a log file or --kafka")
    console = Console(stderr=True)
    with explained(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("deriving decisions", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if log is not None:
            report = asyncio.run(_verify_file(log, on_progress))
        else:
            assert kafka is not None
            report = asyncio.run(_verify_kafka(kafka_settings(kafka, namespace, kafka_config), group, on_progress))
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)
    if report.divergence is not None:
        raise typer.Exit(1)


async def _verify_file(path: Path, on_progress: OnProgress) -> Report:
    recording = SqliteLog.open(path, readonly=True)
    try:
        return await verify(recording, 0, on_progress)
    finally:
        recording.close()


async def _verify_kafka(settings: KafkaSettings, group: str, on_progress: OnProgress) -> Report:
    log = await KafkaLog.open(settings)
    try:
        directory = Directory(log)
        await directory.start()
        directory.close()
        return await verify(log, _partition(settings, directory.groups.partitions, group), on_progress)
    finally:
        await log.close()


def _partition(settings: KafkaSettings, placed: dict[str, int], group: str) -> int:
    if group in placed:
        return placed[group]
    if not group and len(placed) == 1:
        return next(iter(placed.values()))
    known = ", ".join(sorted(placed)) or "none"
    wanted = f"there is no group {group}" if group else "say which --group"
    fail(f"{wanted}: {settings.namespace} on {settings.bootstrap} has {known}")


def _show(report: Report) -> None:
    typer.echo(f"decisions  {report.decisions}, verified {report.verified}")
    typer.echo(f"journal    {report.records} records, {report.claims} owners, {report.snapshots} snapshots")
    if report.void or report.foreign:
        typer.echo(f"passed     {report.void} void records, {report.foreign} foreign ones")
    if report.start:
        typer.echo(f"from       the snapshot at journal offset {report.start}: what came before is gone")
    typer.echo(f"events     {report.events}")
    typer.echo(f"digest     {report.digest} (decisions), {report.state} (state)")
    if report.divergence is not None:
        typer.echo(f"DIVERGENCE at journal offset {report.divergence['offset']}: {report.divergence['reason']}")
        for name, values in report.divergence["differs"].items():
            typer.echo(f"  {name}: recorded {values['recorded']}, derived {values['derived']}")
