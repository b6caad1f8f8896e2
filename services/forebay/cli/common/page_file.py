"""Output file of a report. A command overwrites a file only if it is an earlier report of the same command."""

from collections.abc import Callable
from pathlib import Path

import typer

from forebay.cli.common.errors import BROKEN, complain, fail
from forebay.cli.common.extras import require_extra

HEAD_BYTES = 1024  # the first bytes of a report, which contain its title


def require_writable(option: str, path: Path, title: str) -> None:
    """Check, before any work is done, that a report can be written to `path`.

    Args:
        option: Name of the option with the path, for error messages.
        path: Path of a file that does not exist, or of an earlier report of the same command.
        title: Text with which the title of each report of the command begins.

    Raises:
        typer.Exit: The file cannot be written, exists and is not a report of the command, or plotly is not installed.
    """
    require_extra("report", option, "plotly")
    if not path.parent.is_dir():
        fail(f"{option} {path}: no such directory {path.parent}")
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe or a terminal would wait
        fail(f"{option} {path}: not a regular file; choose another name")
    try:
        with path.open("rb") as file:
            is_page = f"<title>{title}".encode() in file.read(HEAD_BYTES)
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}")
    if not is_page:
        fail(f"{option} {path}: the file exists and is not a report of this command; choose another name")


def write(option: str, path: Path, page: Callable[[], str]) -> None:
    """Render a report and write it atomically. Raises typer.Exit if the file cannot be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(page(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        complain(f"{option} {path}: {error.strerror}")
        raise typer.Exit(BROKEN) from None
    finally:
        part.unlink(missing_ok=True)
