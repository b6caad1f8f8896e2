"""The owner's clock: starts at max(own clock, last recorded reading), then advances evenly.

A clock that only took the larger of wall time and the last reading would stand still after a take-over from
a machine whose clock was ahead, and with it every deadline.
"""

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], int]:
    """The wall clock in microseconds as it is now, advanced by the monotonic clock: stepping it changes nothing."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (offset_ns + time.monotonic_ns()) // 1000


class RunClock:
    """Readings for runs, in microseconds, never backwards.

    Attributes:
        ahead_us: how far the recorded readings were ahead of this machine's clock when it took over.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._last_us = 0
        self.ahead_us = 0

    def take_over(self, recorded_us: int) -> None:
        """Go on from the last recorded reading."""
        self._last_us = recorded_us
        self.ahead_us = max(0, recorded_us - self._clock_us())

    def now_us(self) -> int:
        """The reading for a run that opens now."""
        self._last_us = max(self._last_us, self._clock_us() + self.ahead_us)
        return self._last_us
