"""Accessibility of the console's page: axe, both colour schemes, both widths, and the keyboard.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.console.pages import ConsoleProcess, console_on, go, page_of, read, require_accessible
from tests.harness.browser import Scheme

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("browser"), pytest.mark.slow]

LOGS = Path(__file__).parents[1] / "logs"
RECORDING = "lost-workers"
# Each recording, and each scheme at each width.
SHOWN = (
    (RECORDING, "light", 1_280),
    ("overload", "dark", 390),
    ("disaggregation", "light", 390),
    ("take-over", "dark", 1_280),
)
VIEWS = ("fleet", "requests", "time", "what-if", "scaling")
FOCUSED = """() => {
    const { activeElement: element } = document;
    return element?.getAttribute("aria-label") || element?.closest("label")?.innerText || element?.innerText || "";
}"""


@pytest.fixture(scope="module", params=[RECORDING])
def console(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    log = Path(shutil.copy(LOGS / f"{request.param}.rec", tmp_path_factory.mktemp("console")))
    with console_on(log) as running:
        yield running


def fragments(console: ConsoleProcess) -> list[str]:
    """Return the address of each view, of a request, of a comparison and of a past moment."""
    state = read(console.url, "/v1/console")["state"]
    rows = read(console.url, "/v1/console/requests")["requests"]
    row = max(rows, key=lambda one: (one["attempt"], one["number"]))
    middle_us = (state["begin_us"] + state["end_us"]) // 2
    return [
        *(f"/{view}" for view in VIEWS),
        f"/requests/{row['number']}?id={row['request_id']}",
        f"/time?a={state['begin_us']}&at={middle_us}",
        f"/fleet?at={middle_us}",
    ]


@pytest.mark.parametrize(("console", "scheme", "width"), SHOWN, indirect=["console"])
def test_every_view_is_accessible_and_fits(
    console: ConsoleProcess, browser: Browser, scheme: Scheme, width: int
) -> None:
    with page_of(console.url, browser, scheme=scheme, width=width) as found:
        for fragment in fragments(console):
            go(found.page, fragment)
            require_accessible(found.page, fragment)
        found.page.get_by_role("link", name="Requests").click()
        links = found.page.get_by_role("table", name="Requests").get_by_role("link")
        links.first.click()
        found.page.get_by_role("button", name="requests@").first.click()
        expect(found.page.get_by_role("dialog")).to_be_visible()
        require_accessible(found.page, "record")


def test_the_result_of_a_comparison_is_accessible(console: ConsoleProcess, browser: Browser) -> None:
    with page_of(console.url, browser, "/what-if?policy=round-robin", width=390, scheme="dark") as found:
        found.page.get_by_role("button", name="Compare", exact=True).click()
        expect(found.page.get_by_role("region", name="Figures side by side")).to_be_visible()
        require_accessible(found.page, "what-if")


def test_the_tab_key_reaches_controls_in_order(console: ConsoleProcess, browser: Browser) -> None:
    with page_of(console.url, browser, "/fleet") as found:
        page = found.page
        reached: list[str] = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED).strip())
            if reached[-1] == "Moment":
                break
            style = "({ outlineStyle, boxShadow }) => outlineStyle !== 'none' || boxShadow !== 'none'"
            assert page.evaluate(f"({style})(getComputedStyle(document.activeElement))"), f"focus on {reached[-1]}"
        wanted = ["Skip to content", "Fleet", "Scaling", "Pools", "Workers and ranks", "w0", "Moment"]
        assert [name for name in reached if name in wanted] == wanted
        page.get_by_role("button", name="Skip to content").press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
