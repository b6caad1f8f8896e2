"""Log lines written by a thread, so that a service never waits for the reader of stderr."""

import contextlib
import io
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

from forebay.cli.common.repeats import CountingHandler

QUEUE_MAX = 10_000  # lines; a few seconds of the highest request rate of one process
# Pause after a write, so that the next write has all lines of this time. Waking the thread for every line took as much
# CPU time as creating the line.
GATHER_S = 0.02
# Bytes per write, unless one line has more. Writes of several processes to one pipe are then not mixed.
BATCH_BYTES_MAX = select.PIPE_BUF
CLOSE_S = 1.0  # time to write the last lines if nobody reads them


class BackgroundHandler(CountingHandler):
    """Counting handler whose lines are written by a thread. Lines are dropped and counted if the thread falls behind.

    Args:
        stream: file to which the lines are written.
        queue_max: maximum number of lines that wait.
    """

    def __init__(self, stream: TextIO, queue_max: int = QUEUE_MAX) -> None:
        self._background = _BackgroundStream(stream, queue_max, self._dropped_line)
        super().__init__(self._background)  # type: ignore[arg-type]  # a stream handler only writes and flushes

    def close(self) -> None:
        """Write the queued lines, for at most `CLOSE_S` seconds."""
        super().close()
        self._background.close()

    def _dropped_line(self, dropped: int) -> str:
        text = f"{dropped} log lines were dropped, because stderr is read too slowly"
        record = logging.LogRecord("forebay.cli", logging.WARNING, "", 0, text, None, None)
        return self.format(record) + self.terminator


class _BackgroundStream:
    """Stream whose `write` never waits. A thread writes to the real stream."""

    def __init__(self, stream: TextIO, queue_max: int, dropped_line: Callable[[int], str]) -> None:
        self._stream = stream
        self._queue_max = queue_max
        self._dropped_line = dropped_line
        self._start()
        os.register_at_fork(after_in_child=self._start)  # threads do not survive a fork

    def write(self, text: str) -> None:
        """Queue the text, or drop it if too many lines wait."""
        if len(self._lines) + self._writing < self._queue_max:
            self._lines.append(text)
        else:
            self._dropped += 1
        if not self._wake.is_set():
            self._wake.set()

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def close(self) -> None:
        """Wait until the queued lines are written, for at most `CLOSE_S` seconds."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _start(self) -> None:
        self._lines: deque[str] = deque()
        self._writing = 0  # lines that the thread has taken and not written yet
        self._dropped = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            self._wake.wait()
            self._wake.clear()  # before the lines are taken, so that a later line sets it again
            is_closing = self._closing.is_set()
            while text := self._take():
                with contextlib.suppress(OSError, ValueError):  # the stream is closed
                    self._stream.write(text)
                    self._stream.flush()
                self._writing = 0
            self._closing.wait(GATHER_S)

    def _take(self) -> str:
        """Return the next lines, and a line with the number of dropped lines if there are any."""
        dropped, self._dropped = self._dropped, 0
        taken = [self._dropped_line(dropped)] if dropped else []
        size = sum(len(line.encode(errors="replace")) for line in taken)
        while self._lines:
            size += len(self._lines[0].encode(errors="replace"))
            if taken and size > BATCH_BYTES_MAX:
                break
            taken.append(self._lines.popleft())
        self._writing = len(taken)
        return "".join(taken)


def unbuffered_stderr() -> TextIO:
    """Return a text stream on the file descriptor of stderr, which stays open.

    Unlike `sys.stderr`, it has no buffer with a lock. A thread that waits for the reader of a pipe would hold this lock
    at the exit of the process, and Python would abort.
    """
    return io.TextIOWrapper(
        open(2, "wb", buffering=0, closefd=False),
        errors="backslashreplace",
        write_through=True,
    )
