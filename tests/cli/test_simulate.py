"""The `forebay simulate` command: reproducible output and rejected options."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.simulate.workloads.rows import MooncakeRow
from tests.cli.in_process import forebay
from tests.harness import fork_server
from tests.simulate.traces import conversations, write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=5, turns=4))


def printed(trace: Path, *arguments: str) -> str:
    run = forebay("simulate", str(trace), "--json", *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_output_is_independent_of_processes(trace: Path) -> None:
    result: dict[str, Any] = json.loads(printed(trace, "--workers", "4"))
    assert list(result["policies"]) == ["kv", "round-robin"]
    settings = result["settings"]
    assert (settings["workload"], settings["workload_options"]["speed"]) == ("trace.jsonl", 1.0)
    assert [group["count"] for pool in settings["pools"] for group in pool["groups"]] == [4]
    assert settings["policies"]["kv"]["temperature"] == 0.0
    alone = json.loads(printed(trace, "--workers", "4", "--policy", "round-robin"))
    assert alone["policies"]["round-robin"] == result["policies"]["round-robin"]
    assert alone["digest"] != result["digest"]


def test_a_custom_policy_is_imported_from_the_current_directory(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class Last:\n    def decide(self, world, request):\n        return len(world.candidates) - 1\n"
        "class First:\n    def decide(self, world, request):\n        return 0\n"
    )
    (trace.parent / "mine.py").write_text(source)
    names = ("mine.Last", "mine.First")
    monkeypatch.chdir(trace.parent)
    result = json.loads(printed(trace, "--policy", names[0], "--policy", names[1], "--workers", "2"))
    count = len(conversations(sessions=5, turns=4))
    requests = [[worker["requests"] for worker in result["policies"][name]["workers"]] for name in names]
    assert requests == [[0, count], [count, 0]]


def test_a_fleet_with_several_pools_of_a_model_has_results_by_pool(trace: Path) -> None:
    pools = "".join(f"[[pools]]\nname = '{name}'\nworkers = [{{count = 1}}]\n" for name in ("short", "long"))
    speeds = "pools = [{pool = 'short', priority = 0}, {pool = 'long', priority = 1}]"
    grid = f"isl_max = 4096\ntarget_max_ms = 9\n{speeds}\ncells = [['short'], ['long']]\n"
    fleet = trace.with_name("fleet.toml")
    fleet.write_text(f"{pools}[[models]]\nname = 'simulated'\n[[models.grids]]\n{grid}")
    options = ("--fleet", str(fleet), "--policy", "kv")
    by_pool = json.loads(printed(trace, *options))["policies"]["kv"]["pools"]
    lengths = [row.input_length for row in conversations(sessions=5, turns=4)]
    short = sum(length < 2_048 for length in lengths)
    assert 0 < short < len(lengths)
    assert {name: one["requests"] for name, one in by_pool.items()} == {"short": short, "long": len(lengths) - short}
    table = forebay("simulate", str(trace), *options).stdout
    assert [line.split()[1:3] for line in table.splitlines() if " short " in line or " long " in line] == [
        ["short", str(short)],
        ["long", str(len(lengths) - short)],
    ]


def test_the_table_shows_every_policy_with_its_metrics(trace: Path) -> None:
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--duration-s", "1"])
    assert run.exit_code == 0
    assert "kv" in run.stdout
    assert "digest" in run.stdout
    assert "14 requests under 1 policy" in run.stderr


def test_oversized_requests_are_named_and_exit_1(tmp_path: Path) -> None:
    rows = [MooncakeRow(at, 1024, 1, [2 * at, 2 * at + 1]) for at in range(7)]
    trace = write(tmp_path / "trace.jsonl", [*rows, MooncakeRow(9, 64, 1, [99])])
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--kv-blocks", "4"])
    assert run.exit_code == 1
    assert "kv: request 5 failed: 1024 prompt tokens and 1 to generate need 17 KV blocks" in run.stdout
    assert "kv: and 2 more" in run.stdout
    assert "request 8 failed" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "kw"], "unknown router mode 'kw'"),
        (["--policy", "direct"], "the requests of a workload name no workers"),
        (["--policy", "kv", "--policy", "random", "--policy", "kv"], "--policy kv: duplicate policy"),
        (["--policy", "kv:speed=2"], "unknown setting 'speed'"),
        (["--max-num-batched-tokens", "10"], "max_num_batched_tokens (10) must be at least max_num_seqs (256)"),
        (["--duration-s", "0.001"], "contains no request"),
        (
            ["--kv-blocks", "1"],
            "no request of trace.jsonl fits a worker: the smallest, request 1, has 65 prompt and output",
        ),
        (["--engine-profile", "h900"], "unknown engine profile 'h900'"),
        (["--slo", "ttft"], "--slo ttft: invalid objective 'ttft'"),
        (["--attain", "0.5"], "--attain requires --slo"),
        (["--kill", "mock-8@1"], "--kill mock-8@1: unknown worker 'mock-8'; workers are: mock-0 to mock-7"),
        (
            ["--delays", "carrier-pigeon"],
            "--delays: unknown delay profile 'carrier-pigeon'; delay profiles are: none, embedded, kafka",
        ),
        (["--kill", "mock-0"], "expected WORKER@SECONDS"),
        (["--kill", f"mock-0@{'9' * 400}"], "the maximum is 100 years"),
        (["--kill", f"mock-0@1+{'9' * 12}"], "the maximum is 100 years"),
        (["--policy", "kv:temperature=1,temperature=2"], "duplicate setting temperature"),
        (["--policy", "as configured"], "--policy as configured: requires that every pool has its own router"),
        (["--engine-profile", ""], "unknown engine profile "),
    ],
)
def test_invalid_arguments_give_one_error_line(tmp_path: Path, arguments: list[str], reason: str) -> None:
    trace = write(tmp_path / "trace.jsonl", [MooncakeRow(50, 64, 1, [1])])
    run = CliRunner().invoke(app, ["simulate", str(trace), *arguments])
    assert run.exit_code == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, str((1 << 31) + 1)) for option in ("--kv-blocks", "--block-size", "--max-num-batched-tokens")),
        *((option, "inf") for option in ("--cold-start-s", "--lease-ttl-s")),
        ("--duration-s", "inf"),
    ],
)
def test_numbers_have_bounds(option: str, value: str) -> None:
    run = CliRunner().invoke(app, ["simulate", "synthetic:requests=2", option, value])
    assert run.exit_code == 2
    assert f"Invalid value for '{option}'" in run.stderr


def test_missed_attainment_sets_the_exit_code(trace: Path) -> None:
    promise = ["simulate", str(trace), "--policy", "kv", "--slo", "ttft=0.001,e2e=1e9"]
    run = CliRunner().invoke(app, [*promise, "--json"])
    assert run.exit_code == 0
    figures = json.loads(run.stdout)["policies"]["kv"]
    assert (figures["attained"], figures["attained_each"]) == (0.0, {"ttft": 0.0, "e2e": 1.0})
    assert figures["goodput_per_s"] == 0.0
    short = CliRunner().invoke(app, [*promise, "--policy", "random", "--attain", "0.555"])
    assert short.exit_code == 1
    for name in ("kv", "random"):
        assert f"forebay: {name}: SLO attainment 0% is below --attain 55.5%\n" in short.stderr
    kept = CliRunner().invoke(app, [*promise[:-1], "e2e=1e9", "--attain", "1"])
    assert kept.exit_code == 0
    assert "is below --attain" not in kept.stderr


def test_an_engine_profile_sets_timing_and_sizes(trace: Path) -> None:
    profile = trace.parent / "twice.toml"
    profile.write_text('kind = "linear"\n[costs_us]\nstep = 1000\n[sizes]\nkv_blocks = 4096\nmax_num_seqs = 8\n')
    result = json.loads(printed(trace, "--engine-profile", str(profile), "--max-num-seqs", "16", "--policy", "kv"))
    (group,) = result["settings"]["pools"][0]["groups"]
    assert group["profile"] == "twice"
    assert (group["engine"]["kv_blocks_total"], group["engine"]["max_num_seqs"]) == (4096, 16)
    assert result["policies"]["kv"]["itl_ms"]["p50"] == 1.0  # one token per step


def test_requests_of_a_killed_worker_complete_on_another(trace: Path) -> None:
    figures = json.loads(
        printed(trace, "--policy", "kv", "--workers", "2", "--kill", "mock-0@0.5+1", "--lease-ttl-s", "1")
    )["policies"]["kv"]
    assert figures["failed"] == 0
    assert figures["retried"] > 0
    whole = json.loads(printed(trace, "--policy", "kv", "--workers", "2"))["policies"]["kv"]
    assert whole["retried"] == 0
    assert whole["gpu_hours"] == pytest.approx(2 * whole["lasted_s"] / 3600)
    assert figures["e2e_ms"]["p99"] > whole["e2e_ms"]["p99"]


def test_delays_are_part_of_client_latency(trace: Path) -> None:
    near, far = (json.loads(printed(trace, "--policy", "kv", "--delays", name)) for name in ("none", "kafka"))
    assert far["policies"]["kv"]["ttft_ms"]["p50"] > near["policies"]["kv"]["ttft_ms"]["p50"] + 2.740
    assert far["settings"]["delays"]["submit"]["fixed_us"] == 2740


def test_fault_after_the_end_of_a_run_is_reported(trace: Path) -> None:
    kills = ("--kill", "mock-0@0.5", "--kill", "mock-1@600000")
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--policy", "random", "--json", *kills])
    assert run.exit_code == 0
    kv, random = (json.loads(run.stdout)["policies"][name]["lasted_s"] for name in ("kv", "random"))
    reason = f"because these runs ended earlier: kv after {kv:.1f} s, random after {random:.1f} s"
    assert f"mock-1 did not die at 600000 s, {reason}" in run.stderr
    assert "mock-0" not in run.stderr


def test_report_matches_the_json_output(trace: Path) -> None:
    page = trace.parent / "page.html"
    run = CliRunner().invoke(app, ["simulate", str(trace), "--json", "--slo", "ttft=80", "--report", str(page)])
    assert run.exit_code == 0
    assert json.loads(run.stdout)["digest"] in page.read_text()
    page.write_text("my diary")
    run = CliRunner().invoke(app, ["simulate", str(trace), "--report", str(page)])
    assert run.exit_code == 2
    assert page.read_text() == "my diary"


def test_invalid_rows_are_errors_or_skipped_and_counted(trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 9e9, "input_length": -1, "output_length": 1, "hash_ids": [1]}\n')
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--json"])
    assert run.exit_code == 2
    assert "line 21" in run.stderr
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--json", "--skip-bad-rows"])
    assert run.exit_code == 0
    result = json.loads(run.stdout)
    assert (result["skipped"], result["policies"]["kv"]["requests"]) == (1, 20)
    assert "skipped: " in run.stderr


FLEET = """
delays = "embedded"
[[pools]]
name = "big"
[[pools.workers]]
count = 2
kv_blocks = 4096
gpus = 4
[[pools.workers]]
count = 1
[life]
cold_start_s = 3
[[faults]]
worker = "mock-2"
at_s = 0.2
back_s = 0.5
"""


def test_options_override_the_pools_of_a_fleet_file(trace: Path) -> None:
    file = trace.parent / "fleet.toml"
    file.write_text(FLEET)
    result = json.loads(printed(trace, "--fleet", str(file), "--lease-ttl-s", "1", "--kill", "mock-0@0.4"))
    settings = result["settings"]
    assert [group["count"] for group in settings["pools"][0]["groups"]] == [2, 1]
    assert settings["delays"]["submit"]["fixed_us"] == 1290
    assert (settings["life"]["cold_start_s"], settings["life"]["lease_ttl_s"]) == (3.0, 1.0)
    assert [fault["worker"] for fault in settings["life"]["faults"]] == ["mock-2", "mock-0"]
    assert all(one["retried"] > 0 and not one["failed"] for one in result["policies"].values())
    near = json.loads(printed(trace, "--fleet", str(file), "--delays", "none"))
    assert near["settings"]["delays"]["submit"]["fixed_us"] == 0


def test_no_policy_is_needed_if_every_pool_has_a_router(trace: Path) -> None:
    file = trace.parent / "fleet.toml"
    file.write_text('[[pools]]\nrouter = {mode = "random"}\n[[pools.workers]]\ncount = 2\n')
    configured = json.loads(printed(trace, "--fleet", str(file)))["policies"]
    assert list(configured) == ["as configured"]
    explicit = json.loads(printed(trace, "--workers", "2", "--policy", "random"))["policies"]
    assert configured["as configured"] == explicit["random"]
    run = CliRunner().invoke(app, ["simulate", str(trace), "--fleet", str(file), "--policy", "kv"])
    assert run.exit_code == 2
    assert "--policy kv: has no effect, because every pool has its own router" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workers", "3", "--engine-profile", "mocker"], "defines the fleet; remove --workers and --engine-profile"),
        (["--kill", "mock-9@1"], "--kill mock-9@1: unknown worker 'mock-9'; workers are: mock-0 to mock-2"),
        (["--kill", "mock-2@0.3"], "--kill mock-2@0.3: worker mock-2 starts at 0.7 s"),
    ],
)
def test_options_that_conflict_with_a_fleet_file_are_named(trace: Path, arguments: list[str], reason: str) -> None:
    file = trace.parent / "fleet.toml"
    file.write_text(FLEET)
    run = CliRunner().invoke(app, ["simulate", str(trace), "--fleet", str(file), *arguments])
    assert run.exit_code == 2
    assert reason in run.stderr


def test_profile_with_work_us_delays_work(trace: Path) -> None:
    profile = trace.parent / "fitted.toml"
    profile.write_text('kind = "linear"\nwork_us = 7000\n[costs_us]\nstep = 1000\n')
    result = json.loads(printed(trace, "--engine-profile", str(profile), "--policy", "kv"))
    assert result["settings"]["delays"]["work"]["fixed_us"] == 7000
    result = json.loads(printed(trace, "--engine-profile", str(profile), "--policy", "kv", "--delays", "none"))
    assert result["settings"]["delays"]["work"]["fixed_us"] == 0


def test_a_killed_process_ends_the_command_in_one_line(trace: Path) -> None:
    source = (
        "import multiprocessing, os, signal\nclass Killed:\n    def decide(self, world, request):\n"
        "        if multiprocessing.parent_process() is not None:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return 0\n"
    )
    (trace.parent / "mine.py").write_text(source)
    command = ("simulate", str(trace), "--policy", "mine.Killed", "--policy", "mine.Killed:temperature=1")
    run = fork_server.run(*command, folder=trace.parent, timeout_s=60)
    assert run.returncode == 1
    assert run.stderr == "forebay: a simulation process was killed, possibly because it ran out of memory\n"
