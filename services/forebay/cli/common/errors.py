"""Errors of commands: a one-line message on stderr, then exit code 2. If an engine failed, the exit code is 1."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from forebay.cli.common.logs import logs_json
from forebay.cli.common.terminal import printable
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError, NotDerivable

USAGE = 2
BROKEN = 1
OTHER_RULES = 3  # only a program with other decision rules can do it


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
    except (LogError, ConfigError) as error:
        fail(str(error))
    except Exception as error:
        # Imported here, because engines take 100 ms, which --help does not need.
        from forebay.workers.engine import EngineError, PackageMissing  # noqa: PLC0415

        if not isinstance(error, EngineError):
            raise
        fail(str(error), USAGE if isinstance(error, PackageMissing) else BROKEN)


def cause_of(error: BaseException) -> BaseException:
    """Return the first error of an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def fail(message: str, code: int = USAGE) -> NoReturn:
    """Print an error and exit with this code. Raises click.exceptions.Exit."""
    complain(message)
    raise click.exceptions.Exit(code)


def complain(message: str) -> None:
    """Print an error on stderr, with the prefix `forebay:`. With `--log-format json`, log the error instead."""
    if logs_json():
        logging.getLogger("forebay.cli").error("%s", message)
        return
    lines = "\n".join(printable(line) for line in message.split("\n"))
    sys.stderr.write(f"forebay: {lines}\n")
