"""Run blocking calls on threads that do not delay the end of the process.

The threads of an executor do: the interpreter waits for them when it exits. A call to a file system or a server that
hangs would keep the process alive. Starting a thread takes 50 µs, which is little compared with the calls here.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from forebay import runtime

T = TypeVar("T")


def start_call(act: Callable[[], T], name: str) -> Future[T]:
    """Run a call on a new thread, and return its future result."""
    future: Future[T] = Future()

    def step() -> None:
        try:
            future.set_result(act())
        except Exception as error:  # noqa: BLE001 - it is raised by `result`
            future.set_exception(error)

    runtime.start_ticker(step, name)
    return future
