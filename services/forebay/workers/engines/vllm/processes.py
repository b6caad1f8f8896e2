"""The processes that vLLM starts for a worker: known to it, and gone when it is.

vLLM's processes outlive a frontend that was killed: its engine core waits for requests for ever, with the model's
memory, one that is still starting waits for minutes, and a coordinator of ranks for ever. An interrupt from a terminal
reaches them as soon as the worker, which would still finish what it has. So what is started under `owning`, and what
that starts, watches its parent and leaves the terminal's process group; it does so before it imports vLLM, which may
take a minute. Others' processes are as ever.
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
    """A process that ends with its parent if it was started under `owning`."""

    is_owned = False

    def start(self) -> None:
        """Start it, and say so to who owns it."""
        owned = _owned.get()
        self.is_owned = owned is not None
        super().start()
        if owned is not None:
            owned.append(self)

    def run(self) -> None:
        """What the process does."""
        if self.is_owned:
            _own([])  # so is what it starts
        super().run()

    def __reduce__(self) -> tuple[Any, ...]:
        """How it gets to its own side: what is called there first is called before all that it needs is imported."""
        return _on_its_side, (os.getpid(), self.is_owned), self.__dict__


@contextmanager
def owning(started: list[BaseProcess]) -> Iterator[None]:
    """Own the processes that this thread spawns meanwhile: `started` has each as soon as it is there."""
    token = _own(started)
    try:
        yield
    finally:
        _owned.reset(token)


def _own(started: list[BaseProcess]) -> "Token[list[BaseProcess] | None]":
    # Everybody gets the one context of a start method, and its class from it.
    setattr(multiprocessing.get_context("spawn"), "Process", OwnedProcess)  # noqa: B010
    return _owned.set(started)


def _on_its_side(parent: int, is_owned: bool) -> SpawnProcess:
    if is_owned:
        os.setpgid(0, 0)
        Thread(target=_end_with, args=[parent], name="end-with-parent", daemon=True).start()
    return OwnedProcess.__new__(OwnedProcess)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)
