"""Tables and progress bars on a terminal, and a console whose lines break only between words.

A word may be an id that a user copies, so it may exceed the width.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
import msgspec
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from forebay.cli.common.terminal import printable

WIDTH = 120  # columns, if stdout is not a terminal
ROWS_MAX = 64  # per table with a title; `--json` has all rows
COLUMNS_MAX = 100_000  # columns for measuring; wider than any table


def results(*, soft_wrap: bool = False) -> "WholeWordsConsole":
    """Return a console for results on stdout. It breaks lines between words only, and no lines with `soft_wrap`."""
    return WholeWordsConsole(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=soft_wrap)


def print_result(result: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Print a result as JSON, or call `show`."""
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        show()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without borders on stdout."""
    results().print(plain_table(columns, rows))


def bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr that disappears at its end. It is disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def counting_bar() -> Progress:
    """Return a progress bar with a description, the counts of what is done and of all, and the remaining time."""
    return bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@contextmanager
def shown_reading(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows on stderr how many records were read, and how many there are."""
    with bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def table(title: str, columns: Sequence[str], *, left: int = 1, **of_columns: Any) -> Table:
    """Return a table whose first `left` columns are aligned to the left."""
    made = Table(title=in_markup(title), box=SIMPLE, padding=(0, 0, 0, 1), title_justify="left")
    for at, column in enumerate(columns):
        made.add_column(in_markup(column), justify="left" if at < left else "right", **of_columns)
    return made


def in_markup(text: str) -> str:
    """Escape untrusted text for use in rich markup."""
    return escape(printable(text))


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Set[str] | None = None, *, show_header: bool = True
) -> Table:
    """Return a table without borders. The columns `texts`, by default all, are left-aligned; the others are numbers."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for column in columns:
        table.add_column(Text(printable(column)), justify="left" if texts is None or column in texts else "right")
    for cells in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def titled_table(
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Set[str],
    empty: str,
    rows_max: int = ROWS_MAX,
) -> RenderableType:
    """Return the first `rows_max` rows as a table with a title, or the text `empty` if there are none."""
    title = Text(printable(name), style="bold")
    if not rows:
        return Text.assemble(title, f": {empty}")
    more = [Text(f"and {len(rows) - rows_max} more", style="dim")] if len(rows) > rows_max else []
    return Group(title, plain_table(columns, rows[:rows_max], texts), *more)


def span(us: int) -> str:
    """Format a duration in microseconds for display, rounded."""
    sign, us = ("-", -us) if us < 0 else ("", us)
    if us < 1_000:
        return f"{sign}{us} us"
    if us < 1_000_000:
        return f"{sign}{us / 1_000:.1f} ms"
    if us < 120_000_000:
        return f"{sign}{us / 1_000_000:.1f} s"
    return f"{sign}{us // 60_000_000} min {us // 1_000_000 % 60} s"


class WholeWordsConsole(Console):
    """Console that never breaks a line within a word, also in the cells of tables. Only long words exceed its width."""

    def print(self, *objects: Any, **settings: Any) -> None:
        own = self.width
        options = self.options.update(width=COLUMNS_MAX, markup=settings.get("markup"))
        for part in [part for one in objects for part in (one.renderables if isinstance(one, Group) else [one])]:
            self.width = max(self.width, self._least_width(partial(Measurement.get, self, options), part))
        try:
            super().print(*objects, crop=False, **settings)
        finally:
            self.width = own

    def _least_width(self, measured: Callable[[RenderableType], Measurement], part: Any) -> int:
        """Return the width that a text or table needs. Make each column of a table as wide as its longest word."""
        if isinstance(part, Table):
            part.min_width = 0 if part.title is None else measured(part.title).minimum
            for column in part.columns:
                cells = map(measured, [*column.cells, *([column.header] if part.show_header else [])])
                column.min_width = max((one.maximum if column.no_wrap else one.minimum for one in cells), default=0)
        return measured(part).minimum
