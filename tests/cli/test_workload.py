"""`forebay workload`: statistics of workloads and conversion to one file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forebay.cli.app import app
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions

ROW: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}


def workload(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["workload", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [ROW, {**ROW, "timestamp": 1_500, "hash_ids": [1, 3]}, {**ROW, "timestamp": 4_000, "output_length": 9}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_statistics_of_a_trace(trace: Path) -> None:
    found = json.loads(workload("show", trace, "--json").stdout)
    counted = {name: found[name] for name in ("requests", "sessions", "own_times", "duration_s", "skipped")}
    assert counted == {"requests": 3, "sessions": 3, "own_times": 3, "duration_s": 4.0, "skipped": 0}
    assert (found["rate_per_s"], found["most_in_a_second"]) == (0.75, 1)
    assert found["dispersion"] == pytest.approx((0.6 - 0.36) / 0.6)
    assert found["prompt_tokens"] == {"mean": 1000, "p50": 1000, "p90": 1000, "p99": 1000, "max": 1000}
    # The second prompt shares one of two blocks. The third shares both, the last of which is partial.
    assert found["ideal_reuse"]["tokens"] == pytest.approx(1512 / 3000)
    assert found["ideal_reuse"]["blocks"] == pytest.approx(3 / 6)
    assert found["ideal_reuse"]["distinct_blocks"] == 3
    table = workload("show", trace)
    assert "0.5040 of tokens, 0.5000 of blocks" in table.stdout
    assert "prompt_tokens" in table.stdout


def test_session_statistics_assume_instant_responses() -> None:
    found = json.loads(workload("show", "synthetic:turns=2,think_s=5,requests=4,rate=1000", "--json").stdout)
    assert (found["sessions"], found["own_times"], found["delay_s"]["mean"]) == (2, 2, 5)
    assert found["duration_s"] == pytest.approx(5, abs=0.1)


def test_converted_workload_has_the_options_applied(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.jsonl"
    run = workload("convert", trace, "-o", out, "--speed", "2", "--prefix-multiplier", "3", "--requests", "2")
    assert run.exit_code == 0, run.stderr
    assert f"{out}: 2 requests" in run.stderr
    header = json.loads(out.read_text().splitlines()[0])
    assert header == {
        "format": "forebay.workload",
        "version": 1,
        "block_tokens": 512,
        "name": "",
        "source": "trace.jsonl speed=2.0 requests_max=2 prefix_multiplier=3.0",
    }
    options = WorkloadOptions(speed=2.0, prefix_multiplier=3.0, requests_max=2)
    wanted = list(open_workload(str(trace), options).turns())
    converted = open_workload(str(out), WorkloadOptions())
    assert list(converted.turns()) == wanted
    assert converted.name == "ours.jsonl", "tables call it by its file"
    assert not list(tmp_path.glob("*.part"))


def test_invalid_rows_are_named_and_skipped_only_if_requested(trace: Path, tmp_path: Path) -> None:
    trace.write_text(trace.read_text() + "\nnonsense\n")
    out = tmp_path / "ours.jsonl"
    run = workload("convert", trace, "-o", out)
    assert (run.exit_code, out.exists()) == (2, False)
    assert "trace.jsonl, line 4: JSON is malformed" in run.stderr
    assert run.stderr.endswith("; correct the row, or skip such rows with --skip-bad-rows\n")
    run = workload("convert", trace, "-o", out, "--skip-bad-rows")
    assert (run.exit_code, out.exists()) == (0, True)
    assert "skipped: " in run.stderr
    assert json.loads(workload("show", trace, "--skip-bad-rows", "--json").stdout)["skipped"] == 1


@pytest.mark.parametrize("command", ["simulate", "sweep", "trace", "workload show", "workload convert -o out.jsonl"])
def test_the_error_of_an_invalid_row_names_the_option_that_skips_it(trace: Path, command: str) -> None:
    trace.write_text(trace.read_text() + "nonsense\n")
    run = CliRunner().invoke(app, [*command.split(), str(trace)])
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.endswith("; correct the row, or skip such rows with --skip-bad-rows\n")
    helps = [CliRunner().invoke(app, [*command.split()[:2], option]).stdout for option in ("--help", "--help-all")]
    assert "--skip-bad-rows" in "".join(helps)


def test_devices_are_not_overwritten(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = workload("convert", "synthetic:requests=3", "-o", pipe)
    assert (run.exit_code, pipe.is_fifo()) == (2, True)
    assert f"{pipe}: is not a regular file" in run.stderr


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
    assert run.exit_code == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1
