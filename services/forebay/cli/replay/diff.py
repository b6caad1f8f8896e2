"""`forebay replay diff`: compare the recorded history with another configuration or policy."""

import asyncio
from collections.abc import Set
from pathlib import Path

import msgspec
import typer
from rich.progress import TaskID

from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.page_file import require_writable, write
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import bar, own_stdout
from forebay.cli.common.unverified import DIVERGED, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.alternative import AlternativeOptions
from forebay.cli.policies.pool_rules import PoolRuleOptions
from forebay.cli.replay.closed_loop import ClosedLoop, closed_loop
from forebay.cli.replay.command import DIFF_CHECKS
from forebay.cli.replay.compared import Compared
from forebay.cli.replay.diff_view import show
from forebay.cli.replay.log_time import log_time_us
from forebay.cli.replay.verify import shown_progress
from forebay.core.routing.policies import CustomPolicies
from forebay.replay.diff.handover import Handover
from forebay.replay.diff.report import DiffReport
from forebay.replay.diff.span import span_of
from forebay.replay.policies import require_allowed
from forebay.replay.verify.verify import OnProgress
from forebay.transport.base import Log
from forebay.transport.sqlite.log import SqliteLog

PAGE_TITLE = "forebay replay diff"


def run_diff(
    *,
    other_options: AlternativeOptions,
    rule_options: PoolRuleOptions,
    recording: Recording,
    window: tuple[str, str],
    report: Path | None,
    allow: list[str] | None,
    closed: bool,
    speedup: float,
    allow_policy: AllowPolicyOption,
    json: bool,
) -> None:
    """Run `forebay replay diff`. command.py documents its options; `window` has the values of `--from` and `--to`."""
    recording.require_one_source()
    if report is not None:
        require_writable("--report", report, PAGE_TITLE)
    if speedup != 1.0 and not closed:
        fail("--speedup applies to simulated engines: it needs --closed-loop")
    allowed = allowed_of(allow, DIFF_CHECKS)
    handover = Handover() if closed else None
    with explained(), own_stdout():
        other = other_options.alternative(is_required=rule_options == PoolRuleOptions())
        compared = Compared(other, rule_options, rule_options.rules())
        custom = allowed_policies(allow_policy, other.modes)
        with shown_progress() as on_progress:
            found = asyncio.run(_diff(recording, compared, window, on_progress, handover, custom))
        simulated = None if handover is None else _simulated(found, handover, speedup, custom)
    if json:
        fields = msgspec.to_builtins(found)
        typer.echo(msgspec.json.encode({**fields, "closed_loop": simulated} if closed else fields).decode())
    elif found.divergence is None:
        show(found, simulated)
        if closed and simulated is None:
            typer.echo("closed loop   nothing to simulate, because the alternative never differs from history")
    if report is not None and found.divergence is None:
        _write(report, found, simulated, recording.name)
    _complain(found, allowed, recording)


def _simulated(report: DiffReport, handover: Handover, speedup: float, custom: CustomPolicies) -> ClosedLoop | None:
    """Return the metrics of the closed-loop simulation, or None if there is nothing to simulate.

    Raises:
        Unusable: the recording after the fork cannot be simulated.
    """
    if report.divergence is not None or report.fork is None:
        return None
    with bar() as progress:
        tasks: dict[str, TaskID] = {}

        def on_run(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        ended_us = report.fork.at_us + round((report.span_s - report.fork.after_s) * 1e6)
        return closed_loop(handover, ended_us, speedup, on_run, custom)


def _write(path: Path, report: DiffReport, simulated: ClosedLoop | None, source: str) -> None:
    from forebay.cli.replay.diff_page import page  # noqa: PLC0415 - importing plotly takes a second

    write("--report", path, lambda: page(report, simulated, source))


async def _diff(
    recording: Recording,
    compared: Compared,
    window: tuple[str, str],
    on_progress: OnProgress,
    handover: Handover | None,
    custom: CustomPolicies,
) -> DiffReport:
    async with recording.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_allowed(log, partition, custom)
        span = await span_of(log, partition, *await _window_us(log, partition, *window), custom=custom)
        if handover is not None and span.later:
            fail(
                f"--closed-loop: the journal has a part by other rules, or one that was given up, before offset"
                f" {span.later[-1].first}; select decisions on one side of it with --from or --to"
            )
        return await compared.report(log, partition, span, on_progress, handover)


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
        complain(f"{where}; `forebay replay verify` shows the details")
        raise typer.Exit(DIVERGED)
    failed = {name: count for name, count in report.unverified.items() if name not in allowed}
    if failed:
        complain(complaint(failed))
        raise typer.Exit(exit_code(failed))
