"""A `forebay console` as a process, and its page in a browser that can reach nothing but this console."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Locator, Page

from tests.console.serving import HEADERS, PATIENCE_S, TOKEN
from tests.harness import fork_server
from tests.harness.browser import Opened, Scheme, visited
from tests.harness.fork_server import ForkedProcess
from tests.harness.local import free_ports

# The page handles the change of the address before this listener, which it added later.
GO = """(fragment) => new Promise((done) => {
    if (location.hash === `#${fragment}`) return done();
    addEventListener("hashchange", () => done(), { once: true });
    location.hash = fragment;
})"""


class ConsoleProcess:
    """A running `forebay console`.

    Args:
        log: log file or recording.
        port: TCP port; a free one by default.
        options: further options of the command.

    Attributes:
        log: log file or recording.
        url: origin of the page.
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
        """Stop the console with SIGTERM."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=PATIENCE_S)


@contextmanager
def console_on(log: Path, *options: str) -> Iterator[ConsoleProcess]:
    """Run a console on a log."""
    console = ConsoleProcess(log, *options)
    console.start()
    try:
        yield console
    finally:
        console.stop()


def wait_indexed(url: str) -> None:
    """Wait until a console has read its log."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        try:
            if read(url, "/v1/console")["state"]["is_complete"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"the console at {url} has not read its log within {PATIENCE_S:g} s")


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
        assert found.errors == []
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


def states(table: Locator) -> list[str]:
    """Return the state of each row of a table, without the shape and the reason."""
    return [text.strip("●▲◐◔○◇◆▶✕⊘⊖ \n").split()[0] for text in cells(table, "state")]


def cells(table: Locator, column: str) -> list[str]:
    """Return the texts of a column of a table."""
    headings = [text.lower() for text in table.get_by_role("columnheader").all_inner_texts()]
    at = headings.index(column.lower())
    rows: list[str] = table.locator("tbody tr").evaluate_all(f"rows => rows.map((row) => row.children[{at}].innerText)")
    return rows
