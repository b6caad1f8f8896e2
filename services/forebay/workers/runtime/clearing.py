"""Clear a cache in the background, in at most one task at a time."""

import asyncio
from collections.abc import Awaitable, Callable


class Clearing:
    """Clears a cache in a background task.

    Args:
        clear: clears the cache. If a clearing is requested while it runs, it runs once more.
        on_fault: called with an exception of `clear`.

    Attributes:
        task: the running task, None if no clearing runs.
    """

    def __init__(self, clear: Callable[[], Awaitable[None]], on_fault: Callable[[BaseException], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._clear = clear
        self._on_fault = on_fault
        self._again = False

    def soon(self) -> None:
        """Request a clearing of the cache, and return at once."""
        self._again = True
        if self.task is None:
            self.task = asyncio.create_task(self._all(), name="clear the cache")
            self.task.add_done_callback(self._ended)

    async def over(self) -> None:
        """Wait until all requested clearings have ended."""
        while self.task is not None:
            await asyncio.wait([self.task])

    async def _all(self) -> None:
        while self._again:
            self._again = False
            await self._clear()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(error)
