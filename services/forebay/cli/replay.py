"""`forebay replay`: questions to a recorded log."""

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from forebay.cli.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.errors import explained
from forebay.cli.policy_check import require_policy
from forebay.cli.recording import LogArgument, Recording
from forebay.events.control import PoolConfigured
from forebay.events.topics import CONTROL
from forebay.replay.verify import Report, verify
from forebay.transport.base import Log
from forebay.transport.recorded import decode_or_none

app = typer.Typer(help="Derive recorded decisions again.", no_args_is_help=True)

OnProgress = Callable[[int, int], None]
READ_MAX = 1_000


@app.callback()
def _root() -> None:
    """Derive recorded decisions again."""


@app.command("verify")
def verify_command(
    log: LogArgument = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: Annotated[str, typer.Option(help="The model whose decisions are verified, if Kafka holds several.")] = "",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Derive every routing decision again; exit 1 at the first that the events do not lead to."""
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    console = Console(stderr=True)
    with explained(), Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("deriving decisions", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        report = asyncio.run(_verify(recording, on_progress))
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        _show(report)
    if report.divergence is not None:
        raise typer.Exit(1)


async def _verify(recording: Recording, on_progress: OnProgress) -> Report:
    async with recording.opened() as (log, partition):
        await _require_policies(log, partition)
        return await verify(log, partition, on_progress)


async def _require_policies(log: Log, partition: int) -> None:
    """Refuse policies of users that cannot derive anything again (Unusable); the log names them, they are code here."""
    modes: dict[str, None] = {}
    offset = await log.begin(CONTROL.name, partition)
    while records := await log.read(CONTROL.name, partition, offset, READ_MAX):
        events = (decode_or_none(CONTROL, record.value) for record in records)
        modes |= dict.fromkeys(event.router.mode for event in events if isinstance(event, PoolConfigured))
        offset = records[-1].offset + 1
    for mode in modes:
        await asyncio.to_thread(require_policy, mode)


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
