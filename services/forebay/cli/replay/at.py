"""`forebay replay at`: the state of a recorded group at one moment."""

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from forebay.cli.common.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import GroupOption, LogArgument, Recording
from forebay.cli.common.terminal import own_stdout, results
from forebay.cli.common.times import time_us
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.replay.at_view import (
    facts_sheet,
    lost_sheet,
    queue_sheet,
    ranks_sheet,
    render_sheet,
    requests_sheet,
    summary,
    workers_sheet,
)
from forebay.core.routing.policies import CustomPolicies
from forebay.replay.at import JournalDiverged, Position, last_clock, offset_at, seek
from forebay.replay.moment import Moment
from forebay.replay.policies import require_allowed
from forebay.transport.base import Log

ROWS_MAX = 64  # per table on a terminal; `--json` has all rows
LOST_SHOWN_MAX = 8
CLOCK_DIGITS_MAX = 19  # a time in microseconds, as in records


def at(
    log: LogArgument = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: GroupOption = "",
    time: Annotated[
        str,
        typer.Option(
            help="Time on the owner's clock: 2026-01-31T12:00:00Z, 12:30 that day, -5m before the end, or microseconds."
        ),
    ] = "",
    offset: Annotated[int | None, typer.Option(min=0, help="Offset of a record of the journal `decisions`.")] = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the complete state as one JSON object.")] = False,
) -> None:
    """Show a group's state right after a journal record, by default the last one."""
    if time and offset is not None:
        fail("--time and --offset exclude each other; give one of them")
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    with explained():
        custom = allowed_policies(allow_policy)
        try:
            with own_stdout():
                position, moment = asyncio.run(_read_moment(recording, time, offset, custom))
        except JournalDiverged as diverged:
            complain(f"{recording.name}: {diverged}")
            raise typer.Exit(DIVERGED) from None
    if json:
        typer.echo(msgspec.json.encode(moment).decode())
    else:
        show(results(), position, moment)
    tell_unverified(moment.unverified)


async def _read_moment(
    recording: Recording, time: str, offset: int | None, custom: CustomPolicies
) -> tuple[Position, Moment]:
    async with recording.opened() as (log, partition):
        await require_allowed(log, partition, custom)
        position = await seek(log, partition, await _requested_offset(log, partition, time, offset), custom)
        return position, await position.moment()


async def _requested_offset(log: Log, partition: int, time: str, offset: int | None) -> int | None:
    """Return the journal offset that the options name; None if they name none."""
    if not time:
        return offset
    exactly = time.isdecimal() and len(time) <= CLOCK_DIGITS_MAX
    wanted_us = int(time) if exactly else time_us("--time", time, await last_clock(log, partition))
    return await offset_at(log, partition, wanted_us)


def show(console: Console, position: Position, moment: Moment) -> None:
    """Print the state, with a limit on the rows of each table."""
    console.print(render_sheet(facts_sheet(moment)))
    if position.step is not None:
        console.print(f"record     {summary(position.step.record)}", markup=False, highlight=False)
    for sheet in (workers_sheet(moment, ROWS_MAX), ranks_sheet(moment, ROWS_MAX)):
        console.print()
        console.print(render_sheet(sheet))
    for loss in reversed(moment.lost[-LOST_SHOWN_MAX:]):
        console.print()
        console.print(render_sheet(lost_sheet(loss, ROWS_MAX)))
    if len(moment.lost) > LOST_SHOWN_MAX:
        console.print(f"and {len(moment.lost) - LOST_SHOWN_MAX} workers lost earlier", style="dim")
    for sheet in (queue_sheet(moment, ROWS_MAX), requests_sheet(moment, ROWS_MAX)):
        console.print()
        console.print(render_sheet(sheet))
