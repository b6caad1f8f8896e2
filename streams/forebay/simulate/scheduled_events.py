"""What is to happen at a time."""

from collections.abc import Callable
from heapq import heappush

from forebay.simulate.arrivals import FOREVER_US

Happening = tuple[int, int, Callable[[], object]]


class Happenings(list[Happening]):
    """A heap of what is to happen, of one time in the order in which it was put here; the last is what never does."""

    def __init__(self) -> None:
        super().__init__([(FOREVER_US, 0, _never)])
        self._put = 0

    def put(self, at_us: int, action: Callable[[], object]) -> None:
        """One more."""
        self._put += 1
        heappush(self, (at_us, self._put, action))


def _never() -> None:
    raise AssertionError("the end of time")
