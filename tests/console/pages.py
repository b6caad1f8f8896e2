"""A `forebay console` as a process, and its page in a browser that can reach nothing but this console."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from forebay.replay.moment import Moment
from tests.console.serving import HEADERS, PATIENCE_S, TOKEN
from tests.harness import fork_server
from tests.harness.browser import Opened, Scheme, visited
from tests.harness.fork_server import ForkedProcess
from tests.harness.local import free_ports

POLL_S = 0.05
LEVELS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
CONTRAST = ("color-contrast",)  # the only rule whose result depends on the colour scheme
# The page handles the change of the address before this listener, which it added later.
GO = """(fragment) => new Promise((done) => {
    if (location.hash === `#${fragment}`) return done();
    addEventListener("hashchange", () => done(), { once: true });
    location.hash = fragment;
})"""


class ConsoleProcess:
    """A running `forebay console`.

    Args:
        port: TCP port; a free one by default.
    """

    def __init__(self, log: Path, *options: str, port: int | None = None) -> None:
        self.log = log
        self.port = port or free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = ("console", str(log), "--port", str(self.port), *options)
        self._process: ForkedProcess | None = None

    def start(self) -> None:
        """Start the console, and wait until it has read the log."""
        environment = {**os.environ, "FOREBAY_CONSOLE_TOKEN": TOKEN}
        with Path(os.devnull).open("wb") as output:
            self._process = fork_server.start(*self._command, stdout=os.dup(output.fileno()), environment=environment)
        wait_indexed(self.url)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=PATIENCE_S)


@contextmanager
def console_on(log: Path, *options: str) -> Iterator[ConsoleProcess]:
    console = ConsoleProcess(log, *options)
    console.start()
    try:
        yield console
    finally:
        console.stop()


def wait_indexed(url: str) -> None:
    """Wait until a console has read its log."""

    def is_complete() -> bool:
        try:
            return bool(read(url, "/v1/console")["state"]["is_complete"])
        except httpx.TransportError:
            return False

    wait_until(is_complete, f"the console at {url} has read its log")


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < ends_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(POLL_S)


def read(url: str, path: str, **params: Any) -> Any:
    """Return the JSON of an endpoint of a console."""
    response = httpx.get(f"{url}{path}", params=params, headers=HEADERS, timeout=PATIENCE_S)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


@contextmanager
def page_of(
    url: str, browser: Browser, fragment: str = "/fleet", *, scheme: Scheme = "light", width: int = 1_280
) -> Iterator[Opened]:
    """Open the page of a console at a fragment, with its token, and wait until the view is shown.

    At the end, check that the page had no error and requested nothing but files and endpoints of the console.
    """
    with visited(
        url, f"/#{fragment}{'&' if '?' in fragment else '?'}token={TOKEN}", browser, scheme=scheme, width=width
    ) as found:
        shown(found.page)
        yield found
        assert found.errors == [], found.errors
        assert [one for one in found.requests if not one.startswith((f"{url}/", "data:"))] == []


def go(page: Page, fragment: str) -> None:
    """Show another fragment, and wait until its view is shown."""
    page.evaluate(GO, fragment)
    shown(page)


def shown(page: Page) -> None:
    """Wait until the view of the address is shown."""
    page.locator("main:not([aria-busy]) h1").wait_for(state="attached")


def expect_error(found: Opened, status: str) -> None:
    """Remove the browser's messages about error responses with this status; there must be at least one."""
    mine = [error for error in found.errors if f"the server responded with a status of {status} " in error]
    assert mine, found.errors
    found.errors[:] = [error for error in found.errors if error not in mine]


def review_action(page: Page, action: str, operator: str, token: str, **fields: str) -> Locator:
    """Open the dialog of the actions, fill in the form of an action, and show the event that it writes.

    Args:
        fields: value of each field of the action by its label in lower case.

    Returns:
        The dialog, which waits for a confirmation.
    """
    dialog = page.get_by_role("dialog", name="Change the running system")
    if not dialog.count():
        page.get_by_role("button", name="Actions").press("Enter")
    dialog.get_by_label("Action", exact=True).select_option(action)
    for label, value in fields.items():
        field = dialog.get_by_label(label.capitalize(), exact=True)
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    dialog.get_by_label("Your name").fill(operator)
    dialog.get_by_label("Admin token").fill(token)
    dialog.get_by_role("button", name="Review").click()
    expect(dialog).to_contain_text(f", by {operator}")
    return dialog


def confirm(dialog: Locator) -> None:
    """Write the event that the dialog of the actions shows."""
    dialog.get_by_role("button", name="Write this event").click()


def require_accessible(page: Page, where: str, rules: Sequence[str] = LEVELS) -> None:
    """Require that axe finds nothing, and that the page is not wider than its window.

    Args:
        where: what the page shows, for the message of a failure.
        rules: `LEVELS` for all rules of the levels A and AA, or names of rules.
    """
    kind = "tag" if set(rules) <= set(LEVELS) else "rule"
    found = Axe().run(page, options={"runOnly": {"type": kind, "values": list(rules)}}).response["violations"]
    assert [(one["id"], one["help"], [node["html"] for node in one["nodes"]]) for one in found] == [], where
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, where


def fleet_of(page: Page) -> list[tuple[str, str, str]]:
    """Return worker, state and active requests of each rank that the fleet shows, in order of their names."""
    workers = page.get_by_role("table", name="Workers and ranks")
    return sorted(zip(cells(workers, "worker"), states(workers), cells(workers, "active"), strict=True))


def require_fleet(page: Page, moment: Moment) -> None:
    """Require that the fleet shows the ranks and the number of requests of a moment."""
    phases = {worker.worker_id: worker.phase for worker in moment.workers}
    expected = [(one.worker_id, phases[one.worker_id], str(one.active_requests)) for one in moment.ranks]
    count = len(moment.requests)
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text(f"{count} request{'' if count == 1 else 's'} in fl")
    assert fleet_of(page) == sorted(expected)


def states(table: Locator) -> list[str]:
    """Return the state of each row of a table, without the shape and the reason."""
    return [text.strip("●▲◐◔○◇◆▶✕⊘⊖ \n").split()[0] for text in cells(table, "state")]


def cells(table: Locator, column: str) -> list[str]:
    headings = [text.lower() for text in table.get_by_role("columnheader").all_inner_texts()]
    at = headings.index(column.lower())
    rows: list[str] = table.locator("tbody tr").evaluate_all(f"rows => rows.map((row) => row.children[{at}].innerText)")
    return rows
