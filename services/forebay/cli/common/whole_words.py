"""Console whose lines break only between words. A word may be an id that a user copies, so it may exceed the width."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table

COLUMNS_MAX = 100_000  # columns for measuring; wider than any table


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
