"""Pause the use of a store that fails, so that requests do not wait for its timeouts again and again."""

import logging
import threading
from collections.abc import Sequence

from forebay import runtime

LOG = logging.getLogger(__name__)

FIRST_S = 1.0
LONGEST_S = 60.0  # a store that works again is noticed after this time
PAUSING = frozenset({"deadline", "denied", "failed"})  # not `missing` or `full`, which are answers of a working store


class Pause:
    """Pauses of one store: 1 s after the first call without a success, then twice as long, up to 60 s."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._until_s = 0.0
        self._length_s = 0.0
        self._lock = threading.Lock()

    def active(self) -> bool:
        """Return whether the store should not be used now."""
        return runtime.monotonic_s() < self._until_s

    def observe(self, results: Sequence[str]) -> None:
        if not results:
            return
        with self._lock:
            if not all(reason in PAUSING for reason in results):
                self._length_s = self._until_s = 0.0
                return
            self._length_s = min(LONGEST_S, self._length_s * 2 or FIRST_S)
            self._until_s = runtime.monotonic_s() + self._length_s
        LOG.warning("%s fails (%s); it is not used for %.0f s", self._what, results[0], self._length_s)
