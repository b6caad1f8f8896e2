"""API keys and admin tokens: those that an ingress accepts, and those that a client sends."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from forebay.cli.common.options import Option
from forebay.runtime.errors import ConfigError

API_KEY_VARIABLE = "FOREBAY_API_KEY"
TOKEN_VARIABLE = "FOREBAY_ADMIN_TOKEN"  # noqa: S105 - a name
CHARS_MAX = 4_096  # clients send a key or a token in an HTTP header
FILE_BYTES_MAX = 1 << 20
KEY = re.compile(r"[!-+\--~]+")  # visible ASCII characters except the comma
GIVEN = f"--api-key or {API_KEY_VARIABLE}"

ApiKeysOption = Annotated[
    list[str] | None,
    Option(
        "--api-key",
        metavar="KEY",
        help="API key that clients must send. Repeatable; the variable separates keys by commas.",
    ),
]
ApiKeyFileOption = Annotated[Path | None, Option(help="File with further API keys, one per line.")]
AdminTokenFileOption = Annotated[
    Path | None,
    Option("--token-file", help=f"File with the admin API token. Default: environment variable {TOKEN_VARIABLE}."),
]
ClientKeyOption = Annotated[str | None, Option("--api-key", metavar="KEY", help="API key of the running system.")]


def read_text(where: str, file: Path, chars_max: int) -> str:
    """Return the beginning of a file. Raises ConfigError if it cannot be read."""
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(chars_max)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {where}: {reason}") from error


def require_token(where: str, text: str) -> str:
    """Return a token. Raises ConfigError if it is invalid."""
    if not 0 < len(text) <= CHARS_MAX or not all("!" <= character <= "~" for character in text):
        raise ConfigError(f"{where}: invalid token; expected 1 to {CHARS_MAX} visible ASCII characters without spaces")
    return text


def api_keys(given: Sequence[str] | None, file: Path | None) -> tuple[str, ...]:
    """Return the keys that an ingress accepts; empty if it requires none.

    Values of --api-key, and of the environment variable, may contain several keys, separated by commas. Raises
    ConfigError if a key is empty or invalid, or the file cannot be read or has no key. The message contains no key.
    """
    keys = _checked(GIVEN, (key for value in given or () for key in _split(value)))
    return tuple(dict.fromkeys(keys if file is None else [*keys, *_read(file)]))


def client_headers(given: str | None) -> dict[str, str]:
    """Return the header with the first API key of a value; empty without one. Raises ConfigError if it is invalid."""
    if given is None:
        return {}
    keys = _checked(GIVEN, _split(given))
    return {"authorization": f"Bearer {keys[0]}"}


def _split(value: str) -> list[str]:
    """Return the keys in a value, or one empty key if there is none. click splits the variable at spaces before."""
    return [key.strip() for key in value.split(",") if key.strip()] or [""]


def _read(file: Path) -> list[str]:
    where = f"--api-key-file {file}"
    text = read_text(where, file, FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{where} is larger than {FILE_BYTES_MAX} bytes; expected one key per line")
    keys = _checked(where, (line.strip() for line in text.splitlines() if line.strip()))
    if not keys:
        raise ConfigError(f"{where} has no key; write one per line, for example from `openssl rand -hex 32`")
    return keys


def _checked(where: str, keys: Iterable[str]) -> list[str]:
    checked = list(keys)
    for number, key in enumerate(checked, 1):
        if len(key) > CHARS_MAX or not KEY.fullmatch(key):
            text = f"expected 1 to {CHARS_MAX} visible ASCII characters without spaces and commas"
            raise ConfigError(f"{where}: key {number} is {'invalid' if key else 'empty'}; {text}")
    return checked


def admin_token(file: Path | None) -> str:
    """Return the token of `file`, of the environment if that is None, or ''. Raises ConfigError if it is invalid."""
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        return require_token(TOKEN_VARIABLE, text) if text else ""
    where = f"--token-file {file}"
    text = read_text(where, file, CHARS_MAX + 2).removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(f"{where} is empty; write a token to it, for example from `openssl rand -hex 32`")
    return require_token(where, text)


def required_token(file: Path | None, *, admin_api: bool) -> str:
    """Return the token of the admin API, '' without admin API. Raises ConfigError if it is invalid or missing."""
    if not admin_api:
        if file is not None:
            raise ConfigError("--token-file requires --admin-api")
        return ""
    token = admin_token(file)
    if not token:
        raise ConfigError(f"--admin-api requires a token; set {TOKEN_VARIABLE} or use --token-file FILE")
    return token
