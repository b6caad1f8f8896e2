"""`forebay simulate` and `forebay sweep` with disaggregation."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.simulate.options import FleetOptions, ShapeOptions
from forebay.cli.simulate.sweep_axes import axes_of, combinations
from tests.cli.report_page import Page
from tests.replay.disagg_history import COUNT, history
from tests.simulate.traces import conversations, write

APART = ("--prefill-workers", "2", "--decode-workers", "1")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=5, turns=4))


def simulated(trace: Path, *arguments: str) -> dict[str, Any]:
    run = CliRunner().invoke(app, ["simulate", str(trace), "--json", "--policy", "kv", *arguments])
    assert run.exit_code == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_disaggregated_pools_complete_all_requests(trace: Path) -> None:
    result = simulated(trace, *APART, "--kv-blocks", "4096", "--kv-bytes-per-token", "1000")
    pools = result["settings"]["pools"]
    assert [(pool["role"], pool["model"], pool["groups"][0]["count"]) for pool in pools] == [
        ("prefill", "simulated", 2),
        ("decode", "simulated", 1),
    ]
    assert {pool["groups"][0]["engine"]["kv_blocks_total"] for pool in pools} == {4096}
    figures = result["policies"]["kv"]
    assert (figures["requests"], figures["failed"], figures["prefilled_remotely"]) == (20, 0, 20)
    assert [worker["requests"] for worker in figures["workers"]] == [0, 0, 20]
    assert [worker["computed_tokens"] > 0 for worker in figures["workers"]] == [True, True, False]
    assert 0 < figures["transferred_bytes"] <= figures["prompt_tokens"] * 1_000 + 20 * 64_000
    together = simulated(trace, "--workers", "3")["policies"]["kv"]
    assert "prefilled_remotely" not in together


def test_transfer_time_matches_the_settings(trace: Path) -> None:
    slow = simulated(trace, *APART, "--kv-transfer-bandwidth", "1", "--kv-transfer-latency-us", "500")
    at_once = simulated(trace, *APART, "--kv-transfer-bandwidth", "0")
    assert at_once["policies"]["kv"]["transfer_ms"]["p99"] == 0
    assert slow["settings"]["transfer"] == {
        "kv_bytes_per_token": 131_072,
        "kv_transfer_bandwidth": 1.0,
        "kv_transfer_latency_us": 500,
    }
    assert slow["policies"]["kv"]["transfer_ms"]["p50"] > 0.5
    assert slow["policies"]["kv"]["ttft_ms"]["mean"] > at_once["policies"]["kv"]["ttft_ms"]["mean"]


def test_policy_decides_remote_prefills(trace: Path) -> None:
    name = "kv:disagg.policy=classic,disagg.max_local_prefill_length=1000000"
    run = CliRunner().invoke(app, ["simulate", str(trace), "--json", *APART, "--policy", name])
    figures = json.loads(run.stdout)["policies"][name]
    assert (figures["prefilled_remotely"], figures["transfer_ms"], figures["failed"]) == (0, {}, 0)
    assert figures["workers"][2]["computed_tokens"] > 0


def test_table_and_report_show_roles(trace: Path) -> None:
    page = trace.parent / "page.html"
    run = CliRunner().invoke(app, ["simulate", str(trace), *APART, "--policy", "kv", "--report", str(page)])
    assert run.exit_code == 0
    assert "2 prefill workers and 1 decode workers" in run.stdout
    for text in ("remote", "transfer"):
        assert text in run.stdout
    parsed = Page(page.read_text())
    assert "2 prefill workers (mocker" in parsed.text
    assert "1 decode worker (mocker" in parsed.text
    assert "load to the prefill workers" in parsed.text
    assert "mock-1 (prefill)" in str(parsed.charts)


def test_workers_of_both_pools_can_die(trace: Path) -> None:
    kills = [word for kill in ("mock-0@0.2+0.5", "mock-2@0.4+0.5") for word in ("--kill", kill)]
    figures = simulated(trace, *APART, *kills, "--lease-ttl-s", "1")["policies"]["kv"]
    assert (figures["failed"], figures["requests"]) == (0, 20)
    assert figures["retried"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prefill-workers", "2"], "--prefill-workers 2 requires --decode-workers"),
        (["--decode-workers", "2"], "--decode-workers 2 requires --prefill-workers"),
        ([*APART, "--workers", "3"], "--workers cannot be combined with"),
        ([*APART, "--kill", "mock-3@1"], "unknown worker 'mock-3'; workers are: mock-0 to mock-2"),
        (["--prefill-workers", "4000", "--decode-workers", "4000"], "--decode-workers: pools: got 8000 workers"),
        (["--policy", "kv:disagg.policy=sometimes"], "disagg.policy: must be one of always, classic"),
        (
            ["--policy", "kv:disagg.policy=never"],
            "kv:disagg.policy=never: disagg settings require --prefill-workers and",
        ),
        (["--policy", "kv:disagg.limit=1"], "unknown setting 'disagg.limit'"),
    ],
)
def test_conflicting_options_give_one_error_line(trace: Path, arguments: list[str], reason: str) -> None:
    run = CliRunner().invoke(app, ["simulate", str(trace), *arguments])
    assert run.exit_code == 2
    assert reason.lower() in run.stderr.lower()
    assert run.stderr.count("\n") == 1


def test_pools_of_a_fleet_file_match_the_options(trace: Path) -> None:
    file = trace.parent / "fleet.toml"
    pool = '[[pools]]\nname = "{0}"\nrole = "{0}"\nworkers = [{{count = {1}}}]\n'
    file.write_text(pool.format("prefill", 2) + pool.format("decode", 1) + "[transfer]\nkv_transfer_latency_us = 7\n")
    figures = simulated(trace, "--fleet", str(file))
    assert figures["policies"] == simulated(trace, *APART, "--kv-transfer-latency-us", "7")["policies"]
    run = CliRunner().invoke(app, ["simulate", str(trace), "--fleet", str(file), *APART])
    assert "remove --prefill-workers and --decode-workers" in run.stderr


def test_a_sweep_reports_the_size_of_each_pool(trace: Path) -> None:
    split = "prefill_workers:decode_workers=0:3,1:2,2:1"
    found = combinations(["kv"], axes_of([split]), FleetOptions(), ShapeOptions())
    assert [[(pool.role, pool.groups[0].count) for pool in one.fleet.pools] for one in found] == [
        [("decode", 3)],
        [("prefill", 1), ("decode", 2)],
        [("prefill", 2), ("decode", 1)],
    ]
    run = CliRunner().invoke(
        app, ["sweep", str(trace), "--json", "--policy", "kv", "--set", split, "--set", "disagg.policy=always,never"]
    )
    assert run.exit_code == 0
    runs = {run["name"]: run for run in json.loads(run.stdout)["runs"]}
    assert len(runs) == 6
    assert {run["workers"] for run in runs.values()} == {3}
    remote = {name: run.get("prefilled_remotely") for name, run in runs.items()}
    assert remote["kv, prefill_workers=2, decode_workers=1, disagg.policy=always"] == 20
    assert remote["kv, prefill_workers=2, decode_workers=1, disagg.policy=never"] == 0


def test_sweep_finds_the_capacity_of_a_split(trace: Path) -> None:
    arguments = (
        "--set",
        "prefill_workers:decode_workers=1:2",
        "--slo",
        "e2e=1500",
        "--find-capacity",
        "--attain",
        "0.5",
    )
    run = CliRunner().invoke(app, ["sweep", str(trace), "--json", "--policy", "kv", *arguments])
    assert run.exit_code == 0, run.stderr
    (found,) = json.loads(run.stdout)["runs"]
    assert found["capacity_per_s"] > 0
    assert found["prefilled_remotely"] == 20


def test_a_recording_with_disaggregation_is_a_workload(tmp_path: Path) -> None:
    recording = tmp_path / "run.db"
    asyncio.run(history("always").log(recording)).close()
    figures = simulated(recording, *APART, "--block-size", "4")["policies"]["kv"]
    assert (figures["requests"], figures["prefilled_remotely"]) == (COUNT, COUNT)
