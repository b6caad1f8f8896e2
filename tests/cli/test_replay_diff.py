"""`forebay replay diff`: tables, JSON and errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.codec import decode, encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from tests.cli.logs import invoke
from tests.core.worlds import PROMPTS, Driver, request
from tests.replay.mutations import read_more
from tests.replay.recorded import MemoryLog, log_of, write
from tests.replay.simulated import played
from tests.simulate.traces import conversations

COMMAND = ["replay", "diff"]


@pytest.fixture(scope="module")
def history() -> MemoryLog:
    """Return the log of a simulated run, which the simulator can reproduce."""
    return played(conversations(sessions=11, turns=6, every_ms=2_000), RouterConfig(), workers=3, blocks=1_024).log


@pytest.fixture(scope="module")
def recording(history: MemoryLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "run.db"
    asyncio.run(write(history, path))
    return path


def run_diff(*arguments: Any) -> tuple[int, str, str]:
    run = invoke(*COMMAND, *arguments)
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, run.stdout, run.stderr


def found(*arguments: Any) -> dict[str, Any]:
    code, out, err = run_diff(*arguments, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def error_line(*arguments: Any) -> str:
    code, out, err = run_diff(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line


def test_table_shows_moved_requests_and_notes(recording: Path) -> None:
    code, out, _ = run_diff(recording, "--policy", "round-robin")
    assert code == 0
    for text in ("--policy round-robin", "fork", "requests went to another worker", "Open loop"):
        assert text in out
    assert "w0/0" in out


def test_set_without_effect_is_reported(recording: Path) -> None:
    report = found(recording, "--set", "temperature=0")
    assert report["idle"] == ["--set temperature=0"]
    assert report["identical"]
    assert report["state"] == report["other_state"]
    _, out, _ = run_diff(recording, "--set", "temperature=0")
    assert "equal to the recorded configuration" in out


def test_invalid_comparisons_are_rejected(recording: Path, tmp_path: Path) -> None:
    policy = ("--policy", "random")
    assert "no change; pass" in error_line(recording)
    assert "unknown field" in error_line(recording, "--set", "heat=1")
    assert "unknown pool 'p'; pools are: default" in error_line(recording, "--set", "p:temperature=1")
    assert "--allow: unknown check 'anything'; checks are: " in error_line(recording, *policy, "--allow", "anything")
    assert "expected either a log file or --kafka" in error_line(*policy)
    assert str(tmp_path / "none.db") in error_line(tmp_path / "none.db", *policy)


def test_other_grids_name_recorded_models_and_pools(recording: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    grid = "isl_max = 9\ntarget_max_ms = 9\npools = [{pool = 'P', priority = 0}]\ncells = [['P']]\n"
    text = f"[[models]]\nname = 'm'\n[[models.grids]]\n{grid}"
    rules.write_text(text.replace("P", "default"))
    report = found(recording, "--pool-routing", rules, "--no-canaries")
    assert (report["identical"], report["alternative"]) == (True, f"--pool-routing {rules} --no-canaries")
    rules.write_text(text.replace("P", "deflt"))
    assert "unknown aggregated pool 'deflt'; did you mean default?" in error_line(recording, "--pool-routing", rules)
    rules.write_text(text.replace("'m'", "'other'"))
    assert "unknown model 'other'; " in error_line(recording, "--pool-routing", rules)
    rules.write_text("[[models]]\nnme = 'x'")
    assert f"--pool-routing: {rules}: models[0]: unknown key 'nme'" in error_line(recording, "--pool-routing", rules)


def test_a_diverging_history_is_not_compared(history: MemoryLog, tmp_path: Path) -> None:
    journal = list(history.topics[DECISIONS.name])
    at = 9
    record = decode(DECISIONS, journal[at])
    assert isinstance(record, RequestRouted)
    journal[at] = encode(DECISIONS, msgspec.structs.replace(record, rank=record.rank + 1))
    log = MemoryLog()
    log.topics = {**history.topics, DECISIONS.name: journal}
    path = tmp_path / "changed.db"
    asyncio.run(write(log, path))
    code, out, err = run_diff(path, "--policy", "random")
    assert (code, out) == (1, "")
    assert f"diverges at journal offset {at}" in err


def test_unknown_events_fail_the_comparison_unless_allowed(tmp_path: Path) -> None:
    drive = Driver().fleet("a", "b")
    drive("kv-events", None)
    drive("requests", request("r1", PROMPTS[0]))
    path = tmp_path / "newer.db"
    asyncio.run(write(log_of(drive, undecodable=msgspec.msgpack.encode({"type": "kv.blocks_moved"})), path))
    read_more(path)
    code, out, err = run_diff(path, "--policy", "random")
    assert code == 2
    assert "UNVERIFIED" in out
    assert (
        "not verified: 1 unknown-events; use the version that wrote it, or accept it with --allow unknown-events" in err
    )
    assert run_diff(path, "--policy", "random", "--allow", "unknown-events")[0] == 0
