"""Simulated process: a service with its own clocks, entropy and scheduler queue, which can be paused and killed."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from forebay import runtime
from tests.faults.loop import VirtualLoop, in_scope
from tests.faults.runtime import VirtualRuntime

T = TypeVar("T")
Main = Callable[["Process"], Coroutine[Any, Any, None]]


class Process:
    """One incarnation of a simulated process.

    Args:
        rules: version of the decision rules of its program; 0 if no code of the process depends on them.

    Attributes:
        label: name of the service with its incarnation.
        error: exception that ended the process; None while it runs, and after a normal end.
        on_end: called when the main coroutine has ended, but not after `kill`.
    """

    def __init__(self, loop: VirtualLoop, name: str, incarnation: int, seed: str, rules: int = 0) -> None:
        self.name = name
        self.label = f"{name}#{incarnation}"
        self.runtime = VirtualRuntime(loop, f"{seed}/{self.label}")
        self.error: BaseException | None = None
        self.on_end: Callable[[Process], None] = lambda _: None
        self._loop = loop
        self._scope = loop.scope(self.label)
        self._scope.rules = rules
        with runtime.use(self.runtime):
            self._context = in_scope(self._scope)
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return not self._scope.dead

    @property
    def paused(self) -> bool:
        """Whether the process is stopped for now, as by SIGSTOP."""
        return self._scope.paused

    def start(self, main: Main) -> None:
        """Run `main` as the main coroutine of the process."""
        self._task = self._loop.create_task(self._run(main), context=self._context.copy())

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in the process, for example when it receives a response from the network."""
        self._loop.call_soon(callback, *args, context=self._context)

    def bind(self, variable: ContextVar[T], value: T) -> None:
        """Set a context variable for all that the process runs from now on. The process itself must call this."""
        variable.set(value)
        self._context = copy_context()

    def evaluate(self, function: Callable[[], T]) -> T:
        """Return the result of a function that reads the clocks of the process. It must not wait or schedule."""
        return self._context.copy().run(function)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of the process. It begins after the main coroutine."""
        self._loop.keep(self._loop.create_task(work, context=self._context.copy()))

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in the process after a delay in virtual seconds."""
        self._loop.call_later(delay_s, callback, *args, context=self._context)

    def cancel(self) -> None:
        """Cancel the main coroutine, as a signal or a failed log does. Its `finally` blocks run."""
        assert self._task is not None
        self._task.cancel()

    def kill(self) -> None:
        """End the process at once, as `kill -9` does."""
        self._loop.kill(self._scope)
        self._loop.keep(self._task)

    def pause(self) -> None:
        """Stop the process until `resume`, as SIGSTOP does."""
        self._scope.paused = True

    def resume(self) -> None:
        """Let the process continue after `pause`, as SIGCONT does."""
        self._scope.paused = False

    def slow_down(self, factor: int) -> None:
        """Make each callback of the process take `factor` times as long."""
        self._scope.cost = factor

    async def _run(self, main: Main) -> None:
        try:
            await main(self)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - `on_end` decides whether it is a fault of the services
            self.error = error
        if not self._loop.is_running():  # the garbage collector finalises what is left after the simulation
            return
        self._loop.kill(self._scope)
        self.on_end(self)
