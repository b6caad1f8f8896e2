"""Where pages go: never over what is no page of the same command."""

from collections.abc import Callable
from pathlib import Path

import typer

from forebay.cli.common.errors import BROKEN, complain, fail

HEAD_BYTES = 1024  # of a page, which hold its title


def require_writable(option: str, path: Path, title: str) -> None:
    """Refuse, before any work is done, to write a page where something else is; a page's title begins with `title`.

    Raises typer.Exit.
    """
    if not path.parent.is_dir():
        fail(f"{option} {path}: there is no directory {path.parent}")
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe or a terminal would wait
        fail(f"{option} {path}: is no plain file; choose another name")
    try:
        with path.open("rb") as file:
            is_page = f"<title>{title}".encode() in file.read(HEAD_BYTES)
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}")
    if not is_page:
        fail(f"{option} {path}: is there, and is no page of this command; choose another name")


def write(option: str, path: Path, page: Callable[[], str]) -> None:
    """Make a page and put it there, whole or not at all. Raises typer.Exit."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(page(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        complain(f"{option} {path}: {error.strerror}")
        raise typer.Exit(BROKEN) from None
    finally:
        part.unlink(missing_ok=True)
