"""Threads that move the blocks of one rank. Each lane has its own threads, so that writes never delay loads."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Literal, TypeVar

from forebay import runtime

LOG = logging.getLogger(__name__)

T = TypeVar("T")
Lane = Literal["host-read", "host-write", "disk-read", "disk-write", "store-read", "store-write", "prefetch"]

# One thread writes per tier, so that a removal and a later write of the same block are executed in this order. Loads
# from disk and store use a second thread, because a slow one should not delay the others.
THREADS: dict[Lane, int] = {
    "host-read": 1,
    "host-write": 1,
    "disk-read": 2,
    "disk-write": 1,
    "store-read": 2,
    "store-write": 1,
    "prefetch": 1,
}


class TransferLanes:
    """Thread pools whose results are applied on the thread of the caller.

    What waits in a lane is bounded by its callers: they limit the blocks in flight per tier, and the loads.

    Args:
        wake: called on a thread of a lane when `poll` has work.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pools: dict[Lane, Executor] = {}
        self._ended: deque[Callable[[], None]] = deque()
        self._closing = False
        self.running = 0

    def submit(self, lane: Lane, work: Callable[[], T], then: Callable[[T], None], on_error: T) -> None:
        """Run `work` in a lane, and pass its result to `then` within `poll`.

        Args:
            on_error: result if `work` raises an exception, which is logged.
        """
        if self._closing:
            self.defer(partial(then, on_error))
            return
        if lane not in self._pools:
            self._pools[lane] = runtime.executor(THREADS[lane], f"kv-{lane}")
        self.running += 1
        self._pools[lane].submit(self._run, work, then, on_error)

    def defer(self, call: Callable[[], None]) -> None:
        """Call a function within the next `poll`."""
        self.running += 1
        self._ended.append(call)
        self._wake()

    def poll(self) -> None:
        """Apply the results of the work that has ended."""
        while self._ended:
            self.running -= 1
            self._ended.popleft()()

    def close(self) -> None:
        """Drop the work that has not begun, and wait for the work in progress."""
        self._closing = True
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], T], then: Callable[[T], None], on_error: T) -> None:
        result = on_error
        if not self._closing:
            try:
                result = work()
            except Exception:  # the thread must report the end of the transfer in any case
                LOG.exception("a transfer of KV blocks failed")
        self._ended.append(partial(then, result))
        self._wake()
