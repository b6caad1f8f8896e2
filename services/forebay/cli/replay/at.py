"""`forebay replay at`: the state of a recorded group at one moment."""

import asyncio

import click
import msgspec
from rich.console import Console

from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout, results
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.at_view import (
    facts_table,
    later_lines,
    lost_table,
    queue_table,
    ranks_table,
    requests_table,
    summary,
    workers_table,
)
from forebay.cli.replay.command import AtCommand
from forebay.cli.replay.log_time import log_time_us
from forebay.core.routing.policies import CustomPolicies
from forebay.replay.at import JournalDiverged, Position
from forebay.replay.at_time import seek_record, seek_time
from forebay.replay.moment import Moment
from forebay.replay.policies import require_allowed

LOST_SHOWN_MAX = 8


def run_at(options: AtCommand) -> None:
    if options.time and options.offset is not None:
        fail("--time and --offset exclude each other; give one of them")
    options.recording.require_one_source()
    with explained():
        custom = allowed_policies(options.allow_policy)
        try:
            with own_stdout():
                position, moment = asyncio.run(_read_moment(options.recording, options.time, options.offset, custom))
        except JournalDiverged as diverged:
            complain(f"{options.recording.name}: {diverged}")
            raise click.exceptions.Exit(DIVERGED) from None
    if options.json:
        click.echo(msgspec.json.encode(moment).decode())
    else:
        show(results(), position, moment)
    tell_unverified(moment.unverified)


async def _read_moment(
    recording: Recording, time: str, offset: int | None, custom: CustomPolicies
) -> tuple[Position, Moment]:
    async with recording.opened() as (log, partition):
        await require_allowed(log, partition, custom)
        if time:
            position = await seek_time(log, partition, await log_time_us("--time", time, log, partition), custom)
        else:
            position = await seek_record(log, partition, offset, custom)
        return position, await position.moment()


def show(console: Console, position: Position, moment: Moment) -> None:
    """Print the state, with a limit on the rows of each table."""
    console.print(facts_table(moment))
    if position.step is not None:
        console.print(f"record     {summary(position.step.record)}", markup=False, highlight=False)
    for line in later_lines(moment):
        console.print(line, markup=False, highlight=False)
    for table in (workers_table(moment), ranks_table(moment)):
        console.print()
        console.print(table)
    for loss in reversed(moment.lost[-LOST_SHOWN_MAX:]):
        console.print()
        console.print(lost_table(loss))
    if len(moment.lost) > LOST_SHOWN_MAX:
        console.print(f"and {len(moment.lost) - LOST_SHOWN_MAX} workers lost earlier", style="dim")
    for table in (queue_table(moment), requests_table(moment)):
        console.print()
        console.print(table)
