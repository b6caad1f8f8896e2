"""The terminal application of `forebay top`."""

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from forebay.cli.common.terminal import printable
from forebay.cli.top.explanation import ExplanationScreen
from forebay.cli.top.filters import HINT, FilterInvalid, parse_filter
from forebay.cli.top.lines import charts_line, problem_lines, state_line
from forebay.cli.top.source import Snapshot, Source, SourceError
from forebay.cli.top.tables import RequestsTable, WorkerRank, WorkersTable

READ_EVERY_S = 1.0
DERIVE_EVERY_S = 5.0  # an ingress on Kafka takes a second of CPU time to derive the status
FILTER_CHARS_MAX = 200
NO_REQUESTS = "An ingress has no list of requests: start `forebay console`, and give its --url"


class FleetScreen(Screen[None]):
    """Workers and requests of a group, read again regularly.

    Args:
        read_every_s: pause between two readings; None for the default of the source.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "app.focus_next", "Next"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "leave_filter", show=False),
    ]

    def __init__(self, source: Source, read_every_s: float | None) -> None:
        super().__init__()
        self._source = source
        self._read_every_s = read_every_s
        self._filters: dict[str, str] = {}
        self._filter_error = ""
        self._failure = ""
        self._snapshot: Snapshot | None = None
        self._has_filter_changed = asyncio.Event()
        # Kept, because a response that arrives while the application ends finds no widgets on the screen.
        self._lines = {name: Static(id=name, markup=False) for name in ("state", "problems", "charts")}
        self._workers = WorkersTable()
        self._requests = RequestsTable()

    def compose(self) -> ComposeResult:
        """Yield the lines, the tables and the keys."""
        yield from self._lines.values()
        yield self._workers
        if self._source.is_console:
            yield Input(placeholder=f"filter: {HINT}", id="filter", max_length=FILTER_CHARS_MAX)
            yield self._requests
        else:
            yield Static(NO_REQUESTS, id="no-requests", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read the source."""
        self._workers.focus()
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        """Read the source again and again, and at once after the filter has changed."""
        while True:
            self._has_filter_changed.clear()
            try:
                self._snapshot = await self._source.read(self._filters)
                self._failure = ""
            except SourceError as error:
                self._failure = f"{error}. Trying again."
            self._show()
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._has_filter_changed.wait()
            except TimeoutError:
                continue

    def _pause_s(self) -> float:
        if self._read_every_s is not None:
            return self._read_every_s
        is_derived = self._snapshot is not None and self._snapshot.status.source == "log"
        return DERIVE_EVERY_S if is_derived and not self._source.is_console else READ_EVERY_S

    def _show(self) -> None:
        snapshot = self._snapshot
        self._show_problems()
        if snapshot is None:
            return
        self._set_text("state", state_line(snapshot))
        if snapshot.series is not None:
            self._set_text("charts", charts_line(snapshot.series, self.size.width - 2))  # without the padding
        self._workers.show(
            WorkerRank(worker, rank, snapshot.activity.get(worker.worker_id))
            for worker in snapshot.status.workers
            for rank in worker.ranks
        )
        if snapshot.requests is not None:
            self._requests.show(snapshot.requests)

    def _show_problems(self) -> None:
        failures = [text for text in (self._failure, self._filter_error) if text]
        problems = problem_lines(self._snapshot, failures)
        self._set_text("problems", "\n".join(problems), style="bold red")
        self._lines["problems"].display = bool(problems)

    def _set_text(self, name: str, text: str, style: str = "") -> None:
        """Show text without interpreting markup or control characters in it."""
        shown = "\n".join(printable(line) for line in text.split("\n"))
        self._lines[name].update(Text(shown, style=style, no_wrap=True, overflow="ellipsis"))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is typed."""
        try:
            self._filters = parse_filter(event.value)
            self._filter_error = ""
        except FilterInvalid as error:
            self._filter_error = f"filter: {error}"
        self._show_problems()
        self._has_filter_changed.set()

    def on_input_submitted(self) -> None:
        """Go from the filter to the requests."""
        self._requests.focus()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        table = event.data_table
        if isinstance(table, RequestsTable) and (request := table.selected()) is not None:
            await self.app.push_screen(ExplanationScreen(self._source, request))

    def action_filter(self) -> None:
        if self._source.is_console:
            self.query_one("#filter", Input).focus()

    def action_leave_filter(self) -> None:
        if self._source.is_console:
            self._requests.focus()


class TopApp(App[None]):
    """Workers and requests of a group, and explanations of requests.

    Args:
        read_every_s: pause between two readings; None for the default of the source.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #state, #charts, #no-requests { height: 1; }
    #state { background: $panel; }
    #problems { height: auto; }
    #filter { height: 1; border: none; padding: 0 1; }
    WorkersTable { height: 2fr; scrollbar-size: 1 1; }
    RequestsTable { height: 3fr; scrollbar-size: 1 1; }
    #explanation { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]

    def __init__(self, source: Source, *, read_every_s: float | None = None) -> None:
        super().__init__()
        self._fleet = FleetScreen(source, read_every_s)

    def get_default_screen(self) -> FleetScreen:
        return self._fleet
