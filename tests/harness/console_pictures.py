"""Create the pictures of the console in README and docs/console.md, from a simulated incident."""

import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.console.pages import console_on, page_of
from tests.harness.browser import launched
from tests.harness.incident import DIES_S, LOST_S, SECOND_US, SUSPECT_S, record_incident
from tests.logs.stage import BEGINS_US

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH = 1_280
BEFORE_US = BEGINS_US + round((DIES_S - 1) * SECOND_US)
AFTER_US = BEGINS_US + round((LOST_S + 1) * SECOND_US)
FLEET_US = BEGINS_US + round((SUSPECT_S + 2) * SECOND_US)  # the worker is dead, but not declared lost yet


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        log = Path("incident.rec")  # relative, because the page shows the path
        request_id = record_incident(log)
        with console_on(log) as console, launched() as browser:
            with _shown(console.url, browser, f"/fleet?at={FLEET_US}", 1_040) as page:
                page.screenshot(path=FOLDER / "console-fleet.png")
            with _shown(console.url, browser, f"/requests/by-id?id={request_id}", 1_000) as page:
                page.get_by_role("heading", name="What would have changed the selection").wait_for()
                page.screenshot(path=FOLDER / "console-request.png")
            with _shown(console.url, browser, f"/time?a={BEFORE_US}&b={AFTER_US}", 900) as page:
                page.screenshot(path=FOLDER / "console-time.png")
            with _shown(console.url, browser, "/what-if?policy=round-robin", 1_000) as page:
                page.get_by_role("button", name="Compare", exact=True).click()
                page.get_by_role("heading", name="The first decision that differs").wait_for()
                page.screenshot(path=FOLDER / "console-what-if.png")


@contextmanager
def _shown(url: str, browser: Browser, fragment: str, height: int) -> Iterator[Page]:
    """Show a view in a window of this height, in pixels."""
    with page_of(url, browser, fragment, width=WIDTH) as found:
        found.page.set_viewport_size({"width": WIDTH, "height": height})
        yield found.page


if __name__ == "__main__":
    main()
