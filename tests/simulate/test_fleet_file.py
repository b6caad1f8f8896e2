"""Fleet files: settings, errors that name file and key, and pools with grids."""

from pathlib import Path

import pytest

from forebay.events.control import DisaggConfig, RouterConfig
from forebay.runtime.errors import ConfigError
from forebay.simulate.fleet_file import load_fleet
from forebay.simulate.outcome import SimulationOutcome, summary
from forebay.simulate.settings import (
    DELAYS,
    Delays,
    LifeCycleSettings,
    Settings,
    Transfer,
    policy,
)
from forebay.simulate.workload import Turn
from tests.simulate.scene import crash_at, latency, routed, run, start_at, turn

WHOLE = """
delays = "kafka"

[[pools]]
name = "small"
model = "a"

[pools.router]
mode = "kv"
temperature = 0.3
queue = {threshold = 2.0, classes = [{name = "default"}]}
busy = {active_decode_blocks_threshold = 0.9}

[[pools.workers]]
count = 2
kv_blocks = 100
gpus = 4

[[pools.workers]]
count = 1
engine_profile = "fast.toml"
max_num_seqs = 8

[[pools]]
name = "large"
model = "b"
workers = [{count = 1, block_size = 16}]

[life]
mtbf_s = 3600
cold_start_s = 60.5

[[faults]]
worker = "mock-1"
at_s = 1.5
back_s = 3

[[starts]]
at_s = 2
pool = "large"
count = 2
"""
APART = """
pools = [
    {name = "p", role = "prefill", workers = [{count = 3}]},
    {name = "d", role = "decode", workers = [{count = 1}], router = {disagg = {policy = "classic"}}},
]
transfer = {kv_bytes_per_token = 200_000, kv_transfer_bandwidth = 12.5, kv_transfer_latency_us = 40}
"""
PROFILE = """
kind = "linear"
[costs_us]
step = 5000
[sizes]
kv_blocks = 77
gpus = 2
"""


def load(folder: Path, text: str) -> Settings:
    (folder / "fast.toml").write_text(PROFILE)
    (folder / "fleet.toml").write_text(text)
    return load_fleet(folder / "fleet.toml")


def test_file_defines_disaggregated_pools_and_transfers(tmp_path: Path) -> None:
    fleet = load(tmp_path, APART)
    pools = [(pool.name, pool.role, pool.groups[0].count) for pool in fleet.pools]
    assert pools == [("p", "prefill", 3), ("d", "decode", 1)]
    assert fleet.pools[1].router == RouterConfig(disagg=DisaggConfig(policy="classic"))
    assert fleet.transfer == Transfer(kv_bytes_per_token=200_000, kv_transfer_bandwidth=12.5, kv_transfer_latency_us=40)
    assert fleet.transfer.lasts_us(1) == 16
    assert load(tmp_path, "pools = [{workers = [{count = 1}]}]").transfer == Transfer()


def test_file_defines_fleet_and_life_cycle(tmp_path: Path) -> None:
    fleet = load(tmp_path, WHOLE)
    small, large = fleet.pools
    assert (small.name, small.model, large.name, large.model) == ("small", "a", "large", "b")
    assert small.router == policy("kv:temperature=0.3,queue.threshold=2,busy.active_decode_blocks_threshold=0.9")
    assert large.router is None
    sizes = [(one.count, one.engine.kv_blocks_total, one.engine.max_num_seqs, one.gpus) for one in small.groups]
    assert sizes == [(2, 100, 256, 4.0), (1, 77, 8, 2.0)]
    assert [one.profile for one in small.groups] == ["mocker", "fast"]
    assert large.groups[0].engine.block_size == 16
    assert fleet.delays == DELAYS["kafka"]
    assert fleet.life == LifeCycleSettings(
        mtbf_s=3600.0,
        cold_start_s=60.5,
        faults=(crash_at(worker="mock-1", at_us=1_500_000, back_us=3_000_000),),
        starts=(start_at(at_us=2_000_000, pool="large", count=2),),
    )
    turns = [turn(number, 300, model="ab"[number % 2], at_us=number * 400_000) for number in range(20)]
    outcome = run(fleet, *turns, router="round-robin")
    assert [one.failure for one in outcome.requests] == [""] * 20
    assert {decision.mode for decision in routed(fleet, *turns, router="round-robin").values()} == {"kv", "round-robin"}


def test_each_hop_may_have_its_own_delay(tmp_path: Path) -> None:
    text = "[[pools]]\nworkers = [{count = 3}]\n[delays]\nsubmit = {fixed_ms = 1.5}\nwork = {jitter_ms = 0.25}"
    assert load(tmp_path, text).delays == Delays(submit=latency(fixed_us=1_500), work=latency(jitter_us=250))


POOLS = """
[[pools]]
name = "short"
workers = [{ count = 1 }]
[[pools]]
name = "long"
workers = [{ count = 2 }]
"""
GRID = """
[[models]]
name = "simulated"
[[models.grids]]
isl_max = 2048
target_max_ms = 1000
pools = [{ pool = "short", priority = 0 }, { pool = "long", priority = 1 }]
cells = [["short"], ["long"]]
"""
POOL = "[[pools]]\nworkers = [{count = 3}]\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pools = ", "not TOML: Invalid value (at end of document)"),
        ("", "pools: missing key"),
        ("pools = []", "pools: no pool is configured"),
        ("pools = 3", "pools: must be a list"),
        ("[[pools]]\nname = 'x'", "pools[0].workers: missing key"),
        ("[[pools]]\nworkers = []", "pools[0].workers: pool 'default' has no workers"),
        ("[[pools]]\nworkers = [{count = 0}]", "pools[0].workers[0].count: must be a whole number from 1 to 4096"),
        (
            "[[pools]]\nworkers = [{count = 1, block = 3}]",
            "pools[0].workers[0]: unknown key 'block'; did you mean block_size?",
        ),
        ("[[pools]]\nworkers = [{count = 1, max_num_seqs = 9000}]", "pools[0].workers[0]: max_num_batched"),
        (
            "[[pools]]\nworkers = [{count = 1, engine_profile = 'x.toml'}]",
            "pools[0].workers[0].engine_profile: unknown engine profile",
        ),
        (POOL + "[pools.router]\nmodus = 'kv'", "pools[0].router: unknown key 'modus'; keys are: mode, "),
        (POOL + "[pools.router]\nmode = 'kw'", "pools[0].router.mode: 'kw' cannot be simulated; use kv, "),
        (POOL + "[pools.router]\nmode = 'direct'", "pools[0].router.mode: 'direct' cannot be simulated"),
        (POOL + "[pools.router]\nqueue = {classes = [{x = 1}]}", "pools[0].router.queue.classes[0]: unknown key 'x'; "),
        (POOL + "[pools.router]\nqueue = {classes = 4}", "pools[0].router.queue.classes: must be a list"),
        (POOL + POOL, "pools[1].name: duplicate pool name 'default'"),
        (
            POOL + "[[pools]]\nname = 'b'\nworkers = [{count = 1}]",
            "pools[1].model: pools 'default' and 'b' both serve model 'simulated'; remove one of them, or add grids",
        ),
        (
            "[[pools]]\nworkers = [{count = 1}, {count = 1, block_size = 16}]",
            "pools[0].workers[1].block_size: got 16, but the first group of the pool has 64",
        ),
        (
            "[[pools]]\nworkers = [{count = 1, gpus = inf}]",
            "pools[0].workers[0].gpus: must be a finite number, got inf",
        ),
        ("pools = " + "[" * 5_000, "not TOML: maximum recursion depth exceeded"),
        ("[[pools]]\nworkers = [{count = 1" + "0" * 5_000 + "}]", "not TOML: Exceeds the limit"),
        (
            POOL.replace("[[pools]]", "[[pools]]\nrole = 'encode'"),
            "pools[0].role: must be one of aggregated, decode, prefill",
        ),
        (
            POOL.replace("[[pools]]", "[[pools]]\nrole = 'prefill'"),
            "pools[0].role: prefill pool 'default' needs a pool with role 'decode'",
        ),
        (
            APART.replace("[\n", '[\n    {name = "q", role = "prefill", workers = [{count = 1}]},\n', 1),
            "pools[1].model: pools 'q' and 'p' both compute prompts for model 'simulated'",
        ),
        (
            APART.replace("count = 1", "count = 1, block_size = 16"),
            "pools[0].workers[0].block_size: got 64, but decode",
        ),
        (POOL + "[transfer]\nkv_transfer_bandwidth = -1", "transfer.kv_transfer_bandwidth: must be a number from 0"),
        (POOL + "[life]\nmtbf = 3", "life: unknown key 'mtbf'; did you mean mtbf_s?"),
        (POOL + "[life]\nmtbf_s = 0.1", "life.mtbf_s: got 0.1; must be 0 or at least 1 s"),
        (POOL + "[[faults]]\nworker = 'mock-3'\nat_s = 1", "faults[0].worker: unknown worker 'mock-3'"),
        (POOL + "[[faults]]\nworker = 'mock-2'\nat_s = -1", "faults[0].at_s: must be a number from 0"),
        (
            POOL + "[[starts]]\nat_s = 9\n[[faults]]\nworker = 'mock-3'\nat_s = 1",
            "faults[0].at_s: worker mock-3 starts at 9 s",
        ),
        (POOL + "[[starts]]\nat_s = 9\npool = 'x'", "starts[0].pool: unknown pool 'x'"),
        ("delays = 'slow'\n" + POOL, "delays: unknown delay profile 'slow'; delay profiles are: none, embedded, kafka"),
        (POOL + "[delays]\nwork = {fixed_ms = -1}", "delays.work.fixed_ms: must be a number from 0"),
        (
            POOLS.replace('name = "long"', 'name = "long"\nrole = "decode"'),
            "pools[1].model: pools 'short' and 'long' both serve model 'simulated'; remove one of them",
        ),
        (
            POOLS.replace("count = 2", "count = 2, block_size = 16") + GRID,
            "pools[1].workers[0].block_size: got 16, but aggregated pool 'short' has 64; a model has one block size",
        ),
        (POOLS + GRID.replace("simulated", "other"), "models[0].name: unknown model 'other'; models are: simulated"),
        (POOLS + GRID + GRID, "models[1].name: duplicate model 'simulated'"),
        (
            POOLS + GRID.replace("short", "fast"),
            "models[0].grids[0].pools: unknown aggregated pool 'fast'; aggregated pools are: short, long",
        ),
        (POOLS + GRID.replace("isl_max", "isl_mx"), "models[0].grids[0]: unknown key 'isl_mx'; did you mean isl_max?"),
        (POOLS + GRID.replace("2048", "0"), "models[0].grids[0]: isl_max is 0; it must be above isl_min, 0"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'fleet.toml'}: {reason}")


def test_error_names_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_fleet(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"x\.toml: not TOML"):
        load_fleet(tmp_path / "x.toml")


# Several pools of one model


S = 1_000_000


def run_file(folder: Path, text: str, *turns: Turn) -> SimulationOutcome:
    outcome = run(load(folder, text), *turns)
    assert not outcome.requests.failures
    return outcome


def test_requests_follow_the_grid_and_the_summary_counts_them_by_pool(tmp_path: Path) -> None:
    blocks = tuple(range(32))
    long = [turn(number, 2048, block_ids=blocks, at_us=number * S) for number in range(4)]
    short = [turn(4, 64, at_us=9 * S)]
    outcome = run_file(tmp_path, POOLS + GRID, *long, *short)
    assert [outcome.pools[one.worker or 0] for one in outcome.requests] == ["long"] * 4 + ["short"]
    by_pool = summary(outcome, 3)["pools"]
    assert {name: one["requests"] for name, one in by_pool.items()} == {"short": 1, "long": 4}
    cached = [one.cached_tokens for one in outcome.requests]
    assert by_pool["long"]["prefix_reuse"] == sum(cached) / (4 * 2048) > 0.5
    assert by_pool["short"]["prefix_reuse"] == 0.0
    assert by_pool["short"]["ttft_ms"]["mean"] == (outcome.requests[4].first_us - 9 * S) / 1e3


def test_a_model_with_one_pool_has_no_summary_by_pool(tmp_path: Path) -> None:
    text = "[[pools]]\nworkers = [{ count = 2 }]\n"
    assert "pools" not in summary(run_file(tmp_path, text, turn(0)), 2)
