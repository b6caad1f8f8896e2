"""Background clearing of a cache, by one task at a time."""

import asyncio
from collections.abc import Awaitable, Callable


class Clearing:
    """Runs `clear` in a task, and once more if requested meanwhile. Passes exceptions to `on_fault`."""

    def __init__(self, clear: Callable[[], Awaitable[None]], on_fault: Callable[[BaseException], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._clear = clear
        self._on_fault = on_fault
        self._again = False

    def soon(self) -> None:
        """Request a clearing; start the task unless it runs."""
        self._again = True
        if self.task is None:
            self.task = asyncio.create_task(self._all(), name="clear the cache")
            self.task.add_done_callback(self._ended)

    async def over(self) -> None:
        """Wait until no clearing runs."""
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
