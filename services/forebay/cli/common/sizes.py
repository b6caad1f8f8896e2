"""Parser of sizes such as `500MB` and `10GB`."""

import re

from forebay.cli.common.errors import fail

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(kB|MB|GB|TB)")


def size(option: str, text: str, minimum: int) -> int:
    """Return a size such as `500MB` in bytes. An invalid size, or one below `minimum` bytes, ends the command."""
    found = _SIZE.fullmatch(text)
    if found is None:
        fail(f"{option} {text}: not a size; expected a number with kB, MB, GB or TB, such as 500MB")
    count = int(float(found[1]) * UNITS[found[2]])
    if count < minimum:
        fail(f"{option} {text}: too small; the minimum is {minimum // UNITS['MB']}MB")
    return count
