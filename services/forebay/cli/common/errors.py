"""Errors of commands: a one-line message on stderr, then exit code 2. If an engine failed, the exit code is 1."""

import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from forebay.cli.common.logs import logs_json
from forebay.cli.common.terminal import printable
from forebay.processes import notices
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LeaseError, LogError, NotDerivable

USAGE = 2
BROKEN = 1
OTHER_RULES = 3  # only a program with other decision rules can do it


class NoticeHandler(logging.Handler):
    """Prints announcements on stdout and errors on stderr, or logs them with `--log-format json`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logs_json():
            lines = "\n".join(printable(line) for line in record.getMessage().split("\n"))
            click.echo(f"forebay: {lines}", err=record.levelno > logging.INFO)
        elif logging.getLogger("forebay").isEnabledFor(record.levelno):
            logging.getLogger().handle(record)


notices.logger.addHandler(NoticeHandler())
notices.logger.setLevel(logging.INFO)
notices.logger.propagate = False


@contextmanager
def explained() -> Iterator[None]:
    """Report errors of the body. Exit with code 2 after an error that the user can correct, 1 if an engine failed.

    Exit with code 3 if only a program with other decision rules can derive what was requested.

    A user can correct invalid input, and install a missing package.
    """
    try:
        yield
    except NotDerivable as error:
        fail(str(error), OTHER_RULES)
    except (LeaseError, LogError, ConfigError) as error:
        fail(str(error))
    except Exception as error:
        # Imported here, because engines take 100 ms, which --help does not need.
        from forebay.workers.engine import EngineError, PackageMissing  # noqa: PLC0415

        if not isinstance(error, EngineError):
            raise
        fail(str(error), USAGE if isinstance(error, PackageMissing) else BROKEN)


def fail(message: str, code: int = USAGE) -> NoReturn:
    """Print an error and exit with this code. Raises click.exceptions.Exit."""
    complain(message)
    raise click.exceptions.Exit(code)


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a process until it ends. An error ends this program with a one-line message."""
    import asyncio  # noqa: PLC0415 - --help needs neither this

    import uvloop  # noqa: PLC0415 - nor this

    with explained(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
