"""`forebay replay`: questions to a recorded log."""

import asyncio
from collections.abc import Set
from typing import Annotated

import msgspec
import typer

from forebay.cli import replay_at, replay_export
from forebay.cli.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.errors import USAGE, explained, fail
from forebay.cli.recorded_policies import require_policies
from forebay.cli.recording import LogArgument, Recording
from forebay.cli.replay_diff import diff_command
from forebay.cli.replay_explain import explain_command
from forebay.cli.replay_verify import complaint, show, shown_progress
from forebay.replay.verify import UNKNOWN_EVENTS, UNVERIFIED, OnProgress, Report, verify
from forebay.transport.sqlite_log import SqliteLog

app = typer.Typer(help="Derive recorded decisions again.", no_args_is_help=True)
app.command("explain")(explain_command)
app.command("at")(replay_at.at)
app.command("export")(replay_export.export)
app.command("diff")(diff_command)


@app.callback()
def _root() -> None:
    """Derive recorded decisions again."""


@app.command("verify")
def verify_command(
    log: LogArgument = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: Annotated[str, typer.Option(help="The model whose decisions are verified, if there are several.")] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(help=f"What may stay unverified, several times: {', '.join(UNVERIFIED)}.", metavar="NAME"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Derive every routing decision again; exit 1 at the first that the events do not lead to."""
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    allowed = frozenset(allow or ())
    if unknown := sorted(allowed - UNVERIFIED.keys()):
        fail(f"--allow {unknown[0]}: there is no such name; there are {', '.join(UNVERIFIED)}")
    with explained(), shown_progress() as on_progress:
        report = asyncio.run(_verify(recording, on_progress, allowed))
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        show(report)
    if report.divergence is not None:
        raise typer.Exit(1)
    if report.failed:
        typer.echo(f"forebay: {complaint(report)}", err=True)
        raise typer.Exit(USAGE if UNKNOWN_EVENTS in report.failed else 1)


async def _verify(recording: Recording, on_progress: OnProgress, allowed: Set[str]) -> Report:
    async with recording.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_policies(log, partition)
        return await verify(log, partition, on_progress, allowed)
