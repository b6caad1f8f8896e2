"""Tables of workers and requests. A user can sort them by any column. Values are updated in place."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from forebay.cli.common.terminal import printable
from forebay.cli.replay.at_view import span
from forebay.replay.catalog.facts import RequestRow, WorkerActivity
from forebay.replay.status import RankStatus, WorkerStatus
from forebay.transport.recording.manifest import utc

NONE = "-"
T = TypeVar("T")
Order = float | str


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """Column of a table.

    Attributes:
        order: returns the value by which rows are sorted. Rows with None come last.
        is_number: whether the cells are aligned on the right.
    """

    name: str
    text: Callable[[T], str]
    order: Callable[[T], Order | None]
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table: its text, and the value by which it is sorted."""

    text: str
    order: Order | None
    is_number: bool

    def __rich__(self) -> Text:
        """Return the text without interpreting markup in it."""
        return _aligned(printable(self.text), self.is_number)


def _aligned(text: str, is_number: bool) -> Text:
    return Text(text, justify="right" if is_number else "left", no_wrap=True)


class SortedTable(DataTable[Cell], Generic[T]):
    """Table whose rows keep their place under the cursor when values change.

    Args:
        sort_by: name of the column by which the rows are sorted at first.
        is_reversed: whether the first order is descending.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort_by_next", "Sort"),
        Binding("r", "reverse", "Reverse"),
    ]

    def __init__(
        self, columns: Sequence[Column[T]], key: Callable[[T], str], *, sort_by: str, is_reversed: bool
    ) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._titled = columns
        self._key = key
        self._sort_at = next(at for at, column in enumerate(columns) if column.name == sort_by)
        self._reversed = is_reversed
        self._items: dict[str, T] = {}

    def on_mount(self) -> None:
        self._add_columns()

    def show(self, items: Iterable[T]) -> None:
        """Show `items`. The cursor stays at its row, or in the first line if it is there."""
        wanted = {self._key(item): item for item in items}
        if wanted == self._items:  # drawing a table takes longer than everything else
            return
        place = self._place()
        for key in self._items.keys() - wanted.keys():
            self.remove_row(key)
        for key, item in wanted.items():
            if key not in self._items:
                self.add_row(*self._cells(item), key=key)
            elif item != self._items[key]:
                self._update(key, item)
        self._items = wanted
        self._order(place)

    def action_sort_by_next(self) -> None:
        self._sort_at = (self._sort_at + 1) % len(self._titled)
        self._rebuild()

    def action_reverse(self) -> None:
        """Reverse the order of the rows."""
        self._reversed = not self._reversed
        self._rebuild()

    def selected(self) -> T | None:
        """Return the item at the cursor; None in an empty table."""
        key = self._key_at_cursor()
        return None if key is None else self._items[key]

    def _key_at_cursor(self) -> str | None:
        if not self.is_valid_coordinate(self.cursor_coordinate):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def _place(self) -> str | None:
        """Return the key of the row at which the cursor stays; None if the cursor stays in the first line."""
        return self._key_at_cursor() if self.cursor_row > 0 else None

    def _cells(self, item: T) -> list[Cell]:
        return [Cell(column.text(item), column.order(item), column.is_number) for column in self._titled]

    def _update(self, key: str, item: T) -> None:
        for column, new in zip(self._titled, self._cells(item), strict=True):
            if self.get_cell(key, column.name) != new:
                self.update_cell(key, column.name, new, update_width=True)

    def _add_columns(self) -> None:
        for at, column in enumerate(self._titled):
            arrow = "" if at != self._sort_at else " ▼" if self._reversed else " ▲"
            self.add_column(_aligned(column.name + arrow, column.is_number), key=column.name)

    def _rebuild(self) -> None:
        """Show the columns with an arrow at the one by which the rows are sorted, and sort the rows."""
        place = self._place()
        self.clear(columns=True)
        self._add_columns()
        for key, item in self._items.items():
            self.add_row(*self._cells(item), key=key)
        self._order(place)

    def _order(self, place: str | None) -> None:
        """Sort the rows, and move the cursor to the row `place`."""

        def rank(cell: Cell) -> tuple[bool, Any]:
            return (cell.order is None) != self._reversed, 0 if cell.order is None else cell.order

        self.sort(self._titled[self._sort_at].name, key=rank, reverse=self._reversed)
        if place is not None and place in self._items:
            row = self.get_row_index(place)
            if row != self.cursor_row:
                self.move_cursor(row=row)


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Row of the table of workers.

    Attributes:
        activity: activity of the worker in the last minute; None if unknown.
    """

    worker: WorkerStatus
    rank: RankStatus
    activity: WorkerActivity | None

    @property
    def name(self) -> str:
        return f"{self.worker.worker_id}/{self.rank.rank}"

    @property
    def kv_share(self) -> float | None:
        used, total = self.rank.kv_blocks_used, self.rank.kv_blocks_total
        return None if used is None or not total else used / total

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were cached, in the last minute."""
        return None if self.activity is None else self.activity.hit_rate

    @property
    def ttft_us(self) -> float | None:
        """Median TTFT of the last minute."""
        return None if self.activity is None else self.activity.ttft_p50_us


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def duration(us: float | None) -> str:
    """Format a duration in microseconds; None is shown as `-`."""
    return NONE if us is None else span(round(us))


def clock(us: int) -> str:
    """Format the time of day, in UTC."""
    try:
        return utc(us)[11:19]
    except OverflowError:  # the clock of a damaged record
        return "?"


WORKER_COLUMNS: tuple[Column[WorkerRank], ...] = (
    Column("worker", lambda row: row.name, lambda row: row.name, is_number=False),
    Column("state", lambda row: row.worker.state, lambda row: row.worker.state, is_number=False),
    Column("active", lambda row: _count(row.rank.active_requests), lambda row: row.rank.active_requests),
    Column("running", lambda row: _count(row.rank.running), lambda row: row.rank.running),
    Column("waiting", lambda row: _count(row.rank.waiting), lambda row: row.rank.waiting),
    Column("KV used", lambda row: _percent(row.kv_share), lambda row: row.kv_share),
    Column("hits", lambda row: _percent(row.hit_rate), lambda row: row.hit_rate),
    Column("TTFT p50", lambda row: duration(row.ttft_us), lambda row: row.ttft_us),
    Column("pool", lambda row: row.worker.pool, lambda row: row.worker.pool, is_number=False),
    Column("role", lambda row: row.worker.role, lambda row: row.worker.role, is_number=False),
)
REQUEST_COLUMNS: tuple[Column[RequestRow], ...] = (
    Column("time", lambda row: clock(row.submitted_us), lambda row: row.number, is_number=False),
    Column("state", lambda row: row.state, lambda row: row.state, is_number=False),
    Column("worker", lambda row: row.worker_id or NONE, lambda row: row.worker_id or None, is_number=False),
    Column("TTFT", lambda row: duration(row.ttft_us), lambda row: row.ttft_us),
    Column("ITL", lambda row: duration(row.itl_us), lambda row: row.itl_us),
    Column("prompt", lambda row: _count(row.prompt_tokens), lambda row: row.prompt_tokens),
    Column("cached", lambda row: _count(row.cached_tokens), lambda row: row.cached_tokens),
    Column("output", lambda row: _count(row.output_tokens), lambda row: row.output_tokens),
    Column("queue", lambda row: duration(row.queued_us), lambda row: row.queued_us),
    Column("request", lambda row: row.request_id, lambda row: row.request_id, is_number=False),
    Column("model", lambda row: row.model, lambda row: row.model, is_number=False),
    Column("reason", lambda row: row.reason, lambda row: row.reason, is_number=False),
)


class WorkersTable(SortedTable[WorkerRank]):
    def __init__(self) -> None:
        super().__init__(WORKER_COLUMNS, lambda row: row.name, sort_by="worker", is_reversed=False)


class RequestsTable(SortedTable[RequestRow]):
    """Table of requests, newest first. Their numbers are unique, unlike their IDs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Explain")]

    def __init__(self) -> None:
        super().__init__(REQUEST_COLUMNS, lambda row: str(row.number), sort_by="time", is_reversed=True)
