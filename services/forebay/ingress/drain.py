"""Drain an ingress: reject new requests, wait for requests in flight, then interrupt the requests that remain."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.ingress.errors import ApiError

SHUTTING_DOWN = "the server is shutting down"  # reason of an interruption, and the error message for its client
CLOSE_S = 2.0  # time for clients to read the error that ends their response
AT_ONCE_S = 0.5  # time for clients to read the error after a second signal, when the process ends at once
ALWAYS_SERVED = frozenset(("/live", "/metrics"))


class IngressDrain:
    def __init__(self) -> None:
        self.in_flight = 0
        self._began = asyncio.Event()
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def begun(self) -> bool:
        return self._began.is_set()

    def begin(self) -> None:
        self._began.set()

    def hurry(self) -> None:
        """Begin the drain if it has not begun, and make `run` interrupt the requests in flight at once."""
        self._began.set()
        self._hurried.set()

    async def wait_begun(self) -> None:
        await self._began.wait()

    async def run(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Wait until the drain begins, then until no request is in flight, and interrupt the requests that remain.

        Args:
            interrupt: interrupts every request in flight; its argument is the reason for the client.
            within_s: seconds from the beginning of the drain until the interruption, unless `hurry` is called.
        """
        await self._began.wait()
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        await self.cut(interrupt, AT_ONCE_S if self._hurried.is_set() else CLOSE_S)

    async def cut(self, interrupt: Callable[[str], None], within_s: float) -> None:
        """Interrupt every request in flight, and wait up to `within_s` seconds until clients have read the error."""
        self._began.set()
        interrupt(SHUTTING_DOWN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    def enter(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class DrainMiddleware:
    def __init__(self, app: ASGIApp, drain: IngressDrain, on_rejected: Callable[[str], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_SERVED:
            await self._app(scope, receive, send)
        elif self._drain.begun:
            error = ApiError(503, "shutting_down", SHUTTING_DOWN)
            self._on_rejected(error.code)
            await error.send(send, body=error.encoded(scope["path"]), closes=True)
        else:
            self._drain.enter()
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.leave()
