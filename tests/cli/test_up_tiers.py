"""`forebay up` with KV tiers: responses equal those without tiers, and KV survives a restart."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import dashboard
from tests.cli.up import Up, running, verified

pytestmark = pytest.mark.timeout(180)

# A block of 16 tokens takes 16 ms to compute, so that loading it is faster.
PROFILE = 'kind = "linear"\ncosts_us = { step = 500, prefill_token = 1000, decode_step = 2000 }\n'
SIZES = ("--block-size", "16", "--kv-blocks", "10", "--speedup", "1", "--workers", "2")
PROMPTS = [[number * 31 + place * 7 for place in range(120)] for number in range(6)]


@contextmanager
def tiered(folder: Path, *options: str) -> Iterator[Up]:
    """Run two workers with disks and a shared directory in `folder`."""
    profile = folder / "engine.toml"
    profile.write_text(PROFILE)
    tiers = (
        "--kv-tier",
        f"disk:path={folder / 'disks'},io=plain,filter=off",
        "--kv-tier",
        f"store:path={folder / 'store'}",
    )
    with running("--engine-profile", str(profile), *SIZES, *tiers, *options) as up:
        yield up


def texts(up: Up) -> list[str]:
    found = []
    for prompt in PROMPTS:
        body = {"model": "forebay-default", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        response = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == httpx.codes.OK, response.text
        found.append(response.json()["choices"][0]["text"])
    return found


def samples(up: Up) -> list[Any]:
    text = httpx.get(f"{up.url}/metrics", timeout=10).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def metric(up: Up, name: str) -> float:
    return float(sum(sample.value for sample in samples(up) if sample.name == name))


@pytest.mark.slow
def test_tiers_of_up_survive_a_restart(tmp_path: Path) -> None:
    with running(*SIZES) as up:
        expected = texts(up)
    log = tmp_path / "log.db"
    with tiered(tmp_path, "--log", str(log), "--kv-tier", "host:size=1MB") as up:
        assert texts(up) == expected
        assert texts(up) == expected
        assert metric(up, "kvbm_matched_tokens") > 0, "device memory has room for one prompt per worker"
        assert metric(up, "kvbm_offload_blocks_d2h") > 0
        assert metric(up, "kvbm_offload_blocks_h2d") > 0
        assert metric(up, "kvbm_offload_blocks_h2o") > 0
        shown = {sample.name: {*sample.labels} for sample in samples(up)}
        queries = dashboard.queries()[dashboard.TIERS]
        assert queries
        for query in queries:
            for name in dashboard.metrics(query) - {"forebay_tier_misses_total"}:  # there are none
                assert name in shown, query
                assert "worker_id" in shown[name]
        up.end(signal.SIGKILL)
    assert sorted(folder.name for folder in (tmp_path / "disks").iterdir()) == ["mock-0", "mock-1"]
    with tiered(tmp_path, "--log", str(log)) as up:
        assert texts(up) == expected
        assert metric(up, "kvbm_onboard_blocks_d2d") + metric(up, "kvbm_onboard_blocks_o2d") > 0
        assert up.end(signal.SIGTERM) == 0
    verified(log)


def test_two_processes_cannot_share_a_disk(tmp_path: Path) -> None:
    refused = pytest.raises(AssertionError, match="A disk tier belongs to one worker rank")
    with tiered(tmp_path), refused, tiered(tmp_path):
        pass
