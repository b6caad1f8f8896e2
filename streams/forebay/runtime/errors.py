"""The error of a service that cannot start or continue with what its user configured, and the cause of a group."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(Exception):
    """An option or a configuration is invalid. The message is one line: what is wrong and what to do."""


def cause_of(error: BaseException) -> BaseException:
    """Return the first error of an exception group, or the error itself."""
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
