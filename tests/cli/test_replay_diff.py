"""`forebay replay diff`: tables, JSON, report pages and errors."""

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.common.terminal import printable
from forebay.cli.replay.closed_loop import ALTERNATIVE, HISTORY, RECORDED
from forebay.events.codec import decode, encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from tests.core.worlds import PROMPTS, Driver, request
from tests.replay.mutations import read_more
from tests.replay.recorded import MemoryLog, log_of, write
from tests.replay.simulated import played
from tests.simulate.traces import conversations

HOSTILE = "</script><img src=x onerror=alert(1)>[bold]\x1b[31m&amp;"
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
    run = CliRunner().invoke(app, [*COMMAND, *map(str, arguments)])
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
    for text in ("--policy round-robin", "fork", "requests went to another worker", "Open loop", "--closed-loop"):
        assert text in out
    assert "w0/0" in out


def test_set_without_effect_is_reported(recording: Path) -> None:
    report = found(recording, "--set", "temperature=0")
    assert report["idle"] == ["--set temperature=0"]
    assert report["identical"]
    assert report["state"] == report["other_state"]
    _, out, _ = run_diff(recording, "--set", "temperature=0", "--closed-loop")
    assert "equal to the recorded configuration" in out
    assert "nothing to simulate" in out


def test_closed_loop_is_compared_with_the_recording(recording: Path) -> None:
    closed = found(recording, "--policy", "round-robin", "--closed-loop")["closed_loop"]
    runs = closed["runs"]
    assert list(runs) == [RECORDED, HISTORY, ALTERNATIVE]
    assert all(run["requests"] == closed["requests"] for run in runs.values())
    assert all(run["failed"] == 0 for run in runs.values())
    # The recorded engines are simulated, so only the recency of blocks differs.
    error = abs(runs[RECORDED]["prefix_reuse"] - runs[HISTORY]["prefix_reuse"])
    assert 3 * error < runs[HISTORY]["prefix_reuse"] - runs[ALTERNATIVE]["prefix_reuse"]
    assert runs[HISTORY]["ttft_ms"]["p50"] == pytest.approx(runs[RECORDED]["ttft_ms"]["p50"], rel=0.2)


def test_invalid_comparisons_are_rejected(recording: Path, tmp_path: Path) -> None:
    policy = ("--policy", "random")
    assert "no change; pass" in error_line(recording)
    assert "unknown field" in error_line(recording, "--set", "heat=1")
    assert "unknown pool 'p'; pools are: default" in error_line(recording, "--set", "p:temperature=1")
    assert "no such directory" in error_line(recording, *policy, "--report", tmp_path / "no" / "page.html")
    assert "--allow: unknown check 'anything'; checks are: " in error_line(recording, *policy, "--allow", "anything")
    assert "is not a report of this command" in error_line(recording, *policy, "--report", recording)
    assert "it needs --closed-loop" in error_line(recording, *policy, "--speedup", "2")
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
    path, page = tmp_path / "changed.db", tmp_path / "page.html"
    asyncio.run(write(log, path))
    code, out, err = run_diff(path, "--policy", "random", "--report", page)
    assert (code, out) == (1, "")
    assert f"diverges at journal offset {at}" in err
    assert not page.exists()


def test_unknown_events_fail_the_comparison_unless_allowed(tmp_path: Path) -> None:
    drive = Driver().fleet("a", "b")
    drive("kv-events", None)
    drive("requests", request("r1", PROMPTS[0]))
    path = tmp_path / "newer.db"
    asyncio.run(write(log_of(drive, undecodable=msgspec.msgpack.encode({"type": "kv.blocks_moved"})), path))
    read_more(path)
    page = tmp_path / "page.html"
    code, _, err = run_diff(path, "--policy", "random", "--report", page)
    assert code == 2
    assert "Not verified: 1 events of types that this version does not know" in Page(page.read_text()).text
    assert (
        "not verified: 1 unknown-events; use the version that wrote it, or accept it with --allow unknown-events" in err
    )
    assert run_diff(path, "--policy", "random", "--allow", "unknown-events")[0] == 0


class Page(HTMLParser):
    """Parsed page: tags, attributes and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.text = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data


def test_a_page_is_self_contained_and_complete(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    code, _, err = run_diff(recording, "--policy", "round-robin", "--closed-loop", "--report", path)
    assert code == 0, err
    page = Page(path.read_text())
    assert not {"src", "href", "srcset", "action"} & set(page.attributes)
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert any("default-src 'none'" in content for content in page.attributes["content"])
    figures = json.loads(page.scripts[1])
    assert set(figures) == {"overlap", "load", "series"} <= set(page.attributes["id"])
    for text in ("How to read the results", "Open loop", "The fork", "Closed loop", RECORDED, "--policy round-robin"):
        assert text in page.text


def test_client_names_are_escaped(tmp_path: Path) -> None:
    run = played(conversations(sessions=6, turns=4), RouterConfig(), workers=2, name=HOSTILE)
    recording, path = tmp_path / "run.db", tmp_path / "page.html"
    asyncio.run(write(run.log, recording))
    for _ in range(2):  # an existing page can be overwritten
        code, out, _ = run_diff(recording, "--policy", "round-robin", "--report", path)
        assert code == 0
    assert "[bold]" in out
    assert "\x1b" not in out
    page = Page(path.read_text())
    assert "img" not in page.tags
    assert len(page.scripts) == 3
    assert printable(HOSTILE) in page.text
