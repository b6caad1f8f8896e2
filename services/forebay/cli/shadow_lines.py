"""A shadow's events as JSON lines: in a file that says where the shadow goes on, and on stdout."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.shadow import ShadowEvent
from forebay.events.topics import SHADOW
from forebay.ingress.errors import Unusable
from forebay.live.shadow.shadow import ShadowSink
from forebay.transport.base import LogError

LINE_BYTES_MAX = 1 << 20  # of one event: far above names, and the text of what a shadow changes


class FileSink:
    """Appends a shadow's events to a file of its own, one a line."""

    def __init__(self, path: Path, file: BinaryIO, name: str) -> None:
        self._path = path
        self._file = file
        self._name = name

    async def last(self) -> ShadowEvent | None:
        """The event of the last whole line; one that was cut short by a kill is removed. Raises LogError."""
        try:
            size = self._file.seek(0, os.SEEK_END)
            if not size:
                return None
            self._file.seek(0)
            self._event(self._file.readline(LINE_BYTES_MAX))  # before anything of a foreign file is touched
            self._file.seek(max(0, size - 2 * LINE_BYTES_MAX))
            *lines, cut = self._file.read().split(b"\n")
            if cut:
                self._file.truncate(size - len(cut))
        except OSError as error:
            raise self._trouble("read", error) from error
        return self._event(lines[-1])

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append. Raises LogError."""
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write(_lines(events))
            self._file.flush()
        except OSError as error:
            raise self._trouble("written", error) from error

    def _event(self, line: bytes) -> ShadowEvent:
        try:
            event: ShadowEvent = decode(SHADOW, line)
        except DecodeError as error:
            raise LogError(f"--out {self._path} is there, and holds no shadow's events: give another file") from error
        if event.shadow != self._name:
            raise LogError(f"--out {self._path} is of the shadow {event.shadow}, not {self._name}: give another file")
        return event

    def _trouble(self, what: str, error: OSError) -> LogError:
        return LogError(f"--out {self._path} cannot be {what}: {error.strerror}")


class Printing:
    """Prints what it keeps elsewhere, or nowhere."""

    def __init__(self, kept: ShadowSink | None, to: TextIO | None) -> None:
        self._kept = kept
        self._to = to

    async def last(self) -> ShadowEvent | None:
        """What is kept tells; what was only printed is forgotten. Raises LogError."""
        return None if self._kept is None else await self._kept.last()

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Keep, then print. Raises LogError."""
        if self._kept is not None:
            await self._kept.write(events)
        if self._to is not None:
            self._to.write(_lines(events).decode())
            self._to.flush()


@contextmanager
def file_sink(path: Path, name: str) -> Iterator[FileSink]:
    """A file for the events of one shadow, locked while it is open. Raises Unusable."""
    try:
        file = path.open("r+b", buffering=1 << 16) if path.exists() else path.open("x+b", buffering=1 << 16)
    except OSError as error:
        raise Unusable(f"--out {path} cannot be opened: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unusable(f"--out {path} is in use by another process") from error
        yield FileSink(path, file, name)


def _lines(events: Sequence[ShadowEvent]) -> bytes:
    return b"".join(encode(SHADOW, event) + b"\n" for event in events)
