"""Report pages in a real browser without network: charts, the request explorer and image export.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Dialog, expect

from forebay.cli.simulate.report.page import write_report
from forebay.simulate.slo import Slo
from tests.cli.outcomes import run
from tests.cli.report_page import HOSTILE, Page
from tests.harness import fork_server
from tests.harness.browser import Opened, opened
from tests.simulate.traces import conversations, write

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("browser")]

PATIENCE_S = 60.0
POLICIES = ("kv", "round-robin", "least-loaded")
CHARTS = {"ttft", "itl", "time", "load"}
# Per chart: width of its panels, their numbers of curves, and the numbers of colours that they are drawn in.
DRAWN = """() => Object.fromEntries(Object.entries(plots).map(([id, panels]) => [id, panels.map((plot) => {
    const { width, height } = plot.ctx.canvas, { data } = plot.ctx.getImageData(0, 0, width, height);
    const colours = new Set(new Uint32Array(data.buffer)).size, box = plot.root.getBoundingClientRect();
    return { width: box.width, curves: plot.series.length - 1, colours };
})]))"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a report and the output of the command that wrote it."""
    folder = tmp_path_factory.mktemp("report")
    trace = write(folder / "trace.jsonl", conversations(sessions=12, turns=10))
    command = ["simulate", str(trace), "--workers", "3", "--json"]
    command += [word for name in POLICIES for word in ("--policy", name)]
    command += ["--slo", "ttft=250,itl=20", "--kill", "mock-1@2+3", "--lease-ttl-s", "1"]
    done = fork_server.run(*command, "--report", str(folder / "report.html"), timeout_s=PATIENCE_S)
    return folder / "report.html", json.loads(done.stdout)


@pytest.fixture(scope="module")
def report(simulated: tuple[Path, dict[str, Any]], browser: Browser) -> Iterator[Opened]:
    """Open the report once, because drawing takes seconds. The tests run in this order: charts, explorer, limits."""
    with opened(simulated[0], browser) as found:
        drawn(found)
        yield found


def drawn(found: Opened) -> None:
    """Wait until every chart is drawn, and check that there was no error and no network request."""
    found.page.wait_for_selector("html[data-drawn=all]")
    assert found.errors == []
    assert found.requests == []


def cells(found: Opened, column: int) -> list[str]:
    return found.page.locator(f"#requests tbody tr.row td:nth-child({column})").all_inner_texts()


def test_every_chart_is_drawn(simulated: tuple[Path, dict[str, Any]], report: Opened) -> None:
    path, result = simulated
    written = Page(path.read_text())
    assert set(written.charts) == CHARTS
    there = report.page.evaluate(DRAWN)
    for name, chart in written.charts.items():
        assert len(there[name]) == len(chart["panels"])
        for drawn_panel, panel in zip(there[name], chart["panels"], strict=True):
            assert drawn_panel["curves"] == len(panel.get("curves", ["the heat map"]))
            assert (drawn_panel["width"] > 300, drawn_panel["colours"] > 5) == (True, True), name
    kept = [report.page.locator(".attainment-row b").nth(at).inner_text() for at in range(len(POLICIES))]
    assert kept == [f"{100 * result['policies'][name]['attained']:.1f}%" for name in POLICIES]
    assert result["digest"] in report.page.inner_text("main")


def test_the_explorer_finds_sorts_and_opens_requests(simulated: tuple[Path, dict[str, Any]], report: Opened) -> None:
    path, _ = simulated
    explorer = Page(path.read_text()).data["explorer"]
    first = explorer["runs"][0]["first"]
    slowest = sorted(range(len(first)), key=lambda at: (-first[at], at))
    page, where = report.page, report.page.locator("#where")
    expect(where).to_have_text("1 to 25 of 120")
    assert cells(report, 1) == [str(at + 1) for at in slowest[:25]]
    page.click("#after")
    assert cells(report, 1) == [str(at + 1) for at in slowest[25:50]]
    page.get_by_role("button", name="TTFT", exact=True).press("Enter")  # by keyboard: lowest TTFT first
    assert cells(report, 1)[0] == str(slowest[-1] + 1)
    page.get_by_role("button", name="request", exact=True).click()
    assert cells(report, 1)[:3] == ["1", "2", "3"]
    page.fill("#search", "7")
    expect(where).to_have_text("1 to 1 of 1")
    page.locator("#requests button.open").press("Enter")
    sides = page.locator(".side")
    expect(sides.first).to_contain_text("prompt tokens cached")
    assert page.locator(".side h3").all_inner_texts() == list(POLICIES)
    page.locator("#requests button.open").press("Enter")
    expect(sides).to_have_count(0)
    page.fill("#search", "mock-2")
    assert set(cells(report, 5)) == {"mock-2"}
    page.fill("#search", "nothing is called so")
    expect(where).to_have_text("no matching requests")
    page.fill("#search", "")
    page.select_option("#only", "elsewhere")
    moved = sum(one != other for one, other in zip(*(run["worker"] for run in explorer["runs"][:2]), strict=True))
    expect(where).to_have_text(f"1 to 25 of {moved}")
    page.select_option("#run", "2")
    page.select_option("#only", "again")
    again = sum(attempts > 1 for attempts in explorer["runs"][2]["attempts"])
    expect(where).to_contain_text(f"of {again}" if again else "no matching")
    assert report.errors == []


def test_limits_and_runs_can_be_selected(simulated: tuple[Path, dict[str, Any]], report: Opened) -> None:
    path, _ = simulated
    data = Page(path.read_text()).data
    limits = data["limits"]
    page = report.page
    page.press("#ttft-limit", "End")
    page.press("#itl-limit", "End")
    assert page.locator(".attainment-row b").all_inner_texts() == ["100.0%"] * len(POLICIES)
    page.press("#ttft-limit", "Home")
    within = sum(count for ttft, _, count in limits["kept"][0] if ttft == 0)
    assert page.locator(".attainment-row b").first.inner_text() == f"{100 * within / limits['requests'][0]:.1f}%"
    assert page.evaluate("charts.ttft.marks[0].at") == limits["ttft"][0]
    page.get_by_role("button", name="round-robin", exact=True).click()
    names = page.locator("#ttft .panel-head span[style]")
    expect(names).to_have_count(2)
    assert [name.strip() for name in names.all_inner_texts()] == ["kv", "least-loaded"]
    assert report.errors == []


@pytest.mark.slow
def test_every_chart_can_be_saved_as_an_image(simulated: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    with opened(simulated[0], browser) as found:
        drawn(found)
        for name in sorted(CHARTS):
            with found.page.expect_download() as download:
                found.page.click(f"[data-png={name}]")
            assert download.value.suggested_filename == f"{name}.png"
            with Image.open(io.BytesIO(Path(download.value.path()).read_bytes())) as picture:
                assert picture.format == "PNG"
                assert picture.width > 500
                assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20  # the image is not blank
        assert found.errors == []
        assert {url.split(":")[0] for url in found.requests} <= {"data", "blob"}


@pytest.mark.slow
def test_the_page_follows_the_colour_scheme_and_fits_a_phone(
    simulated: tuple[Path, dict[str, Any]], browser: Browser
) -> None:
    with opened(simulated[0], browser, scheme="dark", width=375, height=720) as found:
        drawn(found)
        page = found.page
        body, line = page.locator("body"), "plots.ttft[0].series[1].stroke()"
        assert page.evaluate(line) == "#6fb1f2"
        expect(body).to_have_css("background-color", "rgb(20, 24, 28)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        page.locator("#requests button.open").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        page.emulate_media(color_scheme="light")
        expect(body).to_have_css("background-color", "rgb(251, 251, 249)")
        while page.evaluate(line) != "#2b6cb0":  # the page's policy forbids `wait_for_function` to evaluate a text
            page.wait_for_timeout(20)
        assert found.errors == []


@pytest.mark.slow
def test_names_are_escaped_and_run_no_script(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "report.html"
    runs = [run(HOSTILE, requests=60, failed=[3]), run("kv", requests=60, held=True)]
    write_report(path, runs, workload=HOSTILE, slo=Slo(e2e_ms=900), digest="d", survey_notes=[HOSTILE])
    with opened(path, browser) as found:
        dialogs: list[str] = []

        def dismissed(dialog: Dialog) -> None:
            dialogs.append(dialog.message)
            dialog.dismiss()

        found.page.on("dialog", dismissed)
        drawn(found)
        found.page.fill("#search", "4")
        found.page.locator("#requests button.open").click()
        expect(found.page.locator(".side h3").first).to_contain_text("</script><img src=x")
        expect(found.page.locator(".side").first).to_contain_text("too large for any worker")
        assert found.page.locator("img").count() == 0
        assert dialogs == []
        assert found.errors == []


@pytest.mark.slow
def test_a_report_without_responses_has_no_errors(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "report.html"
    write_report(path, [run("kv", requests=4, failed=range(4))], workload="w", slo=None, digest="d")
    with opened(path, browser) as found:
        drawn(found)
        expect(found.page.locator("h1")).to_have_text("No request completed.")
        assert cells(found, 7) == ["failed"] * 4
