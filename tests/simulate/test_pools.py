"""Simulated fleets with several pools of one model: grids, canaries and drains at scheduled times."""

from pathlib import Path
from typing import Any

import pytest

from forebay.simulate.fleet_file import FleetUnusable, load_fleet
from forebay.simulate.outcome import SimulationOutcome, summary
from forebay.simulate.settings import Settings, policy
from forebay.simulate.simulation import Simulation
from tests.simulate.fleets import Turns, turn

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
CANARY = "[[canaries]]\npool = 'long'\nbase = 'short'\nshare = 0.5\nat_s = 10\nend_s = 20\n"
DRAIN = "[[drains]]\npool = 'short'\nat_s = 30\nend_s = 40\n"
S = 1_000_000


def settings(folder: Path, text: str) -> Settings:
    (folder / "fleet.toml").write_text(text)
    return load_fleet(folder / "fleet.toml")


def run(folder: Path, text: str, *turns: Any) -> SimulationOutcome:
    outcome = Simulation(settings(folder, text), policy("kv")).run(Turns(*turns), lambda _: None)
    assert not outcome.requests.failures
    return outcome


def pools_of(outcome: SimulationOutcome, begin_s: float, end_s: float) -> set[str]:
    """Return the pools of the requests that arrived in a period."""
    found = (one for one in outcome.requests if begin_s * S <= one.arrived_us < end_s * S)
    return {outcome.pools[one.worker] for one in found if one.worker is not None}


def test_requests_follow_the_grid_and_the_summary_counts_them_by_pool(tmp_path: Path) -> None:
    blocks = tuple(range(32))
    long = [turn(number, 2048, block_ids=blocks, at_us=number * S) for number in range(4)]
    short = [turn(4, 64, at_us=9 * S)]
    outcome = run(tmp_path, POOLS + GRID, *long, *short)
    assert [outcome.pools[one.worker or 0] for one in outcome.requests] == ["long"] * 4 + ["short"]
    by_pool = summary(outcome, 3)["pools"]
    assert {name: one["requests"] for name, one in by_pool.items()} == {"short": 1, "long": 4}
    cached = [one.cached_tokens for one in outcome.requests]
    assert by_pool["long"]["prefix_reuse"] == sum(cached) / (4 * 2048) > 0.5
    assert by_pool["short"]["prefix_reuse"] == 0.0
    assert by_pool["short"]["ttft_ms"]["mean"] == (outcome.requests[4].first_us - 9 * S) / 1e3


def test_a_canary_and_a_drain_apply_between_their_start_and_end(tmp_path: Path) -> None:
    turns = [turn(number, 64, at_us=number * S // 4) for number in range(200)]
    outcome = run(tmp_path, POOLS + GRID + CANARY + DRAIN, *turns)
    assert pools_of(outcome, 0, 10) == {"short"}
    assert pools_of(outcome, 10, 20) == {"short", "long"}
    assert pools_of(outcome, 20, 30) == {"short"}
    assert pools_of(outcome, 30, 40) == {"long"}
    assert pools_of(outcome, 40, 50) == {"short"}
    reasons = {routed.pools[0].reason for routed in outcome.routed.values()}
    assert reasons == {"grid", "canary"}


def test_a_model_with_one_pool_has_no_summary_by_pool(tmp_path: Path) -> None:
    text = "[[pools]]\nworkers = [{ count = 2 }]\n"
    assert "pools" not in summary(run(tmp_path, text, turn(0)), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POOLS, "pools[1].model: pools 'short' and 'long' both serve model 'simulated'; remove one of them, or add"),
        (
            POOLS.replace('name = "long"', 'name = "long"\nrole = "decode"') + DRAIN,
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
        (POOLS + GRID + CANARY.replace("long", "x"), "canaries.pool: unknown pool 'x'; pools are: short, long"),
        (POOLS + GRID + CANARY.replace("'short'", "'long'"), "canaries.base: unknown pool 'long'; pools are: short"),
        (POOLS + GRID + CANARY.replace("0.5", "2"), "canaries[0].share: expected float <= 1.0"),
        (POOLS + GRID + DRAIN.replace("40", "30"), "drains[0].end_s: got 30; it must be above at_s, 30"),
        (POOLS + GRID + DRAIN.replace("short", "x"), "drains.pool: unknown pool 'x'; pools are: short, long"),
    ],
)
def test_contradictory_rules_are_rejected_by_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FleetUnusable) as raised:
        settings(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'fleet.toml'}: {message}")
