"""`forebay replay at`: tables, JSON, errors."""

import asyncio
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from forebay.cli.replay.at_view import summary, titled_table
from forebay.events.decisions import RequestRejected
from forebay.events.topics import PROGRESS
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.cli.logs import invoke
from tests.replay import incident


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("at") / "incident.db"
    asyncio.run(incident.record(path))
    return path


def at(*arguments: str) -> Result:
    """Run the command in this process, which is faster than starting one."""
    return invoke("replay", "at", *arguments)


def moment(*arguments: str) -> dict[str, object]:
    run = at(*arguments, "--json")
    assert run.exit_code == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def test_offset_and_time_select_the_same_record(path: Path) -> None:
    one = moment(str(path), "--offset", "20")
    other = moment(str(path), "--time", str(one["now_us"]))
    assert other["now_us"] == one["now_us"]
    assert int(str(other["offset"])) >= 20
    same = moment(str(path), "--offset", str(other["offset"]))
    assert {**same, "later": other["later"]} == other


def test_the_default_is_the_last_record_shown_as_tables(path: Path) -> None:
    last = moment(str(path))
    run = at(str(path))
    assert run.exit_code == 0, run.stderr
    assert str(last["digest"]) in run.stdout
    for text in ("second, epoch", "w0/0", "lost: slow", "blocks of 4 tokens", "queue: empty"):
        assert text in run.stdout


def test_events_after_the_last_record_are_shown_or_counted(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())

    async def append() -> int:
        log = SqliteLog.open(copy)
        (offset,) = await log.append([Draft(PROGRESS.name, 0, b"\xc1")])
        (record,) = log.records(PROGRESS.name, 0, offset, 1)
        log.close()
        return record.at_us

    at_us = asyncio.run(append())
    last = at(str(copy))
    assert last.exit_code == 0, last.stderr
    assert (
        "not shown  1 event (1 progress) on the log after this record; --time shows the state with later events"
        in last.stdout
    )
    shown = at(str(copy), "--time", str(at_us))
    assert shown.exit_code == 0, shown.stderr
    text = "then       1 event (1 progress) from the log, in the order of their append; no journal record shows"
    assert text in shown.stdout
    assert "not shown" not in shown.stdout
    late = moment(str(copy), "--time", str(at_us))
    assert late["later"] == {
        "requested_us": at_us,
        "applied": {},
        "unrecorded": {"progress": 1},
        "not_applied": {},
    }
    early = at(str(copy), "--time", str(at_us - 1))
    assert "age        " in early.stdout


def test_events_of_the_next_record_are_applied_up_to_the_time(path: Path) -> None:
    clocks = sorted({int(str(moment(str(path), "--offset", str(offset))["now_us"])) for offset in range(20, 60)})
    shown = [at(str(path), "--time", str(now_us - 1)).stdout for now_us in clocks[1:]]
    assert any(", which the owner had applied by the requested time" in one for one in shown)


def test_time_formats(path: Path) -> None:
    now_us = int(str(moment(str(path), "--offset", "20")["now_us"]))
    text = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=now_us)).isoformat()
    for text_form in (text, text.replace("+00:00", "Z")):
        assert moment(str(path), "--time", text_form)["now_us"] == now_us
    late_us = int(str(moment(str(path), "--time", "-0.02s")["now_us"]))
    assert 0 <= int(str(moment(str(path))["now_us"])) - 20_000 - late_us < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offset", "100000"], "no journal record 100000: the recording has records 0 to "),
        (["--time", "1"], "the recording begins at "),
        (["--time", "2999-01-01"], "the recording ends at "),
        (["--time", "yesterday"], "--time yesterday: not a time; expected 2026-01-31T12:00:00Z"),
        (["--time", "9" * 19], "the recording ends at "),
        (["--time", "9" * 20], "not a time; expected"),
        (["--time", "1", "--offset", "1"], "--time and --offset exclude each other; give one of them"),
    ],
)
def test_invalid_offsets_and_times_are_rejected(path: Path, arguments: list[str], message: str) -> None:
    run = at(str(path), *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_file_other_than_a_log_is_rejected(tmp_path: Path) -> None:
    run = forebay("replay", "at", str(tmp_path / "nothing.db"))
    assert (run.returncode, "no such log file; check the path" in run.stderr) == (2, True)


def test_control_characters_are_not_printed() -> None:
    console = Console(file=io.StringIO(), width=60)
    with console.capture() as drawing:
        console.print(titled_table("a\x1b]0;title\x07", ("id",), [("r\x1b[2J\n",)], set(), ""))
    assert not {"\x1b", "\x07"} & set(drawing.get())
    assert "]0;title" in drawing.get()
    rejected = RequestRejected(request_id="r\x1b[2J", reply_slot=0, reason="busy", message="m")
    assert "\x1b" not in summary(rejected)
