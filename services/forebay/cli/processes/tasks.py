"""Tasks of `forebay up`, which end together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from forebay.cli.common.errors import cause_of
from forebay.live.owner.owner import Owner


class Tasks:
    """Tasks of the system. If a task fails, the main task is cancelled and raises the error."""

    def __init__(self, main: "asyncio.Task[Any]") -> None:
        self.error: BaseException | None = None
        self._main = main
        self._tasks: list[asyncio.Task[None]] = []
        self._owners: list[tuple[Owner, asyncio.Task[None]]] = []

    def run(self, part: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(self._task(part, name))

    def own(self, owner: Owner, group: str) -> None:
        """Start the task of the owner of a group, which `stop` stops separately."""
        self._owners.append((owner, self._task(owner.run(), f"owner of {group}")))

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():  # noqa: ASYNC110 - these states set no event
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop all tasks, the owners first, so that they do not report workers as lost while their engines stop."""
        for task in self._tasks:
            task.cancel()
        for owner, _ in self._owners:
            await owner.stop()
        for owner, task in self._owners:
            await task
            await owner.close()
        # Without a second cancel, which would interrupt engines that are stopping.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def abandon(self) -> None:
        await ended([*self._tasks, *(task for _, task in self._owners)])

    def _task(self, part: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and self.error is None and (error := task.exception()) is not None:
            self.error = error
            self._main.cancel()


@asynccontextmanager
async def running_tasks() -> AsyncIterator[Tasks]:
    """Yield the tasks of a system, and stop them after the body. Raises the error of a task that failed."""
    main = asyncio.current_task()
    assert main is not None
    tasks = Tasks(main)
    try:
        yield tasks
        await tasks.stop()
    except asyncio.CancelledError:
        if tasks.error is None:
            raise
        raise cause_of(tasks.error) from None
    finally:
        await tasks.abandon()


async def ended(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
