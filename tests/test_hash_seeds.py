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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, str]]:
    """Return the results of the jobs by name, for each seed. Both processes run at the same time."""
    command = [sys.executable, "-c", "from tests.hash_seeds import main; main()"]
    path = os.pathsep.join((str(ROOT), *sys.path))
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "".join(stderr for _, stderr in results)
    return [json.loads(stdout) for stdout, _ in results]


@pytest.mark.parametrize("job", JOBS)
def test_results_do_not_depend_on_the_hash_seed(outputs: list[dict[str, str]], job: str) -> None:
    first, second = (found[job] for found in outputs)
    assert first
    assert first == second


def test_the_processes_used_different_seeds(outputs: list[dict[str, str]]) -> None:
    assert tuple(found["hash seed"] for found in outputs) == SEEDS
