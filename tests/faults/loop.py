"""Event loop with virtual time that interleaves several simulated processes by a seeded scheduler.

Theory of operation. All simulated processes run on one `VirtualLoop`, but each has a queue of ready callbacks of its
own. A callback belongs to the process in whose context it was scheduled. As on a real event loop, the callbacks of one
process run in the order in which they became ready. Which process runs next, and how many of its callbacks run before
another process gets its turn, is a choice of the scheduler. When no process is ready, time jumps to the next timer. A
paused process keeps its callbacks for later. A killed process never runs again: no `finally` block of it is executed,
as after `kill -9`.

The loop must not depend on memory addresses or on the hash seed. Sets of tasks and futures occur in asyncio and in the
services, so both have hashes that count up from the start of the loop.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from hashlib import blake2b
from random import Random
from typing import Any, Self, TypeVarTuple, Unpack

Args = TypeVarTuple("Args")

NS_PER_S = 1_000_000_000
START_NS = 1_000 * NS_PER_S  # a monotonic clock near 0 hides errors of code that treats 0 as "never"
BURST_MAX = 8  # callbacks of one process that run before the scheduler chooses again
GRID_NS = 1_000_000  # timers are rounded up to this grid, so that processes often become ready at the same time
CALLBACKS_MAX = 1_000_000  # a hundred times what a simulation needs
CALLBACK_NS = 4_000  # virtual duration of a callback; real ones take 1 to 100 us


class _Callback(asyncio.Handle):
    def execute(self) -> None:
        self._run()


class _Timer(asyncio.TimerHandle):
    def execute(self) -> None:
        self._run()


class Scope:
    """Queue of the ready callbacks of one simulated process.

    Attributes:
        number: position in the order of creation.
        cost: virtual duration of its callbacks, relative to the normal duration.
        rules: version of the decision rules of its program; 0 if no code of the process depends on them.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ready: deque[_Callback | _Timer] = deque()
        self.paused = False
        self.dead = False
        self.cost = 1
        self.rules = 0


SCOPE: ContextVar[Scope] = ContextVar("scope")
_numbers: Iterator[int] = itertools.count()


class VirtualTask(asyncio.Task[Any]):
    """Task whose hash is the number of its creation."""

    _number: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Number the task before asyncio adds it to a set."""
        task = super().__new__(cls)
        task._number = next(_numbers)
        return task

    def __hash__(self) -> int:
        return self._number


class VirtualFuture(asyncio.Future[Any]):
    """Future whose hash is the number of its creation."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(_numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class Stalled(Exception):
    """No callback and no timer is left although the main coroutine has not ended."""


class Livelocked(Exception):
    """Processes keep running callbacks although time does not advance."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop with virtual time for several simulated processes.

    Attributes:
        choices: number of times that the scheduler chose between two or more processes, or between two or more numbers
            of callbacks.
        use_rules: called before callbacks of a process that has a version of the decision rules.
    """

    def __init__(self, seed: str) -> None:
        global _numbers  # noqa: PLW0603 - one loop runs at a time, and its hashes must not depend on earlier ones
        super().__init__()
        _numbers = itertools.count(1)
        self.now_ns = START_NS
        self.choices = 0
        self.callbacks = 0
        self.use_rules: Callable[[int], None] = lambda _: None
        self._random = Random(f"{seed}/scheduler")
        self._ready: dict[Scope, None] = {}  # processes with callbacks, in the order in which they got them
        self._scope_numbers = itertools.count()
        self._timers: list[tuple[int, int, Scope, _Timer]] = []
        self._timer_numbers = itertools.count()
        self._trace = blake2b(digest_size=16)
        self._kept: list[object] = []
        self._main_context = in_scope(self.scope("harness"))
        self.set_task_factory(_task)
        self._clock_resolution = 1e-9

    def scope(self, name: str) -> Scope:
        """Return the queue of a new simulated process."""
        return Scope(name, next(self._scope_numbers))

    def kill(self, scope: Scope) -> None:
        """End a process at once. Its callbacks and timers never run.

        The callbacks are kept until the loop is closed. Otherwise the garbage collector would close the coroutines of
        the process, which runs their `finally` blocks.
        """
        scope.dead = True
        self._ready.pop(scope, None)
        self._kept += scope.ready
        scope.ready.clear()

    def keep(self, thing: object) -> None:
        """Keep an object of a killed process until the loop is closed, so that it is not finalised earlier."""
        self._kept.append(thing)

    def call_main_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback of the harness after a delay in virtual seconds, whichever process calls this method."""
        self.call_at(self.time() + delay_s, callback, *args, context=self._main_context)

    def trace(self, fact: bytes) -> None:
        """Add a fact to the trace hash."""
        self._trace.update(fact)

    @property
    def trace_hash(self) -> str:
        """Hash of all choices of the scheduler, and of all facts that were passed to `trace`."""
        return self._trace.hexdigest()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine as part of the harness until it ends, and return its result.

        Raises:
            Stalled: the coroutine waits, but nothing will ever happen.
        """
        return self._main_context.copy().run(self.run_until_complete, main)

    def discard(self) -> None:
        """Close the loop, and let the garbage collector finalise what is left of all processes."""
        self._kept.clear()
        self._timers.clear()
        for scope in self._ready:
            scope.ready.clear()
        self._ready.clear()
        self.close()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_ns / NS_PER_S

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future with a hash that does not depend on its address."""
        return VirtualFuture(loop=self)

    def call_soon(
        self, callback: Callable[[Unpack[Args]], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """Add a callback to the queue of its process."""
        if context is None:
            context = copy_context()
        handle = _Callback(callback, args, self, context)
        scope = context[SCOPE]
        self._add(scope, handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Args]], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """Add a callback to the queue of its process. There are no threads, so this is `call_soon`."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a virtual time in seconds."""
        if context is None:
            context = copy_context()
        timer = _Timer(when, callback, args, self, context)
        self._push(-round(when * NS_PER_S) // GRID_NS * -GRID_NS, context[SCOPE], timer)
        return timer

    def _push(self, when_ns: int, scope: Scope, timer: _Timer) -> None:
        if scope.dead:
            self._kept.append(timer)
        else:
            heapq.heappush(self._timers, (when_ns, next(self._timer_numbers), scope, timer))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def _run_once(self) -> None:
        """Run callbacks of one process, after moving time forward if no process is ready."""
        self._take_due()
        runnable = [scope for scope in self._ready if not scope.paused]
        if not runnable:
            if not self._timers:
                raise Stalled
            self.now_ns = max(self.now_ns, self._timers[0][0])
            return
        scope = runnable[0]
        if self.callbacks > CALLBACKS_MAX:
            raise Livelocked(f"{self.callbacks} callbacks ran until {self.time():.3f} s, the last ones in {scope.name}")
        if len(runnable) > 1:
            self.choices += 1
            scope = runnable[int(self._random.random() * len(runnable))]
        count = len(scope.ready)
        if count > 1:
            self.choices += 1
            count = min(count, 1 + int(self._random.random() * BURST_MAX))
        self._trace.update(b"%d.%d;" % (scope.number, count))
        if scope.rules:
            self.use_rules(scope.rules)
        for _ in range(count):
            handle = scope.ready.popleft()
            if not handle.cancelled():
                handle.execute()
                self.now_ns += CALLBACK_NS * scope.cost
                self.callbacks += 1
            if scope.paused or scope.dead:
                break
        if not scope.ready:
            self._ready.pop(scope, None)

    def _take_due(self) -> None:
        """Move timers that are due to the queues of their processes."""
        timers, now_ns = self._timers, self.now_ns
        while timers and timers[0][0] <= now_ns:
            _, _, scope, timer = heapq.heappop(timers)
            if not timer.cancelled():
                self._add(scope, timer)

    def _add(self, scope: Scope, handle: _Callback | _Timer) -> None:
        if scope.dead:
            self._kept.append(handle)
            return
        scope.ready.append(handle)
        self._ready[scope] = None

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing, because the loop has no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing, because no thread waits."""


def _task(loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None) -> VirtualTask:
    return VirtualTask(coro, loop=loop, context=context)


def in_scope(scope: Scope) -> Context:
    """Return a copy of the current context in which callbacks belong to a process."""
    context = copy_context()
    context.run(SCOPE.set, scope)
    return context
