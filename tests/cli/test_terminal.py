"""Terminal output of commands that read a log: control characters, wide tables and output of policies."""

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from forebay.cli.app import app
from forebay.cli.common.terminal import in_markup, printable
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from tests.core.worlds import PROMPTS, Driver, request
from tests.harness import fork_server
from tests.replay.mutations import read_more
from tests.replay.recorded import GARBAGE, log_of, write
from tests.replay.recorder import Recorder

PATIENCE_S = 60.0
HOSTILE = "[bold]\x1b[2J\u202er\r\n"
NOISY = """
print("import")
class Noisy:
    def decide(self, world, request):
        print("decide")
        return 0
"""


def forebay(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_log(made: Recorder, path: Path) -> Path:
    async def run() -> None:
        (await made.log(path)).close()

    asyncio.run(run())
    return path


class First:
    """The policy of `NOISY` without its output."""

    def decide(self, world: Any, request: Any) -> int:
        return 0


def routed(*names: str, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Recorder:
    made = Recorder(custom)
    made.fleet("a", "b", **router)
    for number, name in enumerate(names):
        made("requests", request(name, PROMPTS[number]))
    return made


def diverging(path: Path) -> int:
    """Write a log whose second decision diverges and return the offset of that decision."""
    made = routed("r0", "r1", "r2")
    at = [number for number, record in enumerate(made.journal) if isinstance(record, RequestRouted)][1]
    was = made.journal[at]
    assert isinstance(was, RequestRouted)
    made.journal[at] = msgspec.structs.replace(was, worker_id="b" if was.worker_id == "a" else "a")
    write_log(made, path)
    return at


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == "[bold]\\x1b[2J\\u202er\\r\\n"
    assert printable("größer 模型") == "größer 模型"
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as shown:
        console.print(in_markup(HOSTILE))
    assert shown.get() == printable(HOSTILE) + "\n"


def test_control_characters_in_ids_are_escaped(tmp_path: Path) -> None:
    path = write_log(routed("r0", "r1", HOSTILE), tmp_path / "log.db")
    for command in (
        ("explain", path, HOSTILE),
        ("explain", path, HOSTILE[:8]),
        ("explain", path, HOSTILE + "?"),
        ("replay", "at", path),
        ("replay", "diff", path, "--set", "busy.active_prefill_tokens_threshold=1"),
    ):
        run = forebay(*command)
        output = run.stdout + run.stderr
        assert "[bold]\\x1b[2J" in output, command
        assert not {"\x1b", "\u202e", "\r"} & set(output), command


def test_control_characters_in_a_divergence_are_escaped(tmp_path: Path) -> None:
    made = routed(HOSTILE)
    was = made.journal[-1]
    assert isinstance(was, RequestRouted)
    made.journal[-1] = msgspec.structs.replace(was, worker_id="\x7f\x9b[red]")
    run = forebay("verify", write_log(made, tmp_path / "log.db"))
    assert run.exit_code == 1
    assert "worker_id: recorded \\x7f\\x9b[red], derived" in run.stdout
    assert not {"\x1b", "\u202e", "\x7f", "\x9b"} & set(run.stdout)


def test_at_stops_at_a_divergence(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    at = diverging(path)
    for options in (("--offset", at), (), ("--json",)):
        run = forebay("replay", "at", path, *options)
        assert run.exit_code == 1, run.output
        assert f"log.db: journal record {at} does not follow from the events (differs in worker_id)" in run.stderr
    assert forebay("replay", "at", path, "--offset", at - 1).exit_code == 0


def test_at_reports_skipped_records(tmp_path: Path) -> None:
    drive = Driver().fleet("a", "b")
    drive("requests", request("r1", PROMPTS[0]))
    drive("kv-events", None)
    drive("requests", request("r2", PROMPTS[1]))
    log = log_of(drive, undecodable=msgspec.msgpack.encode({"type": "kv.blocks_moved"}))
    newer, foreign = tmp_path / "newer.db", tmp_path / "foreign.db"
    asyncio.run(write(log, newer))
    read_more(newer)
    run = forebay("replay", "at", newer, "--json")
    assert run.exit_code == 2
    assert json.loads(run.stdout)["unverified"] == {"unknown-events": 1}
    assert run.stderr == "forebay: not verified: 1 events of types that this version does not know\n"
    assert forebay("replay", "at", newer, "--offset", "1").exit_code == 0  # no record was skipped before that offset
    log.topics["kv-events"] = [GARBAGE]
    log.topics[DECISIONS.name].insert(2, b"{}")
    asyncio.run(write(log, foreign))
    run = forebay("replay", "at", foreign)
    assert run.exit_code == 0, run.output  # owners skipped the record, too
    assert "not verified: 1 journal records that no owner wrote" in run.stderr


@pytest.mark.slow
def test_output_of_a_policy_is_separate_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = routed("r0", "r1", custom={"noisy.Noisy": First}, mode="noisy.Noisy")
    path = write_log(made, tmp_path / "log.db")
    for command in (
        ("verify", path),
        ("explain", path, "r1"),
        ("replay", "at", path),
        ("replay", "diff", path, "--set", "attempts_max=7"),
    ):
        arguments = map(str, (*command, "--allow-policy", "noisy.Noisy", "--json"))
        environment = {**os.environ, "NO_COLOR": "1"}
        run = fork_server.run(*arguments, folder=tmp_path, environment=environment, timeout_s=PATIENCE_S)
        assert run.returncode == 0, run.stderr
        assert "decide" in run.stderr
        assert isinstance(json.loads(run.stdout), dict)
