"""Processes that vLLM starts for a worker: the worker records them, and they end when it dies.

Two problems are solved here. If the worker is killed, vLLM's engine core and its coordinator of ranks would wait for
ever and keep the memory of the model. And an interrupt from a terminal (Ctrl-C) would end them at once, before the
worker has finished its requests. Processes started in the context `owning`, and their children, therefore watch their
parent and leave the process group of the terminal. They do this before they import vLLM, which may take a minute. Other
processes are not affected.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

WATCH_S = 0.5

_owned: ContextVar[list[BaseProcess] | None] = ContextVar("owned", default=None)


class OwnedProcess(SpawnProcess):
    """Process that ends when its parent dies, if it was started in the context `owning`.

    Attributes:
        is_owned: whether it was started in that context.
    """

    is_owned = False

    def start(self) -> None:
        """Start the process. In the context `owning`, also append it to the list of that context."""
        owned = _owned.get()
        self.is_owned = owned is not None
        super().start()
        if owned is not None:
            owned.append(self)

    def run(self) -> None:
        """Run the target of the process. In the new process, this method also makes its own children owned."""
        if self.is_owned:
            _own([])  # own its children, too
        super().run()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form. `_restore_in_child` runs in the new process before it imports anything else."""
        return _restore_in_child, (os.getpid(), self.is_owned), self.__dict__


@contextmanager
def owning(started: list[BaseProcess]) -> Iterator[None]:
    """Return a context in which each process that is spawned ends when this process dies.

    Args:
        started: list to which each process is appended when it starts.
    """
    token = _own(started)
    try:
        yield
    finally:
        _owned.reset(token)


def _own(started: list[BaseProcess]) -> "Token[list[BaseProcess] | None]":
    # All callers share the context of a start method, and its process class.
    setattr(multiprocessing.get_context("spawn"), "Process", OwnedProcess)  # noqa: B010
    return _owned.set(started)


def _restore_in_child(parent: int, is_owned: bool) -> SpawnProcess:
    if is_owned:
        os.setpgid(0, 0)
        Thread(target=_end_with, args=[parent], name="end-with-parent", daemon=True).start()
    return OwnedProcess.__new__(OwnedProcess)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)
