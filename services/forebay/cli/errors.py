"""What ends a command early: one line on stderr that says what to do, and exit code 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from forebay.ingress.errors import Unusable
from forebay.transport.base import LogError

USAGE = 2


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors that a user can mend into a line and exit code 2."""
    try:
        yield
    except (LogError, Unusable) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command. Raises typer.Exit."""
    sys.stderr.write(f"forebay: {message}\n")
    raise typer.Exit(USAGE)
