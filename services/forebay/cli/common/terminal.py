"""What commands put on a terminal: as wide as there is room, and harmless, whatever a log holds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn

WIDTH = 120  # of what is not a terminal


def results(*, wide: bool = False, soft_wrap: bool = False) -> Console:
    """For results on stdout; `soft_wrap` leaves long lines whole.

    A `wide` one goes on in the next line of a narrow terminal: a table that is cut to its width says nothing.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=soft_wrap)
    return Console(width=max(console.width, WIDTH), highlight=False) if wide else console


def bar(*columns: ProgressColumn) -> Progress:
    """Progress on stderr, while it lasts, if that is a terminal; without columns in rich's usual ones."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def printable(text: str) -> str:
    """Text from a log, which anybody may have written, without what a terminal would obey."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def in_markup(text: str) -> str:
    """The same as a part of rich's markup."""
    return escape(printable(text))


@contextmanager
def own_stdout() -> Iterator[None]:
    """What others print in the body, such as a policy of the user's, goes to stderr: results are not mixed with it."""
    with redirect_stdout(sys.stderr):
        yield
