"""How many fetches run at once: so many, of so many bytes together, first come first served."""

import asyncio
from collections import deque

from forebay.workers.kv_transfer.api import Stats
from forebay.workers.kv_transfer.nixl_agent import TransferError

FETCHES_MAX = 16  # more of them share one thread and one memory bus, and each ends later
BYTES_MAX = 1 << 30  # a larger one goes alone
WAITING_MAX = 4096  # far beyond what may end within a deadline


class Gate:
    """Room for fetches. On one event loop only."""

    def __init__(self, stats: Stats, *, fetches_max: int = FETCHES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._stats = stats
        self._fetches_max = fetches_max
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, size: int) -> None:
        """Have room for a fetch of `size` bytes, waiting for it. Raises TransferError (`full`) when too many wait."""
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._take(size)

    def leave(self, size: int) -> None:
        """Give the room to others."""
        self._stats.in_flight -= 1
        self._stats.in_flight_bytes -= size
        self._admit()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise TransferError(f"{WAITING_MAX} fetches wait already", "full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        self._stats.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came while it was being cancelled
                self.leave(size)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._stats.waiting -= 1
                self._admit()
            raise

    def _fits(self, size: int) -> bool:
        stats = self._stats
        alone = not stats.in_flight
        return alone or (stats.in_flight < self._fetches_max and stats.in_flight_bytes + size <= self._bytes_max)

    def _take(self, size: int) -> None:
        self._stats.in_flight += 1
        self._stats.in_flight_bytes += size

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, size = self._waiting.popleft()
            self._stats.waiting -= 1
            if not turn.cancelled():  # else whoever waited has yet to hear of it
                self._take(size)
                turn.set_result(None)
