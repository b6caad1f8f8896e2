"""Terminal output of commands. Text from logs is escaped, so it cannot control the terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich takes 100 ms, and --help and errors do not need it
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from forebay.cli.common.tables import WholeWordsConsole

WIDTH = 120  # columns, if stdout is not a terminal


def results(*, soft_wrap: bool = False) -> "WholeWordsConsole":
    """Return a console for results on stdout. It breaks lines between words only, and no lines with `soft_wrap`."""
    from forebay.cli.common.tables import WholeWordsConsole  # noqa: PLC0415

    return WholeWordsConsole(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=soft_wrap)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without borders on stdout."""
    from forebay.cli.common.tables import plain_table  # noqa: PLC0415

    results().print(plain_table(columns, rows))


def bar(*columns: "ProgressColumn") -> "Progress":
    """Return a progress bar on stderr that disappears at its end. It is disabled if stderr is not a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def counting_bar() -> "Progress":
    """Return a progress bar with a description, the counts of what is done and of all, and the remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    return bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@contextmanager
def shown_reading(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows on stderr how many records were read, and how many there are."""
    with bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def table(title: str, columns: Sequence[str], *, left: int = 1, **of_columns: Any) -> "Table":
    """Return a table whose first `left` columns are aligned to the left."""
    from rich.box import SIMPLE  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    made = Table(title=in_markup(title), box=SIMPLE, padding=(0, 0, 0, 1))
    for at, column in enumerate(columns):
        made.add_column(in_markup(column), justify="left" if at < left else "right", **of_columns)
    return made


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """Escape the unprintable characters of untrusted text, such as terminal control sequences."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def in_markup(text: str) -> str:
    """Escape untrusted text for use in rich markup."""
    from rich.markup import escape  # noqa: PLC0415

    return escape(printable(text))


@contextmanager
def own_stdout() -> Iterator[None]:
    """Redirect to stderr what the body prints, for example a user's policy, because stdout is for results."""
    with redirect_stdout(sys.stderr):
        yield
