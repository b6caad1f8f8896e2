"""`forebay simulate --planner`: the planner's sizes in the output and in the report, and files that are rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.simulate.planned import size_changes
from tests.cli.in_process import forebay
from tests.cli.report_page import Page
from tests.core.scaling.scene import decided

pytestmark = pytest.mark.timeout(120)

WORKLOAD = "synthetic:requests=1500,rate=12,prompt=900,output=40"
COMMAND = ("simulate", WORKLOAD, "--workers", "1", "--policy", "kv", "--planner")
FILE = """
interval_s = 20
gpu_budget = 0
{more}

[[pools]]
group = "simulated"
pool = "{pool}"
max_size = 6
startup_s = 25
profile = "profile.json"
"""
PROFILE = {
    "prefill": [{"isl": 900, "ttft_ms": 100, "tokens_per_s": 6000}],
    "decode": [{"context": 920, "concurrency": 8, "itl_ms": 20, "tokens_per_s": 400}],
}


@pytest.fixture
def planner(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    return written(tmp_path / "planner.toml")


def written(path: Path, pool: str = "default", more: str = "") -> Path:
    path.write_text(FILE.format(pool=pool, more=more))
    return path


def simulated(planner: Path, *options: str) -> dict[str, Any]:
    run = forebay(*COMMAND, str(planner), "--json", *options)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.parametrize("predictor", ["constant", pytest.param("kalman", marks=pytest.mark.slow)])
def test_the_output_has_sizes_gpu_hours_and_attainment_of_each_interval(planner: Path, predictor: str) -> None:
    written(planner, more=f'predictor = "{predictor}"')
    result = simulated(planner)
    one = result["policies"]["kv"]
    intervals = one["planner"]["intervals"]
    workers = [interval["pools"]["default"]["workers"] for interval in intervals]
    assert workers[0] > 1
    assert intervals[0]["pools"]["default"]["ready"] == 1
    hours = [interval["gpu_hours"] for interval in intervals]
    assert hours == sorted(hours)
    assert hours[-1] < one["gpu_hours"]
    assert sum(interval["requests"] for interval in intervals) <= 1500
    assert all(0 <= interval["attained"] <= 1 for interval in intervals)
    assert one["planner"]["changes"] > 0
    assert "attained" in one, "without --slo, the targets of the planner count"
    assert result["settings"]["planner"]["predictor"] == predictor
    assert simulated(planner) == result


@pytest.mark.slow
def test_method_simulate_simulates_each_forecast(planner: Path) -> None:
    text = planner.read_text().replace("interval_s = 20", 'interval_s = 20\nmethod = "simulate"\nttft_ms = 2000')
    planner.write_text(text.replace('profile = "profile.json"', 'engine_profile = "mocker"'))
    result = simulated(planner)
    one = result["policies"]["kv"]
    reasons = {pool["reason"] for interval in one["planner"]["intervals"] for pool in interval["pools"].values()}
    assert reasons <= {"scale_up", "scale_down", "hold", "limited"}
    assert result["settings"]["planner"]["method"] == "simulate"


def test_the_report_shows_the_planner(planner: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    run = forebay(*COMMAND, str(planner), "--report", str(report))
    assert run.returncode == 0, run.stderr
    assert "GPU hours" in run.stdout
    page = Page(report.read_text())
    assert "workers by the planner" in str(page.charts)
    assert "SLO attainment, by arrival" in str(page.charts)


@pytest.mark.parametrize(
    ("pool", "more", "message"),
    [("other", "", "other"), ("default", 'predictor = "nobody"', "predictor"), ("default", "ttft = 3", "ttft_ms")],
)
def test_a_planner_that_cannot_be_used_ends_the_command(planner: Path, pool: str, more: str, message: str) -> None:
    written(planner, pool, more)
    run = forebay("simulate", WORKLOAD, "--planner", str(planner))
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert str(planner) in run.stderr
    assert message in run.stderr


@pytest.mark.parametrize(
    ("sizes", "changes", "reversals"),
    [
        ([], 0, 0),
        ([[(1, 3), (3, 5), (5, 5)]], 1, 0),  # decisions of one interval count as one change
        ([[(1, 3)], [(3, 3)], [(3, 4)], [(4, 2)], [(2, 2)], [(2, 1)], [(1, 6)]], 5, 2),
    ],
)
def test_size_changes_and_their_reversals(sizes: list[list[tuple[int, int]]], changes: int, reversals: int) -> None:
    assert size_changes([[decided(0, 0, *one) for one in interval] for interval in sizes]) == (changes, reversals)
