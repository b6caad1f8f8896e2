"""Logs of the services: text or JSON lines on stderr.

Theory of operation. Records of forebay are logged from `--log-level` on, records of client libraries from WARNING on,
and records of aiokafka from ERROR on, because it warns about every rebalance. A thread writes the lines, so a service
continues while stderr is a pipe that nobody reads.
"""

import contextlib
import io
import logging
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TextIO

import msgspec

from forebay.cli.common.options import Option

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Fields that the message of an access record contains already.
IN_MESSAGE = frozenset({"method", "path", "status", "topic", "partition", "offset"})


class TextFormatter(logging.Formatter):
    """Formatter of text lines: time, level, logger and message, then the fields of the record as `name=value`."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - name of the base class
        line = super().formatMessage(record)
        return line + "".join(f" {name}={value}" for name, value in _fields(record).items() if name not in IN_MESSAGE)


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: `time`, `level`, `logger`, `message`, the fields of the record, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


SUMMARY_S = 30.0  # minimum time between two lines about the same problem
KINDS_MAX = 256  # maximum number of problems in memory; a process has a few dozen
NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Problem:
    """A problem: when it was last written, its newest record, and the number of repetitions since."""

    at_s: float
    record: logging.LogRecord
    hidden: int = 0


class CountingHandler(logging.StreamHandler[TextIO]):
    """Logging handler that writes a repeated warning or error once, and later the number of repetitions.

    Client libraries log each failed attempt to reconnect, which was 68,000 lines in the five minutes of one outage.
    The number is written at most every `SUMMARY_S` seconds per problem. Two records of forebay are the same problem if
    their texts are equal. Records of libraries contain node ids, ports and durations, so their texts may differ in
    numbers. Records below WARNING are always written.
    """

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock_s = clock_s
        self._shown: dict[tuple[str, int, str], _Problem] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or only count it if it repeats a problem."""
        now_s = self._clock_s()
        self._write_summaries(now_s - SUMMARY_S)
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        text = record.getMessage()
        kind = (record.name, record.levelno, text if _is_ours(record) else NUMBERS.sub("#", text))
        shown = self._shown.get(kind)
        if shown is not None:
            shown.hidden += 1
            shown.record = record
            return
        if len(self._shown) >= KINDS_MAX:
            self._write_summary(self._shown.pop(next(iter(self._shown))))
        self._shown[kind] = _Problem(now_s, record)
        super().emit(record)

    def close(self) -> None:
        """Write the number of repetitions of each problem that was not written yet."""
        self._write_summaries(self._clock_s())
        super().close()

    def _write_summaries(self, until_s: float) -> None:
        """Write the repetitions of problems last written before `until_s`, and forget problems without repetitions."""
        for kind in [kind for kind, shown in self._shown.items() if shown.at_s <= until_s]:
            shown = self._shown.pop(kind)
            if shown.hidden:
                self._write_summary(shown)
                # The outage continues, so further repetitions are only counted.
                self._shown[kind] = _Problem(self._clock_s(), shown.record)

    def _write_summary(self, shown: _Problem) -> None:
        if shown.hidden:
            seconds = max(1, round(self._clock_s() - shown.at_s))
            text = f"{shown.record.getMessage()} (repeated {shown.hidden} times in {seconds} s)"
            plain = {**shown.record.__dict__, "msg": text, "args": None, "exc_info": None, "exc_text": None}
            super().emit(logging.makeLogRecord(plain))


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "forebay"


QUEUE_MAX = 10_000  # lines; a few seconds of the highest request rate of one process
# Pause after a write, so that the next write has all lines of this time. Waking the thread for every line took as much
# CPU time as creating the line.
GATHER_S = 0.02
# Bytes per write, unless one line has more. Writes of several processes to one pipe are then not mixed.
BATCH_BYTES_MAX = select.PIPE_BUF
CLOSE_S = 1.0  # time to write the last lines if nobody reads them


class BackgroundHandler(CountingHandler):
    """Counting handler whose lines a thread writes. If more than `queue_max` wait, lines are dropped and counted."""

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


ACCESS = "forebay.access"  # the logger of forebay.ingress.access_log, which --help should not load
# The logger of an error that is part of every healthy start with new consumer groups. aiokafka retries after it.
COORDINATOR = "aiokafka.consumer.group_coordinator"
STARTING = "GroupCoordinatorNotAvailableError"  # until a broker has created the coordinator of a new group
START_S = 30.0  # a coordinator that is missing for longer is a problem


AccessLogOption = Annotated[bool, Option("--access-log", help="Write a line per request, at level info.")]


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(help="Lowest level of the messages on stderr. debug: also INFO messages of client libraries."),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Option(help="Format of the messages on stderr.")] = "text"

    def start(self, quiet: Iterable[str] = (), *, has_access_log: bool = False) -> None:
        """Begin to log to stderr.

        Of the loggers `quiet`, only warnings are written, unless the options ask for more. Access records are written
        if `has_access_log`, and the level is at most INFO.
        """
        level = self.log_level.upper()
        formatter: logging.Formatter = JsonFormatter() if self.log_format == "json" else TextFormatter()
        handler = BackgroundHandler(unbuffered_stderr())
        handler.setFormatter(formatter)
        is_detailed = self.log_level == "debug"
        libraries = logging.INFO if is_detailed else max(logging.WARNING, logging.getLevelNamesMapping()[level])
        # No format contains these values, and finding them takes a third of the time of creating a record.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging.basicConfig(handlers=[handler], level=libraries)
        logging.getLogger("forebay").setLevel(level)
        if not is_detailed:
            logging.getLogger("aiokafka").setLevel(logging.ERROR)
            logging.getLogger(COORDINATOR).addFilter(StartFilter())
        if self.log_level == "info":
            for name in quiet:
                logging.getLogger(name).setLevel(logging.WARNING)
        if not has_access_log:
            logging.getLogger(ACCESS).setLevel(logging.WARNING)


class StartFilter(logging.Filter):
    """Filter that drops errors about a missing group coordinator in the first `START_S` seconds of a process."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._ends_s = clock_s() + START_S

    def filter(self, record: logging.LogRecord) -> bool:
        return self._clock_s() > self._ends_s or STARTING not in record.getMessage()
