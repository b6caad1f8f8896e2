"""The console's page beside a running system: new requests, workers that drain, actions, and a console that restarts.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.cli.in_process import forebay
from tests.cli.up import ADMIN_TOKEN, Up, running
from tests.console.pages import (
    ConsoleProcess,
    cells,
    confirm,
    console_on,
    expect_error,
    go,
    page_of,
    require_accessible,
    review_action,
    states,
    wait_indexed,
)
from tests.console.serving import TOKEN
from tests.harness.local import free_ports

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("browser"), pytest.mark.slow]

MODEL = "forebay-default"
MANY = 200


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, str, Path]]:
    """Run `forebay up` with a console beside it; yields the system, the origin of the page and the log."""
    log, port = tmp_path_factory.mktemp("live") / "log.db", free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREBAY_CONSOLE_TOKEN", TOKEN)
        options = ("--console", "--console-port", str(port), "--log", str(log), "--workers", "3", "--admin-api")
        with running(*options) as up:
            url = f"http://127.0.0.1:{port}"
            wait_indexed(url)
            yield up, url, log


def send(up: Up, text: str) -> None:
    up.client().completions.create(model=MODEL, prompt=text, max_tokens=4)


def commands(log: Path) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(1) as thread:  # the browser's loop runs in this one
        run = thread.submit(forebay, "topics", "tail", str(log), "control", "-n", "1000").result()
    events = [json.loads(line)["event"] for line in run.stdout.splitlines()]
    return [(one["type"], one["operator"]) for one in events if one["type"] == "control.worker_commanded"]


def test_new_requests_appear_without_a_reload(system: tuple[Up, str, Path], browser: Browser) -> None:
    up, url, _ = system
    with page_of(url, browser, "/requests") as found:
        expect(found.page.get_by_role("main")).to_contain_text("There are no requests yet.")
        send(up, "one " * 200)
        table = found.page.get_by_role("table", name="Requests")
        expect(table.get_by_role("row")).to_have_count(2)
        expect(table).to_contain_text("finished")
        send(up, "two " * 200)
        expect(table.get_by_role("row")).to_have_count(3)
        found.page.get_by_role("button", name="Pause").click()
        send(up, "three " * 200)
        fresh = found.page.get_by_role("button", name="1 new request")
        expect(fresh).to_be_visible()
        assert len(cells(table, "request")) == 2, "a paused list does not move"
        fresh.click()
        expect(table.get_by_role("row")).to_have_count(4)
        expect(found.page.get_by_role("banner")).to_contain_text("up to date")


def test_a_worker_is_drained_in_the_name_of_the_operator(system: tuple[Up, str, Path], browser: Browser) -> None:
    _, url, log = system
    with page_of(url, browser) as found:
        page = found.page
        workers = page.get_by_role("table", name="Workers and ranks")
        expect(workers.get_by_role("row")).to_have_count(4)
        page.get_by_role("button", name="Actions").press("Enter")
        dialog = page.get_by_role("dialog", name="Change the running system")
        expect(page.get_by_label("Worker", exact=True)).to_be_visible()
        require_accessible(page, "actions")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        page.get_by_role("button", name="Actions").press("Enter")
        confirm(review_action(page, "Drain a worker", "mallory", "wrong", worker="mock-1"))
        expect(dialog.get_by_role("alert")).to_contain_text("token")
        expect_error(found, "403")
        assert commands(log) == []
        review_action(page, "Drain a worker", "alice", ADMIN_TOKEN, worker="mock-1")
        expect(dialog).to_contain_text(f"command drain, sent to worker mock-1 of {MODEL}, by alice")
        require_accessible(page, "review of an action")
        confirm(dialog)
        expect(dialog).to_contain_text("mock-1: done")
        dialog.get_by_role("button", name="Close").press("Enter")
        expect(dialog).to_have_count(0)
        expect(workers.get_by_role("row")).to_have_count(3)
        assert sorted(cells(workers, "worker")) == ["mock-0", "mock-2"]
        assert commands(log) == [("control.worker_commanded", "alice")]
        stored = page.evaluate("[...Object.keys(sessionStorage), ...Object.keys(localStorage)]")
        assert stored == ["forebay-console-token"], "the admin token must not be stored"


def test_a_wrong_token_opens_a_form(system: tuple[Up, str, Path], browser: Browser) -> None:
    with page_of(system[1], browser) as found:
        found.page.evaluate("sessionStorage.clear()")
        found.page.reload()
        form = found.page.get_by_label("Token")
        expect(form).to_be_focused()
        expect_error(found, "401")
        form.fill("wrong")
        found.page.keyboard.press("Enter")
        expect(found.page.get_by_text("The console rejected this token.")).to_be_visible()
        expect_error(found, "401")
        form.fill(TOKEN)
        found.page.keyboard.press("Enter")
        expect(found.page.get_by_role("heading", level=1)).to_contain_text("Ready")


def test_the_page_reconnects_to_a_console_that_was_started_again(tmp_path: Path, browser: Browser) -> None:
    with running("--log", str(tmp_path / "log.db"), "--workers", "1") as up:
        console = ConsoleProcess(tmp_path / "log.db")
        console.start()
        try:
            with page_of(console.url, browser, "/requests") as found:
                console.stop()
                lost = found.page.get_by_role("alert").filter(has_text="Connection to the console lost")
                expect(lost).to_be_visible()
                send(up, "one " * 200)
                console.start()
                expect(lost).to_be_hidden()
                table = found.page.get_by_role("table", name="Requests")
                expect(table.get_by_role("row")).to_have_count(2)
                found.errors[:] = [one for one in found.errors if "net::ERR_" not in one]
        finally:
            console.stop()


def test_many_workers_are_shown(tmp_path: Path, browser: Browser) -> None:
    log = tmp_path / "log.db"
    with (
        # On a busy machine, leases of 200 workers in one process would expire: suspect workers are no candidates.
        running("--log", str(log), "--workers", str(MANY), "--lease-ttl-s", "60") as up,
        console_on(log) as console,
        page_of(console.url, browser, width=390) as found,
    ):
        page = found.page
        workers = page.get_by_role("table", name="Workers and ranks")
        expect(workers).to_have_attribute("aria-rowcount", str(MANY + 1))
        assert set(states(workers)) == {"ready"}
        page.get_by_role("searchbox", name="Find").fill("mock-19")
        expect(page.get_by_text(f"11 of {MANY} ranks")).to_be_visible()
        require_accessible(page, f"{MANY} workers")
        send(up, "one " * 200)
        go(page, "/requests")
        page.get_by_role("table", name="Requests").get_by_role("link").click()
        page.get_by_role("button", name=f"Show all {MANY} candidates").click()
        costs = page.get_by_role("table", name="cost").first.get_by_role("row")
        expect(costs).to_have_count(MANY)
