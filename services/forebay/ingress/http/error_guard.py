"""Turn every exception of the application into an error in OpenAI's format, and log each request.

One outermost ASGI layer has both tasks, because each layer costs time for each message of a response. Starlette's
handlers see subclasses of `Exception` only, and only before a response has started. Cancelled requests and streams that
fail would otherwise reach uvicorn, which responds with status 500 and plain text.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.ingress.access_log import AccessEntry, open_entry
from forebay.ingress.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

SEND_S = 2.0  # time for a client to read the error, so that it does not delay the end of the process


class ErrorGuard:
    def __init__(self, app: ASGIApp, on_rejected: Callable[[str], None]) -> None:
        self._app = app
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to an exception with 500, or with 503 if the request is cancelled. Serve HEAD as GET.

        If the response cannot be completed, the exception propagates, so that uvicorn closes the connection.
        """
        entry = open_entry(scope)
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body
        if entry is None:
            await self._run(scope, receive, _Response(send))
            return
        has_failed = True
        try:
            await self._run(scope, receive, _Response(send, entry))
            has_failed = False
        finally:
            entry.write(has_failed=has_failed)

    async def _run(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        try:
            await self._app(scope, receive, response.send)
        except asyncio.CancelledError:
            text = "the server is stopping; send the request again, to another server if there is one"
            if not await self._send_error(response, ApiError(503, "server_stopping", text)):
                raise
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not await self._send_error(response, internal_error()):
                raise

    async def _send_error(self, response: "_Response", error: ApiError) -> bool:
        """Send an error, unless a response other than an event stream has started. Return whether it is complete."""
        if response.is_complete:
            return True
        if response.is_started and not response.is_event_stream:
            return False
        self._on_rejected(error.code)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                await response.fail(error)
        return response.is_complete


class _Response:
    __slots__ = ("_entry", "_send", "is_complete", "is_event_stream", "is_started")

    def __init__(self, send: Send, entry: AccessEntry | None = None) -> None:
        self._send = send
        self._entry = entry
        self.is_started = False
        self.is_complete = False
        self.is_event_stream = False

    async def send(self, message: Message) -> None:
        if self._entry is not None:
            self._entry.observe(message)
        if message["type"] == "http.response.start":
            self.is_started = True
            self.is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True

    async def fail(self, error: ApiError) -> None:
        """Send an error as the last event of a stream that has started, otherwise as the response."""
        if self.is_started:
            await self.send({"type": "http.response.body", "body": b"data: " + error.encoded() + b"\n\n"})
        else:
            await error.send(self.send)
