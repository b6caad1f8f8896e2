"""Times on the owner's clock, as options of `forebay replay`."""

from forebay.cli.common.times import time_us
from forebay.replay.at_time import last_time
from forebay.transport.base import Log

CLOCK_DIGITS_MAX = 19  # a time in microseconds, as in records


async def log_time_us(option: str, text: str, log: Log, partition: int) -> int:
    """Return a point in time in microseconds since 1970. An invalid time ends the command.

    `text` is a time, a duration before the end of the log such as `-5m`, or microseconds.
    """
    exactly = text.isdecimal() and len(text) <= CLOCK_DIGITS_MAX
    return int(text) if exactly else time_us(option, text, await last_time(log, partition))
