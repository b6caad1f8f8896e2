"""Text for the terminal. What comes from logs is escaped, so it cannot control the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Escape the unprintable characters of untrusted text, such as terminal control sequences."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@contextmanager
def own_stdout() -> Iterator[None]:
    """Redirect to stderr what the body prints, for example a user's policy, because stdout is for results."""
    with redirect_stdout(sys.stderr):
        yield
