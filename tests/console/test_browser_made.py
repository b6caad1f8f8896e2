"""The console's page on a log with hostile names and a planner, and on an empty log.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Dialog, Page, expect

from forebay.cli.common.terminal import printable
from forebay.events.codec import encode
from forebay.events.topics import SCALING
from forebay.ingress.model import DEFAULT_MODEL
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.scaling_log import a_day
from tests.cli.up import running as running_up
from tests.console.pages import ConsoleProcess, cells, console_on, go, page_of, read
from tests.core.worlds import PROMPTS, Driver, request
from tests.harness.browser import Opened
from tests.replay.recorded import log_of, write

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("browser")]

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;\u202egnp\x1b[31m"
WORKER = "<b>w</b>\"'\u2066&lt;"
REQUESTS = 20


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    drive = Driver().fleet(WORKER, "b")
    for number in range(REQUESTS - 1):
        drive("requests", request(f"r{number}", PROMPTS[number % 3]))
    drive("requests", request(HOSTILE, PROMPTS[0]))
    log = log_of(drive)
    log.topics[SCALING.name] = [encode(SCALING, record) for record in a_day().records]
    path = tmp_path_factory.mktemp("console") / "log.db"
    with ThreadPoolExecutor(1) as thread:  # the browser's loop may run in this one
        thread.submit(asyncio.run, write(log, path)).result()
    with console_on(path) as running:
        yield running


@pytest.fixture(scope="module")
def opened(console: ConsoleProcess, browser: Browser) -> Iterator[Opened]:
    with page_of(console.url, browser) as found:

        def dismiss(dialog: Dialog) -> None:
            found.errors.append(f"a script opened a dialog: {dialog.message}")
            dialog.dismiss()

        found.page.on("dialog", dismiss)
        yield found


@pytest.fixture
def page(opened: Opened) -> Iterator[Page]:
    yield opened.page
    assert opened.errors == []
    assert opened.page.locator("img, script:not([src])").count() == 0


def test_names_with_markup_and_control_characters_are_text(page: Page) -> None:
    go(page, "/fleet")
    workers = page.get_by_role("table", name="Workers and ranks")
    assert printable(WORKER) in cells(workers, "worker")
    assert printable(WORKER) != WORKER
    page.get_by_role("searchbox", name="Find").fill(printable(WORKER)[:8])
    expect(workers.get_by_role("row")).to_have_count(2)
    workers.get_by_role("link", name=printable(WORKER)).click()
    expect(page.get_by_role("combobox", name="Worker")).to_have_value(WORKER)
    table = page.get_by_role("table", name="Requests")
    expect(table.get_by_role("row").nth(1)).to_contain_text(printable(WORKER))
    assert set(cells(table, "worker")) == {printable(WORKER)}


def test_ids_with_markup_and_control_characters_are_text(page: Page) -> None:
    go(page, "/requests")
    page.get_by_role("searchbox", name="ID").fill(HOSTILE[:20])
    link = page.get_by_role("table", name="Requests").get_by_role("link")
    expect(link).to_have_count(1)
    assert link.get_attribute("title") == printable(HOSTILE)
    link.click()
    main = page.get_by_role("main")
    expect(main).to_contain_text(printable(HOSTILE))
    expect(main).to_contain_text(printable(WORKER))
    assert not {"\u202e", "\x1b", "\u2066"} & set(page.locator("body").inner_text())
    page.get_by_role("button", name="requests@").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("onerror=alert(1)>")
    assert not {"\u202e", "\x1b", "\u2066"} & set(page.get_by_role("dialog").inner_text())
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_planner_is_shown_with_its_decisions(console: ConsoleProcess, page: Page) -> None:
    go(page, "/scaling")
    view = read(console.url, "/v1/console/scaling")
    main = page.get_by_role("main")
    expect(page.get_by_role("heading", level=1)).to_contain_text("It scales 2 pools")
    for pool in view["status"]["pools"]:
        card = main.locator("section", has=page.get_by_role("heading", level=3, name=pool["pool"])).last
        expect(card).to_contain_text(f"{pool['size']} worker")
        expect(card.get_by_role("img", name="Workers from")).to_be_visible()
        expect(card.get_by_role("img", name="Requests per second from")).to_be_visible()
    expect(main).to_contain_text("alice has set 5")
    decisions = main.locator("section", has=page.get_by_role("heading", name="Decisions")).locator("> ol > li")
    expect(decisions).to_have_count(len(view["decisions"]))
    expect(main).to_contain_text("no free GPU")


@pytest.mark.slow
def test_a_comparison_can_be_cancelled(page: Page) -> None:
    go(page, "/what-if")
    page.get_by_role("combobox", name="Policy").select_option("round-robin")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="Cancel").click()  # the process of the comparison takes a second to start
    expect(page.get_by_role("alert").filter(visible=True)).to_have_text("The comparison was cancelled.")
    expect(page.get_by_role("progressbar", name="Progress of the comparison")).to_be_hidden()
    expect(page.get_by_role("button", name="Compare", exact=True)).to_be_enabled()


@pytest.mark.slow
def test_an_empty_log_shows_how_to_begin(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "log.db"
    SqliteLog.open(path).close()
    with console_on(path) as console, page_of(console.url, browser) as found:
        expect(found.page.get_by_role("main")).to_contain_text("The log has no decisions yet.")
        expect(found.page.get_by_role("main")).to_contain_text("forebay trace")
        for view, text in {
            "requests": "There are no requests yet.",
            "time": "0 markers",
            "scaling": "No planner has written to this log.",
            "what-if": "Compare the recorded decisions",
        }.items():
            go(found.page, f"/{view}")
            expect(found.page.get_by_role("main")).to_contain_text(text)


def test_a_request_of_another_model_is_explained_without_its_records(tmp_path: Path, browser: Browser) -> None:
    """The console reads the records of one group, so a link to those of another would show a wrong record."""
    models = [tmp_path / name for name in ("alpha", "beta")]
    for model in models:
        shutil.copytree(DEFAULT_MODEL, model)
    log = tmp_path / "run.db"
    with running_up(*(f"--model={model}" for model in models), "--log", str(log)) as up:
        found = up.client().completions.create(model="beta", prompt="Which model?", max_tokens=2).id
    jaeger = ("--trace-url", "http://jaeger/trace/{trace_id}")
    with console_on(log, "--group", "alpha", *jaeger) as console, page_of(console.url, browser) as opened:
        go(opened.page, f"/requests/by-id?id={found}")
        expect(opened.page.get_by_role("main")).to_contain_text("prompt tokens for beta")
        trace_id = read(console.url, f"/v1/requests/{found}/explain")["submitted"]["trace_id"]
        trace = opened.page.get_by_role("link", name=trace_id)
        expect(trace).to_have_attribute("href", f"http://jaeger/trace/{trace_id}")
        expect(opened.page.locator(".record-link:visible")).to_have_count(0)
