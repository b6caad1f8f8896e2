"""`forebay verify`: derive the decisions of a recorded log again."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from forebay.cli.common.errors import OTHER_RULES, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import bar, in_markup, plain_table, print_result, results, table
from forebay.cli.common.terminal import counted, own_stdout
from forebay.cli.common.unverified import DIVERGED, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.command import VerifyCommand
from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import CostTerms
from forebay.events.topics import DECISIONS
from forebay.journal.checks import UNKNOWN_EVENTS, UNVERIFIED
from forebay.journal.groups import groups_of
from forebay.journal.release import rules_text
from forebay.processes.notices import complain
from forebay.replay.scaling.reader import ScalingVerification, has_scaling
from forebay.replay.verify.divergence import CostTableRow, CostTables, DivergenceReport, EventSummary
from forebay.replay.verify.verify import OnProgress, VerifyReport, include_scaling, verify
from forebay.transport.sqlite.log import SqliteLog

ROWS_SHOWN = 32  # per cost table, winner, runner-up and differences first; --json has all
TERMS = CostTerms.__struct_fields__
RARE_TERMS = ("host_overlap", "disk_overlap", "store_overlap", "taint_factor", "eviction_cost")


def run_verify(options: VerifyCommand) -> None:
    options.recording.require_one_source()
    allowed = allowed_of(options.allow, UNVERIFIED)
    with explained():
        custom = allowed_policies(options.allow_policy)
    with explained(), shown_progress() as on_progress, own_stdout():
        report = asyncio.run(_verify(options.recording, on_progress, allowed, custom))
    print_result(report, options.json, lambda: show(report))
    if report.diverged:
        raise click.exceptions.Exit(DIVERGED)
    if report.failed:
        fail(complaint(report.failed, report.unknown_event), exit_code(report.failed))
    if report.is_empty:
        versions = " and ".join(sorted({rules_text(span.rules, span.release) for span in report.others}))
        complain(
            f"nothing was verified: this program has version {CORE_VERSION} of the rules, the journal was decided by"
            f" {versions}; run `verify` of a forebay with that version"
        )
        raise click.exceptions.Exit(OTHER_RULES)


async def _verify(
    recording: Recording, on_progress: OnProgress, allowed: Set[str], custom: CustomPolicies
) -> VerifyReport:
    async with recording.opened(custom) as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        ends = [await of(DECISIONS.name, partition) for of in (log.begin, log.end)]
        if ends[0] == ends[1] and "" not in await groups_of(log) and not await has_scaling(log):
            fail(f"nothing to verify: the journal of control partition {partition} in {recording.name} is empty")
        report = await verify(log, partition, on_progress, allowed, custom)
        await include_scaling(log, report)
        return report


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """Show on stderr the records verified, decisions per second and remaining time, if stderr is a terminal."""
    columns = (
        TextColumn("deriving decisions"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:,.0f} decisions/s"),
        TimeRemainingColumn(),
    )
    with bar(*columns) as progress:
        task = progress.add_task("", total=None, rate=0.0)

        def on_progress(done: int, total: int, decisions: int) -> None:
            elapsed_s = progress.tasks[task].elapsed
            rate = decisions / elapsed_s if elapsed_s else 0.0
            progress.update(task, completed=done, total=total, rate=rate)

        yield on_progress


def show(report: VerifyReport) -> None:
    console = results(soft_wrap=True)

    def print_row(name: str, text: str) -> None:
        console.print(f"{name:<11}{in_markup(text)}")

    print_row("decisions", f"{report.decisions}, verified {report.verified}")
    counts = [counted(report.records, "record"), counted(report.claims, "owner"), counted(report.snapshots, "snapshot")]
    print_row("journal", ", ".join(counts))
    if report.void:
        print_row("stale", f"{report.void} records of owners that had lost the group")
    if report.repeated:
        print_row("repeated", f"{report.repeated} records that repeat an earlier record")
    if report.start:
        print_row(
            "from",
            f"the snapshot at journal offset {report.start}; the {report.start} earlier records are no longer there",
        )
    for span in report.others:
        print_row(
            "left out",
            f"journal offsets {span.first} to {span.end - 1}: verified only by a forebay with"
            f" {rules_text(span.rules, span.release)}; this one has version {CORE_VERSION}",
        )
    print_row("events", f"{report.events}" + (f", {report.malformed} malformed" if report.malformed else ""))
    if report.pending or report.unapplied:
        print_row(
            "at the end", f"{report.pending} decisions not journaled yet, {report.unapplied} events not applied yet"
        )
    print_row("digest", f"{report.digest} (decisions), {report.state} (state)")
    for name, count in report.unverified.items():
        allowed = " (allowed)" if name in report.allowed else ""
        first = f" (first: {report.unknown_event})" if name == UNKNOWN_EVENTS else ""
        print_row("UNVERIFIED", f"{count} {name}: {UNVERIFIED[name]}{first}{allowed}")
    for foreign in report.foreign_progress:
        print_row("foreign", foreign.text())
    if report.scaling is not None:
        for line in verification_lines(report.scaling):
            console.print(in_markup(line))
    if report.divergence is not None:
        _show_divergence(console, report.divergence)


def verification_lines(verification: ScalingVerification) -> Iterator[str]:
    """Yield lines about the second derivation of decisions."""
    parts = [f"{verification.equal:,} of {verification.decisions:,} decisions derived again: equal"]
    if verification.stale:
        parts.append(f"{verification.stale:,} stale, without effect")
    if verification.other_rules:
        parts.append(f"{verification.other_rules:,} by rules of another version, not derived again")
    if verification.undecodable:
        parts.append(f"{verification.undecodable:,} records do not decode")
    yield f"scaling    {', '.join(parts)}"
    if verification.different:
        yield f"DIFFERENT  {verification.different:,} decisions do not follow from the records before them"
    for one in verification.first:
        for name, values in one.differs.items():
            yield f"  {one.offset}: {name}: recorded {values['recorded']}, derived {values['derived']}"


def _show_divergence(console: Console, divergence: DivergenceReport) -> None:
    kind = f"{divergence.recorded['type']} of owner epoch {divergence.owner_epoch}"
    console.print(f"\n[bold red]DIVERGENCE[/] at journal offset {divergence.offset}, {kind}:")
    console.print(f"  {in_markup(divergence.reason)}")
    if divergence.hint:
        console.print(f"  {in_markup(divergence.hint)}")
    for name, values in divergence.differs.items():
        recorded, derived = _short(values["recorded"]), _short(values["derived"])
        console.print(f"  {in_markup(f'{name}: recorded {recorded}, derived {derived}')}")
    console.print(f"recorded   {in_markup(_line(divergence.recorded))}")
    console.print(f"derived    {in_markup('nothing' if divergence.derived is None else _line(divergence.derived))}")
    console.print(f"previous   {in_markup('none' if divergence.previous is None else _brief(divergence.previous))}")
    held = "last matching digest" if divergence.held.sealed else "no digest matched yet; start"
    since = ", ".join(f"{topic} {first} to {end - 1}" for topic, (first, end) in divergence.held.since.items())
    console.print(
        f"verified   {held} at journal offset {divergence.held.journal_offset}; applied since: {since or 'nothing'}"
    )
    if divergence.table is not None:
        _show_tables(console, divergence.table)
    elsewhere = (
        "" if divergence.events_offset == divergence.offset else f", by journal record {divergence.events_offset}"
    )
    more = f"; {divergence.events_before} earlier ones omitted" if divergence.events_before else ""
    _show_events(console, f"Events applied since the previous record{elsewhere}{more}", divergence.events)


def _show_tables(console: Console, found: CostTables) -> None:
    console.print(
        f"\nCost table of {in_markup(found.request_id)} in {in_markup(found.pool)}, by {in_markup(found.mode)}"
    )
    console.print(f"  derived    {len(found.rows)} candidates, digest {found.digest}")
    if not found.comparable:
        console.print("  recorded   not comparable: the record is about another decision")
    elif found.recorded_in_full:
        console.print(f"  recorded   {found.recorded_candidates} candidates, digest {found.recorded_digest}")
    else:
        console.print(
            f"  recorded   {found.recorded_candidates} candidates, digest {found.recorded_digest}; the journal holds"
            " only the terms of the winner and the runner-up"
        )
    terms = [name for name in TERMS if name not in RARE_TERMS or _is_used(found, name)]
    grid = table("", ("candidate", "derived place", *(name.replace("_", " ") for name in terms)), left=2)
    ordered = sorted(found.rows, key=lambda row: not (row.place or row.recorded is not None))
    for row in ordered[:ROWS_SHOWN]:
        grid.add_row(in_markup(f"{row.worker_id}/{row.rank}"), _place(row), *(_cell(row, name) for name in terms))
    console.print(grid, soft_wrap=False)
    if len(ordered) > ROWS_SHOWN:
        console.print(f"{len(ordered) - ROWS_SHOWN} more candidates; --json shows all")
    if any(row.differs or row.place != row.recorded_place for row in found.rows):
        console.print("values are derived; != marks a different recorded value")


def _is_used(table: CostTables, name: str) -> bool:
    """Return whether a term differs from its default for any candidate."""
    defaults = CostTerms(
        cost=0.0, prefill_blocks=0.0, overlap_credit=0.0, decode_blocks=0.0, active_requests=0, device_overlap=0
    )
    shown = (terms for row in table.rows for terms in (row.derived, row.recorded) if terms is not None)
    return any(getattr(terms, name) != getattr(defaults, name) for terms in shown)


def _place(row: CostTableRow) -> str:
    if row.recorded is None or row.place == row.recorded_place:
        return row.place
    return f"{row.place or '-'} [bold red]!= {row.recorded_place or '-'}[/]"


def _cell(row: CostTableRow, name: str) -> str:
    derived = "-" if row.derived is None else _number(getattr(row.derived, name))
    if row.recorded is None or (row.derived is not None and name not in row.differs):
        return derived
    return f"{derived} [bold red]!= {_number(getattr(row.recorded, name))}[/]"


def _number(value: float) -> str:
    """Format a number exactly, so that different numbers look different."""
    return str(int(value)) if value == int(value) else repr(value)


def _show_events(console: Console, title: str, events: Sequence[EventSummary]) -> None:
    console.print(f"\n{in_markup(title)}")
    if not events:
        console.print("  none")
        return
    rows = [
        ["" if value is None else str(value) for value in (one.topic, one.offset, one.type, one.now_us, one.text)]
        for one in events
    ]
    columns = ("topic", "offset", "type", "clock, us", "event")
    console.print(plain_table(columns, rows, {"topic", "type", "event"}), soft_wrap=False)


def _line(record: object) -> str:
    return msgspec.json.encode(record).decode()


def _brief(record: Mapping[str, Any]) -> str:
    names = ("offset", "type", "seq", "request_id", "worker_id")
    return ", ".join(f"{name} {record[name]}" for name in names if name in record)


def _short(value: object) -> str:
    return value if isinstance(value, str) else _line(value)
