"""A cache that is to be emptied soon: by one task at a time, once more if that is asked for meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable


class Clearing:
    """`clear` empties the cache; `on_fault` gets what it fails by."""

    def __init__(self, clear: Callable[[], Awaitable[None]], on_fault: Callable[[BaseException], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._clear = clear
        self._on_fault = on_fault
        self._again = False

    def soon(self) -> None:
        """Begin, if that has not been done."""
        self._again = True
        if self.task is None:
            self.task = asyncio.create_task(self._all(), name="clear the cache")
            self.task.add_done_callback(self._ended)

    async def over(self) -> None:
        """Wait while it is emptied."""
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
