"""The page of `forebay simulate --report`: content, size limits, escaping, and the page in a browser."""

import io
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from playwright.sync_api import Browser, Dialog, expect

from forebay.analysis.runs import SimulationRun
from forebay.cli.common.terminal import printable
from forebay.cli.simulate.report.charts import COLUMNS, ROWS
from forebay.cli.simulate.report.page import RUNS_MAX, duration, page, require_report, write_report
from forebay.events.control import RouterConfig
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome, summary
from forebay.simulate.settings import engine_config
from forebay.simulate.slo import Slo, goodput
from tests.cli.outcomes import run
from tests.cli.report_page import HOSTILE, Page
from tests.harness import fork_server
from tests.harness.browser import Opened, opened
from tests.simulate.scene import conversations, one_pool, write

pytestmark = pytest.mark.timeout(180)


def made(*runs: SimulationRun, slo: Slo | None = None, **more: Any) -> Page:
    return Page(page(runs, workload="a trace", slo=slo, digest="the digest", **more))


def headline(*runs: SimulationRun, slo: Slo | None = None) -> str:
    return "".join(made(*runs, slo=slo).texts["h1"])


def timed(name: str, *times_us: tuple[int, int, int], workers: int = 2) -> SimulationRun:
    """Return a run of requests with the given TTFT, E2E and output tokens. A TTFT of 0 means no response."""
    served = [
        RequestOutcome(number * 1_000, 100, tokens, None, failure="no room", number=number)
        if not first_us
        else RequestOutcome(
            number * 1_000, 100, tokens, 0, 0, number * 1_000 + first_us, number * 1_000 + last_us, 1, number=number
        )
        for number, (first_us, last_us, tokens) in enumerate(times_us)
    ]
    outcome = SimulationOutcome(
        requests=RequestOutcomes(served), workers=[f"mock-{number}" for number in range(workers)]
    )
    return SimulationRun(name, one_pool(workers, engine_config()), RouterConfig(), outcome, summary(outcome, workers))


def test_a_page_is_self_contained_and_has_all_charts() -> None:
    found = made(
        run("kv", held=True),
        run("round-robin", slower=1.5, mode="round-robin", again=[3]),
        survey_notes=["2 rows left out"],
    )
    assert not {"src", "href", "srcset", "action"} & set(found.attributes)
    assert not {"link", "iframe", "img", "object"} & set(found.tags)
    assert any("default-src 'none'" in content for content in found.attributes["content"])
    assert set(found.charts) == {"ttft", "itl", "time", "load"} <= set(found.attributes["id"])
    assert set(found.charts) == set(found.attributes["data-png"])
    for text in ("2 rows left out", "the digest", "TTFT mean", "E2E p99", "a trace: 400 requests"):
        assert text in found.text
    titles = {panel["title"] for panel in found.charts["time"]["panels"]}
    assert {"requests queued in the router", "workers in the fleet"} < titles
    assert any("retried" in title for title in titles)


def test_names_are_escaped() -> None:
    found = made(run(HOSTILE), run("kv", failed=[1]), survey_notes=[HOSTILE])
    assert "img" not in found.tags
    assert len(found.scripts) == 3
    assert printable(HOSTILE) in found.text
    assert found.data["labels"][0] == HOSTILE  # the page inserts labels as text nodes


def attaining(name: str, count: int) -> SimulationRun:
    """Return a run of 1,000 requests of which `count` have a TTFT of 1 ms, and the others of 9 ms."""
    return timed(name, *[(1_000, 2_000, 2)] * count, *[(9_000, 10_000, 2)] * (1_000 - count))


SLO = Slo(ttft_ms=5, e2e_ms=15)


@pytest.mark.parametrize(
    ("runs", "slo", "text"),
    [
        (
            [timed(name, (us, 9_000, 2)) for name, us in (("slow", 3_000), ("fast", 1_000), ("next", 1_500))],
            None,
            "Best TTFT mean: fast, 1 ms; next has 1.5 ms.",
        ),
        (
            [timed(str(number), (1_000, 9_000, 2)) for number in range(5)],
            None,
            "Best TTFT mean: 0, 1 and 3 others, 1 ms.",
        ),
        # The tolerance is relative: 106 and 115 of 1,000 differ, 991 and 1,000 are equal.
        (
            [attaining("less", 106), attaining("more", 115)],
            SLO,
            "Best SLO attainment (TTFT ≤ 5 ms, E2E ≤ 15 ms): more, 11.5%; less has 10.6%.",
        ),
        (
            [attaining("one", 991), attaining("two", 1_000)],
            SLO,
            "Best SLO attainment (TTFT ≤ 5 ms, E2E ≤ 15 ms): two and one, 100.0%.",
        ),
        ([run("none", requests=9, failed=range(9))], None, "No request completed."),
        ([run("none", requests=1, failed=[0]), timed("some", (1_000, 2_000, 2))], None, "Best TTFT mean: some, 1 ms."),
    ],
)
def test_the_headline_compares_runs(runs: list[SimulationRun], slo: Slo | None, text: str) -> None:
    assert headline(*runs, slo=slo) == text


def test_failed_requests_are_reported_first() -> None:
    text = made(run("kv", failed=[4, 7])).text
    assert "kv: 2 of 400 requests failed; the first reason: too large for any worker" in text


@pytest.mark.parametrize(
    "runs",
    [
        [run("empty", requests=0)],
        [run("none", requests=5, failed=range(5))],
        [run("none", requests=5, failed=range(5)), run("some", requests=5)],
        [run("one", requests=1, workers=1)],
        [timed("no timeline", (1_000, 2_000, 2))],
        [timed("one token each", (1_000, 1_000, 1), (2_000, 2_000, 1))],
    ],
)
def test_runs_with_little_to_show_have_a_page(runs: list[SimulationRun]) -> None:
    found = made(*runs)
    assert ("ttft" in found.charts) is any(one.summary["requests"] for one in runs)


def test_the_table_shows_metrics_and_marks_the_best() -> None:
    kv, slow = run("kv", reuse=0.4), run("slow", slower=2.0, reuse=0.1)
    values = made(kv, slow).texts["td"]
    rows = {values[at]: values[at + 1 : at + 3] for at in range(0, len(values), 3)}
    assert rows["prefix reuse"] == [f"{kv.summary['prefix_reuse']:.1%} ★", f"{slow.summary['prefix_reuse']:.1%}"]
    ttft = [duration(one.summary["ttft_ms"]["p99"]) for one in (kv, slow)]
    assert rows["TTFT p99"] == [f"{ttft[0]} ★", ttft[1]]
    assert not any("★" in cell for cell in rows["GPU hours"])  # equal
    assert not any("★" in cell for cell in made(kv).texts["td"])


def test_runs_with_equal_names_get_unique_labels() -> None:
    found = made(run("kv", workers=2), run("kv", workers=4), run("kv", workers=4))
    assert found.data["labels"] == ["kv, 2 workers", "kv, 4 workers", "kv, 4 workers (2)"]
    assert "fleets of different sizes" in found.text


def test_omitted_runs_are_reported() -> None:
    found = made(*(run(f"run {number}", requests=3) for number in range(RUNS_MAX + 2)))
    assert len(found.data["labels"]) == RUNS_MAX
    assert f"The report shows the first {RUNS_MAX} of {RUNS_MAX + 2} runs." in found.text


times = st.tuples(st.integers(0, 5_000_000), st.integers(0, 9_000_000), st.integers(1, 300))


@given(
    st.lists(times.map(lambda one: (one[0], one[0] + one[1], one[2])), min_size=1, max_size=60),
    st.floats(0.5, 6_000),
    st.floats(0.01, 500),
    st.none() | st.floats(1, 12_000),
)
def test_limits_match_goodput(
    given_times: list[tuple[int, int, int]], ttft_ms: float, itl_ms: float, e2e_ms: float | None
) -> None:
    """Compare at the SLO limits and at the largest limits, which every answered request meets."""
    one = timed("one", *given_times)
    slo = Slo(ttft_ms=ttft_ms, itl_ms=itl_ms, e2e_ms=e2e_ms)
    found = made(one, slo=slo).data["limits"]
    (kept,) = found["kept"]
    ttft_at, itl_at = found["ttft"].index(ttft_ms), found["itl"].index(itl_ms)
    within = sum(count for ttft, itl, count in kept if ttft <= ttft_at and itl <= itl_at)
    assert within / len(given_times) == pytest.approx(goodput(one.outcome, slo)["attained"])
    assert all(ttft < len(found["ttft"]) and itl < len(found["itl"]) for ttft, itl, _ in kept)
    every = goodput(one.outcome, Slo(ttft_ms=1e12, e2e_ms=e2e_ms))["attained"] * len(given_times)
    assert sum(count for *_, count in kept) == pytest.approx(every)


def test_attainment_curves_count_requests_without_a_response() -> None:
    found = made(timed("half", (1_000, 3_000, 3), (0, 0, 3), (2_000, 2_000, 1), (0, 0, 1)))
    for name in ("ttft", "itl"):
        (curve,) = found.charts[name]["panels"][0]["curves"]
        assert max(curve["y"]) == 0.5
    assert found.charts["itl"]["panels"][0]["curves"][0]["y"][0] == 0.25  # a single token has no ITL


def test_heat_maps_have_rates_of_merged_workers_and_bins() -> None:
    one = run("one", requests=50, workers=1)
    (panel,) = made(one).charts["load"]["panels"]
    computed = sum(served.prompt_tokens - served.cached_tokens for served in one.outcome.requests)
    assert sum(panel["heat"]["values"][0]) == computed  # bins of one second
    (panel,) = made(run("wide", requests=2_000, workers=150)).charts["load"]["panels"]
    assert len(panel["heat"]["values"]) <= ROWS
    assert all(len(line) <= COLUMNS for line in panel["heat"]["values"])
    assert panel["heat"]["rows"][0] == "mock-0 … mock-2"


def test_every_setting_is_shown() -> None:
    found = made(run("kv"), run("random", mode="random"))
    settings = json.loads("".join(found.texts["pre"]))
    assert [one["run"] for one in settings] == ["kv", "random"]
    assert msgspec.convert(settings[0]["router"], RouterConfig) == RouterConfig()
    assert settings[1]["fleet"] == "as under kv"


def test_a_report_overwrites_only_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, mine = tmp_path / "report.html", tmp_path / "notes.html"
    mine.write_text("mine")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for refused, reason in (
        (mine, "is not a report of this command"),
        (tmp_path / "no" / "page.html", "no such directory"),
        (pipe, "not a regular file"),
    ):
        with pytest.raises(click.exceptions.Exit):
            require_report(refused)
        assert f"--report {refused}: " in (error := capsys.readouterr().err)
        assert reason in error
    for _ in range(2):  # a report can be overwritten
        require_report(path)
        write_report(path, [run("kv", requests=5)], workload="w", slo=None, digest="d")
    assert mine.read_text() == "mine"
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # like a full disk
    try:
        with pytest.raises(click.exceptions.Exit) as ended:
            write_report(path, [run("random", requests=5)], workload="w", slo=None, digest="d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (ended.value.exit_code, capsys.readouterr().err) == (1, f"forebay: --report {path}: File too large\n")
    assert (path.read_text(), sorted(tmp_path.iterdir())) == (before, sorted([mine, path, pipe]))


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"), (0.0042, "4.2 µs"), (0.9996, "1 ms"), (12.34, "12.3 ms"), (999.4, "999 ms"), (999.6, "1 s"),
        (61_250, "61.2 s"), (599_999, "600 s"), (3_600_000, "60 min"), (86_400_000, "24.0 h"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(ms: float, text: str) -> None:
    assert duration(ms) == text


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
    """Open the report once, because drawing takes seconds. The tests run in this order: charts, limits."""
    with opened(simulated[0], browser) as found:
        drawn(found)
        yield found


def drawn(found: Opened) -> None:
    """Wait until every chart is drawn, and check that there was no error and no network request."""
    found.page.wait_for_selector("html[data-drawn=all]")
    assert found.errors == []
    assert found.requests == []


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
    assert page.evaluate("charts.ttft.mark") == limits["ttft"][0]
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
        expect(found.page.locator(".chip").first).to_contain_text("</script><img src=x")
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
