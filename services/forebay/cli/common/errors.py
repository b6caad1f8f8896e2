"""What ends a command early: one line on stderr that says what to do, and exit code 2, or 1 for a broken engine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from forebay.cli.common.terminal import printable
from forebay.ingress.errors import Unusable
from forebay.transport.base import LogError
from forebay.workers.engine import EngineError

USAGE = 2
BROKEN = 1


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors that a user can mend into a line and exit code 2; what an engine died of ends with 1."""
    try:
        yield
    except (LogError, Unusable) as error:
        fail(str(error))
    except EngineError as error:
        complain(str(error))
        raise typer.Exit(BROKEN) from None


def cause_of(error: BaseException) -> BaseException:
    """The first error of those that ended a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def fail(message: str) -> NoReturn:
    """End the command. Raises typer.Exit."""
    complain(message)
    raise typer.Exit(USAGE)


def complain(message: str) -> None:
    """Say on stderr what is wrong."""
    lines = "\n".join(printable(line) for line in message.split("\n"))
    sys.stderr.write(f"forebay: {lines}\n")
