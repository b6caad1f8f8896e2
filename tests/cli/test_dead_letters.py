"""`forebay dead-letters` on a log file: what it prints, and that an owner applies a retried record."""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest

from forebay.events.codec import encode
from forebay.events.control import PolicySet
from forebay.events.topics import CONTROL
from forebay.transport.base import Record
from forebay.transport.dead_letters import dead_letter
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import up
from tests.cli.in_process import forebay
from tests.system import MODEL, System, until

POLICY = PolicySet(model=MODEL, pool="default", mode="random")
UNDECODABLE = b"\x1b[31m no JSON"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the log of a system that is stopped, with four dead letters."""
    path = tmp_path / "log.db"

    async def write() -> None:
        with closing(SqliteLog.open(path)) as log:
            async with System(log).started(1) as system, system.owned() as owner:
                await until(lambda: len(owner.world.fleet) == 1)
                for topic, value, reason in (
                    ("kv-events", UNDECODABLE, "not JSON"),
                    ("control", UNDECODABLE, "not JSON"),
                    ("control", encode(CONTROL, POLICY), "unknown tag \x1b[31m"),
                    ("control", encode(CONTROL, POLICY), "unknown tag" * 40),
                ):
                    await log.append([dead_letter(Record(topic, 0, 9, 0, value), 0, reason)])

    asyncio.run(write())
    return path


def lines(*arguments: object) -> list[str]:
    run = forebay("dead-letters", *map(str, arguments))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def error(*arguments: object, code: int = 2) -> str:
    run = forebay("dead-letters", *map(str, arguments))
    assert (run.returncode, run.stdout) == (code, "")
    (line,) = run.stderr.splitlines()
    return line.removeprefix("forebay: ")


def listed(*arguments: object) -> list[int]:
    return [json.loads(line)["offset"] for line in lines("list", *arguments, "--json")]


def test_filters_select_letters(log: Path) -> None:
    assert listed(log) == [3, 2, 1, 0]
    assert listed(log, "--topic", "control") == [3, 2, 1]
    assert listed(log, "--topic", "control", "--limit", 2) == [3, 2]
    assert listed(log, "--from", "-1h") == [3, 2, 1, 0]
    assert listed(log, "--to", "-1h") == []
    assert lines("list", log, "--to", "-1h") == ["no dead letters"]
    assert error("list", log, "--topic", "controls") == "--topic: unknown topic 'controls'; did you mean control?"


def test_the_table_is_safe_and_states_that_it_is_cut_off(log: Path) -> None:
    table = lines("list", log, "--limit", 3)
    assert [word for line in table if "/" in (word := line.split()[0])] == ["0/3", "0/2", "0/1"]
    assert "only the newest 3 letters are shown" in table[-1]
    assert "\x1b" not in "".join(table)
    assert "\\x1b" in "".join(table)


def test_one_letter_is_shown_with_decoded_record_and_whether_it_can_be_retried(log: Path) -> None:
    shown = "\n".join(lines("list", log, "--letter", "0/2"))
    assert '"type": "control.policy_set"' in shown
    assert "retry    possible: applies now, and so overrides newer changes" in shown
    found = json.loads(*lines("list", log, "--letter", 1, "--json"))
    assert (found["topic"], found["source_offset"], found["record"]) == ("control", 9, {"value": "\x1b[31m no JSON"})
    assert found["retry"].startswith("no: the record does not decode in this version either")
    assert "\x1b" not in "".join(lines("list", log, "--letter", 1))


def test_an_owner_applies_a_retried_setting(log: Path) -> None:
    text = lines("retry", log, "0/2")
    (place,) = [one.removesuffix(")") for one in " ".join(text).split() if one.startswith("control/0/")]
    assert text[0].startswith("letter 0/2 decodes as control.policy_set; appended as control/0/")
    assert error("retry", log, "0/2", code=1) == f"letter 0/2 was not retried: it was retried before, as {place}"
    retried = {json.loads(line)["offset"]: json.loads(line)["retried_as"] for line in lines("list", log, "--json")}
    assert retried == {3: "", 2: place, 1: "", 0: ""}

    async def mode() -> str:
        with closing(SqliteLog.open(log)) as opened:
            async with System(opened).owned() as owner:
                return owner.world.pools["default"].router.mode

    assert asyncio.run(mode()) == "random"


def test_letters_that_cannot_be_retried_are_refused(log: Path) -> None:
    assert "a record of kv-events is stale" in error("retry", log, "0/0", code=1)
    assert "does not decode in this version either" in error("retry", log, "0/1", code=1)
    assert "has no offset 9; letters are at offsets 0 to 3" in error("retry", log, "0/9")
    assert error("list", log, "--letter", "x") == "--letter x: expected PARTITION/OFFSET, for example 0/12"
    assert error("retry", log, "x") == "LETTER x: expected PARTITION/OFFSET, for example 0/12"
    assert "no such log file" in error("retry", log.with_name("other.db"), "0/2")
    assert not log.with_name("other.db").exists()


def test_a_log_in_use_is_not_written(log: Path) -> None:
    with closing(SqliteLog.open(log)):
        assert listed(log) == [3, 2, 1, 0], "reading works beside the writer"
        assert "another process (pid" in error("retry", log, "0/2")


def test_the_command_runs_as_a_process(log: Path) -> None:
    run = up.forebay("dead-letters", "list", str(log), "--json")
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 4
