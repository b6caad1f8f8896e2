"""Parser of times such as `2026-01-31T12:00:00Z` or `-5m`, of durations such as `90s`, and of sizes such as `500MB`."""

import re
from datetime import datetime, time

from forebay.cli.common.errors import fail

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_CLOCK = re.compile(r"\d\d:\d\d(:\d\d(\.\d+)?)?")
_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
TIMES_HELP = "2026-01-31T12:00:00Z (local time without a zone), 12:30[:05] today, or -5m for 5 minutes ago"


def span_us(option: str, text: str) -> int:
    """Return a duration such as `90s`, `5m`, `2h` or `1d` in microseconds. Any other text ends the command."""
    found = _SPAN.fullmatch(text)
    span = round(float(found[1]) * _UNIT_US[found[2]]) if found else 0
    if not span:
        fail(f"{option} {text}: not a duration; expected a number above 0 with s, m, h or d, such as 90s")
    return span


def time_us(option: str, text: str, now_us: int) -> int:
    """Return a time, or a negative duration from `now_us`, in µs since 1970. An invalid time ends the command."""
    if text.startswith("-"):
        return now_us - span_us(option, text.removeprefix("-"))
    try:
        if _CLOCK.fullmatch(text):
            today = datetime.fromtimestamp(now_us / 1e6).astimezone().date()
            moment = datetime.combine(today, time.fromisoformat(text))
        else:
            moment = datetime.fromisoformat(text)
        return round(moment.astimezone().timestamp() * 1e6)
    except (ValueError, OverflowError):
        fail(f"{option} {text}: not a time; expected {TIMES_HELP}")


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
