"""The runtime of a real process: clocks, entropy and threads of the operating system.

Every command imports this module, so what loads asyncio is imported only when a thread starts.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

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
        import asyncio  # noqa: PLC0415 - see above

        return await asyncio.to_thread(function, *args, **kwargs)

    def executor(self, threads: int, name: str) -> "Executor":
        """Return a thread pool whose calls inherit the context of their submitter."""
        from forebay.runtime.threads import ContextExecutor  # noqa: PLC0415 - see above

        return ContextExecutor(threads, name)

    def start_ticker(self, step: Callable[[], float | None], name: str) -> Ticker:
        """Start a thread that calls `step` and then sleeps for the returned seconds, until `step` returns None."""
        from forebay.runtime.threads import ThreadTicker  # noqa: PLC0415 - see above

        return ThreadTicker(step, name)
