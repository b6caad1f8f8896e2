"""End an ingress: refuse new requests, wait for those in flight, then interrupt the rest."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.ingress.errors import ApiError

SHUTTING_DOWN = "the server is shutting down"  # why a stream is interrupted; its client gets it as the message
CLOSE_S = 2.0  # for clients to take the error that ends their response
AT_ONCE_S = 0.5  # likewise, when the server is told to end at once
ALWAYS_SERVED = frozenset(("/live", "/metrics"))


class IngressDrain:
    """Tracks the HTTP requests in flight of one ingress, from `begin` on until the last has ended."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._began = asyncio.Event()
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._began.is_set()

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self._began.set()

    def hurry(self) -> None:
        """Do not wait for requests in flight any longer."""
        self._began.set()
        self._hurried.set()

    async def wait_begun(self) -> None:
        """Wait until `begin` is called."""
        await self._began.wait()

    async def run(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Wait until the drain begins, then until no request is in flight; after `within_s` interrupt the rest."""
        await self._began.wait()
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        await self.cut(interrupt, CLOSE_S)

    async def cut(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Interrupt every request in flight, and give their clients a moment to take the error."""
        self._began.set()
        interrupt(SHUTTING_DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    def enter(self) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request that ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class DrainMiddleware:
    """ASGI middleware: counts requests in flight, and refuses new ones once the drain began."""

    def __init__(self, app: ASGIApp, drain: IngressDrain, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._drain = drain
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_SERVED:
            await self._app(scope, receive, send)
        elif self._drain.begun:
            await self._refuse(send)
        else:
            self._drain.enter()
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                # Its client took nothing until the very end: the server closes the connection.
                if not self._drain.begun:
                    raise
            finally:
                self._drain.leave()

    async def _refuse(self, send: Send) -> None:
        error = ApiError(503, "shutting_down", SHUTTING_DOWN)
        self._refused(error)
        await error.send(send, closes=True)
