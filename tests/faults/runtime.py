"""Runtime of a simulated process: virtual clocks with skew and drift, seeded entropy, and threads that run inline."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from random import Random
from typing import ParamSpec, TypeVar

from forebay.runtime import Ticker
from tests.faults.loop import NS_PER_S, START_NS, VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")

EPOCH_NS = 1_800_000_000 * NS_PER_S  # wall clock at the start of every simulation
READING_NS = 100  # a clock reading takes time, so that loops that wait for the clock end
OFFLOAD_S_MAX = 0.004  # delay until a thread runs, and again until the event loop learns of it


class VirtualRuntime:
    """Runtime of one simulated process on a `VirtualLoop`.

    Attributes:
        skew_ns: nanoseconds by which the wall clock is ahead.
    """

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.skew_ns = 0
        self._rate = 1.0
        self._from_ns = self._at_ns = START_NS
        self._loop = loop
        self._random = Random(f"{seed}/runtime")

    def monotonic_ns(self) -> int:
        self._loop.now_ns += READING_NS
        return self._at_ns + int((self._loop.now_ns - self._from_ns) * self._rate)

    def set_rate(self, rate: float) -> None:
        """Make both clocks run `rate` times as fast as the clock of the loop from now on."""
        self._at_ns, self._from_ns = self.monotonic_ns(), self._loop.now_ns
        self._rate = rate

    def wall_ns(self) -> int:
        return EPOCH_NS + self.skew_ns + self.monotonic_ns() - START_NS

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    async def offload(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function at one instant, after a delay, and return its result after another delay."""
        await asyncio.sleep(self._random.random() * OFFLOAD_S_MAX)
        try:
            return function(*args, **kwargs)
        finally:
            await asyncio.sleep(self._random.random() * OFFLOAD_S_MAX)

    def executor(self, threads: int, name: str) -> Executor:
        del threads, name
        return _InlineExecutor()

    def start_ticker(self, step: Callable[[], float | None], name: str) -> Ticker:
        del name
        return _TimerTicker(step)


class _InlineExecutor(Executor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)
        return future


class _TimerTicker:
    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._ended = asyncio.Event()
        self._timer: asyncio.Handle = asyncio.get_running_loop().call_soon(self._run)

    def wake(self) -> None:
        if not self._ended.is_set():
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_soon(self._run)

    async def ended(self) -> None:
        await self._ended.wait()

    def _run(self) -> None:
        wait_s = self._step()
        if wait_s is None:
            self._ended.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._run)
