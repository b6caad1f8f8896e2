"""Ends a process in bounded time, also when a part of it hangs: a broker that is away holds up every client library.

A thread of its own does it, because a library that joins its threads can block the event loop.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.cli.common.errors import BROKEN, complain

STOP_S = 15.0  # for the work under way at the first signal, unless a service has a limit of its own
CLOSE_S = 4.0  # for connections after that; both together stay below the 20 s of `stop_grace_period` in compose.yaml
AT_ONCE_S = 3.0  # for connections after a second signal
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_within(seconds: float, why: str) -> threading.Timer:
    """End this process after so many seconds, unless it ends by itself or the timer is cancelled."""
    timer = threading.Timer(seconds, _end, [seconds, why])
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def ending_within(seconds: float, why: str) -> Iterator[None]:
    """End this process if the body takes longer."""
    timer = end_within(seconds, why)
    try:
        yield
    finally:
        timer.cancel()


def on_second_signal(then: Callable[[], object]) -> None:
    """End this process within `AT_ONCE_S` after the next SIGINT or SIGTERM, also while the event loop is blocked."""

    def hear(_number: int, _frame: object) -> None:
        end_within(AT_ONCE_S, "a second signal")
        then()

    for number in SIGNALS:
        signal.signal(number, hear)


def _end(seconds: float, why: str) -> None:
    complain(f"ended by force, because it did not stop within {seconds:g} s after {why}")
    sys.stderr.flush()
    os._exit(BROKEN)
