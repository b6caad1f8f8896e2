"""`forebay top` in a terminal of a test, with a console or an ingress in memory."""

import asyncio
import html
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from forebay.cli.common.cluster_options import NAMESPACE
from forebay.cli.common.recording import Recording
from forebay.cli.console.command import ConsoleOptions
from forebay.cli.top.explanation import ExplanationScreen
from forebay.cli.top.filters import FilterInvalid, parse_filter
from forebay.cli.top.lines import bars
from forebay.cli.top.run import log_client
from forebay.cli.top.screen import TopApp
from forebay.cli.top.source import Source
from forebay.cli.top.tables import RequestsTable, WorkersTable
from forebay.console.console import ConsoleInfo, FleetView
from forebay.replay.catalog.facts import CatalogState, MetricSeries, RequestPage, RequestRow, WorkerActivity
from forebay.replay.explain.explanation import Explanation
from forebay.replay.status import (
    GroupStatus,
    OwnerStatus,
    PoolStatus,
    RankStatus,
    RequestsStatus,
    WorkerStatus,
)
from tests.cli.in_process import forebay
from tests.replay import incident

LOGS = Path(__file__).parents[1] / "logs"
NOW_US = 1_795_384_132_000_000
TOKEN = "token-of-tests"
EVERY_S = 0.1
SMALL = (80, 24)


def worker(number: int, *, active: int = 0, state: str = "ready", name: str = "") -> WorkerStatus:
    rank = RankStatus(
        rank=0,
        active_requests=active,
        prefill_tokens=0,
        decode_blocks=0.0,
        running=active,
        waiting=0,
        kv_blocks_used=512,
        kv_blocks_total=1_024,
        cached_blocks=7,
    )
    return WorkerStatus(
        worker_id=name or f"worker-{number:03}",
        epoch=0,
        state=state,
        pool="default",
        role="aggregated",
        engine="mock",
        loras=[],
        ranks=[rank],
    )


def status(workers: list[WorkerStatus], problems: list[str] | None = None, source: str = "log") -> GroupStatus:
    return GroupStatus(
        version=1,
        group="forebay-default",
        source="owner" if source == "owner" else "log",
        at_us=NOW_US,
        ready=True,
        problems=problems or [],
        owner=OwnerStatus(
            owner_id="router-1", epoch=3, since_us=None, alive=True, heartbeat_age_s=0.1, standbys=["router-2"]
        ),
        pools=[PoolStatus(pool="default", model="forebay-default", role="aggregated", policy="kv", routed=7, queued=0)],
        workers=workers,
        requests=RequestsStatus(in_flight=12, queued=5, by_phase={"decode": 12}),
        topics=[],
    )


def row(number: int, *, name: str = "", state: str = "finished", ttft_us: int | None = 120_000) -> RequestRow:
    return RequestRow(
        number=number,
        request_id=name or f"chatcmpl-{number:032}",
        model="forebay-default",
        lora_name="",
        pool="default",
        worker_id=f"worker-{number % 7:03}",
        rank=0,
        state=state,  # type: ignore[arg-type]
        submitted_us=NOW_US + number,
        queued_us=0,
        routed_us=NOW_US,
        first_token_us=NOW_US,
        ended_us=NOW_US,
        prompt_tokens=1_000 + number,
        cached_tokens=0,
        output_tokens=16,
        attempt=1,
        reason="",
        ttft_us=ttft_us,
        itl_us=20_000.0,
        journal_offset=number,
    )


def series() -> MetricSeries:
    values = [float(number) for number in range(60)]
    times: list[float | None] = [None, *(1_000.0 * number for number in range(1, 60))]
    return MetricSeries(
        from_us=NOW_US,
        interval_us=5_000_000,
        requests_per_s=values,
        finished_per_s=values,
        failed_per_s=values,
        output_tokens_per_s=values,
        ttft_p50_us=times,
        ttft_p95_us=times,
        itl_p50_us=times,
        itl_p95_us=times,
        hit_rate=times,
    )


@dataclass
class Server:
    """A console, or an ingress if `is_console` is false. Counts requests, and keeps the last query of the list."""

    workers: list[WorkerStatus] = field(default_factory=lambda: [worker(0), worker(1)])
    rows: list[RequestRow] = field(default_factory=lambda: [row(2), row(1)])
    problems: list[str] = field(default_factory=list)
    behind_s: float = 0.0
    is_console: bool = True
    is_down: bool = False
    explanation: Explanation | None = None
    query: dict[str, str] = field(default_factory=dict)

    def respond(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("refused")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._error(401, "the token is missing or wrong")
        path = request.url.path
        if path == "/v1/status":
            return self._json(status(self.workers, self.problems, "owner"))
        if not self.is_console:
            return self._error(404, f"unknown path {path}")
        if path.endswith("/explain"):
            return self._error(404, "no such request") if self.explanation is None else self._json(self.explanation)
        if path == "/v1/console/requests":
            self.query = dict(request.url.params)
        return self._json(self._content(path))

    def _content(self, path: str) -> Any:
        activity = [
            WorkerActivity(worker_id=one.worker_id, first_tokens=3, hit_rate=0.25, ttft_p50_us=90_000)
            for one in self.workers
        ]
        state = CatalogState(
            begin_us=0,
            end_us=NOW_US,
            begin_offset=0,
            end_offset=9,
            log_end_offset=9,
            behind_s=self.behind_s,
            is_complete=True,
        )
        contents: dict[str, Any] = {
            "/v1/console": ConsoleInfo(
                version="1",
                source="run.db",
                kind="file",
                group="forebay-default",
                is_live=True,
                can_act=False,
                policies=[],
                state=state,
            ),
            "/v1/console/fleet": FleetView(
                at_us=NOW_US, status=status(self.workers), workers=activity, problems=self.problems
            ),
            "/v1/console/requests": RequestPage(requests=self.rows, next_before=None),
            "/v1/console/series": series(),
        }
        return contents[path]

    @staticmethod
    def _json(content: Any) -> httpx.Response:
        return httpx.Response(200, content=msgspec.json.encode(content))

    @staticmethod
    def _error(code: int, message: str) -> httpx.Response:
        return httpx.Response(code, json={"error": {"message": message, "code": "error"}})


@asynccontextmanager
async def top(server: Server, size: tuple[int, int] = SMALL) -> AsyncIterator[Pilot[None]]:
    """Run `forebay top` until its first values are shown."""
    transport = httpx.MockTransport(server.respond)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://console", headers=headers) as client:
        source = Source(client)
        await source.connect()
        app = TopApp(source, read_every_s=EVERY_S)
        async with app.run_test(size=size) as pilot:
            await until(lambda: text(pilot, "state"))
            await pilot.pause()
            await until(lambda: "Quit" in shown(pilot))  # the footer is drawn later
            yield pilot


async def until(condition: Callable[[], object]) -> None:
    """Let the application run until the condition holds."""
    while not condition():  # noqa: ASYNC110 - the application sets no event
        await asyncio.sleep(0.001)


def text(pilot: Pilot[None], name: str) -> str:
    return str(pilot.app.screen_stack[0].query_one(f"#{name}", Static).content)


def cells(pilot: Pilot[None], table: type[DataTable[Any]], column: str) -> list[str]:
    """Return the texts of a column, in the order of the rows."""
    found = pilot.app.screen_stack[0].query_one(table)
    return [found.get_row_at(at)[found.get_column_index(column)].text for at in range(found.row_count)]


def explanation_of(pilot: Pilot[None]) -> str:
    """Return the text of the open explanation; empty if none is open."""
    screen = pilot.app.screen
    return str(screen.query_one("#explanation", Static).content) if isinstance(screen, ExplanationScreen) else ""


def shown(pilot: Pilot[None]) -> str:
    """Return the characters on the screen."""
    lines: dict[int, str] = defaultdict(str)
    for at, part in re.findall(r'<text [^>]*-line-(\d+)\)">([^<]*)</text>', pilot.app.export_screenshot()):
        lines[int(at)] += html.unescape(part).replace("\xa0", " ")
    return "\n".join(lines[at] for at in sorted(lines))


async def test_fleet_and_requests_of_a_console_are_shown_in_a_small_terminal() -> None:
    async with top(Server(problems=["worker-1 has been suspect for 3 s"])) as pilot:
        screen = shown(pilot)
        for part in (
            "forebay-default: ready",
            "12 in flight, 5 queued",
            "2 workers",
            "worker-1 has been suspect for 3 s",
            "59.0 requests/s",
            "TTFT p50 59.0 ms",
            "worker-001/0",
            "50%",
            "finished",
            "120.0 ms",
            "q Quit",
            "s Sort",
            "/ Filter",
        ):
            assert part in screen
        assert max(map(len, screen.splitlines())) <= SMALL[0]
        assert cells(pilot, RequestsTable, "prompt") == ["1,002", "1,001"]
        await pilot.press("q")
    assert not pilot.app.is_running


async def test_values_change_in_place() -> None:
    server = Server()
    async with top(server) as pilot:
        server.workers = [worker(1, active=5, state="suspect"), worker(2)]
        server.rows = [row(3, state="decode", ttft_us=None), row(2)]
        await until(lambda: "suspect" in cells(pilot, WorkersTable, "state"))
        assert cells(pilot, WorkersTable, "worker") == ["worker-001/0", "worker-002/0"]
        assert cells(pilot, WorkersTable, "active") == ["5", "0"]
        assert cells(pilot, RequestsTable, "TTFT") == ["-", "120.0 ms"]


async def test_a_lost_connection_is_reported_and_tried_again() -> None:
    server = Server()
    async with top(server) as pilot:
        assert text(pilot, "problems") == ""
        server.is_down = True
        await until(lambda: "http://console does not respond" in text(pilot, "problems"))
        assert "Trying again." in text(pilot, "problems")
        assert cells(pilot, WorkersTable, "worker") == ["worker-000/0", "worker-001/0"]
        server.is_down = False
        server.behind_s = 2.5
        await until(lambda: text(pilot, "problems") == "the console is 2.5 s behind the log")


async def test_markup_and_control_characters_are_escaped() -> None:
    hostile = "[red]x[/red]\x1b[2J"
    escaped = "[red]x[/red]\\x1b[2J"
    server = Server(
        workers=[worker(0, name=hostile)], rows=[row(1, name=hostile)], problems=[f"worker-1 and {hostile} are lost"]
    )
    async with top(server, (200, 40)) as pilot:
        await until(lambda: shown(pilot).count(escaped) == 3)
        await pilot.press("tab", "tab", "enter")
        await until(lambda: "cannot explain" in explanation_of(pilot))
        assert f"cannot explain {escaped}: http://console: no such request" in explanation_of(pilot)


async def test_two_hundred_workers_can_be_sorted_by_any_column() -> None:
    server = Server(workers=[worker(number, active=number * 7 % 200) for number in range(200)])
    async with top(server) as pilot:
        assert cells(pilot, WorkersTable, "worker")[-1] == "worker-199/0"
        await pilot.press("s", "s", "r")
        assert cells(pilot, WorkersTable, "active")[:3] == ["199", "198", "197"]
        await pilot.press("ctrl+end")
        assert (last := pilot.app.screen.query_one(WorkersTable).selected()) is not None
        assert last.rank.active_requests == 0


async def test_missing_values_come_last_in_both_directions() -> None:
    server = Server(rows=[row(3, ttft_us=5), row(2, ttft_us=None), row(1, ttft_us=9)])
    async with top(server) as pilot:
        await pilot.press("tab", "tab", *"sss")
        assert cells(pilot, RequestsTable, "TTFT") == ["9 us", "5 us", "-"]
        await pilot.press("r")
        assert cells(pilot, RequestsTable, "TTFT") == ["5 us", "9 us", "-"]


async def test_the_cursor_stays_at_its_request_when_new_ones_arrive() -> None:
    server = Server(rows=[row(number) for number in range(50, 0, -1)])
    async with top(server) as pilot:
        await pilot.press("tab", "tab", "down", "down")
        table = pilot.app.screen.query_one(RequestsTable)
        assert (selected := table.selected()) is not None
        assert selected.number == 48
        server.rows = [row(number) for number in range(60, 20, -1)]
        await until(lambda: table.row_count == 40)
        assert table.selected() == selected
        await pilot.press("ctrl+home")
        server.rows = [row(number) for number in range(61, 21, -1)]
        await until(lambda: (first := table.selected()) is not None and first.number == 61)


@pytest.mark.slow
async def test_the_filter_applies_while_it_is_typed() -> None:
    server = Server()
    async with top(server) as pilot:
        await pilot.press("slash", *"4f2q state:dec slow:50")
        wanted = {"limit": "100", "q": "4f2q", "state": "decode", "slow_ms": "50"}
        await until(lambda: server.query == wanted)
        await pilot.press("x")
        await until(lambda: "filter: slow:50x: expected milliseconds" in text(pilot, "problems"))
        assert server.query == wanted
        await pilot.press("ctrl+u")
        await until(lambda: server.query == {"limit": "100"})
        assert text(pilot, "problems") == ""
        await pilot.press("escape")
        assert isinstance(pilot.app.focused, RequestsTable)


@dataclass(frozen=True)
class Recorded:
    """A recorded request, its explanation, and what `forebay replay explain` prints about it."""

    name: str
    explanation: Explanation
    printed: list[str]


@pytest.fixture
def recorded() -> Recorded:
    path = str(LOGS / "kv.rec")
    decisions = [json.loads(line)["event"] for line in forebay("topics", "tail", path, "decisions").stdout.splitlines()]
    name = next(one["request_id"] for one in decisions if one["type"] == "request.routed")
    as_json = forebay("replay", "explain", path, name, "--json").stdout
    printed = [line.rstrip() for line in forebay("replay", "explain", path, name).stdout.splitlines()]
    return Recorded(name, msgspec.json.decode(as_json, type=Explanation), printed)


async def test_a_request_is_explained_as_by_replay_explain(recorded: Recorded) -> None:
    server = Server(rows=[row(1, name=recorded.name)], explanation=recorded.explanation)
    async with top(server, (122, 60)) as pilot:
        await pilot.press("tab", "tab", "enter")
        await until(lambda: "verified: " in explanation_of(pilot))
        assert [line.rstrip() for line in explanation_of(pilot).splitlines()] == recorded.printed
        await pilot.press("escape")
        assert isinstance(pilot.app.focused, RequestsTable)


async def test_an_ingress_shows_workers_and_says_that_requests_need_a_console() -> None:
    async with top(Server(is_console=False)) as pilot:
        assert cells(pilot, WorkersTable, "worker") == ["worker-000/0", "worker-001/0"]
        assert cells(pilot, WorkersTable, "TTFT p50") == ["-", "-"]
        assert "start `forebay console`" in shown(pilot)
        await pilot.press("slash")
        assert isinstance(pilot.app.focused, WorkersTable)


@pytest.mark.parametrize(
    ("typed", "query"),
    [
        ("", {}),
        ("chatcmpl-4f", {"q": "chatcmpl-4f"}),
        ("a:b  c", {"q": "a:b c"}),
        ("worker:w-1 model:m/n state:", {"worker": "w-1", "model": "m/n"}),
        ("state:finished", {"state": "finished"}),
        ("state:uns", {"failed": "true"}),
    ],
)
def test_a_filter_becomes_a_query(typed: str, query: dict[str, str]) -> None:
    assert parse_filter(typed) == query


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("slow:-1", "slow:-1: expected milliseconds"),
        ("slow:nan", "slow:nan: expected milliseconds"),
        ("state:xyz", "unknown state 'xyz'"),
        ("state:f", "state:f may be finished or failed"),
    ],
)
def test_an_invalid_filter_is_explained(typed: str, message: str) -> None:
    with pytest.raises(FilterInvalid, match=message):
        parse_filter(typed)


def test_bars_begin_at_zero_and_show_the_newest_values() -> None:
    assert bars([9, 0, 4, None, 8], 4) == "▁▅ █"
    assert bars([0, 0], 4) == "▁▁"
    assert bars([], 4) == bars([1, 2], 0) == ""


def test_a_terminal_is_required() -> None:
    run = forebay("top")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "forebay: forebay top needs a terminal; use `forebay status` in scripts\n"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_log_is_followed_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await incident.record(path)
    recording = Recording(None, NAMESPACE, None, path, "")
    async with log_client(recording, ConsoleOptions()) as client:
        app = TopApp(Source(client), read_every_s=EVERY_S)
        async with app.run_test(size=SMALL) as pilot:
            await until(lambda: cells(pilot, RequestsTable, "request"))
            assert cells(pilot, WorkersTable, "worker") == ["w0/0", "w1/0", "w2/0"]
            await pilot.press("tab", "tab", "enter")
            await until(lambda: "verified: " in explanation_of(pilot))
