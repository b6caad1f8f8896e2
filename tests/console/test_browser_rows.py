"""Long tables of the console's page: only visible rows are elements, also after scrolling and with the keyboard.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.console.pages import ConsoleProcess, console_on, go, page_of, read
from tests.core.worlds import PROMPTS, Driver, request
from tests.replay.recorded import log_of, write

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("browser")]

WORKERS = [f"w{number:03}" for number in range(150)]
REQUESTS = 230
PAGE = 50
ELEMENTS_MAX = 50  # rows of 900 pixels, and of a margin above and below
STEP_PX = 500
SCROLL = """async (px) => {
    scrollTo(0, px);
    for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
}"""
ROWS = """rows => rows.map((row) => {
    const { top, bottom } = row.getBoundingClientRect();
    return { index: Number(row.ariaRowIndex), name: row.querySelector("a").title || row.innerText, top, bottom };
})"""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    drive = Driver().fleet(*WORKERS)
    for number in range(REQUESTS):
        drive("requests", request(f"r{number:03}", PROMPTS[number % 3]))
    path = tmp_path_factory.mktemp("console") / "log.db"
    with ThreadPoolExecutor(1) as thread:  # the browser's loop may run in this one
        thread.submit(asyncio.run, write(log_of(drive), path)).result()
    with console_on(path) as running:
        yield running


@pytest.fixture
def page(console: ConsoleProcess, browser: Browser) -> Iterator[Page]:
    with page_of(console.url, browser) as found:
        yield found.page


def open_requests(page: Page, console: ConsoleProcess) -> tuple[Locator, list[str]]:
    """Show all requests in the list, and return its table and the expected ids."""
    go(page, "/requests")
    table = page.get_by_role("table", name="Requests")
    older = page.get_by_role("button", name="Older requests")
    expect(table).to_have_attribute("aria-rowcount", str(PAGE + 1))
    for count in range(2 * PAGE, REQUESTS + PAGE, PAGE):
        older.press("Enter")
        expect(table).to_have_attribute("aria-rowcount", str(min(count, REQUESTS) + 1))
    expect(older).to_be_hidden()
    expect(page.get_by_text(f"{REQUESTS} requests")).to_contain_text("there are no older ones")
    page.evaluate("document.activeElement.blur()")
    return table, [row["request_id"] for row in read(console.url, "/v1/console/requests", limit=500)["requests"]]


def require_rows_while_scrolling(page: Page, table: Locator, names: list[str]) -> None:
    """Scroll through a table, and check its rows: few, each with its name, without a gap, and all of them at last."""
    rows = table.locator("tbody tr")
    seen: set[int] = set()
    for top_px in range(0, page.evaluate("document.documentElement.scrollHeight"), STEP_PX):
        page.evaluate(SCROLL, top_px)
        shown = rows.evaluate_all(ROWS)
        assert len(shown) <= ELEMENTS_MAX, top_px
        assert all(names[row["index"] - 2] in row["name"] for row in shown), top_px
        if shown[0]["index"] > 2:
            assert shown[0]["top"] <= 0, f"no rows at the top of the page at {top_px}"
        if shown[-1]["index"] <= len(names):
            assert shown[-1]["bottom"] >= 900, f"no rows at the bottom of the page at {top_px}"
        seen |= {row["index"] for row in shown}
    assert seen == set(range(2, len(names) + 2))


def test_requests_are_shown_while_scrolling(console: ConsoleProcess, page: Page) -> None:
    table, ids = open_requests(page, console)
    require_rows_while_scrolling(page, table, ids)


def test_sorted_workers_are_shown_while_scrolling(page: Page) -> None:
    table = page.get_by_role("table", name="Workers and ranks")
    heading = table.get_by_role("button", name="worker")
    heading.press("Enter")
    heading.press("Enter")
    expect(table.get_by_role("row").nth(1)).to_contain_text(WORKERS[-1])
    page.evaluate("document.activeElement.blur()")
    require_rows_while_scrolling(page, table, WORKERS[::-1])
    page.get_by_role("searchbox", name="Find").fill(WORKERS[77])
    expect(table).to_have_attribute("aria-rowcount", "2")
    expect(table.get_by_role("row").nth(1)).to_contain_text(WORKERS[77])


@pytest.mark.slow
def test_arrow_keys_reach_every_request(console: ConsoleProcess, page: Page) -> None:
    table, ids = open_requests(page, console)
    page.evaluate(SCROLL, 0)
    table.get_by_role("link").first.focus()
    for request_id in ids[1:]:
        page.keyboard.press("ArrowDown")
        expect(table.get_by_title(request_id)).to_be_focused()
    page.evaluate(SCROLL, 0)
    expect(table.get_by_title(ids[-1])).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(table.get_by_title(ids[-2])).to_be_focused()


@pytest.mark.slow
def test_all_rows_are_printed(console: ConsoleProcess, page: Page) -> None:
    _, ids = open_requests(page, console)
    page.evaluate(
        "addEventListener('beforeprint', () => (window.printed = document.querySelectorAll('tbody tr').length))"
    )
    page.pdf()
    assert page.evaluate("window.printed") == len(ids)
    page.wait_for_function("max => document.querySelectorAll('tbody tr').length <= max", arg=ELEMENTS_MAX)
