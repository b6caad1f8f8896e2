"""Which requests an ingress takes on: decided before their bodies are read, because that is when refusing is cheap.

Theory of operation. Two things can be short. *CPU of this process*: to validate and tokenise a prompt takes
milliseconds of the event loop, which also accepts connections and streams answers. So a few requests are prepared in
each iteration of the loop and the others wait their turn. While the first of these has waited for too long, new
requests get 503. *Room in the router's queue*: its bounds follow from what the workers can run, and only the owner
knows them, across all ingresses. So the ingress learns from answers: once the owner has refused a request because the
queue of the pool is full, new requests get 429 until one of those in flight has ended, or a second has passed.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.ingress.errors import RETRY_AFTER_S, ApiError
from forebay.ingress.metrics import IngressMetrics

POOL_FULL = "pool_full"  # what the owner refuses a request with when its queue is full
IN_FLIGHT_MAX = 8_192  # of one process: some 100 kB each; a Python process streams no more answers at once
STARTED_PER_ITERATION = 2  # some ten milliseconds of the event loop, between two looks at its sockets
WAITING_MAX = 2_048  # as many as the listener's backlog
WAIT_S = 4.0  # whoever would wait longer for its turn is refused; less than a request may wait in the router's queue
BURST_S = 1.0  # anybody may wait for a turn during a burst of this length: its pace is not known yet
FULL_S = 1.0  # the owner may have room again that other ingresses gave back: one second of refusals at most
PACE_S = 5.0  # over which the ends of requests are counted
RETRY_AFTER_S_MAX = 30  # whoever comes back later than that finds another load
GATED = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}


class IngressAdmission:
    """Counts the requests in flight, paces their preparation, and refuses those that cannot be served in time."""

    def __init__(self, metrics: IngressMetrics, now_s: Callable[[], float] = time.monotonic) -> None:
        self.in_flight = 0
        self._metrics = metrics
        self._now_s = now_s
        self._started = 0  # in this iteration of the event loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._busy_since_s = 0.0  # while requests wait for their turn
        self._begun = 0  # turns since then
        self._full_from = 0
        self._full_until_s = -math.inf
        self._window = (now_s(), 0)  # when it began, and how many requests have ended since
        self._ended_per_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the router's queue is taken to be full."""
        return self.in_flight >= self._full_from and self._now_s() < self._full_until_s

    def enter(self) -> None:
        """Admit a request; `leave` must follow. Raises ApiError."""
        if self.is_full:
            text = "every worker is full, and as many requests wait for one as may"
            raise ApiError(429, POOL_FULL, text, retry_after_s=self.retry_after_s)
        if self.in_flight >= IN_FLIGHT_MAX or self._is_behind():
            raise ApiError(503, "overloaded", "more requests come than this ingress can prepare")
        self.in_flight += 1
        self._metrics.admitted.set(self.in_flight)

    async def turn(self) -> None:
        """Wait until the event loop may be kept busy with the preparation of another request."""
        if self._waiting or self._started >= STARTED_PER_ITERATION:
            if not self._waiting:
                self._busy_since_s, self._begun = self._now_s(), 0
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._start()

    def leave(self) -> None:
        """Count the end of an admitted request."""
        self.in_flight -= 1
        self._metrics.admitted.set(self.in_flight)
        began_s, count = self._window
        took_s = self._now_s() - began_s
        if took_s < PACE_S:
            self._window = began_s, count + 1
        else:
            self._ended_per_s = (count + 1) / took_s
            self._window = began_s + took_s, 0

    def queue_full(self) -> None:
        """The owner refused a request in flight because the queue is full."""
        self._full_from = max(0, self.in_flight - 1)
        self._full_until_s = self._now_s() + FULL_S

    @property
    def retry_after_s(self) -> int:
        """After how many seconds the requests in flight will have ended, at the pace of the last seconds."""
        began_s, count = self._window
        lately = count / max(self._now_s() - began_s, 1.0)
        pace = max(self._ended_per_s, lately)
        if not pace:
            return RETRY_AFTER_S
        return max(RETRY_AFTER_S, min(RETRY_AFTER_S_MAX, math.ceil(self.in_flight / pace)))

    def _is_behind(self) -> bool:
        count = len(self._waiting)
        if not count or count >= WAITING_MAX:
            return count > 0
        busy_s = self._now_s() - self._busy_since_s
        return busy_s > BURST_S and count * busy_s > WAIT_S * max(1, self._begun)

    def _start(self) -> None:
        if not self._started:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._started += 1

    def _next_iteration(self) -> None:
        self._started = 0
        while self._waiting and self._started < STARTED_PER_ITERATION:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                self._start()
                self._begun += 1
                turn.set_result(None)


class AdmissionMiddleware:
    """ASGI middleware that admits the requests which are work for the router, or answers them at once."""

    def __init__(self, app: ASGIApp, admission: IngressAdmission, metrics: IngressMetrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        endpoint = GATED.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            self._admission.enter()
        except ApiError as error:
            self._metrics.refused.labels(error.code).inc()
            self._metrics.rejected(endpoint)
            # The connection stays open: closed while the body is on its way, the client might not see the answer.
            await error.send(send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._admission.leave()
