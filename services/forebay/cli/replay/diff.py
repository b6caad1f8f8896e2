"""`forebay replay diff`: compare the recorded history with another configuration or policy."""

import asyncio
from collections.abc import Set

import click
import msgspec

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.alternative import Alternative
from forebay.cli.replay.at import log_time_us
from forebay.cli.replay.command import DIFF_CHECKS, DiffCommand
from forebay.cli.replay.diff_view import show
from forebay.cli.replay.verify import shown_progress
from forebay.core.routing.policies import CustomPolicies
from forebay.journal.groups import pools_of
from forebay.journal.records import OtherRules, SpanEnds
from forebay.replay.diff.diff import Span, diff, span_of
from forebay.replay.diff.report import DiffReport
from forebay.replay.verify.verify import OnProgress
from forebay.transport.base import Log, LogError, NotDerivable
from forebay.transport.sqlite.log import SqliteLog


def run_diff(options: DiffCommand) -> None:
    options.recording.require_one_source()
    allowed = allowed_of(options.allow, DIFF_CHECKS)
    with explained(), own_stdout():
        other = options.other_options.alternative()
        custom = allowed_policies(options.allow_policy, other.modes)
        with shown_progress() as on_progress:
            found = asyncio.run(_diff(options.recording, other, (options.start, options.end), on_progress, custom))
    if options.json:
        click.echo(msgspec.json.encode(found).decode())
    elif found.divergence is None:
        show(found)
    _complain(found, allowed, options.recording)


async def compared(other: Alternative, log: Log, partition: int, span: Span, on_progress: OnProgress) -> DiffReport:
    """Return the comparison of a recorded span with an alternative."""
    pools = await pools_of(log, partition)
    other.require_pools(pools)
    report = await diff(log, partition, other.of, on_progress, other.named, span)
    report.alternative, report.idle = str(other), other.idle(pools, report.undone)
    return report


async def _diff(
    recording: Recording,
    other: Alternative,
    window: tuple[str, str],
    on_progress: OnProgress,
    custom: CustomPolicies,
) -> DiffReport:
    async with recording.opened(custom) as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        try:
            span = await span_of(log, partition, *await _window_us(log, partition, *window), custom)
            return await compared(other, log, partition, span, on_progress)
        except SpanEnds as error:
            kind = NotDerivable if isinstance(error, OtherRules) else LogError
            raise kind(f"{error}. To compare only a part of the log, give --from and --to") from error


async def _window_us(log: Log, partition: int, start: str, end: str) -> tuple[int | None, int | None]:
    """Return the values of `--from` and `--to` in microseconds since 1970; None for an empty value."""
    from_us = await log_time_us("--from", start, log, partition) if start else None
    to_us = await log_time_us("--to", end, log, partition) if end else None
    if from_us is not None and to_us is not None and from_us >= to_us:
        fail(f"--from {start} is not before --to {end}")
    return from_us, to_us


def _complain(report: DiffReport, allowed: Set[str], recording: Recording) -> None:
    """Exit with an error if the recorded history could not be verified."""
    if report.divergence is not None:
        divergence = report.divergence
        where = f"{recording.name}: history diverges at journal offset {divergence.offset}: {divergence.reason}"
        fail(f"{where}; `forebay verify` shows the details", DIVERGED)
    failed = {name: count for name, count in report.unverified.items() if name not in allowed}
    if failed:
        fail(complaint(failed), exit_code(failed))
