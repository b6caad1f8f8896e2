"""`forebay trace` against more than one door."""

import json
from pathlib import Path

import httpx
import pytest

from infra.local import free_ports
from tests.cli.test_up import Up, forebay, running

REQUESTS = 20

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps({"timestamp": 10 * at, **row}) + "\n" for at in range(REQUESTS)))
    return path


def answered(up: Up) -> int:
    """Requests that this system answered well."""
    lines = httpx.get(f"{up.url}/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("dynamo_frontend_requests_total{") and "success" in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in counts))


def test_requests_take_turns_at_several_systems(trace: Path) -> None:
    with running("--workers", "1") as one, running("--workers", "1") as two:
        run = forebay("trace", str(trace), "--url", one.url, "--url", f"{two.url}/", "--json")
        assert run.returncode == 0, run.stderr
        assert [answered(one), answered(two)] == [REQUESTS // 2] * 2
    summary = json.loads(run.stdout)
    counted = {name: summary[name] for name in ("requests", "failed", "answered_once", "answered_again")}
    assert counted == {"requests": REQUESTS, "failed": 0, "answered_once": REQUESTS, "answered_again": 0}


def test_a_system_that_is_not_there_is_named(trace: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    run = forebay("trace", str(trace), "--url", url)
    assert (run.returncode, f"{url} does not answer" in run.stderr) == (2, True)
