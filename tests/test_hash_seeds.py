"""Replay, explanation and simulation give equal results in processes with different hash seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hash_seeds import JOBS

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ("0", "12345")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, str]]:
    """Return the results of the jobs by name, for each seed."""
    command = [sys.executable, "-c", "from tests.hash_seeds import main; main()"]
    found = []
    for seed in SEEDS:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout))
    return found


@pytest.mark.parametrize("job", JOBS)
def test_results_do_not_depend_on_the_hash_seed(outputs: list[dict[str, str]], job: str) -> None:
    first, second = (found[job] for found in outputs)
    assert first
    assert first == second


def test_the_processes_used_different_seeds(outputs: list[dict[str, str]]) -> None:
    assert tuple(found["hash seed"] for found in outputs) == SEEDS
