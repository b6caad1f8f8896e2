"""`forebay replay diff`: compare the recorded history with another configuration or policy."""

import asyncio
from collections.abc import Set

import click
import msgspec
from rich.console import Console
from rich.table import Table as Grid

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import in_markup, results, table
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.alternative import Alternative
from forebay.cli.replay.at import log_time_us
from forebay.cli.replay.command import DIFF_CHECKS, DiffCommand
from forebay.cli.replay.verify import shown_progress
from forebay.core.routing.policies import CustomPolicies
from forebay.events.decisions import CostTerms
from forebay.journal.checks import UNVERIFIED
from forebay.journal.groups import pools_of
from forebay.journal.records import OtherRules, SpanEnds
from forebay.replay.diff.diff import Span, diff, span_of
from forebay.replay.diff.report import DecisionOutcome, DiffReport, WorldSummary
from forebay.replay.verify.verify import OnProgress
from forebay.transport.base import Log, LogError, NotDerivable
from forebay.transport.sqlite.log import SqliteLog

RANKS_SHOWN = 32
MOST_SHOWN = 10
NAMES = ("history", "alternative")


def show(report: DiffReport) -> None:
    console = results()
    _print_row(console, "alternative", report.alternative)
    for given in report.idle:
        _print_row(console, "no change", f"{given}: equal to the recorded configuration")
    _print_row(
        console,
        "history",
        f"{report.history.decisions:,} decisions about {report.requests:,} requests in {report.span_s:,.1f} s, "
        "verified against the journal",
    )
    for name, count in report.unverified.items():
        _print_row(console, "UNVERIFIED", f"{count} {name}: {UNVERIFIED[name]}")
    _fork(console, report)
    moved = report.moved
    if not report.identical:
        share = f" ({moved.moved / moved.compared:.1%})" if moved.compared else ""
        _print_row(console, "moved", f"{moved.moved:,} of {moved.compared:,} requests went to another worker{share}")
        won, lost, later = report.overlap.won, report.overlap.lost, report.overlap.later_won
        _print_row(
            console,
            "overlap",
            f"{won.device:,} blocks won and {lost.device:,} lost on devices"
            + (f", {won.host:,} and {lost.host:,} in host memory" if won.host or lost.host else "")
            + (f", {won.disk:,} and {lost.disk:,} on disk" if won.disk or lost.disk else "")
            + (f", {won.store:,} and {lost.store:,} in shared stores" if won.store or lost.store else "")
            + (f"; {later:,} of those won because the request was sent later, see below" if later else ""),
        )
    console.print(_worlds(report))
    console.print(_ranks(report))
    if len(report.ranks) > RANKS_SHOWN:
        console.print(f"{len(report.ranks) - RANKS_SHOWN} more workers; --json shows all\n")
    if report.most:
        console.print(_most(report))
    for note in report.notes:
        _print_row(console, "note", note)


def terms_text(terms: CostTerms) -> str:
    found = [f"{terms.device_overlap} blocks on the device"]
    if terms.host_overlap or terms.disk_overlap:
        found.append(f"{terms.host_overlap} in host memory, {terms.disk_overlap} on disk")
    if terms.store_overlap:
        found.append(f"{terms.store_overlap} in the shared store")
    evicted = f"eviction {terms.eviction_cost:g}, " if terms.eviction_cost else ""
    return (
        f"cost {terms.cost:g} = prefill {terms.prefill_blocks:g}, credit {terms.overlap_credit:g}, {evicted}"
        f"decode {terms.decode_blocks:g}, {terms.active_requests} active; overlap: {', '.join(found)}"
    )


def outcome_text(outcome: DecisionOutcome) -> str:
    match outcome.decision:
        case "routed":
            assert outcome.terms is not None, "routed by cost"
            return f"{outcome.worker_id}/{outcome.rank}: {terms_text(outcome.terms)}"
        case "held":
            return f"held in queue class {outcome.reason}"
        case "nothing":
            return "no decision at this event"
        case _:
            return f"{outcome.decision}: {outcome.reason}"


def rows(report: DiffReport) -> list[tuple[str, str, str]]:
    """Return one row per metric of a comparison: its name, its value in history and in the alternative."""
    sides = (report.history, report.other)

    def row(name: str, *values: str) -> tuple[str, str, str]:
        return name, values[0], values[1]

    found = [
        row("attempts sent to workers", *(f"{side.routed:,}" for side in sides)),
        row("prefix reuse, predicted", *(f"{side.reuse:.4f}" for side in sides)),
        row("prompt tokens to compute", *(f"{side.prompt_tokens - side.cached_tokens:,}" for side in sides)),
        row("busiest worker over the mean", *(f"{side.max_over_mean:.3f}" for side in sides)),
        row("overlap on devices, blocks", *(f"{side.overlap.device:,}" for side in sides)),
    ]
    if any(side.overlap.host or side.overlap.disk for side in sides):
        found.append(
            row("overlap in host memory, on disk", *(f"{side.overlap.host:,}, {side.overlap.disk:,}" for side in sides))
        )
    if any(side.overlap.store for side in sides):
        found.append(row("overlap in shared stores", *(f"{side.overlap.store:,}" for side in sides)))
    if any(side.held for side in sides):
        found.append(row("held in the queue", *(f"{side.held:,}" for side in sides)))
        found.append(row("time in the queue, ms: p50, p99, max", *map(_waits, sides)))
    if any(side.still_held for side in sides):
        found.append(row("still held at the end", *(f"{side.still_held:,}" for side in sides)))
    for name, counts in (("rejected", [s.rejected for s in sides]), ("aborted", [s.aborted for s in sides])):
        found += [
            row(f"{name}: {reason}", *(f"{one.get(reason, 0):,}" for one in counts))
            for reason in sorted({*counts[0], *counts[1]})
        ]
    landed = ["" if side.landed is None else f"{side.landed:.1%}" for side in sides]
    return [*found, row("prompt blocks cached where they were sent", *landed)]


def _waits(side: WorldSummary) -> str:
    waited = side.wait_ms
    return f"{waited['p50']:,.0f}, {waited['p99']:,.0f}, {waited['max']:,.0f}" if waited else "-"


def _print_row(console: Console, name: str, text: str) -> None:
    grid = Grid.grid(padding=(0, 1))
    grid.add_column(width=13)
    grid.add_column()
    grid.add_row(name, in_markup(text))
    console.print(grid)


def _fork(console: Console, report: DiffReport) -> None:
    fork = report.fork
    if fork is None:
        _print_row(console, "fork", "none: all decisions are equal")
        return
    _print_row(
        console,
        "fork",
        f"journal offset {fork.offset}, after {fork.after_s:,.3f} s, {fork.request_id}; "
        f"{report.before_fork:.1%} of the decisions are before the fork and exact",
    )
    for name, outcome in zip(NAMES, (fork.history, fork.alternative), strict=True):
        _print_row(console, f"  {name}", outcome_text(outcome))
    other, there = fork.history, fork.alternative.there
    if there is not None:
        _print_row(console, "", f"in the alternative's cost table {other.worker_id}/{other.rank}: {terms_text(there)}")


def _worlds(report: DiffReport) -> Grid:
    grid = table("", ["", *NAMES])
    for row in rows(report):
        grid.add_row(*map(in_markup, row))
    return grid


def _ranks(report: DiffReport) -> Grid:
    grid = table("", ["worker", "requests", "in the alternative", "tokens to compute", "in the alternative"])
    for rank in report.ranks[:RANKS_SHOWN]:
        one, other = rank.history, rank.alternative
        numbers = (one.requests, other.requests, one.computed_tokens, other.computed_tokens)
        grid.add_row(in_markup(f"{rank.worker_id}/{rank.rank}"), *(f"{number:,}" for number in numbers))
    return grid


def _most(report: DiffReport) -> Grid:
    columns = ["request", *NAMES, "prompt blocks", "overlap", "in the alternative", "change"]
    grid = table("Moved requests with the largest change of overlap", columns, left=1 + len(NAMES))
    for one in report.most[:MOST_SHOWN]:
        places = (f"{one.worker_id}/{one.rank}", f"{one.other_worker_id}/{one.other_rank}")
        numbers = (f"{one.blocks:,}", f"{one.overlap:,}", f"{one.other_overlap:,}", f"{one.gain:+,}")
        grid.add_row(in_markup(one.request_id), *map(in_markup, places), *numbers)
    return grid


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
