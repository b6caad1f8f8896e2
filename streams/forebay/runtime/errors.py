"""Errors about what a user configured or did not install, and the cause of a group."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(Exception):
    """An option or a configuration is invalid. The message is one line: what is wrong and what to do."""


def install_command(extra: str) -> str:
    """Return how to install an extra. forebay is on no package index, where others could take its name."""
    return f"pip install 'PATH[{extra}]', where PATH is a checkout or wheel of forebay"


def cause_of(error: BaseException, kind: type[Exception] = Exception) -> BaseException:
    """Return the first error of an exception group, of this kind if there is one, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        error = error.subgroup(kind) or error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def prefixed(where: object) -> Iterator[None]:
    """Begin errors of the body about invalid values with `where`: the option, file or key that has the value."""
    try:
        yield
    except (ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None
