"""Secrets in text that commands print."""

import re

from forebay.cli.common.command_class import SECRETS

MASK = "********"
PARAMETER = re.compile(rf"([?&][^=&]*(?:{'|'.join(sorted(SECRETS))})=)[^&#]*", re.IGNORECASE)
PASSWORD = re.compile(r"(?<=://)([^:]*):.*@", re.DOTALL)  # greedy, because a password may contain / and @


def without_passwords(text: str) -> str:
    """Return text with masked passwords: those before the host of a URL, and query parameters with such a name."""
    if "://" in text:
        text = PARAMETER.sub(rf"\1{MASK}", text)
    return PASSWORD.sub(rf"\1:{MASK}@", text)
