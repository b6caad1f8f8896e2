"""Admission control of an ingress: admits or rejects a request before its body is read, while rejection is cheap.

Theory of operation. Two resources can run out.

- *CPU of this process.* Validating and tokenizing a prompt takes milliseconds of the event loop, which also accepts
  connections and streams responses. So only a few requests are prepared per iteration of the loop, and the others wait.
  If requests would wait too long, new requests get 503.
- *Capacity of the router's queue.* The bounds of the queue depend on the workers, and only the owner knows them. So the
  ingress learns from responses: after the owner has rejected a request because the pool's queue is full, new requests
  get 429 until a request in flight has ended or a second has passed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from forebay import runtime
from forebay.ingress.errors import RETRY_AFTER_S, ApiError
from forebay.ingress.metrics import IngressMetrics

POOL_FULL = "pool_full"  # error code of the owner when its queue is full
IN_FLIGHT_MAX = 8_192  # per process, about 100 kB each; a Python process cannot stream more responses at once
# Bytes of bodies that are prepared per iteration: up to ten milliseconds of the event loop between two polls of its
# sockets. Requests that are prepared together share what the log does per iteration, such as a request to a broker.
STARTED_BYTES = 32 << 10
STARTED_BYTES_MIN = 2 << 10  # a smaller body counts as much, because it takes as long
WAITING_MAX = 2_048  # as many as the listener's backlog
WAIT_S = 4.0  # requests that would wait longer are rejected; shorter than the timeout of the router's queue
BURST_S = 1.0  # a burst of this length is always queued, because its rate is not known yet
FULL_S = 1.0  # other ingresses may have freed capacity: reject for at most one second
RATE_WINDOW_S = 5.0  # window in which completed requests are counted
RETRY_AFTER_S_MAX = 30  # a longer estimate is useless, because the load changes within this time


class FullPool:
    """For which tenants an ingress assumes that the queue of a pool is full, because the owner just rejected a request.

    A full queue still takes requests of tenants that have queued less than their part of it.
    """

    def __init__(self, in_flight: Callable[[], int], now_s: Callable[[], float] = runtime.monotonic_s) -> None:
        self._in_flight = in_flight
        self._now_s = now_s
        self._full: dict[str, tuple[int, float]] = {}  # requests in flight and time until which, by tenant, by time

    def __contains__(self, tenant: str) -> bool:
        if tenant not in self._full:
            return False
        full_from, until_s = self._full[tenant]
        return self._in_flight() >= full_from and self._now_s() < until_s

    def mark(self, tenant: str) -> None:
        now_s = self._now_s()
        self._full.pop(tenant, None)
        while self._full and next(iter(self._full.values()))[1] <= now_s:
            del self._full[next(iter(self._full))]
        self._full[tenant] = max(0, self._in_flight() - 1), now_s + FULL_S

    def error(self, retry_after_s: int) -> ApiError:
        text = "all workers and the queue of the pool are full; try again later"
        return ApiError(429, POOL_FULL, text, retry_after_s=retry_after_s)


class IngressAdmission:
    """Counts the requests of an ingress, spreads their preparation over iterations of the loop, and rejects some."""

    def __init__(self, metrics: IngressMetrics, now_s: Callable[[], float] = runtime.monotonic_s) -> None:
        self.in_flight = 0
        metrics.admitted.set_function(lambda: self.in_flight)
        self._now_s = now_s
        self._started = 0  # bytes of the requests started in this iteration of the event loop
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()  # with the bytes of their bodies
        self._busy_since_s = 0.0  # time from which on requests have been waiting without a break
        self._begun = 0  # requests started since that time
        self.full = FullPool(lambda: self.in_flight, now_s)  # of the only model; several models have their own
        self._window = (now_s(), 0)  # beginning of the window, and requests that ended in it
        self._ended_per_s = 0.0

    def enter(self, count: int = 1, tenant: str = "", *, is_read: bool = False) -> None:
        """Admit a request, or `count` more choices of it. The caller must call `leave` with the same count at its end.

        A request that only reads or cancels others (`is_read`) is admitted although the router's queue is full.

        Raises ApiError: 429 if the router's queue is full, 503 if too many requests are in flight or wait.
        """
        if tenant in self.full and not is_read:
            raise self.full.error(self.retry_after_s)
        if self.in_flight + count > IN_FLIGHT_MAX or self._is_behind():
            raise ApiError(
                503, "overloaded", "requests arrive faster than this ingress can prepare them; try again later"
            )
        self.in_flight += count

    async def turn(self, size: int) -> None:
        """Wait until a request with a body of `size` bytes may be prepared.

        Requests start in an iteration of the event loop until their bodies together have `STARTED_BYTES`.
        """
        if self._waiting or self._started >= STARTED_BYTES:
            if not self._waiting:
                self._busy_since_s, self._begun = self._now_s(), 0
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, size))
            await turn
        else:
            self._start(size)

    def leave(self, count: int = 1) -> None:
        self.in_flight -= count
        began_s, ended = self._window
        took_s = self._now_s() - began_s
        if took_s < RATE_WINDOW_S:
            self._window = began_s, ended + count
        else:
            self._ended_per_s = (ended + count) / took_s
            self._window = began_s + took_s, 0

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until requests in flight have ended, from `RETRY_AFTER_S` to `RETRY_AFTER_S_MAX`."""
        began_s, count = self._window
        recent = count / max(self._now_s() - began_s, 1.0)
        rate = max(self._ended_per_s, recent)
        if not rate:
            return RETRY_AFTER_S
        return max(RETRY_AFTER_S, min(RETRY_AFTER_S_MAX, math.ceil(self.in_flight / rate)))

    def _is_behind(self) -> bool:
        count = len(self._waiting)
        if not count or count >= WAITING_MAX:
            return count > 0
        busy_s = self._now_s() - self._busy_since_s
        return busy_s > BURST_S and count * busy_s > WAIT_S * max(1, self._begun)

    def _start(self, size: int) -> None:
        if not self._started:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._started += max(size, STARTED_BYTES_MIN)

    def _next_iteration(self) -> None:
        self._started = 0
        while self._waiting and self._started < STARTED_BYTES:
            turn, size = self._waiting.popleft()
            if not turn.done():  # the client may have disconnected
                self._start(size)
                self._begun += 1
                turn.set_result(None)
