"""The page of `forebay simulate --report`: content, size limits and escaping."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.common.terminal import printable
from forebay.cli.simulate.report import words
from forebay.cli.simulate.report.charts import COLUMNS, ROWS
from forebay.cli.simulate.report.measures import limits, measured
from forebay.cli.simulate.report.page import RUNS_MAX, page, require_report, write_report
from forebay.cli.simulate.report.rows import ROWS_MAX
from forebay.cli.simulate.report.words import duration
from forebay.cli.simulate.simulations import SimulationRun
from forebay.events.control import RouterConfig
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome, summary
from forebay.simulate.settings import engine_config, one_pool
from forebay.simulate.slo import Slo, goodput
from tests.cli.outcomes import run
from tests.cli.report_page import HOSTILE, Page
from tests.simulate.traces import conversations, write


def made(*runs: SimulationRun, slo: Slo | None = None, **more: Any) -> Page:
    return Page(page(runs, workload="a trace", slo=slo, digest="the digest", **more))


def headline(*runs: SimulationRun, slo: Slo | None = None) -> str:
    return words.headline(measured(runs), slo)


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
    assert set(found.charts) == {"ttft", "itl", "ttft-slo", "itl-slo", "time", "load"} <= set(found.attributes["id"])
    assert set(found.charts) == set(found.attributes["data-png"])
    for text in (
        "2 rows left out",
        "the digest",
        "All percentiles",
        "mean TTFT",
        "a trace: 400 requests",
    ):
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


def test_headline_names_the_best_and_the_second_policy() -> None:
    text = headline(run("slow", slower=3.0), run("fast"), run("next", slower=1.5))
    assert text.startswith("fast has the lowest mean TTFT:")
    assert text.endswith("33.3% less than next.")


def test_headline_of_equal_policies_names_no_winner() -> None:
    assert "one and two are equal: mean TTFT" in headline(run("one"), run("two", slower=1.005))
    assert headline(run("one"), run("two", slower=1.005), run("far", slower=2.0)).startswith(
        "one and two are equal and have the lowest mean TTFT"
    )


def test_headline_names_the_policy_with_the_lowest_p99() -> None:
    even, tail = [(1_000, 2_000, 2)] * 99, (9_000, 9_500, 2)
    text = headline(timed("even", *[(1_200, 2_000, 2)] * 100), timed("tailed", *even[:97], tail, tail, tail))
    assert text.startswith("even has the lowest mean TTFT") or "the lowest p99 is that of even" in text
    assert "the lowest p99 is that of even: 1.2 ms against 9 ms" in headline(
        timed("even", *[(1_200, 2_000, 2)] * 200), timed("tailed", *[(1_000, 2_000, 2)] * 197, tail, tail, tail)
    )


def test_headline_compares_slo_attainment() -> None:
    text = headline(run("late", slower=30.0), run("kept"), slo=Slo(ttft_ms=500, itl_ms=13))
    assert text.startswith("kept meets TTFT ≤ 500 ms, ITL ≤ 13 ms for ")
    assert ", late for " in text
    assert "No run meets" not in text


def test_equal_attainment_uses_the_tolerance_of_the_cards() -> None:
    """The tolerance is relative: 106 and 115 of 1,000 differ, 991 and 1,000 are equal."""

    def attaining(name: str, count: int) -> SimulationRun:
        return timed(name, *[(1_000, 2_000, 2)] * count, *[(9_000, 10_000, 2)] * (1_000 - count))

    slo = Slo(ttft_ms=5, e2e_ms=15)
    few = made(attaining("less", 106), attaining("more", 115), slo=slo)
    assert "".join(few.texts["h1"]) == (
        "more meets TTFT ≤ 5 ms, E2E ≤ 15 ms for 11.5% of all requests, less for 10.6%. "
        "No run meets all objectives for most requests; TTFT is missed most often, met for 11.5% under more."
    )
    assert few.attributes["class"].count("best") > 0
    text = headline(attaining("less", 106), attaining("more", 115), slo=Slo(ttft_ms=5))
    assert text.endswith(", less for 10.6%. No run meets it for most requests.")
    assert headline(attaining("one", 991), attaining("two", 1_000), slo=slo).endswith(
        "for 99.1% to 100.0% of all requests; they differ by less than 1%."
    )
    assert headline(attaining("one", 700), attaining("two", 700), slo=slo).endswith(
        "for 70.0% of all requests; they differ by less than 1%."
    )


def test_failed_requests_are_reported_first() -> None:
    nobody = run("none", requests=9, failed=range(9))
    assert headline(nobody) == "No request completed."
    assert headline(run("nobody", requests=0)) == "The workload contains no requests."
    assert headline(nobody, run("some", requests=9)).startswith(
        "No request completed under none. The other policies: some"
    )
    text = made(run("kv", failed=[4, 7])).text
    assert "Failed requests: 2 of 400 under kv." in text
    assert "2 of 400 requests failed; the first reason: too large for any worker" in text


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
    assert len(found.data["explorer"]["rows"]) == max(len(one.outcome.requests) for one in runs)
    assert ("ttft" in found.charts) is any(one.summary["requests"] for one in runs)


def test_cards_show_metrics_and_mark_the_best() -> None:
    kv, slow = run("kv", reuse=0.4), run("slow", slower=2.0, reuse=0.1)
    found = made(kv, slow)
    values = found.texts["dd"]
    assert f"{kv.summary['prefix_reuse']:.1%}" in values
    assert duration(slow.summary["ttft_ms"]["p99"]) in values
    assert duration(kv.summary["ttft_ms"]["mean"]) in found.texts["b"]
    best = [name for name in found.attributes["class"] if name == "best"]
    assert 0 < len(best) < len(values) / 2
    alone = made(kv)
    assert "best" not in alone.attributes["class"]


def test_runs_with_equal_names_get_unique_labels() -> None:
    found = made(run("kv", workers=2), run("kv", workers=4), run("kv", workers=4))
    assert found.data["labels"] == ["kv, 2 workers", "kv, 4 workers", "kv, 4 workers (2)"]
    assert "GPU hours of all workers, and TTFT." in found.text  # their costs differ
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
    found = limits(measured([one]), slo)
    (kept,) = found.kept
    ttft_at, itl_at = found.ttft_ms.index(ttft_ms), found.itl_ms.index(itl_ms)
    within = sum(count for (ttft, itl), count in kept.items() if ttft <= ttft_at and itl <= itl_at)
    assert within / len(given_times) == pytest.approx(goodput(one.outcome, slo)["attained"])
    assert all(ttft < len(found.ttft_ms) and itl < len(found.itl_ms) for ttft, itl in kept)
    every = goodput(one.outcome, Slo(ttft_ms=1e12, e2e_ms=e2e_ms))["attained"] * len(given_times)
    assert sum(kept.values()) == pytest.approx(every)


def test_page_starts_at_the_slo_limits() -> None:
    found = made(run("kv"), slo=Slo(ttft_ms=333, itl_ms=7.5, e2e_ms=900)).data["limits"]
    assert (found["ttft"][found["ttft_at"]], found["itl"][found["itl_at"]]) == (333, 7.5)
    assert found["e2e"] == "900 ms"


def test_attainment_curves_count_requests_without_a_response() -> None:
    found = made(timed("half", (1_000, 3_000, 3), (0, 0, 3), (2_000, 2_000, 1), (0, 0, 1)))
    for name in ("ttft-slo", "itl-slo"):
        (curve,) = found.charts[name]["panels"][0]["curves"]
        assert max(curve["y"]) == 0.5
    assert found.charts["itl-slo"]["panels"][0]["curves"][0]["y"][0] == 0.25  # a single token has no ITL


def test_requests_are_matched_across_policies_with_different_arrivals() -> None:
    first = timed("first", (1_000, 2_000, 5), (2_000, 3_000, 7))
    other = timed("other", (3_000, 4_000, 7), (4_000, 6_000, 5))
    numbers = other.outcome.requests.column("number")
    numbers[0], numbers[1] = 1, 0
    explorer = made(first, other).data["explorer"]
    assert explorer["rows"] == [0, 1]
    assert explorer["output"] == [5, 7]
    assert [one["first"] for one in explorer["runs"]] == [[1_000, 2_000], [4_000, 3_000]]


def test_requests_missing_under_a_policy_are_left_out() -> None:
    explorer = made(timed("one", (1_000, 2_000, 5)), timed("two", (1_000, 2_000, 5), (2_000, 3_000, 6))).data[
        "explorer"
    ]
    assert explorer["rows"] == [0, 1]
    assert explorer["runs"][0]["attempts"] == [1, -1]
    assert explorer["runs"][0]["first"] == [1_000, -1]


def test_decisions_are_shown_with_their_runner_up() -> None:
    kv = run("kv", requests=20, workers=3, held=True)
    (found,) = made(kv).data["explorer"]["runs"]
    routed = kv.outcome.routed[5]
    assert routed.runner_up is not None
    assert found["workers"][found["other"][5]] == routed.runner_up.worker_id
    assert found["my_cost"][5] == pytest.approx(routed.terms.cost, abs=0.01)
    assert found["other_cost"][5] == pytest.approx(routed.runner_up.terms.cost, abs=0.01)
    assert found["modes"][found["mode"][5]] == "kv"
    assert found["waited_us"][5] == 20_000


@pytest.mark.slow
def test_the_slowest_and_failed_of_too_many_requests_are_kept() -> None:
    failed = [7, 23_456]
    long = run("long", requests=ROWS_MAX + 5_000, failed=failed)
    found = made(long)
    explorer = found.data["explorer"]
    assert len(explorer["rows"]) <= ROWS_MAX
    assert len(explorer["rows"]) > ROWS_MAX * 0.9
    assert set(failed) < set(explorer["rows"])
    requests = long.outcome.requests
    slowest = sorted((one for one in requests if not one.failure), key=lambda one: one.arrived_us - one.first_us)[
        :1_000
    ]
    assert {one.number for one in slowest} < set(explorer["rows"])
    assert f"{len(explorer['rows']):,} of {ROWS_MAX + 5_000:,} requests" in found.text
    assert explorer["runs"][0]["mode"][-1] == -1  # decisions are kept for the first requests only


def test_many_workers_and_bins_are_merged() -> None:
    found = made(run("wide", requests=2_000, workers=150))
    (heat,) = found.data["heat"]
    for values in heat.values():
        assert len(values) <= ROWS
        assert all(len(line) <= COLUMNS for line in values)
    (panel,) = found.charts["load"]["panels"]
    assert panel["heat"]["values"] == heat["computed"]
    assert panel["heat"]["rows"][0] == "mock-0 … mock-2"


def test_heat_map_values_are_per_second() -> None:
    one = run("one", requests=50, workers=1)
    (heat,) = made(one).data["heat"]
    computed = sum(served.prompt_tokens - served.cached_tokens for served in one.outcome.requests)
    assert sum(heat["computed"][0]) == computed  # bins of one second


@pytest.mark.slow
def test_the_report_of_five_policies_and_one_hour_is_small() -> None:
    runs = [run(f"policy {number}", requests=12_031, workers=8, slower=1 + number / 9) for number in range(5)]
    size = len(page(runs, workload="hour", slo=None, digest=""))
    assert size < 9_000_000, size


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
        with pytest.raises(typer.Exit):
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
        with pytest.raises(typer.Exit) as ended:
            write_report(path, [run("random", requests=5)], workload="w", slo=None, digest="d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (ended.value.exit_code, capsys.readouterr().err) == (1, f"forebay: --report {path}: File too large\n")
    assert (path.read_text(), sorted(tmp_path.iterdir())) == (before, sorted([mine, path, pipe]))


def test_an_unwritable_report_is_rejected_before_the_simulation(tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    trace = write(tmp_path / "trace.jsonl", conversations(sessions=2, turns=1))
    done = CliRunner().invoke(app, ["simulate", str(trace), "--report", str(mine), "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not a report of this command" in done.stderr
    both = CliRunner().invoke(app, ["simulate", "--against", "some.rec", "--report", str(tmp_path / "page.html")])
    assert both.exit_code == 2
    assert "--report" in both.stderr


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"), (0.0042, "4.2 µs"), (0.9996, "1 ms"), (12.34, "12.3 ms"), (999.4, "999 ms"), (999.6, "1 s"),
        (61_250, "61.2 s"), (599_999, "600 s"), (3_600_000, "60 min"), (86_400_000, "24.0 h"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(ms: float, text: str) -> None:
    assert duration(ms) == text
