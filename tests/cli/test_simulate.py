"""`forebay simulate`: output and rejected options, with disaggregation, a planner and KV tiers."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.analysis.runs import size_changes
from forebay.simulate.workloads.rows import MooncakeRow
from tests.cli.in_process import error_of, forebay, json_of
from tests.cli.report_page import Page
from tests.core.scaling.scene import decided
from tests.harness import fork_server
from tests.simulate.scene import conversations, write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=5, turns=4))


def test_output_is_independent_of_processes(trace: Path) -> None:
    result: dict[str, Any] = json_of("simulate", trace, "--workers", "4")
    assert list(result["policies"]) == ["kv", "round-robin"]
    settings = result["settings"]
    assert (settings["workload"], settings["workload_options"]["speed"]) == ("trace.jsonl", 1.0)
    assert [group["count"] for pool in settings["pools"] for group in pool["groups"]] == [4]
    assert settings["policies"]["kv"]["temperature"] == 0.0
    alone = json_of("simulate", trace, "--workers", "4", "--policy", "round-robin")
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
    result = json_of("simulate", trace, "--policy", names[0], "--policy", names[1], "--workers", "2")
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
    by_pool = json_of("simulate", trace, *options)["policies"]["kv"]["pools"]
    lengths = [row.input_length for row in conversations(sessions=5, turns=4)]
    short = sum(length < 2_048 for length in lengths)
    assert 0 < short < len(lengths)
    assert {name: one["requests"] for name, one in by_pool.items()} == {"short": short, "long": len(lengths) - short}
    table = forebay("simulate", trace, *options).stdout
    assert [line.split()[1:3] for line in table.splitlines() if " short " in line or " long " in line] == [
        ["short", str(short)],
        ["long", str(len(lengths) - short)],
    ]


def test_oversized_requests_are_named_and_exit_1(tmp_path: Path) -> None:
    rows = [MooncakeRow(at, 1024, 1, [2 * at, 2 * at + 1]) for at in range(7)]
    trace = write(tmp_path / "trace.jsonl", [*rows, MooncakeRow(9, 64, 1, [99])])
    run = forebay("simulate", trace, "--policy", "kv", "--kv-blocks", "4")
    assert run.returncode == 1
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
        (["--policy", "as configured"], "--policy as configured: requires that every pool has its own router"),
    ],
)
def test_invalid_arguments_give_one_error_line(tmp_path: Path, arguments: list[str], reason: str) -> None:
    trace = write(tmp_path / "trace.jsonl", [MooncakeRow(50, 64, 1, [1])])
    assert reason in error_of("simulate", trace, *arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, str((1 << 31) + 1)) for option in ("--kv-blocks", "--block-size", "--max-num-batched-tokens")),
        *((option, "inf") for option in ("--cold-start-s", "--lease-ttl-s")),
        ("--duration-s", "inf"),
    ],
)
def test_numbers_have_bounds(option: str, value: str) -> None:
    assert f"Invalid value for '{option}'" in error_of("simulate", "synthetic:requests=2", option, value)


def test_missed_attainment_sets_the_exit_code(trace: Path) -> None:
    promise = ["simulate", str(trace), "--policy", "kv", "--slo", "ttft=0.001,e2e=1e9"]
    run = forebay(*promise, "--json")
    assert run.returncode == 0
    figures = json.loads(run.stdout)["policies"]["kv"]
    assert (figures["attained"], figures["attained_each"]) == (0.0, {"ttft": 0.0, "e2e": 1.0})
    assert figures["goodput_per_s"] == 0.0
    short = forebay(*promise, "--policy", "random", "--attain", "0.555")
    assert short.returncode == 1
    for name in ("kv", "random"):
        assert f"forebay: {name}: SLO attainment 0% is below --attain 55.5%\n" in short.stderr
    kept = forebay(*promise[:-1], "e2e=1e9", "--attain", "1")
    assert kept.returncode == 0
    assert "is below --attain" not in kept.stderr


def test_an_engine_profile_sets_timing_and_sizes(trace: Path) -> None:
    profile = trace.parent / "twice.toml"
    profile.write_text('kind = "linear"\n[costs_us]\nstep = 1000\n[sizes]\nkv_blocks = 4096\nmax_num_seqs = 8\n')
    result = json_of("simulate", trace, "--engine-profile", profile, "--max-num-seqs", "16", "--policy", "kv")
    (group,) = result["settings"]["pools"][0]["groups"]
    assert group["profile"] == "twice"
    assert (group["engine"]["kv_blocks_total"], group["engine"]["max_num_seqs"]) == (4096, 16)
    assert result["policies"]["kv"]["itl_ms"]["p50"] == 1.0  # one token per step


def test_fault_after_the_end_of_a_run_is_reported(trace: Path) -> None:
    kills = ("--kill", "mock-0@0.5", "--kill", "mock-1@600000")
    run = forebay("simulate", trace, "--policy", "kv", "--policy", "random", "--json", *kills)
    assert run.returncode == 0
    kv, random = (json.loads(run.stdout)["policies"][name]["lasted_s"] for name in ("kv", "random"))
    reason = f"because these runs ended earlier: kv after {kv:.1f} s, random after {random:.1f} s"
    assert f"mock-1 did not die at 600000 s, {reason}" in run.stderr
    assert "mock-0" not in run.stderr


def test_invalid_rows_are_errors_or_skipped_and_counted(trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 9e9, "input_length": -1, "output_length": 1, "hash_ids": [1]}\n')
    assert "line 21" in error_of("simulate", trace, "--policy", "kv", "--json")
    run = forebay("simulate", trace, "--policy", "kv", "--json", "--skip-bad-rows")
    assert run.returncode == 0
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
    result = json_of("simulate", trace, "--fleet", file, "--lease-ttl-s", "1", "--kill", "mock-0@0.4")
    settings = result["settings"]
    assert [group["count"] for group in settings["pools"][0]["groups"]] == [2, 1]
    assert settings["delays"]["submit"]["fixed_ms"] == 1.29
    assert (settings["life"]["cold_start_s"], settings["life"]["lease_ttl_s"]) == (3.0, 1.0)
    assert [fault["worker"] for fault in settings["life"]["faults"]] == ["mock-2", "mock-0"]
    assert all(one["retried"] > 0 and not one["failed"] for one in result["policies"].values())
    near = json_of("simulate", trace, "--fleet", file, "--delays", "none")
    assert near["settings"]["delays"]["submit"]["fixed_ms"] == 0


def test_no_policy_is_needed_if_every_pool_has_a_router(trace: Path) -> None:
    file = trace.parent / "fleet.toml"
    file.write_text('[[pools]]\nrouter = {mode = "random"}\n[[pools.workers]]\ncount = 2\n')
    configured = json_of("simulate", trace, "--fleet", file)["policies"]
    assert list(configured) == ["as configured"]
    explicit = json_of("simulate", trace, "--workers", "2", "--policy", "random")["policies"]
    assert configured["as configured"] == explicit["random"]
    assert "--policy kv: has no effect, because every pool has its own router" in error_of(
        "simulate", str(trace), "--fleet", str(file), "--policy", "kv"
    )


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
    assert reason in error_of("simulate", trace, "--fleet", file, *arguments)


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


APART = ("--prefill-workers", "2", "--decode-workers", "1")


def simulated(trace: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json_of("simulate", trace, "--policy", "kv", *arguments)
    return found


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
    run = forebay("simulate", trace, *arguments)
    assert run.returncode == 2
    assert reason.lower() in run.stderr.lower()
    assert run.stderr.count("\n") == 1


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
    return planner_file(tmp_path / "planner.toml")


def planner_file(path: Path, pool: str = "default", more: str = "") -> Path:
    path.write_text(FILE.format(pool=pool, more=more))
    return path


def planned(planner: Path, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json_of(*COMMAND, planner, *options)
    return found


@pytest.mark.parametrize("predictor", ["constant", pytest.param("kalman", marks=pytest.mark.slow)])
def test_the_output_has_sizes_gpu_hours_and_attainment_of_each_interval(planner: Path, predictor: str) -> None:
    planner_file(planner, more=f'predictor = "{predictor}"')
    result = planned(planner)
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
    assert planned(planner) == result


def test_the_report_shows_the_planner(planner: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    run = forebay(*COMMAND, planner, "--report", str(report))
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
    planner_file(planner, pool, more)
    run = forebay("simulate", WORKLOAD, "--planner", planner)
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


SMALL = ("--workers", "2", "--kv-blocks", "300", "--policy", "kv")
HOST = ("--kv-tier", "host:size=2000blocks")


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=8, turns=4))


def test_tiers_are_reported_only_if_there_are_any(sessions: Path) -> None:
    plain = json_of("simulate", sessions, *SMALL)
    assert "tiers" not in plain["policies"]["kv"]
    assert "tiers" not in plain["settings"]
    assert "tiers" not in plain["settings"]["pools"][0]["groups"][0]
    tiered = json_of("simulate", sessions, *SMALL, *HOST)
    assert tiered["settings"]["tiers"]["host"]["size"] == "2000blocks"
    assert "tiers" not in tiered["settings"]["pools"][0]["groups"][0]
    tiers = tiered["policies"]["kv"]["tiers"]
    assert tiers["tokens"]["host"] > 0
    assert sum(tiers["tokens"].values()) == tiered["policies"]["kv"]["prompt_tokens"]
    assert sum(tiers["shares"].values()) == pytest.approx(1.0)
    assert tiered["policies"]["kv"]["prefix_reuse"] == pytest.approx(1.0 - tiers["shares"]["computed"])
    assert tiered == json_of("simulate", sessions, *SMALL, *HOST)
    assert json_of("simulate", sessions, *SMALL, "--kv-tier", "host:size=0")["policies"] == plain["policies"]
    table = forebay("simulate", sessions, *SMALL, *HOST).stdout
    assert "prompt tokens by tier" in table
    assert f"{tiers['shares']['host']:.4f}" in table


def test_files_define_tiers_and_options_resize_them(sessions: Path) -> None:
    profile = sessions.with_name("engine.toml")
    profile.write_text('kind = "mocker"\n[sizes]\nkv_blocks = 300\n[tiers.host]\nsize = "16GB"\nbandwidth = 50.0\n')
    fleet = sessions.with_name("fleet.toml")
    fleet.write_text(
        '[[pools]]\nworkers = [{count = 1, engine_profile = "engine.toml"}, {count = 1, kv_blocks = 300}]\n'
        '[tiers.host]\nsize = "8GB"\n[tiers.store]\nsize = "1TB"\nbandwidth = 3\nlatency_us = 900\nfilter = false\n'
        "[transfer]\nkv_bytes_per_token = 65536\n"
    )
    settings = json_of("simulate", sessions, "--fleet", fleet, "--policy", "kv")["settings"]
    first, second = settings["pools"][0]["groups"]
    assert first["tiers"]["host"] == {
        "size": "16GB", "bandwidth": 50.0, "latency_us": 20, "filter": None,
    }  # fmt: skip
    assert "tiers" not in second
    assert settings["tiers"]["host"]["size"] == "8GB"
    assert (settings["tiers"]["store"]["bandwidth"], settings["tiers"]["store"]["filter"]) == (3.0, False)
    resized = json_of("simulate", sessions, "--fleet", fleet, "--policy", "kv", "--kv-tier", "host:size=4GB")[
        "settings"
    ]
    assert resized["pools"][0]["groups"][0]["tiers"]["host"] == {**first["tiers"]["host"], "size": "4GB"}
    assert resized["tiers"] == {**settings["tiers"], "host": {**settings["tiers"]["host"], "size": "4GB"}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[tiers.host]\nsize = "1MB"\n', "tiers.host: got a size of 1MB, but one block has 8388608 bytes"),
        ("[tiers.disk]\nbandwidth = 3\n", "tiers.disk.size: missing key"),
        ('[tiers.store]\nsize = "1GB"\nspeed = 3\n', "tiers.store: unknown key 'speed'"),
        ('[tiers.store]\nsize = "1GB"\nbandwidth = -1\n', "tiers.store.bandwidth: must be a number from 0"),
    ],
)
def test_errors_name_the_file_and_the_key(sessions: Path, text: str, reason: str) -> None:
    fleet = sessions.with_name("fleet.toml")
    fleet.write_text(f"[[pools]]\nworkers = [{{count = 1}}]\n{text}")
    run = forebay("simulate", sessions, "--fleet", fleet)
    assert run.returncode == 2
    assert run.stderr.startswith(f"forebay: {fleet}: {reason}".replace("`", "")), run.stderr
