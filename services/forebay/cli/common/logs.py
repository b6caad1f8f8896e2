"""Logs of the services: text or JSON lines on stderr.

Theory of operation. Records of forebay are logged from `--log-level` on, records of client libraries from WARNING on,
and records of aiokafka from ERROR on, because it warns about every rebalance. A thread writes the lines, so a service
continues while stderr is a pipe that nobody reads.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from forebay.cli.common.log_format import JsonFormatter, TextFormatter, logs_json
from forebay.cli.common.log_thread import BackgroundHandler, unbuffered_stderr

ACCESS = "forebay.access"  # the logger of forebay.ingress.access_log, which --help should not load
# The logger of an error that is part of every healthy start with new consumer groups. aiokafka retries after it.
COORDINATOR = "aiokafka.consumer.group_coordinator"
STARTING = "GroupCoordinatorNotAvailableError"  # until a broker has created the coordinator of a new group
START_S = 30.0  # a coordinator that is missing for longer is a problem


AccessLogOption = Annotated[
    bool, typer.Option("--access-log/--no-access-log", help="Write a line per request, at level info.")
]


class LogLevel(StrEnum):
    """Lowest level of the messages that a service logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    """Options of the log of a service. Each field is a command-line option."""

    log_level: Annotated[LogLevel, typer.Option(help="Lowest level of the messages on stderr.")] = LogLevel.INFO
    log_format: Annotated[LogFormat, typer.Option(help="Format of the messages on stderr.")] = LogFormat.TEXT
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also write INFO messages of all parts and client libraries.")
    ] = False

    def start(self, quiet: Iterable[str] = (), *, has_access_log: bool = False) -> None:
        """Begin to log to stderr.

        Args:
            quiet: loggers of which only warnings are written, unless the options ask for more.
            has_access_log: whether to write access records, if the level is at most INFO.
        """
        level = self.log_level.upper()
        formatter: logging.Formatter = JsonFormatter() if self.log_format is LogFormat.JSON else TextFormatter()
        handler = BackgroundHandler(unbuffered_stderr())
        handler.setFormatter(formatter)
        libraries = logging.INFO if self.verbose else max(logging.WARNING, logging.getLevelNamesMapping()[level])
        # No format contains these values, and finding them takes a third of the time of creating a record.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging.basicConfig(handlers=[handler], level=libraries)
        logging.getLogger("forebay").setLevel(level)
        if not self.verbose:
            logging.getLogger("aiokafka").setLevel(logging.ERROR)
            logging.getLogger(COORDINATOR).addFilter(StartFilter())
        if self.log_level is LogLevel.INFO and not self.verbose:
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


def announce(text: str) -> None:
    """Print a line about the state of a service on stdout. With `--log-format json`, log the line instead."""
    if logs_json():
        logging.getLogger("forebay.cli").info("%s", text.removeprefix("forebay: "))
    else:
        typer.echo(text)
