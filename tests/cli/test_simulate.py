"""`forebay simulate` from a shell: the same answer from every process, and what it does not take."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.simulate.mooncake import Row
from tests.simulate.traces import conversations, write

COMMAND = (sys.executable, "-c", "from forebay.cli.app import main; main()", "simulate")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", conversations(sessions=5, turns=4))


def printed(trace: Path, *arguments: str, hash_seed: int = 0, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [*COMMAND, str(trace), "--json", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_one_object_whatever_the_hash_seed_and_however_many_processes(trace: Path) -> None:
    both = printed(trace, "--workers", "4", hash_seed=1)
    assert printed(trace, "--workers", "4", hash_seed=2) == both
    result: dict[str, Any] = json.loads(both)
    assert list(result["policies"]) == ["kv", "round-robin"]
    assert result["settings"] == {
        "trace": "trace.jsonl",
        "workers": 4,
        "block_size": 64,
        "blocks": 16_384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "speed": 1.0,
        "seed": 0,
        "duration_s": None,
    }
    alone = json.loads(printed(trace, "--workers", "4", "--policy", "round-robin"))
    assert alone["policies"]["round-robin"] == result["policies"]["round-robin"]
    assert alone["digest"] != result["digest"]


def test_a_policy_of_the_user_is_found_where_the_user_stands(trace: Path) -> None:
    source = (
        "class Last:\n    def decide(self, world, request):\n        return len(world.candidates) - 1\n"
        "class First:\n    def decide(self, world, request):\n        return 0\n"
    )
    (trace.parent / "mine.py").write_text(source)
    names = ("mine.Last", "mine.First")
    result = json.loads(printed(trace, "--policy", names[0], "--policy", names[1], "--workers", "2", cwd=trace.parent))
    count = len(conversations(sessions=5, turns=4))
    requests = [[worker["requests"] for worker in result["policies"][name]["workers"]] for name in names]
    assert requests == [[0, count], [count, 0]]


def test_the_table_names_every_policy_and_its_figures(trace: Path) -> None:
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--duration-s", "1"])
    assert run.exit_code == 0
    assert "kv" in run.stdout
    assert "digest" in run.stdout
    assert "14 requests under 1 policies" in run.stderr


def test_requests_that_fit_nowhere_are_named_and_end_in_exit_code_1(tmp_path: Path) -> None:
    rows = [Row(at, 1024, 1, [at, at + 1]) for at in range(7)]
    trace = write(tmp_path / "trace.jsonl", [*rows, Row(9, 64, 1, [1])])
    run = CliRunner().invoke(app, ["simulate", str(trace), "--policy", "kv", "--blocks", "4"])
    assert run.exit_code == 1
    assert "kv: request 5 failed: 1024 prompt tokens and 1 to generate need 17 KV blocks" in run.stdout
    assert "kv: and 2 more" in run.stdout
    assert "request 8 failed" not in run.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "kw"], "there is no policy 'kw'"),
        (["--policy", "direct"], "the requests of a trace name no workers"),
        (["--policy", "kv:speed=2"], "'speed=2' is no setting=value"),
        (["--max-num-batched-tokens", "10"], "max_num_batched_tokens (10) must be at least max_num_seqs (256)"),
        (["--duration-s", "0.001"], "holds no request"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(tmp_path: Path, arguments: list[str], reason: str) -> None:
    trace = write(tmp_path / "trace.jsonl", [Row(50, 64, 1, [1])])
    run = CliRunner().invoke(app, ["simulate", str(trace), *arguments])
    assert run.exit_code == 2
    assert reason in run.stderr
    assert run.stderr.count("\n") == 1
