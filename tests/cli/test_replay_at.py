"""`forebay replay at`: tables, JSON, errors, and stepping on a real terminal."""

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from forebay.cli.app import app
from forebay.cli.replay.at_view import Sheet, drawn, summary
from forebay.cli.replay.watch_keys import Command, Typed
from forebay.events.decisions import RequestRejected
from tests.cli.in_process import forebay
from tests.cli.test_up import FOREBAY, PATIENCE_S
from tests.replay import incident

LINES, COLUMNS = 50, 140


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("at") / "incident.db"
    asyncio.run(incident.record(path))
    return path


def at(*arguments: str) -> Result:
    """In this process: starting one takes longer than all that it does."""
    return CliRunner().invoke(app, ["replay", "at", *arguments])


def moment(*arguments: str) -> dict[str, object]:
    run = at(*arguments, "--json")
    assert run.exit_code == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def test_offset_and_time_name_the_same_moment(path: Path) -> None:
    one = moment(str(path), "--offset", "20")
    other = moment(str(path), "--time", str(one["now_us"]))
    assert other["now_us"] == one["now_us"]
    assert int(str(other["offset"])) >= 20
    same = moment(str(path), "--offset", str(other["offset"]))
    assert same == other


def test_the_last_record_by_default_and_tables_for_people(path: Path) -> None:
    last = moment(str(path))
    run = at(str(path))
    assert run.exit_code == 0, run.stderr
    assert str(last["digest"]) in run.stdout
    for text in ("second, epoch", "w0/0", "lost: slow", "blocks of 4 tokens", "nobody waits"):
        assert text in run.stdout


def test_times_that_people_write(path: Path) -> None:
    now_us = int(str(moment(str(path), "--offset", "20")["now_us"]))
    text = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=now_us)).isoformat()
    for said in (text, text.replace("+00:00", "Z")):
        assert moment(str(path), "--time", said)["now_us"] == now_us
    late_us = int(str(moment(str(path), "--time", "-0.02s")["now_us"]))
    assert 0 <= int(str(moment(str(path))["now_us"])) - 20_000 - late_us < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--offset", "100000"], "there is no journal record 100000: the recording has those from 0 to "),
        (["--time", "1"], "the recording begins at "),
        (["--time", "2999-01-01"], "the recording ends at "),
        (["--time", "yesterday"], "--time yesterday: no time; give 2026-01-31T12:00:00Z"),
        (["--time", "9" * 19], "the recording ends at "),
        (["--time", "9" * 20], "no time; give"),
        (["--time", "1", "--offset", "1"], "give --time or --offset, not both"),
        (["--watch", "--json"], "give --watch or --json, not both"),
    ],
)
def test_what_cannot_be_shown(path: Path, arguments: list[str], told: str) -> None:
    run = at(str(path), *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    assert told in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_what_is_no_log(tmp_path: Path) -> None:
    run = forebay("replay", "at", str(tmp_path / "nothing.db"))
    assert (run.returncode, "there is no such log" in run.stderr) == (2, True)


def test_a_line_for_each_record_where_there_is_no_terminal(path: Path) -> None:
    run = at(str(path), "--watch")
    assert run.exit_code == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
    assert "owner.claimed owner_id=first" in lines[0]
    assert "request.routed talk-0-0 to w" in lines[1]
    late = at(str(path), "--watch", "--offset", "30").stdout.splitlines()
    assert late == lines[30:]


@pytest.mark.parametrize(
    ("keys", "commands"),
    [
        ("\r", [Command("forward")]),
        (
            "n 12\nb3b",
            [Command("forward"), Command("forward"), Command("forward", 12), Command("back"), Command("back", 3)],
        ),
        ("t1.5s\r", [Command("time", 1_500_000)]),
        ("t 200ms\rt2m\rt 3\r", [Command("time", 200_000), Command("time", 120_000_000), Command("time", 3_000_000)]),
        ("tx\x7f7s\r", [Command("time", 7_000_000)]),
        ("tsoon\r", [Command("mistake", text="soon is no length of time: 1.5s, 200ms, 2m")]),
        ("/req n1\r", [Command("find", text="req n1")]),
        ("/\r/gone\x1bn", [Command("forward")]),
        ("5xq", [Command("quit")]),
    ],
)
def test_keys_are_commands(keys: str, commands: list[Command]) -> None:
    typed = Typed()
    assert [command for key in keys if (command := typed.take(key)) is not None] == commands


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    console = Console(file=io.StringIO(), width=60)
    with console.capture() as drawing:
        console.print(drawn(Sheet("a\x1b]0;title\x07", ("id",), {"k": ("r\x1b[2J\n",)})))
    assert not {"\x1b", "\x07"} & set(drawing.get())
    assert "]0;title" in drawing.get()
    rejected = RequestRejected(request_id="r\x1b[2J", reply_slot=0, reason="busy", message="m")
    assert "\x1b" not in summary(rejected)


class Terminal:
    """A program on a terminal of its own: keys in, the text that it drew out."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(LINES, COLUMNS)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        self.settings = termios.tcgetattr(theirs)
        # A suite that was started in the background ignores it, and so would what it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        self.theirs = theirs
        self._drawn = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, *texts: str) -> str:
        """What was drawn since the last call, up to where all these texts stand in it."""
        ends_s = time.monotonic() + PATIENCE_S
        while not all(text in self._drawn for text in texts):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, ends_s - time.monotonic()))
            assert ready, f"{texts} not in {self._drawn}"
            self._drawn += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._ours, 65_536).decode(errors="replace"))
        drawn, self._drawn = self._drawn, ""
        return drawn

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@contextmanager
def watching(path: Path, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(FOREBAY, "replay", "at", str(path), "--watch", *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def test_stepping_on_a_terminal(path: Path) -> None:
    with watching(path) as terminal:
        terminal.until("record 0", "owner.claimed")
        for key in ("\r", " ", "n"):
            terminal.press(key)
        terminal.until("record 3", "request.routed talk-2-0")
        terminal.press("20\r")
        terminal.until("> 20")
        terminal.until("record 23")
        terminal.press("b")
        assert str(moment(str(path), "--offset", "22")["digest"]) in terminal.until("record 22", "digest")
        terminal.press("/stranded-0\r")
        terminal.until("stranded-0 to slow")
        terminal.press("/nobody\r")
        terminal.until("is about nobody")
        terminal.press("t soon\r")
        terminal.until("soon is no length of time")
        terminal.press("999\r")
        terminal.until("this is the last record")
        terminal.resize(30, 200)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.until("this is the last record")
        terminal.press("q")
        assert terminal.process.wait(PATIENCE_S) == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.settings, "the terminal is left as it was"


def test_interrupted_it_leaves_the_terminal_as_it_was(path: Path) -> None:
    with watching(path, "--offset", "25") as terminal:
        terminal.until("record 25")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(PATIENCE_S) != 0
        assert termios.tcgetattr(terminal.theirs) == terminal.settings
