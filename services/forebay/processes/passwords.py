"""Mask passwords in texts for users."""

import re

SECRETS = frozenset({"key", "keys", "token", "password", "secret"})  # last words of option names
MASK = "********"
PARAMETER = re.compile(rf"([?&][^=&]*(?:{'|'.join(sorted(SECRETS))})=)[^&#]*", re.IGNORECASE)
PASSWORD = re.compile(r"(?<=://)([^:]*):.*@", re.DOTALL)  # greedy, because a password may contain / and @


def without_passwords(text: str) -> str:
    """Return text with masked passwords: those before the host of a URL, and query parameters with such a name."""
    if "://" in text:
        text = PARAMETER.sub(rf"\1{MASK}", text)
    return PASSWORD.sub(rf"\1:{MASK}@", text)
