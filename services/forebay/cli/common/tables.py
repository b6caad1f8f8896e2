"""Tables on a terminal, and a console whose lines break only between words.

A word may be an id that a user copies, so it may exceed the width.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from forebay.cli.common.terminal import printable

ROWS_MAX = 64  # per table with a title; `--json` has all rows
COLUMNS_MAX = 100_000  # columns for measuring; wider than any table


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
    """Console that never breaks a line within a word, also in the cells of tables."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print `objects`. Tables get column widths that suit the terminal. Only long words exceed its width."""
        own = self.width
        options = self.options.update(width=COLUMNS_MAX, markup=settings.get("markup"))
        parts = [part for one in objects for part in (one.renderables if isinstance(one, Group) else [one])]
        self.width = max([own, *(_fitted(self, options, part, own) for part in parts)])
        try:
            super().print(*objects, **settings)
        finally:
            self.width = own


def _fitted(console: Console, options: ConsoleOptions, part: Any, room: int) -> int:
    """Return the least width of a text or table. The columns of a table get widths that fit into `room` if possible."""
    if not isinstance(part, Table):
        return Measurement.get(console, options, part).minimum
    ranges = []
    for column in part.columns:
        cells = [*column.cells, *([column.header] if part.show_header else [])]
        found = [Measurement.get(console, options, cell) for cell in cells]
        most = max((one.maximum for one in found), default=0)
        least = most if column.no_wrap else max((one.minimum for one in found), default=0)
        ranges.append((least, most) if column.width is None else (column.width, column.width))
    borders = Measurement.get(console, options, part).maximum - sum(most for _, most in ranges)
    widths = _widths(ranges, room - borders)
    for column, width in zip(part.columns, widths, strict=True):
        column.width = width
    part.min_width = 0 if part.title is None else Measurement.get(console, options, part.title).minimum
    return max(part.min_width, borders + sum(widths))


def _widths(ranges: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Return a width within each of `ranges`: its least value, and an equal share of what then remains of `room`."""
    widths = [least for least, _ in ranges]
    spare = max(0, room - sum(widths))
    order = sorted(range(len(ranges)), key=lambda at: ranges[at][1] - ranges[at][0])
    for place, at in enumerate(order):
        least, most = ranges[at]
        widths[at] += min(most - least, spare // (len(order) - place))
        spare -= widths[at] - least
    return widths
