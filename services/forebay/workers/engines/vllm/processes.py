"""Processes that vLLM starts for a worker: recorded by the worker, and killed when it dies.

vLLM's processes outlive a killed frontend. Its engine core and its coordinator of ranks wait for ever, with the model's
memory. An interrupt from a terminal reaches them at the same time as the worker, which would first finish its requests.
Processes started in the context `owning`, and their children, therefore watch their parent and leave the terminal's
process group. They do this before they import vLLM, which may take a minute. Other processes are not affected.
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
    """Process that dies with its parent if it was started in the context `owning`."""

    is_owned = False

    def start(self) -> None:
        """Start the process and record it."""
        owned = _owned.get()
        self.is_owned = owned is not None
        super().start()
        if owned is not None:
            owned.append(self)

    def run(self) -> None:
        """Run in the new process."""
        if self.is_owned:
            _own([])  # own its children, too
        super().run()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form. `_restore_in_child` runs in the new process before it imports anything else."""
        return _restore_in_child, (os.getpid(), self.is_owned), self.__dict__


@contextmanager
def owning(started: list[BaseProcess]) -> Iterator[None]:
    """Own the processes that this context spawns, and append each to `started` at once."""
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
