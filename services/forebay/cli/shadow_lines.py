"""Sinks that write a shadow's events as JSON lines: to a file from which the shadow can resume, and to stdout."""

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

LINE_BYTES_MAX = 1 << 20  # per event, far above what names and the alternative's description need


class FileSink:
    """Appends a shadow's events to its own file, one per line."""

    def __init__(self, path: Path, file: BinaryIO, name: str) -> None:
        self._path = path
        self._file = file
        self._name = name

    async def last(self) -> ShadowEvent | None:
        """Return the event of the last complete line of the file. Remove a partial last line that a kill has left.

        Raises:
            LogError: the file cannot be read, or has other contents than events of this shadow.
        """
        try:
            size = self._file.seek(0, os.SEEK_END)
            if not size:
                return None
            self._file.seek(0)
            self._event(self._file.readline(LINE_BYTES_MAX))  # check before a foreign file is modified
            self._file.seek(max(0, size - 2 * LINE_BYTES_MAX))
            *lines, cut = self._file.read().split(b"\n")
            if cut:
                self._file.truncate(size - len(cut))
        except OSError as error:
            raise self._error("read", error) from error
        return self._event(lines[-1])

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append events to the file.

        Raises:
            LogError: the file cannot be written.
        """
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write(_lines(events))
            self._file.flush()
        except OSError as error:
            raise self._error("written", error) from error

    def _event(self, line: bytes) -> ShadowEvent:
        try:
            event: ShadowEvent = decode(SHADOW, line)
        except DecodeError as error:
            raise LogError(
                f"--out {self._path} exists and does not contain shadow events; give another file"
            ) from error
        if event.shadow != self._name:
            raise LogError(f"--out {self._path} belongs to shadow {event.shadow}, not {self._name}; give another file")
        return event

    def _error(self, what: str, error: OSError) -> LogError:
        return LogError(f"--out {self._path} cannot be {what}: {error.strerror}")


class PrintingSink:
    """Prints a shadow's events as JSON lines, after another sink has stored them, if there is one."""

    def __init__(self, kept: ShadowSink | None, to: TextIO | None) -> None:
        self._kept = kept
        self._to = to

    async def last(self) -> ShadowEvent | None:
        """Return the last event of the other sink; None if there is no other sink, because nothing else stores events.

        Raises:
            LogError: the other sink cannot be read.
        """
        return None if self._kept is None else await self._kept.last()

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Write events to the other sink, then print them.

        Raises:
            LogError: the other sink cannot be written.
        """
        if self._kept is not None:
            await self._kept.write(events)
        if self._to is not None:
            self._to.write(_lines(events).decode())
            self._to.flush()


@contextmanager
def file_sink(path: Path, name: str) -> Iterator[FileSink]:
    """Open the event file of one shadow, and lock it while it is open.

    Raises:
        Unusable: the file cannot be opened, or is in use.
    """
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
