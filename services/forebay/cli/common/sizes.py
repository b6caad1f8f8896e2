"""Sizes as people type them: `500MB`, `10GB`."""

import re

from forebay.cli.common.errors import fail

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kB|MB|GB|TB)")


def size(option: str, text: str, minimum: int) -> int:
    """Return a size like `500MB` in bytes. Ends the command for text that is no size, or a size below a minimum."""
    found = _SIZE.fullmatch(text)
    if found is None:
        fail(f"{option} {text}: not a size; give a number with kB, MB, GB or TB, as 500MB or 10GB")
    count = int(float(found[1]) * UNITS[found[2]])
    if count < minimum:
        fail(f"{option} {text}: too small; the minimum is {minimum // UNITS['MB']}MB")
    return count
