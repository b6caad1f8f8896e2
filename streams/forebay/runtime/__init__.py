"""The runtime port: the clocks, entropy and threads of every service.

Theory of operation. Services read no clock, draw no entropy and start no thread themselves; lint enforces that. They
call this module, which forwards to the current runtime: `SystemRuntime`, unless `use` installed another one. The
current runtime is a context variable, so tasks, callbacks and threads inherit it from where they were started. A
simulator can therefore run several services in one process, each with clocks and entropy of its own.

Timers are not part of the port: `asyncio.sleep`, timeouts and `loop.time()` belong to the event loop, which a simulator
replaces as a whole. Adapters of engines and of NIXL use the operating system directly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from forebay.runtime.system import SystemRuntime, Ticker

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = [
    "Runtime",
    "Ticker",
    "executor",
    "monotonic_ns",
    "monotonic_s",
    "offload",
    "random_bytes",
    "random_id",
    "random_int",
    "start_ticker",
    "use",
    "wall_ns",
    "wall_s",
    "wall_us",
]

P = ParamSpec("P")
T = TypeVar("T")


class Runtime(Protocol):
    """Methods of a runtime. The functions of this module have the same names and call the current runtime."""

    def monotonic_ns(self) -> int: ...

    def wall_ns(self) -> int:
        """Return the wall clock in nanoseconds since 1970."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Return `count` unpredictable bytes."""
        ...

    async def offload(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on another thread and return its result."""
        ...

    def executor(self, threads: int, name: str) -> "Executor":
        """Return an executor with up to `threads` threads of its own."""
        ...

    def start_ticker(self, step: Callable[[], float | None], name: str) -> Ticker:
        """Call `step` repeatedly on a thread of its own, until it returns None."""
        ...


_SYSTEM = SystemRuntime()
_current: ContextVar[Runtime] = ContextVar("runtime", default=_SYSTEM)


@contextmanager
def use(runtime: Runtime) -> Iterator[None]:
    """Make `runtime` the current runtime of this context, and of the tasks and threads that are started in it."""
    token = _current.set(runtime)
    try:
        yield
    finally:
        _current.reset(token)


def monotonic_ns() -> int:
    """Return the monotonic clock in nanoseconds. Only differences have a meaning."""
    return _current.get().monotonic_ns()


def monotonic_s() -> float:
    """Return the monotonic clock in seconds. Only differences have a meaning."""
    return _current.get().monotonic_ns() / 1e9


def wall_ns() -> int:
    """Return the wall clock in nanoseconds since 1970. It may step backwards."""
    return _current.get().wall_ns()


def wall_us() -> int:
    """Return the wall clock in microseconds since 1970, the unit of events."""
    return _current.get().wall_ns() // 1000


def wall_s() -> float:
    """Return the wall clock in seconds since 1970."""
    return _current.get().wall_ns() / 1e9


def random_bytes(count: int) -> bytes:
    """Return `count` bytes that nobody can predict."""
    return _current.get().random_bytes(count)


def random_int(count: int) -> int:
    """Return an unsigned integer of `count` bytes that nobody can predict."""
    return int.from_bytes(_current.get().random_bytes(count), "little")


def random_id() -> str:
    """Return 32 hexadecimal digits that no other call returns."""
    return _current.get().random_bytes(16).hex()


async def offload(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function on another thread, so that the event loop continues, and return its result."""
    return await _current.get().offload(function, *args, **kwargs)


def executor(threads: int, name: str) -> "Executor":
    """Return an executor with up to `threads` threads of its own. The caller shuts it down."""
    return _current.get().executor(threads, name)


def start_ticker(step: Callable[[], float | None], name: str) -> Ticker:
    """Call `step` again and again on a thread of its own, which does not wait for the event loop.

    Args:
        step: returns the seconds until its next call, or None to end.
    """
    return _current.get().start_ticker(step, name)
