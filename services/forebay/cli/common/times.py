"""Times and spans as people type them: `2026-01-31T12:00:00Z`, `12:30` of today, `-5m` before now, `90s`."""

import re
from datetime import datetime, time

from forebay.cli.common.errors import fail

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_CLOCK = re.compile(r"\d\d:\d\d(:\d\d(\.\d+)?)?")
_UNIT_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
TIMES_HELP = "2026-01-31T12:00:00Z (local time without a zone), 12:30[:05] for today, or -5m for before now"


def span_us(option: str, text: str) -> int:
    """A span like `90s`, `5m`, `2h` or `1d` in microseconds, more than none. Ends the command for what is none."""
    found = _SPAN.fullmatch(text)
    span = round(float(found[1]) * _UNIT_US[found[2]]) if found else 0
    if not span:
        fail(f"{option} {text}: no span; give a number above 0 with s, m, h or d, as 90s, 5m or 2h")
    return span


def time_us(option: str, text: str, now_us: int) -> int:
    """A point in time in microseconds since 1970, seen from `now_us`. Ends the command for what is none."""
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
        fail(f"{option} {text}: no time; give {TIMES_HELP}")
