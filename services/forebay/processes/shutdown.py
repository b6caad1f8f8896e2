"""Process shutdown in bounded time, even if a client library hangs because its broker is unreachable.

A timer thread ends the process, because a library that joins its threads can block the event loop.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.processes.notices import complain

STOP_S = 15.0  # seconds for requests in flight after the first signal, unless a service has its own limit
CLOSE_S = 4.0  # seconds to close connections; with STOP_S below the `stop_grace_period` of 20 s in compose.yaml
AT_ONCE_S = 3.0  # seconds to close connections after a second signal
HURRY_S = 10.0  # seconds to fail the requests in flight after a second signal, and to stop engines and owners
REPORT_S = 2.0  # seconds to write the last lines to stderr
KILLED = 1  # exit code
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_notice(service: str, in_flight: int, within_s: float) -> str:
    """Return the line that a service prints after the first signal: what it waits for, and what a second signal does.

    `service` is the subject, such as `worker w1`; empty for `forebay up`.
    """
    subject = f"{service} is shutting down" if service else "shutting down"
    if not in_flight:
        return f"{subject}: no requests in flight"
    requests = "1 request" if in_flight == 1 else f"{in_flight} requests"
    return (
        f"{subject}: waiting up to {within_s:g} s for {requests} in flight; "
        "press Ctrl-C again or send a second signal to end at once"
    )


def end_within(seconds: float, why: str) -> threading.Timer:
    """Start a timer that ends this process after `seconds`. Its error message contains the reason `why`."""
    timer = threading.Timer(seconds, _end, [seconds, why])
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def ending_within(seconds: float, why: str) -> Iterator[None]:
    """End this process if the body takes longer than `seconds`."""
    timer = end_within(seconds, why)
    try:
        yield
    finally:
        timer.cancel()


def on_second_signal(then: Callable[[], object], within_s: float) -> None:
    """End this process within `within_s` seconds of the next SIGINT or SIGTERM, also while the loop is blocked."""

    def handle(_number: int, _frame: object) -> None:
        end_within(within_s, "a second signal")
        then()

    for number in SIGNALS:
        signal.signal(number, handle)


def _end(seconds: float, why: str) -> None:
    def report() -> None:
        complain(f"killed: the process did not stop within {seconds:g} s after {why}")
        logging.shutdown()

    reporting = threading.Thread(target=report, daemon=True)  # noqa: TID251 - the loop may be blocked
    reporting.start()
    reporting.join(REPORT_S)  # it waits for ever while stderr is a pipe that nobody reads
    os._exit(KILLED)
