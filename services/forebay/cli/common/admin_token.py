"""Token of the admin API. `forebay control` sends the token, and an ingress requires it."""

import os
from pathlib import Path
from typing import Annotated

from forebay.cli.common.options import Option
from forebay.ingress.errors import Unusable

VARIABLE = "FOREBAY_ADMIN_TOKEN"
TOKEN_CHARS_MAX = 4_096  # clients send the token in an HTTP header

AdminTokenFileOption = Annotated[
    Path | None,
    Option("--token-file", help=f"File with the admin API token. Default: environment variable {VARIABLE}."),
]


def admin_token(file: Path | None) -> str:
    """Return the token of `file`, of the environment if that is None, or ''. Raises Unusable if it is invalid."""
    if file is None:
        text, where = os.environ.get(VARIABLE, ""), VARIABLE
    else:
        where = f"--token-file {file}"
        try:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(TOKEN_CHARS_MAX + 2).removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise Unusable(f"cannot read {where}: {reason}") from error
        if not text:
            raise Unusable(f"{where} is empty; write a token to it, for example from `openssl rand -hex 32`")
    if len(text) > TOKEN_CHARS_MAX or not all("!" <= character <= "~" for character in text):
        raise Unusable(
            f"{where}: invalid token; expected 1 to {TOKEN_CHARS_MAX} visible ASCII characters without spaces"
        )
    return text


def required_token(file: Path | None, *, admin_api: bool) -> str:
    """Return the token that an ingress requires, '' without admin API. Raises Unusable if it is invalid or missing."""
    if not admin_api:
        if file is not None:
            raise Unusable("--token-file requires --admin-api")
        return ""
    token = admin_token(file)
    if not token:
        raise Unusable(f"--admin-api requires a token; set {VARIABLE} or use --token-file FILE")
    return token
