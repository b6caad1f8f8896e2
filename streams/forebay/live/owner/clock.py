"""Provide the owner's clock, which starts at max(wall clock, last recorded reading) and then advances evenly.

After a takeover from a machine whose clock was ahead, max(wall clock, last reading) at every reading would not advance
until the wall clock had caught up, and no deadline would expire meanwhile.
"""

from collections.abc import Callable

from forebay import runtime


def steady_clock() -> Callable[[], int]:
    """Return a clock in microseconds that starts at the wall clock and follows the monotonic clock.

    Later steps of the wall clock do not affect it.
    """
    offset_ns = runtime.wall_ns() - runtime.monotonic_ns()
    return lambda: (offset_ns + runtime.monotonic_ns()) // 1000


class RunClock:
    """Clock of an owner in microseconds, which never goes backwards. All events of a run share one reading of it.

    Attributes:
        ahead_us: Microseconds by which the last recorded reading was ahead of this machine's clock at the takeover.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._last_us = 0
        self.ahead_us = 0

    def resume(self, recorded_us: int) -> None:
        """Continue from the last recorded reading, in microseconds."""
        self._last_us = recorded_us
        self.ahead_us = max(0, recorded_us - self._clock_us())

    def now_us(self) -> int:
        """Return the clock reading for a run of events that begins now."""
        self._last_us = max(self._last_us, self._clock_us() + self.ahead_us)
        return self._last_us
