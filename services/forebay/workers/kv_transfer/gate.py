"""Limit the number and the total bytes of concurrent fetches."""

import asyncio
from collections import deque

from forebay.workers.kv_transfer.api import Stats
from forebay.workers.kv_transfer.nixl_agent import TransferError

FETCHES_MAX = 16  # more fetches would share one thread and memory bus, and each would end later
BYTES_MAX = 1 << 30  # a larger fetch runs alone
WAITING_MAX = 4096  # far more than can end within the deadline


class FetchLimiter:
    """Limits the concurrent fetches of one transport. Fetches above the limits wait in the order of their arrival.

    Use it on one event loop only.

    Args:
        bytes_max: maximum bytes of concurrent fetches; a larger fetch runs alone.
    """

    def __init__(self, stats: Stats, *, fetches_max: int = FETCHES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._stats = stats
        self._fetches_max = fetches_max
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, size: int) -> None:
        """Wait until a fetch of `size` bytes may run. The caller must call `leave` when the fetch has ended.

        Raises:
            TransferError: with reason `full`, if too many fetches wait.
        """
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._take(size)

    def leave(self, size: int) -> None:
        """Record that a fetch of `size` bytes has ended, and admit waiting fetches."""
        self._stats.in_flight -= 1
        self._stats.in_flight_bytes -= size
        self._admit()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise TransferError(f"{WAITING_MAX} fetches are already waiting", "full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        self._stats.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted while it was being cancelled
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
            if not turn.cancelled():  # otherwise it is admitted and not resumed yet
                self._take(size)
                turn.set_result(None)
