"""Deadlines of requests, in a heap.

A request that ended leaves its entry in the heap; such entries are removed later.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Deadline = tuple[int, str, int]  # time in microseconds, request id, offset of the submission
SPARE = 64  # stale entries that may remain, however few requests there are


class Deadlines:
    """Heap of request deadlines.

    Removing an entry from the middle of a heap takes linear time. So a request that ends leaves its entry behind, and
    the caller's function `holds` returns whether an entry is still valid.
    """

    def __init__(self, holds: Callable[[Deadline], bool]) -> None:
        self._holds = holds
        self._heap: list[Deadline] = []

    def add(self, deadline: Deadline, active_requests: int) -> None:
        """Add a deadline. The heap never has more than twice `active_requests` entries plus `SPARE`."""
        heap = self._heap
        heappush(heap, deadline)
        if len(heap) > 2 * active_requests + SPARE:
            heap[:] = filter(self._holds, heap)
            heapify(heap)

    def earliest(self, due_us: int | None) -> int | None:
        """Return the earliest valid deadline or `due_us`, whichever is earlier. None means no deadline."""
        heap = self._heap
        # Called for every event. Check for stale entries only if the first entry would change the result.
        if not heap or (due_us is not None and due_us <= heap[0][0]):
            return due_us
        self._drop()
        if heap and (due_us is None or heap[0][0] < due_us):
            return heap[0][0]
        return due_us

    def take(self, now_us: int) -> list[str]:
        """Remove the deadlines at or before `now_us`. Return the ids of their requests, earliest deadline first."""
        found = []
        self._drop()
        while self._heap and self._heap[0][0] <= now_us:
            found.append(heappop(self._heap)[1])
            self._drop()
        return found

    def _drop(self) -> None:
        heap = self._heap
        while heap and not self._holds(heap[0]):
            heappop(heap)
