"""What `forebay replay verify` shows of its report on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from forebay.cli.common.terminal import bar, in_markup, results
from forebay.events.decisions import CostTerms
from forebay.replay.explain.event_text import EventTold
from forebay.replay.verify.cost_tables import Row, Table
from forebay.replay.verify.divergence import Told
from forebay.replay.verify.verify import UNVERIFIED, OnProgress, Report
from forebay.replay.walk import UNKNOWN_EVENTS

ROWS_SHOWN = 32  # of a cost table: those with a place or a difference come first; --json has all
TERMS = CostTerms.__struct_fields__
RARE_TERMS = ("host_overlap", "disk_overlap", "taint_factor")


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """Journal records done, decisions a second and the time that is left, on stderr if that is a terminal."""
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


def show(report: Report) -> None:
    """The report on stdout."""
    console = results(soft_wrap=True)

    def say(name: str, text: str) -> None:
        console.print(f"{name:<11}{in_markup(text)}")

    say("decisions", f"{report.decisions}, verified {report.verified}")
    say("journal", f"{report.records} records, {report.claims} owners, {report.snapshots} snapshots")
    if report.void:
        say("void", f"{report.void} records of owners that had lost the group")
    if report.start:
        say(
            "from", f"the snapshot at journal offset {report.start}: the {report.start} records before it are not there"
        )
    say("events", f"{report.events}" + (f", {report.malformed} malformed" if report.malformed else ""))
    if report.pending or report.unapplied:
        say("at the end", f"{report.pending} decisions not journalled yet, {report.unapplied} events not applied yet")
    say("digest", f"{report.digest} (decisions), {report.state} (state)")
    for name, count in report.unverified.items():
        allowed = " (allowed)" if name in report.allowed else ""
        first = f" (the first: {report.unknown_event})" if name == UNKNOWN_EVENTS else ""
        say("UNVERIFIED", f"{count} {name}: {UNVERIFIED[name]}{first}{allowed}")
    for foreign in report.foreign_progress:
        say("foreign", foreign.text())
    if report.divergence is not None:
        _show_divergence(console, report.divergence)


def _show_divergence(console: Console, told: Told) -> None:
    kind = told.recorded["type"]
    console.print(
        f"\n[bold red]DIVERGENCE[/] at journal offset {told.offset}, a {kind} of owner epoch {told.owner_epoch}:"
    )
    console.print(f"  {in_markup(told.reason)}")
    if told.hint:
        console.print(f"  {in_markup(told.hint)}")
    for name, values in told.differs.items():
        recorded, derived = _short(values["recorded"]), _short(values["derived"])
        console.print(f"  {in_markup(f'{name}: recorded {recorded}, derived {derived}')}")
    console.print(f"recorded   {in_markup(_line(told.recorded))}")
    console.print(f"derived    {in_markup('nothing' if told.derived is None else _line(told.derived))}")
    console.print(f"previous   {in_markup('none' if told.previous is None else _brief(told.previous))}")
    held = "last digest that held" if told.held.sealed else "no digest held yet; it begins"
    since = ", ".join(f"{topic} {first} to {end - 1}" for topic, (first, end) in told.held.since.items())
    console.print(
        f"held       {held} at journal offset {told.held.journal_offset}; applied since: {since or 'nothing'}"
    )
    if told.table is not None:
        _show_tables(console, told.table)
    elsewhere = "" if told.events_offset == told.offset else f", for the journal record {told.events_offset}"
    more = f"; {told.events_before} more before these" if told.events_before else ""
    _show_events(console, f"Events applied since the record before{elsewhere}{more}", told.events)
    if told.suspicion is not None:
        suspicion = told.suspicion
        more = f"; {suspicion.more} more" if suspicion.more else ""
        title = f"Suspects since journal offset {told.held.journal_offset}: {suspicion.why}{more}"
        _show_events(console, title, [*suspicion.likely, *suspicion.others])


def _show_tables(console: Console, table: Table) -> None:
    console.print(
        f"\nCost table of {in_markup(table.request_id)} in {in_markup(table.pool)}, by {in_markup(table.mode)}"
    )
    console.print(f"  derived    {len(table.rows)} candidates, digest {table.digest}")
    if not table.comparable:
        console.print("  recorded   the record is about something else")
    elif table.recorded_in_full:
        console.print(f"  recorded   {table.recorded_candidates} candidates, digest {table.recorded_digest}")
    else:
        console.print(
            f"  recorded   {table.recorded_candidates} candidates, digest {table.recorded_digest}; the journal has the"
            " terms of the winner and the runner-up, the full table is not on the log"
        )
    terms = [name for name in TERMS if name not in RARE_TERMS or _is_used(table, name)]
    grid = Grid(box=box.SIMPLE)
    grid.add_column("candidate", overflow="fold")
    grid.add_column("derived place", overflow="fold")
    for name in terms:
        grid.add_column(name.replace("_", " "), justify="right", overflow="fold")
    ordered = sorted(table.rows, key=lambda row: not (row.place or row.recorded is not None))
    for row in ordered[:ROWS_SHOWN]:
        grid.add_row(in_markup(f"{row.worker_id}/{row.rank}"), _place(row), *(_cell(row, name) for name in terms))
    console.print(grid, soft_wrap=False)
    if len(ordered) > ROWS_SHOWN:
        console.print(f"{len(ordered) - ROWS_SHOWN} more candidates: --json has them all")
    if any(row.differs or row.place != row.recorded_place for row in table.rows):
        console.print("as derived, and != as recorded")


def _is_used(table: Table, name: str) -> bool:
    """Whether a term says something of any candidate."""
    usual = CostTerms(
        cost=0.0, prefill_blocks=0.0, overlap_credit=0.0, decode_blocks=0.0, active_requests=0, device_overlap=0
    )
    shown = (terms for row in table.rows for terms in (row.derived, row.recorded) if terms is not None)
    return any(getattr(terms, name) != getattr(usual, name) for terms in shown)


def _place(row: Row) -> str:
    if row.recorded is None or row.place == row.recorded_place:
        return row.place
    return f"{row.place or '-'} [bold red]!= {row.recorded_place or '-'}[/]"


def _cell(row: Row, name: str) -> str:
    derived = "-" if row.derived is None else _number(getattr(row.derived, name))
    if row.recorded is None or (row.derived is not None and name not in row.differs):
        return derived
    return f"{derived} [bold red]!= {_number(getattr(row.recorded, name))}[/]"


def _number(value: float) -> str:
    """All of a number: two that differ look different."""
    return str(int(value)) if value == int(value) else repr(value)


def _show_events(console: Console, title: str, events: Sequence[EventTold]) -> None:
    console.print(f"\n{in_markup(title)}")
    if not events:
        console.print("  none")
        return
    timed = any(event.now_us is not None for event in events)
    grid = Grid(box=box.SIMPLE)
    grid.add_column("topic")
    grid.add_column("offset", justify="right")
    grid.add_column("type")
    if timed:
        grid.add_column("clock, us", justify="right")
    grid.add_column("what", overflow="fold")
    for event in events:
        offset = "" if event.offset is None else str(event.offset)
        clock = [str(event.now_us)] if timed else []
        grid.add_row(event.topic, offset, in_markup(event.type), *clock, in_markup(event.text))
    console.print(grid, soft_wrap=False)


def _line(record: object) -> str:
    return msgspec.json.encode(record).decode()


def _brief(record: Mapping[str, Any]) -> str:
    names = ("offset", "type", "seq", "request_id", "worker_id")
    return ", ".join(f"{name} {record[name]}" for name in names if name in record)


def _short(value: object) -> str:
    return value if isinstance(value, str) else _line(value)
