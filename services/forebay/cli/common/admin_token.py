"""The token of the admin API, which `forebay control` sends and an ingress demands."""

import os
from pathlib import Path
from typing import Annotated

import typer

from forebay.ingress.errors import Unusable

VARIABLE = "FOREBAY_ADMIN_TOKEN"
TOKEN_CHARS_MAX = 4_096  # it travels in a header

AdminTokenFileOption = Annotated[
    Path | None,
    typer.Option(help=f"File with the token of the admin API; the environment variable {VARIABLE} when left out."),
]


def admin_token(file: Path | None) -> str:
    """Return the token of a file, else that of the environment; empty if there is none.

    Raises:
        Unusable: for a file that cannot be read, and for a token that no header can carry.
    """
    if file is None:
        text, where = os.environ.get(VARIABLE, ""), VARIABLE
    else:
        where = f"--admin-token-file {file}"
        try:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(TOKEN_CHARS_MAX + 2).removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise Unusable(f"{where} cannot be read ({reason})") from error
        if not text:
            raise Unusable(f"{where} is empty; write a token into it, for example of `openssl rand -hex 32`")
    if len(text) > TOKEN_CHARS_MAX or not all("!" <= character <= "~" for character in text):
        raise Unusable(f"{where}: a token has 1 to {TOKEN_CHARS_MAX} visible ASCII characters, and no spaces")
    return text


def required_token(file: Path | None, *, admin_api: bool) -> str:
    """Return the token that an ingress demands, empty while its admin API is off.

    Raises:
        Unusable: as `admin_token`, when there is none for an admin API, and for a file that would have no effect.
    """
    if not admin_api:
        if file is not None:
            raise Unusable("--admin-token-file needs --admin-api: without it there is no admin API")
        return ""
    token = admin_token(file)
    if not token:
        raise Unusable(f"--admin-api needs a token: set {VARIABLE}, or give --admin-token-file FILE")
    return token
