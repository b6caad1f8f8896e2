"""Log lines written by a thread, so that a service never waits for the reader of stderr."""

import contextlib
import io
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

from forebay.cli.common.repeats import CountingHandler

QUEUE_MAX = 10_000  # lines; a few seconds of the highest request rate of one process
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
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def close(self) -> None:
        """Wait until the queued lines are written, for at most `CLOSE_S` seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    def _start(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(self._queue_max)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, args=[self._queue], name="log", daemon=True)
        self._thread.start()

    def _run(self, lines: queue.Queue[str | None]) -> None:
        while (text := lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text += self._dropped_line(dropped)
            with contextlib.suppress(OSError, ValueError):  # the stream is closed
                self._stream.write(text)
                self._stream.flush()


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
