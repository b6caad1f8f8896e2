"""`forebay replay at`: the world of a recorded group at one moment."""

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
from forebay.cli.policies.recorded import require_policies
from forebay.cli.replay.at_view import (
    drawn,
    facts_sheet,
    lost_sheet,
    queue_sheet,
    ranks_sheet,
    requests_sheet,
    summary,
    workers_sheet,
)
from forebay.replay.at import Diverged, Position, arrive, last_clock, offset_at
from forebay.replay.moment import Moment
from forebay.transport.base import Log

ROWS_MAX = 64  # of a table on a terminal; `--json` has all
LOST_SHOWN_MAX = 8
CLOCK_DIGITS_MAX = 19  # microseconds, as records say them


def at(
    log: LogArgument = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: GroupOption = "",
    time: Annotated[
        str,
        typer.Option(
            help="On the owner's clock: 2026-01-31T12:00:00Z, 12:30 of that day, -5m before the end; or microseconds."
        ),
    ] = "",
    offset: Annotated[int | None, typer.Option(min=0, help="A record of the journal `decisions`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, with everything.")] = False,
) -> None:
    """Show the world as its owner knew it when it wrote a journal record, the last one by default."""
    if time and offset is not None:
        fail("give --time or --offset, not both")
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    with explained():
        try:
            with own_stdout():
                position, moment = asyncio.run(_look(recording, time, offset))
        except Diverged as diverged:
            complain(f"{recording.name}: {diverged}")
            raise typer.Exit(DIVERGED) from None
    if json:
        typer.echo(msgspec.json.encode(moment).decode())
    else:
        show(results(), position, moment)
    tell_unverified(moment.unverified)


async def _look(recording: Recording, time: str, offset: int | None) -> tuple[Position, Moment]:
    async with recording.opened() as (log, partition):
        position = await arrive(log, partition, await _wanted(log, partition, time, offset))
        return position, await position.moment()


async def _wanted(log: Log, partition: int, time: str, offset: int | None) -> int | None:
    """The journal offset that the command names, if it does."""
    await require_policies(log, partition)
    if not time:
        return offset
    exactly = time.isdecimal() and len(time) <= CLOCK_DIGITS_MAX
    wanted_us = int(time) if exactly else time_us("--time", time, await last_clock(log, partition))
    return await offset_at(log, partition, wanted_us)


def show(console: Console, position: Position, moment: Moment) -> None:
    """The whole moment, each table bounded."""
    console.print(drawn(facts_sheet(moment)))
    if position.step is not None:
        console.print(f"record     {summary(position.step.record)}", markup=False, highlight=False)
    for sheet in (workers_sheet(moment, ROWS_MAX), ranks_sheet(moment, ROWS_MAX)):
        console.print()
        console.print(drawn(sheet))
    for loss in reversed(moment.lost[-LOST_SHOWN_MAX:]):
        console.print()
        console.print(drawn(lost_sheet(loss, ROWS_MAX)))
    if len(moment.lost) > LOST_SHOWN_MAX:
        console.print(f"and {len(moment.lost) - LOST_SHOWN_MAX} lost before", style="dim")
    for sheet in (queue_sheet(moment, ROWS_MAX), requests_sheet(moment, ROWS_MAX)):
        console.print()
        console.print(drawn(sheet))
