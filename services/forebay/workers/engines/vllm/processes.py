"""Processes that vLLM starts for a worker: the worker records them, and they end when it dies.

If the worker is killed, vLLM's engine core and its coordinator of ranks would wait for ever and keep the memory of the
model. Processes started in the context `owning`, and their children, therefore watch their parent. They begin before
they import vLLM, which may take a minute. Other processes are not affected.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

WATCH_S = 0.5

Owned = tuple[list[BaseProcess], Mapping[str, str]]  # processes, and their additional environment variables

_owned: ContextVar[Owned | None] = ContextVar("owned", default=None)


class OwnedProcess(SpawnProcess):
    """Process that ends when its parent dies, if it was started in the context `owning`.

    Attributes:
        environment: additional environment variables from that context; None if it was started elsewhere.
    """

    environment: Mapping[str, str] | None = None

    def start(self) -> None:
        """Start the process. In the context `owning`, also append it to the list of that context."""
        if (owned := _owned.get()) is not None:
            self.environment = owned[1]
        super().start()
        if owned is not None:
            owned[0].append(self)

    def run(self) -> None:
        """Run the target of the process. In the new process, this method also makes its own children owned."""
        if self.environment is not None:
            _own([], {})  # own its children, too, which inherit its environment
        super().run()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form. `_restore_in_child` runs in the new process before it imports anything else."""
        return _restore_in_child, (os.getpid(), self.environment), self.__dict__


@contextmanager
def owning(started: list[BaseProcess], environment: Mapping[str, str]) -> Iterator[None]:
    """Return a context in which each process that is spawned ends when this process dies.

    Args:
        started: list to which each process is appended when it starts.
        environment: additional environment variables of the processes. The environment of this process stays as it is,
            because other engines may start at the same time.
    """
    token = _own(started, environment)
    try:
        yield
    finally:
        _owned.reset(token)


def _own(started: list[BaseProcess], environment: Mapping[str, str]) -> "Token[Owned | None]":
    # All callers share the context of a start method, and its process class.
    setattr(multiprocessing.get_context("spawn"), "Process", OwnedProcess)  # noqa: B010
    return _owned.set((started, environment))


def _restore_in_child(parent: int, environment: Mapping[str, str] | None) -> SpawnProcess:
    if environment is not None:
        os.environ.update(environment)
        Thread(target=_end_with, args=[parent], name="end-with-parent", daemon=True).start()
    return OwnedProcess.__new__(OwnedProcess)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)
