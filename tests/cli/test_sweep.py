"""`forebay sweep`, `forebay workload` and `forebay fit`."""

import asyncio
import json
import os
import signal
import subprocess
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.simulate.simulations import Work, run_all
from forebay.cli.simulate.sweep import OF_FLEET, OF_SHAPE
from forebay.engine_model.timing import LinearTiming
from forebay.events.control import RouterConfig
from forebay.simulate.pareto import costs
from forebay.simulate.profiles.profile import EngineSizes, load_profile
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import ROUTER_SETTINGS
from forebay.simulate.workload import WorkloadOptions
from forebay.simulate.workloads.rows import MooncakeRow
from tests.cli.in_process import Finished, error_of, forebay, json_of
from tests.cli.up import FOREBAY
from tests.replay.recorded import write as write_log
from tests.replay.simulated import BLOCK, played
from tests.simulate.scene import conversations, write

pytestmark = pytest.mark.timeout(120)
SIX = ("--set", "workers=1,2", "--set", "temperature=0,0.5", "--policy", "kv", "--policy", "round-robin")
# In a process of a sweep this policy reports its start and never returns. Elsewhere it decides normally.
STUCK = """
import multiprocessing, signal
class Stuck:
    def decide(self, world, request):
        if multiprocessing.parent_process() is not None:
            print("deciding", flush=True)
            signal.pause()
        return 0
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=4, turns=3))


def sweep(trace: Path, *arguments: str) -> Finished:
    return forebay("sweep", trace, *arguments)


def runs_of(trace: Path, *arguments: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json_of("sweep", trace, *arguments)["runs"]
    return runs


def started(trace: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a sweep without the fork server, because signals to its process group are the subject."""
    command = [FOREBAY, "sweep", str(trace), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=trace.parent, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_every_distinct_combination_is_run(trace: Path) -> None:
    runs = runs_of(trace, *SIX)
    assert sorted(run["name"] for run in runs) == [
        "kv, workers=1, temperature=0",
        "kv, workers=1, temperature=0.5",
        "kv, workers=2, temperature=0",
        "kv, workers=2, temperature=0.5",
        "round-robin, workers=1",
        "round-robin, workers=2",
    ]
    assert all(run["requests"] == 12 for run in runs)
    drawn, sure = (
        next(run for run in runs if run["name"] == f"kv, workers=2, temperature={of}") for of in ("0.5", "0")
    )
    assert drawn["digest"] != sure["digest"]


def test_run_equals_simulate_with_the_same_settings(trace: Path) -> None:
    (run,) = runs_of(trace, "--policy", "kv", "--set", "temperature=0.5", "--set", "kv_blocks=512", "--set", "speed=3")
    alone = forebay(
        "simulate", str(trace), "--json", "--policy", "kv:temperature=0.5", "--kv-blocks", "512", "--speed", "3"
    )
    figures = json.loads(alone.stdout)["policies"]["kv:temperature=0.5"]
    assert {name: run[name] for name in figures if name != "workers"} == {
        name: value for name, value in figures.items() if name != "workers"
    }


def test_runs_are_sorted_by_cost_and_optimal_ones_are_marked(trace: Path) -> None:
    runs = runs_of(trace, *SIX)
    points = [costs(run, ("failed", "gpu_hours", "ttft_ms.p90", "itl_ms.p90")) for run in runs]
    assert points == sorted(points)
    for run, point in zip(runs, points, strict=True):
        worse = [other for other in points if other != point and all(o <= p for o, p in zip(other, point, strict=True))]
        assert run["pareto"] is not bool(worse)
    assert any(run["pareto"] for run in runs)
    assert not all(run["pareto"] for run in runs)


def test_cheapest_settings_attain_the_slo_with_every_seed(trace: Path) -> None:
    axes = ("--set", "workers=1,2", "--set", "seed=1,2,3", "--policy", "random", "--slo", "ttft=80")
    runs = runs_of(trace, *axes)
    attained = {n: [one["attained"] for one in runs if one["set"]["workers"] == n] for n in ("1", "2")}
    worst = {n: min(of) for n, of in attained.items()}
    assert worst["1"] < worst["2"] < max(attained["2"]), attained
    held = sweep(trace, *axes, "--attain", repr(worst["2"]))
    assert f"attainment of at least {worst['2']:.2%}, with each of 3 seeds: random, workers=2\n" in held.stdout
    assert held.returncode == 0
    broken = sweep(trace, *axes, "--attain", repr(max(attained["2"])))
    assert " with every seed\n" in broken.stdout
    assert broken.returncode == 1


def test_missed_attainment_exits_1(trace: Path) -> None:
    run = sweep(trace, *SIX, "--slo", "ttft=0.001", "--attain", "0.5")
    assert run.returncode == 1
    assert "no run has an SLO attainment of at least 50.00%" in run.stdout


def test_failed_requests_exit_1(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [MooncakeRow(0, 64, 1, [1]), MooncakeRow(1, 512, 1, [2])])
    run = sweep(trace, "--set", "kv_blocks=4,64", "--json", "--policy", "kv")
    assert run.returncode == 1
    assert [(one["set"]["kv_blocks"], one["failed"]) for one in json.loads(run.stdout)["runs"]] == [("64", 0), ("4", 1)]


def test_capacity_is_the_highest_rate_that_attains_the_slo(trace: Path) -> None:
    promise = ["--policy", "kv", "--slo", "ttft=100"]
    (run,) = runs_of(trace, *promise, "--set", "workers=1", "--find-capacity", "--attain", "0.75")
    found = run["capacity"]
    assert found["answer"] == "found"
    speeds = sorted((step["speed"], step["holds"]) for step in found["steps"])
    broken = min(speed for speed, holds in speeds if not holds)
    assert found["step"]["speed"] < broken <= found["step"]["speed"] * 1.01
    for speed, holds in ((found["step"]["speed"], True), (broken, False)):
        (at,) = runs_of(trace, *promise, "--set", "workers=1", "--set", f"speed={speed!r}")
        assert (at["attained"] >= 0.75) is holds
        if holds:
            assert {name: run[name] for name in at if name not in ("name", "set", "speed", "pareto")} == {
                name: at[name] for name in at if name not in ("name", "set", "speed", "pareto")
            }
    arrived_ms = [row.timestamp for row in conversations(sessions=4, turns=3)]
    rate = (len(arrived_ms) - 1) / (max(arrived_ms) / 1e3) * found["step"]["speed"]
    assert run["capacity_per_s"] == pytest.approx(rate, rel=1e-4)  # arrivals are rounded to microseconds


def test_note_on_dependent_requests_in_a_capacity_search() -> None:
    workload = "synthetic:arrivals=poisson,rate=4,requests=30,turns=3"
    run = forebay("sweep", workload, "--policy", "kv", "--find-capacity", "--slo", "ttft=40")
    assert run.returncode == 0
    assert "20 requests depend on responses" in run.stderr


def test_capacity_search_reports_unlimited_and_zero_capacity(trace: Path) -> None:
    run = sweep(trace, "--policy", "kv", "--find-capacity", "--slo", "ttft=1e9")
    assert run.returncode == 0
    assert ">= " in run.stdout
    assert "kv: no limit found: the SLO is met with the workload at " in run.stdout
    run = sweep(trace, "--policy", "kv", "--find-capacity", "--slo", "ttft=0.001")
    assert run.returncode == 1
    assert " none " in run.stdout
    assert run.stdout.count("(missed)") == 1
    assert "kv: no rate meets the SLO: at nearly zero load, " in run.stdout
    assert "requests that meet each limit: ttft 0.00%; 0 failed" in run.stdout


def test_a_killed_run_keeps_the_results_of_others() -> None:
    # The runs fail in the function that receives their progress.
    fails, works = Work(1, methodcaller("fail")), Work(1, callable)
    found = run_all([fails, works])
    assert isinstance(found[0], AttributeError)
    assert found[1] is True
    (alone,) = run_all([fails])
    assert isinstance(alone, AttributeError)


def test_a_killed_run_is_named_and_exits_1(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise AssertionError("two requests of one id")

    monkeypatch.setattr("forebay.cli.simulate.sweep.simulate_metrics", dies)
    run = sweep(trace, "--policy", "kv", "--set", "workers=3", "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout)["runs"] == []
    assert json.loads(run.stdout)["dead"][0]["set"] == {"workers": "3"}
    assert "forebay: kv, workers=3: two requests of one id\n" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_a_sweep_ends_its_processes(trace: Path, number: signal.Signals) -> None:
    (trace.parent / "mine.py").write_text(STUCK)
    run = started(trace, "--policy", "mine.Stuck", "--set", "temperature=1,2,3")
    assert run.stderr is not None
    assert "deciding" in run.stderr.readline()
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # like a terminal
    else:
        run.send_signal(number)
    stdout, stderr = run.communicate(timeout=60)  # until stderr, which its processes share, is closed
    assert run.returncode != 0
    assert not stdout
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--set", "workers"], "--set workers: expected NAME=VALUE,VALUE"),
        (["--set", "workers=1,1"], "duplicate value"),
        (["--set", "workers=1", "--set", "workers=2"], "workers is varied twice"),
        (["--set", "worker=1"], "unknown setting 'worker'; did you mean workers"),
        (["--set", "workers=0"], "--set workers=0: expected a number greater than or equal to 1, got 0"),
        (["--set", "temperature=1", "--policy", "kv:temperature=2"], "temperature is in both --policy"),
        (["--set", "workers:kv_blocks=1:2,3"], "2 names need 2 values per point"),
        (["--set", "kv_blocks=64,1"], "kv, kv_blocks=1: no request of trace.jsonl fits a worker"),
        (["--set", f"seed={','.join(map(str, range(501)))}"], "the sweep would have 1002 runs; the maximum is 1000"),
        (["--find-capacity"], "--find-capacity requires --slo"),
        (["--find-capacity", "--slo", "ttft=1", "--duration-s", "0.1"], "arrive at one time"),
    ],
)
def test_invalid_sweeps_give_one_error_line_before_any_run(trace: Path, arguments: list[str], reason: str) -> None:
    run = sweep(trace, *arguments)
    assert run.returncode == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1


def test_setting_names_are_unambiguous() -> None:
    assert not set(ROUTER_SETTINGS) & {*OF_FLEET, *OF_SHAPE}
    assert not set(OF_FLEET) & set(OF_SHAPE)


ROW: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}


def workload(*arguments: object) -> Finished:
    return forebay("workload", *map(str, arguments))


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    rows = [ROW, {**ROW, "timestamp": 1_500, "hash_ids": [1, 3]}, {**ROW, "timestamp": 4_000, "output_length": 9}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_statistics_of_a_trace(rows_file: Path) -> None:
    found = json.loads(workload("show", rows_file, "--json").stdout)
    counted = {name: found[name] for name in ("requests", "own_times", "duration_s", "rate_per_s", "skipped")}
    assert counted == {"requests": 3, "own_times": 3, "duration_s": 4.0, "rate_per_s": 0.75, "skipped": 0}
    assert found["prompt_tokens"] == {"mean": 1000, "p50": 1000, "p90": 1000, "p99": 1000, "max": 1000}
    # The second prompt shares one of two blocks. The third shares both, the last of which is partial.
    assert found["ideal_reuse"]["tokens"] == pytest.approx(1512 / 3000)
    assert found["ideal_reuse"]["distinct_blocks"] == 3
    table = workload("show", rows_file)
    assert "0.5040 of tokens" in table.stdout
    assert "prompt_tokens" in table.stdout


def test_converted_workload_has_the_options_applied(rows_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.jsonl"
    run = workload("convert", rows_file, "-o", out, "--speed", "2", "--requests", "2")
    assert run.returncode == 0, run.stderr
    assert f"{out}: 2 requests" in run.stderr
    header = json.loads(out.read_text().splitlines()[0])
    assert header == {
        "format": "forebay.workload",
        "version": 1,
        "block_tokens": 512,
        "name": "",
        "source": "trace.jsonl speed=2.0 requests_max=2",
    }
    options = WorkloadOptions(speed=2.0, requests_max=2)
    wanted = list(open_workload(str(rows_file), options).turns())
    converted = open_workload(str(out), WorkloadOptions())
    assert list(converted.turns()) == wanted
    assert converted.name == "ours.jsonl", "tables call it by its file"
    assert not list(tmp_path.glob("*.part"))


def test_invalid_rows_are_named_and_skipped_only_if_requested(rows_file: Path, tmp_path: Path) -> None:
    rows_file.write_text(rows_file.read_text() + "\nnonsense\n")
    out = tmp_path / "ours.jsonl"
    run = workload("convert", rows_file, "-o", out)
    assert (run.returncode, out.exists()) == (2, False)
    assert "trace.jsonl, line 4: JSON is malformed" in run.stderr
    run = workload("convert", rows_file, "-o", out, "--skip-bad-rows")
    assert (run.returncode, out.exists()) == (0, True)
    assert "skipped: " in run.stderr
    assert json.loads(workload("show", rows_file, "--skip-bad-rows", "--json").stdout)["skipped"] == 1


@pytest.mark.parametrize("command", ["simulate", "sweep", "trace", "workload show", "workload convert -o out.jsonl"])
def test_the_error_of_an_invalid_row_names_the_option_that_skips_it(rows_file: Path, command: str) -> None:
    rows_file.write_text(rows_file.read_text() + "nonsense\n")
    run = forebay(*command.split(), str(rows_file))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("; correct the row, or skip such rows with --skip-bad-rows\n")
    helps = [forebay(*command.split()[:2], option).stdout for option in ("--help", "--help-all")]
    assert "--skip-bad-rows" in "".join(helps)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "none.jsonl"], "cannot be read"),
        (["show", "synthetic:rate=x"], "rate"),
        (["show", "synthetic:", "--columns", "time=x"], "a generated workload has no columns"),
        (["show", "none.csv", "--columns", "when=x"], "unknown field 'when'"),
        (["convert", "synthetic:requests=3", "-o", "."], "is not a regular file"),
        (["convert", "synthetic:requests=3", "-o", "nowhere/at/all"], "cannot be written (No such file or directory)"),
    ],
)
def test_errors_take_one_line(arguments: list[str], reason: str) -> None:
    run = workload(*arguments)
    assert run.returncode == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1


TRUTH = LinearTiming(step=1500.0, prefill_token=8.0, decode_step=2000.0, decode_sequence=300.0, context_token=0.1)


def recording(path: Path, rows: list[MooncakeRow]) -> Path:
    asyncio.run(write_log(played(rows, RouterConfig(), 2, timing=TRUTH).log, path))
    return path


def test_a_recording_becomes_a_profile(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(12, 12, every_ms=90))
    out = tmp_path / "engine.toml"
    result = forebay("fit", log, "-o", out)
    assert result.returncode == 0, result.stderr
    profile = load_profile(str(out))
    assert isinstance(profile.timing, LinearTiming)
    assert profile.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.1)
    assert profile.timing.step + profile.timing.decode_step == pytest.approx(3500, rel=0.1)
    assert profile.sizes == EngineSizes(
        block_size=BLOCK, kv_blocks=16_384, max_num_seqs=256, max_num_batched_tokens=8192
    )
    assert (profile.name, profile.source) == ("mock, fitted", "fitted to run.db")
    for text in ("TTFT of requests outside", "ITL of requests outside", "on 2 ranks of mock", "(prefill_token)"):
        assert text in result.stderr
        assert text in out.read_text()


def test_too_few_requests_are_rejected(tmp_path: Path) -> None:
    assert "only 6 requests can be compared; at least 20 are needed" in error_of(
        "fit", recording(tmp_path / "run.db", conversations(2, 3))
    )


def test_the_output_cannot_overwrite_the_recording(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(5, 8))
    before = log.read_bytes()
    (tmp_path / "same.db").symlink_to(log)
    for out in (log, tmp_path / "same.db"):
        result = forebay("fit", log, "-o", out)
        assert (result.returncode, log.read_bytes() == before) == (2, True)
        assert f"{out}: --out names the recording itself" in result.stderr
