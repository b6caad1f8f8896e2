"""The error of a service that cannot start or continue with what its user configured, and the cause of a group."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(Exception):
    """An option or a configuration is invalid. The message is one line: what is wrong and what to do."""


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
