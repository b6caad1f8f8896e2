"""`forebay simulate` and `forebay sweep` with KV tiers: options, fleet files, engine profiles and output."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forebay.cli.app import app
from tests.simulate.traces import conversations, write

pytestmark = pytest.mark.timeout(120)
SMALL = ("--workers", "2", "--kv-blocks", "300", "--policy", "kv")
HOST = ("--kv-tier", "host:size=2000blocks")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=8, turns=4))


def forebay(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def result(trace: Path, *options: object) -> dict[str, Any]:
    run = forebay("simulate", trace, "--json", *options)
    assert run.exit_code == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_tiers_are_reported_only_if_there_are_any(trace: Path) -> None:
    plain = result(trace, *SMALL)
    assert "tiers" not in plain["policies"]["kv"]
    assert "tiers" not in plain["settings"]
    assert "tiers" not in plain["settings"]["pools"][0]["groups"][0]
    tiered = result(trace, *SMALL, *HOST)
    assert tiered["settings"]["tiers"]["host"]["size"] == "2000blocks"
    assert "tiers" not in tiered["settings"]["pools"][0]["groups"][0]
    tiers = tiered["policies"]["kv"]["tiers"]
    assert tiers["tokens"]["host"] > 0
    assert sum(tiers["tokens"].values()) == tiered["policies"]["kv"]["prompt_tokens"]
    assert sum(tiers["shares"].values()) == pytest.approx(1.0)
    assert tiered["policies"]["kv"]["prefix_reuse"] == pytest.approx(1.0 - tiers["shares"]["computed"])
    assert tiered == result(trace, *SMALL, *HOST)
    assert result(trace, *SMALL, "--kv-tier", "host:size=0")["policies"] == plain["policies"]
    table = forebay("simulate", trace, *SMALL, *HOST).stdout
    assert "prompt tokens by tier" in table
    assert f"{tiers['shares']['host']:.4f}" in table


def test_files_define_tiers_and_options_resize_them(trace: Path) -> None:
    profile = trace.with_name("engine.toml")
    profile.write_text('kind = "mocker"\n[sizes]\nkv_blocks = 300\n[tiers.host]\nsize = "16GB"\nbandwidth = 50.0\n')
    fleet = trace.with_name("fleet.toml")
    fleet.write_text(
        '[[pools]]\nworkers = [{count = 1, engine_profile = "engine.toml"}, {count = 1, kv_blocks = 300}]\n'
        '[tiers.host]\nsize = "8GB"\n[tiers.store]\nsize = "1TB"\nbandwidth = 3\nlatency_us = 900\nfilter = false\n'
        "[transfer]\nkv_bytes_per_token = 65536\n"
    )
    settings = result(trace, "--fleet", fleet, "--policy", "kv")["settings"]
    first, second = settings["pools"][0]["groups"]
    assert first["tiers"]["host"] == {
        "size": "16GB", "bandwidth": 50.0, "latency_us": 20, "write": "through", "filter": None,
    }  # fmt: skip
    assert "tiers" not in second
    assert settings["tiers"]["host"]["size"] == "8GB"
    assert (settings["tiers"]["store"]["bandwidth"], settings["tiers"]["store"]["filter"]) == (3.0, False)
    resized = result(trace, "--fleet", fleet, "--policy", "kv", "--kv-tier", "host:size=4GB")["settings"]
    assert resized["pools"][0]["groups"][0]["tiers"]["host"] == {**first["tiers"]["host"], "size": "4GB"}
    assert resized["tiers"] == {**settings["tiers"], "host": {**settings["tiers"]["host"], "size": "4GB"}}


def test_a_sweep_varies_sizes(trace: Path) -> None:
    options = ("--set", "kv_host_size=0,300blocks,3000blocks", "--workers", 1, "--kv-blocks", 300, "--policy", "kv")
    runs = {
        run["set"]["kv_host_size"]: run
        for run in json.loads(forebay("sweep", trace, *options, "--json").stdout)["runs"]
    }
    assert "tiers" not in runs["0"]
    loaded = [runs[size]["tiers"]["tokens"]["host"] for size in ("300blocks", "3000blocks")]
    assert 0 <= loaded[0] < loaded[1]
    assert runs["3000blocks"]["prefix_reuse"] > runs["0"]["prefix_reuse"]
    table = forebay("sweep", trace, *options).stdout
    assert "host/disk/store" in table


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[tiers.host]\nsize = "1MB"\n', "tiers.host: got a size of 1MB, but one block has 8388608 bytes"),
        ('[tiers.host]\nsize = "big"\n', "tiers.host: got 'big', expected a size with a unit"),
        ("[tiers.disk]\nbandwidth = 3\n", "tiers.disk.size: missing key"),
        ('[tiers.ram]\nsize = "1GB"\n', "tiers: unknown key 'ram'"),
        ('[tiers.store]\nsize = "1GB"\nspeed = 3\n', "tiers.store: unknown key 'speed'"),
        ('[tiers.store]\nsize = "1GB"\nbandwidth = -1\n', "tiers.store.bandwidth: expected `float` >= 0"),
    ],
)
def test_errors_name_the_file_and_the_key(trace: Path, text: str, reason: str) -> None:
    fleet = trace.with_name("fleet.toml")
    fleet.write_text(f"[[pools]]\nworkers = [{{count = 1}}]\n{text}")
    run = forebay("simulate", trace, "--fleet", fleet)
    assert run.exit_code == 2
    assert run.stderr.startswith(f"forebay: {fleet}: {reason}".replace("`", "")), run.stderr


def test_errors_name_the_option(trace: Path) -> None:
    for tier in ("host", "disk", "store"):
        size = ("simulate", trace, "--kv-tier", f"{tier}:size=")
        assert f"--kv-tier {tier}: got 'x', expected a size" in forebay(*size[:-1], f"{size[-1]}x").stderr
        assert f"--kv-tier {tier}: got a size of 1KB" in forebay(*size[:-1], f"{size[-1]}1KB").stderr
    assert "unknown kind of tier 'hosts'" in forebay("simulate", trace, "--kv-tier", "hosts:size=1GB").stderr
    profile = trace.with_name("engine.toml")
    profile.write_text('kind = "mocker"\n[tiers.disk]\nsize = "1KB"\n')
    run = forebay("simulate", trace, "--engine-profile", profile)
    assert f"{profile}: tiers.disk: got a size of 1KB" in run.stderr
    profile.write_text('kind = "mocker"\n[tiers.store]\nsize = "1TB"\n')
    assert "unknown key 'store'" in forebay("simulate", trace, "--engine-profile", profile).stderr
