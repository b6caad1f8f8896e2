"""Terminal output of `forebay replay diff`."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from forebay.cli.common.tables import in_markup, results
from forebay.events.decisions import CostTerms
from forebay.journal.checks import UNVERIFIED
from forebay.replay.diff.report import DecisionOutcome, DiffReport, WorldSummary

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
    grid = _grid([""], NAMES)
    for row in rows(report):
        grid.add_row(*map(in_markup, row))
    return grid


def _ranks(report: DiffReport) -> Grid:
    grid = _grid(["worker"], ["requests", "in the alternative", "tokens to compute", "in the alternative"])
    for rank in report.ranks[:RANKS_SHOWN]:
        one, other = rank.history, rank.alternative
        numbers = (one.requests, other.requests, one.computed_tokens, other.computed_tokens)
        grid.add_row(in_markup(f"{rank.worker_id}/{rank.rank}"), *(f"{number:,}" for number in numbers))
    return grid


def _most(report: DiffReport) -> Grid:
    grid = _grid(["request", *NAMES], ["prompt blocks", "overlap", "in the alternative", "change"])
    grid.title, grid.title_justify = "Moved requests with the largest change of overlap", "left"
    for one in report.most[:MOST_SHOWN]:
        places = (f"{one.worker_id}/{one.rank}", f"{one.other_worker_id}/{one.other_rank}")
        numbers = (f"{one.blocks:,}", f"{one.overlap:,}", f"{one.other_overlap:,}", f"{one.gain:+,}")
        grid.add_row(in_markup(one.request_id), *map(in_markup, places), *numbers)
    return grid


def _grid(texts: Sequence[str], numbers: Sequence[str]) -> Grid:
    grid = Grid(box=box.SIMPLE, padding=(0, 1))
    for name in texts:
        grid.add_column(name)
    for name in numbers:
        grid.add_column(name, justify="right")
    return grid
