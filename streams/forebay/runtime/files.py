"""Read files that users write, and replace files. Readers raise ConfigError, with the path, for an unreadable file."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from forebay.runtime.errors import ConfigError

FILE_BYTES_MAX = 1 << 20  # such files have a few kilobytes


def read_file(path: Path, what: str = "file", bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return the content of a file of at most `bytes_max` bytes. Errors call it `what`."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) > bytes_max:
        raise ConfigError(f"{path}: the {what} is larger than {bytes_max} bytes; check the path")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(read_file(path).decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or an integer with too many digits
        raise ConfigError(f"{path}: not TOML: {error}") from None


def read_text(where: str, file: Path, chars_max: int) -> str:
    """Return the beginning of a file. Errors call the file `where`, the option with its path."""
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(chars_max)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {where}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the one at `path` at the end of the body, unless the body fails. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
