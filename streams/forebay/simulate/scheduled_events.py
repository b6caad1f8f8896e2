"""Queue of scheduled events."""

from collections.abc import Callable
from heapq import heappush

from forebay.simulate.arrivals import FOREVER_US

ScheduledEvent = tuple[int, int, Callable[[], object]]


class EventQueue(list[ScheduledEvent]):
    """Heap of actions scheduled for virtual times. Actions of one time run in insertion order."""

    def __init__(self) -> None:
        super().__init__([(FOREVER_US, 0, _never)])
        self._put = 0

    def put(self, at_us: int, action: Callable[[], object]) -> None:
        """Schedule an action at `at_us`."""
        self._put += 1
        heappush(self, (at_us, self._put, action))


def _never() -> None:
    raise AssertionError("the sentinel of the event queue ran")
