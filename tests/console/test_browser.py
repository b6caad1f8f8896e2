"""The console's page on a recording, in a real browser that can reach only the console.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1. They share one page.
"""

import asyncio
import json
import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from forebay.replay.at import seek_time
from forebay.replay.moment import Moment
from forebay.replay.states import States
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.logs import invoke
from tests.console.pages import (
    ConsoleProcess,
    cells,
    console_on,
    expect_error,
    go,
    page_of,
    read,
    require_fleet,
    states,
)
from tests.harness.browser import Opened

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("browser")]

LOGS = Path(__file__).parents[1] / "logs"
SEED = 20_261_124
MOMENTS = 4


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    log = Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path_factory.mktemp("console")))
    with console_on(log) as running:
        yield running


@pytest.fixture(scope="module")
def opened(console: ConsoleProcess, browser: Browser) -> Iterator[Opened]:
    with page_of(console.url, browser) as found:
        yield found


@pytest.fixture
def page(opened: Opened) -> Iterator[Page]:
    yield opened.page
    assert opened.errors == []


def moment_at(log: Path, at_us: int) -> Moment:
    """Return the moment of `forebay replay at`, derived in another thread, because this one runs the browser's loop."""

    async def derived() -> Moment:
        with closing(SqliteLog.open(log, readonly=True)) as opened:
            return await (await seek_time(States(opened, 0), at_us)).moment()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, derived()).result()


def rows_of(console: ConsoleProcess, **filters: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(console.url, "/v1/console/requests", limit=500, **filters)["requests"]
    return found


@pytest.mark.slow
def test_the_fleet_of_random_moments_is_that_of_replay_at(console: ConsoleProcess, page: Page) -> None:
    state = read(console.url, "/v1/console")["state"]
    draw = random.Random(SEED)
    busy = 0
    for _ in range(MOMENTS):
        at_us = draw.randint(state["begin_us"], state["end_us"])
        go(page, f"/fleet?at={at_us}")
        moment = moment_at(console.log, at_us)
        require_fleet(page, moment)
        busy += len(moment.requests)
    assert busy


def test_workers_can_be_found_and_sorted(console: ConsoleProcess, page: Page) -> None:
    at_us = read(console.url, "/v1/console")["state"]["begin_us"] + 25_000
    go(page, f"/fleet?at={at_us}")
    workers = page.get_by_role("table", name="Workers and ranks")
    names = cells(workers, "worker")
    assert len(names) == 4
    workers.get_by_role("button", name="worker").press("Enter")
    assert cells(workers, "worker") == sorted(names)
    expect(workers.get_by_role("columnheader", name="worker")).to_have_attribute("aria-sort", "ascending")
    workers.get_by_role("button", name="worker").press("Enter")
    assert cells(workers, "worker") == sorted(names, reverse=True)
    page.get_by_role("searchbox", name="Find").fill("w2")
    expect(page.get_by_text("1 of 4 ranks")).to_be_visible()
    assert cells(workers, "worker") == ["w2"]
    page.get_by_role("searchbox", name="Find").fill("")
    workers.get_by_role("link", name="w2").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests")
    expect(page.get_by_role("combobox", name="Worker")).to_have_value("w2")


def test_requests_can_be_filtered(console: ConsoleProcess, page: Page) -> None:
    go(page, "/requests")
    table = page.get_by_role("table", name="Requests")
    rows = rows_of(console)
    assert cells(table, "request")[0].startswith(rows[0]["request_id"])
    expect(table.get_by_role("row")).to_have_count(len(rows) + 1)
    page.get_by_role("checkbox", name="failed, rejected or aborted").press("Space")
    failed = rows_of(console, failed=True)
    expect(table.get_by_role("row")).to_have_count(len(failed) + 1)
    assert set(states(table)) == {row["state"] for row in failed}
    page.get_by_role("combobox", name="State").select_option("rejected")
    expect(table.get_by_role("row")).to_have_count(2)
    page.get_by_role("searchbox", name="ID").fill("nothing has this ID")
    expect(page.get_by_text("No request matches the filters at this moment.")).to_be_visible()
    page.get_by_role("button", name="Clear the filters").first.click()
    expect(table.get_by_role("row")).to_have_count(len(rows) + 1)
    page.get_by_role("searchbox", name="ID").fill(rows[3]["request_id"][-6:])
    expect(table.get_by_role("row")).to_have_count(2)
    page.reload()  # the filters are part of the address
    expect(table.get_by_role("row")).to_have_count(2)
    expect(page.get_by_role("searchbox", name="ID")).to_have_value(rows[3]["request_id"][-6:])


def test_requests_of_the_past_have_the_state_of_that_moment(console: ConsoleProcess, page: Page) -> None:
    at_us = read(console.url, "/v1/console")["state"]["begin_us"] + 25_000
    go(page, f"/requests?at={at_us}")
    active = {one.request_id: one.phase for one in moment_at(console.log, at_us).requests}
    table = page.get_by_role("table", name="Requests")
    shown = zip((text.split()[0] for text in cells(table, "request")), states(table), strict=True)
    assert active
    assert {name: state for name, state in shown if name in active} == active


def test_a_request_is_explained(console: ConsoleProcess, page: Page) -> None:
    row = next(one for one in rows_of(console) if one["attempt"] > 1 and one["state"] == "finished")
    found = read(console.url, f"/v1/requests/{row['request_id']}/explain")
    go(page, "/requests")
    page.get_by_role("link", name=row["request_id"]).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("finished", ignore_case=True)
    expect(page.get_by_role("img", name="Course of the request")).to_be_visible()
    main = page.get_by_role("main")
    assert len(found["routings"]) == row["attempt"]
    for routing in found["routings"]:
        expect(main).to_contain_text(re.compile(re.escape(routing["why"]), re.IGNORECASE))
    for entry in found["timeline"]:
        expect(main.get_by_role("listitem").filter(has_text=entry["text"]).first).to_be_visible()
    routing = found["routings"][0]
    bars = page.get_by_role("table", name=re.compile("cost", re.IGNORECASE)).first
    winner = routing["candidates"][routing["winner"]]["seen"]["worker_id"]
    expect(bars.get_by_role("row").filter(has_text="selected")).to_contain_text(winner)
    expect(bars.get_by_role("row").filter(has_text="runner-up")).to_have_count(1)
    assert bars.get_by_role("row").count() == len(routing["candidates"])
    expect(page.get_by_role("heading", name="What would have changed the selection")).to_be_visible()
    for decision in read(console.url, f"/v1/requests/{row['request_id']}/explain", changes="true")["routings"]:
        for text in [one["text"] for one in decision["changes"]] + decision["notes"]:
            expect(main).to_contain_text(text, ignore_case=True)
    entry = found["timeline"][0]
    page.get_by_role("button", name=f"{entry['topic']}@{entry['offset']}").first.click()
    dialog = page.get_by_role("dialog", name=f"{entry['topic']}@{entry['offset']}")
    expect(dialog).to_contain_text(row["request_id"])
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("link", name="All requests").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Requests")


def test_an_unknown_request_is_an_error_in_words(opened: Opened, page: Page) -> None:
    go(page, "/requests/by-id?id=nobody")
    expect(page.get_by_role("heading", level=1)).to_have_text("This request cannot be explained.")
    expect(page.get_by_role("main")).to_contain_text("unknown request 'nobody'")
    expect_error(opened, "404")


def test_what_if_shows_the_numbers_of_replay_diff(console: ConsoleProcess, page: Page) -> None:
    go(page, "/what-if")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("Nothing is changed.")
    page.get_by_role("combobox", name="Policy").select_option("round-robin")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("progressbar", name="Progress of the comparison")).to_be_visible()
    result = page.get_by_role("heading", name="would have gone to another worker")
    expect(result).to_be_visible()
    with ThreadPoolExecutor(1) as thread:
        printed = thread.submit(invoke, "replay", "diff", console.log, "--policy", "round-robin", "--json").result()
    report = json.loads(printed.stdout)
    moved = report["moved"]
    expect(result).to_contain_text(f"{moved['moved']} of {moved['compared']} requests")
    figures = page.get_by_role("region", name="Figures side by side")
    sides = (report["history"], report["other"])
    for name, values in {
        "Attempts sent to workers": [str(side["routed"]) for side in sides],
        "Prompt tokens to compute": [f"{side['prompt_tokens'] - side['cached_tokens']:,}" for side in sides],
        "Overlap on devices, blocks": [str(side["overlap"]["device"]) for side in sides],
    }.items():
        row = figures.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name))
        assert [cell.inner_text() for cell in row.get_by_role("cell").all()[:2]] == values, name
    expect(page.get_by_role("main")).to_contain_text(report["fork"]["request_id"])
    attempts = page.get_by_role("table", name="Attempts per worker")
    expected = {f"{one['worker_id']}/{one['rank']}": one["history"]["requests"] for one in report["ranks"]}
    shown = zip(cells(attempts, "worker"), cells(attempts, "requests"), strict=True)
    assert {name: int(count) for name, count in shown} == expected


def test_the_slider_works_by_keyboard_and_live_returns(console: ConsoleProcess, page: Page) -> None:
    state = read(console.url, "/v1/console")["state"]
    go(page, "/fleet")
    slider = page.get_by_role("slider", name="Moment")
    newest = page.get_by_role("button", name="Newest", exact=True)
    expect(newest).to_have_attribute("aria-pressed", "true")
    slider.focus()
    page.keyboard.press("Home")
    expect(page).to_have_url(re.compile(f"at={state['begin_us']}$"))
    expect(newest).to_have_attribute("aria-pressed", "false")
    expect(slider).to_have_attribute("aria-valuetext", "2025-06-15 15:06:40.010 UTC")
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(f"at={state['begin_us'] + 1_000}$"))
    page.keyboard.press("PageUp")
    page.keyboard.press("End")
    expect(page).to_have_url(re.compile(f"at={state['end_us']}$"))
    expect(page.get_by_text(re.compile("^Showing .*, at the newest event"))).to_be_visible()
    page.get_by_role("link", name="Requests").click()  # other views show the same moment
    expect(page).to_have_url(re.compile(rf"#/requests\?at={state['end_us']}$"))
    page.get_by_role("button", name="Back to the newest state").press("Enter")
    expect(page).to_have_url(re.compile("#/requests$"))
    expect(newest).to_have_attribute("aria-pressed", "true")


def test_markers_are_reached_by_keyboard_and_show_their_moment(console: ConsoleProcess, page: Page) -> None:
    go(page, "/fleet")
    markers = read(console.url, "/v1/console/markers")["markers"]
    *_, lost, joined = markers
    group = page.get_by_role("group", name="Markers")
    group.get_by_role("button").first.focus()
    expect(page.get_by_role("tooltip")).to_contain_text(markers[0]["text"])
    page.keyboard.press("End")
    expect(page.get_by_role("tooltip")).to_contain_text(joined["text"])
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tooltip")).to_contain_text(lost["text"])
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"at={lost['at_us']}$"))
    page.get_by_role("button", name="Next marker").click()
    expect(page).to_have_url(re.compile(f"at={joined['at_us']}$"))
    page.get_by_role("button", name="Previous marker").click()
    expect(page).to_have_url(re.compile(f"at={lost['at_us']}$"))
    page.get_by_role("link", name="Time", exact=True).click()
    table = page.get_by_role("table", name="Markers")
    expect(table.get_by_role("row")).to_have_count(len(markers) + 1)
    assert sorted(cells(table, "event")) == sorted(one["text"] for one in markers)


def test_a_time_can_be_entered(page: Page) -> None:
    go(page, "/fleet")
    entry = page.get_by_role("textbox", name="Time to show, in UTC")
    entry.fill("yesterday")
    entry.press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text('"yesterday" is not a time')
    entry.fill("15:06:40.05")
    entry.press("Enter")
    expect(page.get_by_text(re.compile("^Showing 15:06:40.050 UTC"))).to_be_visible()
    entry.fill("2020-01-01 00:00")
    entry.press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("is outside of the log")


def test_two_moments_are_compared(console: ConsoleProcess, page: Page) -> None:
    lost = next(one for one in read(console.url, "/v1/console/markers")["markers"] if one["kind"] == "worker_lost")
    before, after = lost["at_us"] - 1_000, lost["at_us"] + 1_000
    go(page, f"/fleet?at={before}")
    page.get_by_role("button", name="Compare with").click()
    go(page, f"/time?a={before}&at={after}")
    expected = read(console.url, "/v1/console/compare", a_us=before, b_us=after)
    changes = page.get_by_role("table", name="Changes")
    expect(changes.get_by_role("row")).to_have_count(len(expected["changes"]) + 1)
    assert cells(changes, "change") == [one["subject"] for one in expected["changes"]]
    totals = page.get_by_role("table", name="Totals at both moments")
    ready = totals.get_by_role("row").filter(has_text="ready workers")
    numbers = [str(expected[side]["ready"]) for side in ("a", "b")]
    assert ready.get_by_role("cell").all_inner_texts()[1:] == numbers
    assert numbers[0] != numbers[1]


def test_a_moment_before_the_log_is_an_error_in_words(opened: Opened, page: Page) -> None:
    go(page, "/fleet?at=1000")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("begins at 2025-06-15")
    go(page, "/fleet")
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    expect_error(opened, "404")
