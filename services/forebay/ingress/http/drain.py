"""Drain an ingress: reject new requests, wait for requests in flight, then interrupt the remaining ones."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.ingress.errors import ApiError

SHUTTING_DOWN = "the server is shutting down"  # reason of an interruption, and the error message for its client
CLOSE_S = 2.0  # time for clients to read the error that ends their response
AT_ONCE_S = 0.5  # the same after a second signal, when the process ends at once
ALWAYS_SERVED = frozenset(("/live", "/metrics"))


class IngressDrain:
    """Tracks the HTTP requests in flight of one ingress, and its drain.

    Attributes:
        in_flight: number of HTTP requests in flight.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._began = asyncio.Event()
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def begun(self) -> bool:
        """Whether the drain has begun, so that new requests are rejected."""
        return self._began.is_set()

    def begin(self) -> None:
        """Begin the drain: reject new requests from now on."""
        self._began.set()

    def hurry(self) -> None:
        """Begin the drain, and do not wait for requests in flight any longer."""
        self._began.set()
        self._hurried.set()

    async def wait_begun(self) -> None:
        """Wait until the drain begins."""
        await self._began.wait()

    async def run(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Wait until the drain begins, then until no request is in flight.

        Args:
            interrupt: interrupts the remaining requests; its argument is the reason.
            within_s: seconds to wait before the remaining requests are interrupted.
        """
        await self._began.wait()
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        await self.cut(interrupt, CLOSE_S)

    async def cut(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Interrupt every request in flight, and wait up to `within_s` seconds for clients to read the error."""
        self._began.set()
        interrupt(SHUTTING_DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    def enter(self) -> None:
        """Count a new request."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count the end of a request."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class DrainMiddleware:
    """ASGI middleware that counts requests in flight, and rejects new requests once the drain has begun.

    Args:
        app: the application.
        drain: the drain.
        on_rejected: called with the error of each rejected request.
    """

    def __init__(self, app: ASGIApp, drain: IngressDrain, on_rejected: Callable[[ApiError], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_SERVED:
            await self._app(scope, receive, send)
        elif self._drain.begun:
            await self._reject(send)
        else:
            self._drain.enter()
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                # The client did not read the response until the end of the drain, so the server closes the connection.
                if not self._drain.begun:
                    raise
            finally:
                self._drain.leave()

    async def _reject(self, send: Send) -> None:
        error = ApiError(503, "shutting_down", SHUTTING_DOWN)
        self._on_rejected(error)
        await error.send(send, closes=True)
