"""`forebay simulate --against` a recording of workers with tiers: reuse by tier."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.events.control import RouterConfig
from forebay.simulate.tiers.settings import DiskTier, FleetTiers, HostTier, StoreTier
from tests.replay.recorded import write
from tests.replay.simulated import played
from tests.simulate.traces import conversations

SIZES = {"host": "900blocks", "disk": "1500blocks", "store": "4000blocks"}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose engines and tiers are the simulator's own."""
    tiers = FleetTiers(
        host=HostTier(size=SIZES["host"]), disk=DiskTier(size=SIZES["disk"]), store=StoreTier(size=SIZES["store"])
    )
    rows = conversations(sessions=11, turns=6, every_ms=2_000)
    run = played(rows, RouterConfig(), workers=2, blocks=512, tiers=tiers)
    path = tmp_path_factory.mktemp("tiers") / "run.db"
    asyncio.run(write(run.log, path))
    return path


def against(recording: Path, *options: str) -> tuple[int, str, str]:
    given = CliRunner().invoke(app, ["simulate", "--against", str(recording), *options])
    assert given.exception is None or isinstance(given.exception, SystemExit), given.exception
    return given.exit_code, given.stdout, given.stderr


def found(recording: Path, *options: str) -> dict[str, Any]:
    code, out, err = against(recording, *options, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)["simulated"][0]
    return result


def test_the_tiers_of_a_simulated_recording_are_reproduced_exactly(recording: Path) -> None:
    options = [part for tier, size in SIZES.items() for part in (f"--kv-{tier}-size", size)]
    run = found(recording, *options)
    assert list(run["tiers"]) == ["device", "host", "disk", "store", "computed"]
    assert {metric["error"] for metric in run["tiers"].values()} == {0.0}
    assert {metric["error"] for of in run["times"].values() for metric in of.values()} == {0.0}
    assert run["tiers"]["host"]["observed"] > 0.05
    _, table, _ = against(recording, *options)
    assert "from host" in table


def test_without_tiers_a_simulation_loads_nothing(recording: Path) -> None:
    run = found(recording)
    assert run["tiers"]["host"]["observed"] > run["tiers"]["host"]["simulated"] == 0.0
    assert run["tiers"]["computed"]["error"] > 1.0
    smaller = found(recording, "--kv-host-size", "1GB", "--kv-bytes-per-token", "32768")
    assert 0.0 < smaller["tiers"]["host"]["simulated"] < run["tiers"]["host"]["observed"]


def test_bytes_per_token_need_a_tier(recording: Path) -> None:
    code, _, err = against(recording, "--kv-bytes-per-token", "32768")
    assert code == 2
    assert "--kv-bytes-per-token cannot be combined with --against" in err
    code, _, err = against(recording, "--kv-host-size", "1KB")
    assert code == 2
    assert "--kv-host-size: got a size of 1KB, but one block has 8388608 bytes" in err
