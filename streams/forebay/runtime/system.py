"""The runtime of a real process: clocks, entropy and threads of the operating system."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Ticker(Protocol):
    """Handle of a function that is called repeatedly on a thread of its own."""

    def wake(self) -> None:
        """Call the function as soon as possible instead of after the current wait. May be called on any thread."""

    async def ended(self) -> None:
        """Wait until the function returned None."""


class SystemRuntime:
    """Clocks, entropy and threads of the operating system."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Return the wall clock in nanoseconds since 1970."""
        return time.time_ns()

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes of the operating system's entropy."""
        return os.urandom(count)

    async def offload(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the event loop's default executor."""
        return await asyncio.to_thread(function, *args, **kwargs)

    def executor(self, threads: int, name: str) -> Executor:
        """Return a thread pool whose calls inherit the context of their submitter."""
        return _ContextExecutor(threads, name)

    def start_ticker(self, step: Callable[[], float | None], name: str) -> Ticker:
        """Start a thread that calls `step` and then sleeps for the returned seconds, until `step` returns None."""
        return _ThreadTicker(step, name)


class _ContextExecutor(ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(copy_context().run, partial(fn, *args, **kwargs))


class _ThreadTicker:
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
