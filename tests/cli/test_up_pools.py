"""`forebay up` with several pools: requests follow the grid, a canary and drains, and the log explains each choice."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.in_process import forebay
from tests.cli.up import ADMIN, ADMIN_TOKEN, PATIENCE_S, Up, running, verified

pytestmark = pytest.mark.timeout(180)

RULES = """
[[models]]
name = "forebay-default"

[[models.grids]]
isl_max = 400
target_max_ms = 1000
pools = [{ pool = "short", priority = 0 }, { pool = "long", priority = 1 }]
cells = [["short"], ["long"]]
"""
SHORT, LONG = "once upon a time", "word " * 300
POOL_OF = {"mock-0": "short", "mock-1": "long"}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the token that `Up` requires."""
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", ADMIN_TOKEN)


def pools(log: Path) -> tuple[str, ...]:
    return ("--log", str(log), "--pool-workers", "short=1", "--pool-workers", "long=1", "--admin-api")


def control(up: Up, *arguments: str) -> dict[str, Any]:
    run = forebay("control", *arguments, "--url", up.url, "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def complete(up: Up, prompt: str, name: str = "") -> str:
    """Return the pool that served a completion."""
    body = {"model": "forebay-default", "prompt": prompt, "max_tokens": 4}
    headers = {"x-request-id": name} if name else {}
    response = httpx.post(f"{up.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    return POOL_OF[response.json()["forebay"]["worker"]]


def choice(up: Up, name: str) -> str:
    """Return the explanation of the choice of a pool for a request."""
    explained = httpx.get(f"{up.url}/v1/requests/{name}/explain", timeout=60).json()
    (text,) = [entry["text"] for entry in explained["timeline"] if entry["what"] == "pool_chosen"]
    return str(text)


def test_requests_follow_the_grid_a_canary_and_a_drain_and_nothing_is_lost(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    with running(*pools(log), "--pool-routing", str(rules)) as up, ThreadPoolExecutor(4) as threads:
        assert (complete(up, SHORT, "by-grid"), complete(up, LONG)) == ("short", "long")
        assert choice(up, "by-grid").startswith("pool short: the grid names short")

        control(up, "pools", "--pool", "long", "--base", "short", "--share", "1")
        assert complete(up, SHORT, "by-canary") == "long"
        assert choice(up, "by-canary").startswith("pool long: long is a canary of short")
        control(up, "pools", "--pool", "long", "--base", "short", "--share", "0.5")
        assert {complete(up, SHORT) for _ in range(40)} == {"short", "long"}  # all in one: 1 in 10**12
        control(up, "pools", "--pool", "long", "--remove")
        assert {complete(up, SHORT) for _ in range(5)} == {"short"}

        control(up, "power", "pause", "--pool", "short")
        waiting: list[Future[str]] = [threads.submit(complete, up, SHORT) for _ in range(3)]
        until(up, lambda status: in_flight(status, "mock-0") == 3)
        control(up, "drain", "short")
        assert complete(up, SHORT, "by-drain") == "long"
        assert choice(up, "by-drain").startswith("pool long: the grid names short")
        assert "; short is drain" in choice(up, "by-drain")
        control(up, "power", "resume", "--pool", "short")
        assert [one.result() for one in waiting] == ["short"] * 3
        control(up, "drain", "short", "--remove")
        assert complete(up, SHORT) == "short"
        counted = choices(up)
        assert counted["short", "grid"] >= 4
        assert counted["long", "canary"] >= 2
    assert verified(log)["decisions"]


def test_requests_that_are_queued_in_a_drained_pool_move_and_none_is_lost(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    one_each = ("--max-num-seqs", "1", "--router-queue-run-ahead", "0", "--pool-routing", str(rules))
    with running(*pools(log), *one_each) as up, ThreadPoolExecutor(4) as threads:
        control(up, "power", "pause")
        waiting: list[Future[str]] = [threads.submit(complete, up, SHORT, f"short-{number}") for number in range(3)]
        until(up, lambda status: status["requests"]["queued"] == 2)
        blocking = threads.submit(complete, up, LONG)
        until(up, lambda status: status["requests"]["in_flight"] == 4)
        control(up, "drain", "short")
        control(up, "power", "resume", "--pool", "long")
        assert blocking.result() == "long"
        moved = list(islice(as_completed(waiting, timeout=PATIENCE_S), 2))
        assert [one.result() for one in moved] == ["long"] * 2
        control(up, "power", "resume", "--pool", "short")
        assert sorted(one.result() for one in waiting) == ["long", "long", "short"]
    assert verified(log)["decisions"]


def choices(up: Up) -> dict[tuple[str, str], float]:
    """Return the counted choices of pools by pool and reason."""
    families = text_string_to_metric_families(httpx.get(f"{up.url}/metrics", timeout=30).text)
    samples = (sample for family in families for sample in family.samples)
    name = "forebay_router_pool_choices_total"
    return {(one.labels["pool"], one.labels["reason"]): one.value for one in samples if one.name == name}


def until(up: Up, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the status of the system fulfils a condition."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        status = httpx.get(f"{up.url}/v1/status", timeout=30).json()
        if reached(status):
            return
        time.sleep(0.02)
    raise AssertionError(status)


def in_flight(status: dict[str, Any], worker: str) -> int:
    (ranks,) = (one["ranks"] for one in status["workers"] if one["worker_id"] == worker)
    return sum(rank["active_requests"] for rank in ranks)


def test_the_file_replaces_rules_of_the_log_at_each_start_and_canaries_stay(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    with running(*pools(log)) as up:
        assert (complete(up, SHORT), complete(up, LONG)) == ("long", "long"), "without rules the first pool serves"
        shown = control(up, "pools", "--pool-routing", str(rules))
        assert [grid["cells"] for grid in shown["grids"]] == [[["short"], ["long"]]]
        control(up, "pools", "--pool", "long", "--base", "short", "--share", "0")
        assert complete(up, LONG) == "long"
    with running(*pools(log)) as up:
        assert control(up, "pools")["grids"] == shown["grids"]
    rules.write_text(RULES.replace('[["short"], ["long"]]', '[["long"], ["short"]]'))
    with running(*pools(log), "--pool-routing", str(rules)) as up:
        assert complete(up, LONG) == "short"
        listed = httpx.get(f"{up.url}/v1/pools", headers=ADMIN, timeout=30).json()
        assert [one["canary"] for one in listed["pools"]] == [{"base": "short", "share": 0.0}, None]
    assert verified(log)["decisions"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool-workers", "a=1", "--workers", "2"), "--workers cannot be combined with --pool-workers"),
        (("--pool-workers", "a=1", "--pool-workers", "a=2"), "--pool-workers a=2: the name a appears twice"),
        (("--pool-workers", "a"), "--pool-workers a: expected NAME=COUNT, a pool and its number of workers from 1"),
        (("--pool-workers", "a=0"), "--pool-workers a=0: expected NAME=COUNT, a pool and its number of workers from 1"),
        (("--pool-workers", "a b=1"), "--pool-workers: the pool name 'a b' cannot be used: it is part of Kafka topics"),
        (
            ("--pool-workers", "a=1", "--pool-routing", "RULES"),
            "--pool-routing RULES: unknown pool 'short'; pools are: a",
        ),
        (("--model-name", "m", "--pool-routing", "RULES"), "--pool-routing: RULES: unknown model 'm'"),
        (("--pool-routing", "none.toml"), "--pool-routing: none.toml: No such file or directory"),
        (
            ("--pool-workers", "a=1000", "--dp-size", "8"),
            "1000 workers with --dp-size 8 are 8000 ranks; the maximum is 4096",
        ),
    ],
)
def test_contradictory_pools_are_rejected_in_one_line(options: tuple[str, ...], message: str, rules: Path) -> None:
    run = forebay("up", *(option.replace("RULES", str(rules)) for option in options))
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith(f"forebay: {message.replace('RULES', str(rules))}")
