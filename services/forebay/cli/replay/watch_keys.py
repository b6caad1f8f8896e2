"""The keys of `forebay replay at --watch`: what is typed becomes a command, and nothing else happens here."""

import asyncio
import os
import re
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

HELP = (
    "Enter, space, n: on   NUMBER Enter: so many   b: back   t 1.5s Enter: by time   /ID Enter: to a request   q: quit"
)
TYPED_MAX = 256  # a request id
COUNT_DIGITS_MAX = 9
ENTER = ("\r", "\n")
ERASE = ("\x7f", "\b")
ESCAPE = "\x1b"
WOKEN = ""  # nothing was typed, but the screen is another
_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_LENGTH = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(us|ms|s|m|h|)")


@dataclass(frozen=True, slots=True)
class Command:
    """What to do: `count` records forward or back, or `count` microseconds on; `text` is a request id or a mistake."""

    kind: Literal["forward", "back", "time", "find", "mistake", "quit"]
    count: int = 1
    text: str = ""


class Typed:
    """What is typed so far: a number, or a line that begins with `t` or `/`."""

    def __init__(self) -> None:
        self.line = ""

    def take(self, key: str) -> Command | None:
        """The command that this key completes, if it does."""
        if self.line[:1] in ("t", "/"):
            return self._take_line(key)
        if key.isdecimal() and key.isascii():
            self.line = (self.line + key)[:COUNT_DIGITS_MAX]
            return None
        count, self.line = int(self.line or 1), ""
        if key in ENTER or key in (" ", "n"):
            return Command("forward", count)
        if key == "b":
            return Command("back", count)
        if key in ("t", "/"):
            self.line = key
        return Command("quit") if key == "q" else None

    def _take_line(self, key: str) -> Command | None:
        if key in ENTER:
            line, self.line = self.line, ""
            text = line[1:].strip()
            if line[0] == "t":
                return _by_time(text)
            return Command("find", text=text) if text else None
        if key == ESCAPE:
            self.line = ""
        elif key in ERASE:
            self.line = self.line[:-1]
        elif key.isprintable():
            self.line = (self.line + key)[:TYPED_MAX]
        return None


def _by_time(text: str) -> Command:
    found = _LENGTH.fullmatch(text)
    if found is None:
        return Command("mistake", text=f"{text or 'nothing'} is no length of time: 1.5s, 200ms, 2m")
    return Command("time", round(float(found[1]) * _UNITS_US[found[2] or "s"]))


@contextmanager
def keys_of(terminal: int) -> Iterator["asyncio.Queue[str]"]:
    """Keys as they are pressed on a terminal, by its descriptor; `WOKEN` when its size changed."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        pressed = os.read(terminal, 1_024).decode(errors="ignore")
        for key in pressed or "q":  # the terminal is gone
            keys.put_nowait(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, WOKEN)
    try:
        yield keys
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
