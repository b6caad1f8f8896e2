"""Threads of the operating system that inherit the context of their starter."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ContextExecutor(ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(copy_context().run, partial(fn, *args, **kwargs))


class ThreadTicker:
    def __init__(self, step: Callable[[], float | None], name: str) -> None:
        self._step = step
        self._wake = threading.Event()
        run = copy_context().run
        self._thread = threading.Thread(target=lambda: run(self._run), name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    async def ended(self) -> None:
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._step()
            if wait_s is None:
                return
            self._wake.wait(wait_s)
