"""API keys and admin tokens: those that an ingress accepts, and those that a client sends."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from forebay.cli.common.options import Option
from forebay.ingress.key_file import CHARS_MAX, require_keys
from forebay.runtime.errors import ConfigError
from forebay.runtime.files import read_text

API_KEY_VARIABLE = "FOREBAY_API_KEY"
TOKEN_VARIABLE = "FOREBAY_ADMIN_TOKEN"  # noqa: S105 - a name
GIVEN = f"--api-key or {API_KEY_VARIABLE}"

ApiKeysOption = Annotated[
    list[str] | None,
    Option(
        "--api-key",
        metavar="KEY",
        help="API key that clients must send. Repeatable; the variable separates keys by commas.",
    ),
]
ApiKeyFileOption = Annotated[
    Path | None, Option(help="File with further API keys, one per line, also records of `forebay keys create`.")
]
AdminTokenFileOption = Annotated[
    Path | None,
    Option("--token-file", help=f"File with the admin API token. Default: environment variable {TOKEN_VARIABLE}."),
]
ClientKeyOption = Annotated[str | None, Option("--api-key", metavar="KEY", help="API key of the running system.")]


def require_token(where: str, text: str) -> str:
    """Return a token. Raises ConfigError if it is invalid."""
    if not 0 < len(text) <= CHARS_MAX or not all("!" <= character <= "~" for character in text):
        raise ConfigError(f"{where}: invalid token; expected 1 to {CHARS_MAX} visible ASCII characters without spaces")
    return text


def api_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the keys of --api-key or the environment variable; empty if there are none.

    A value may contain several keys, separated by commas. Raises ConfigError if a key is empty or invalid. The message
    contains no key.
    """
    return tuple(dict.fromkeys(require_keys(GIVEN, (key for value in given or () for key in _split(value)))))


def client_headers(given: str | None) -> dict[str, str]:
    """Return the header with the first API key of a value; empty without one. Raises ConfigError if it is invalid."""
    if given is None:
        return {}
    keys = require_keys(GIVEN, _split(given))
    return {"authorization": f"Bearer {keys[0]}"}


def _split(value: str) -> list[str]:
    """Return the keys in a value, or one empty key if there is none. click splits the variable at spaces before."""
    return [key.strip() for key in value.split(",") if key.strip()] or [""]


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
            raise ConfigError("--token-file requires --admin-api or --admin-port")
        return ""
    token = admin_token(file)
    if not token:
        raise ConfigError(f"the admin API requires a token; set {TOKEN_VARIABLE} or use --token-file FILE")
    return token
