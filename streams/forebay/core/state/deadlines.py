"""When requests are due: a heap from which deadlines that no longer hold are dropped late."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Deadline = tuple[int, str, int]  # when, the request's id, the offset of its submission
SPARE = 64  # deadlines that no longer hold and may stay, however few requests there are


class Deadlines:
    """Deadlines of requests; `holds` says whether one still does.

    Taking a deadline out of the middle of a heap costs a walk, so a request that ends leaves its deadline behind.
    """

    def __init__(self, holds: Callable[[Deadline], bool]) -> None:
        self._holds = holds
        self._heap: list[Deadline] = []

    def add(self, deadline: Deadline, under_way: int) -> None:
        """Add a deadline; the heap stays bounded by twice the number of requests `under_way`."""
        heap = self._heap
        heappush(heap, deadline)
        if len(heap) > 2 * under_way + SPARE:
            heap[:] = filter(self._holds, heap)
            heapify(heap)

    def sooner(self, due_us: int | None) -> int | None:
        """Return the first deadline if it comes before `due_us`, else `due_us`."""
        heap = self._heap
        # Asked with every event: whose the first deadline is only matters if it comes first.
        if not heap or (due_us is not None and due_us <= heap[0][0]):
            return due_us
        self._drop()
        if heap and (due_us is None or heap[0][0] < due_us):
            return heap[0][0]
        return due_us

    def take(self, now_us: int) -> list[str]:
        """Take out the deadlines that have passed; the ids of their requests, the first due first."""
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
