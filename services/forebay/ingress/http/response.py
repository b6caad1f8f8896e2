"""Send a chat or text completion to an HTTP client, as server-sent events or as one object.

Status and headers wait for the first token, so a request that the router or an engine rejects gets a real HTTP status.
"""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.ingress.errors import ApiError, deadline_exceeded
from forebay.ingress.ingress import GRACE_S, Ingress
from forebay.ingress.response_fold import CompletionFold, was_rejected
from forebay.ingress.streams import Stream, interruption

DISCONNECTED = "client disconnected"
TIMED_OUT = "deadline"
BEGIN, END = b"data: ", b"\n\n"  # of a server-sent event
DONE = b"data: [DONE]\n\n"


class CompletionResponse(Response):
    """ASGI response of one completion. It does not use Starlette's streaming response, which costs a task group each.

    Args:
        ingress: the ingress.
        fold: the response, still empty.
        stream: events of the request.
        began_s: monotonic clock when the request arrived, in seconds.
    """

    def __init__(self, ingress: Ingress, fold: CompletionFold, stream: Stream, began_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._ingress = ingress
        self._metrics = ingress.metrics
        self._fold = fold
        self._stream = stream
        self._began_s = began_s
        self._first_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Cancel the request if the client gets no complete response."""
        stream, fold = self._stream, self._fold
        watch = asyncio.get_running_loop().create_task(wait_for_disconnect(receive, stream.interrupt))
        self._metrics.inflight.inc()
        status = "error"
        try:
            status = await self._send(send)
        except (_ClientGone, TimeoutError):
            status = "cancelled"
            self._metrics.disconnected.inc()
        finally:
            watch.cancel()
            self._ingress.replies.close(fold.request_id)
            if stream.ended is None:
                reason = fold.cancel_reason or stream.interrupt_reason or DISCONNECTED
                self._ingress.cancel(fold.request_id, reason)
            self._metrics.inflight.dec()
            self._count(status)

    async def _send(self, send: Send) -> str:
        """Send the response or an error; return the status for metrics. Raises TimeoutError if the client stalls."""
        wait_s = self._ingress.settings.timeout_s + GRACE_S
        async with asyncio.timeout(None) as limit:
            deadline = asyncio.get_running_loop().call_later(wait_s, self._expire, limit)
            try:
                await (self._send_stream(send) if self._fold.stream else self._send_whole(send))
            except ApiError as error:
                self._metrics.errors.labels(error.code).inc()
                await error.send(send, self._fold.request_id)
                return "error"
            finally:
                deadline.cancel()
        return "success"

    def _expire(self, limit: asyncio.Timeout) -> None:
        self._stream.interrupt(TIMED_OUT)
        # If the client does not read, the response blocks in `send`, which an interruption does not end.
        limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    async def _send_stream(self, send: Send) -> None:
        chunks = await self._next()
        await send(self._start(b"text/event-stream; charset=utf-8"))
        try:
            while True:
                body = BEGIN + (END + BEGIN).join(chunks) + END
                if self._fold.is_over and self._fold.error is None:
                    await send({"type": "http.response.body", "body": body + DONE})
                    return
                await send({"type": "http.response.body", "body": body, "more_body": True})
                chunks = await self._next()
        except ApiError as error:
            # The status was sent already, so the error is the last event of the stream.
            self._metrics.errors.labels(error.code).inc()
            await send({"type": "http.response.body", "body": BEGIN + error.encoded() + END})

    async def _send_whole(self, send: Send) -> None:
        (body,) = await self._next()
        await send(self._start(b"application/json", len(body)))
        await send({"type": "http.response.body", "body": body})

    async def _next(self) -> list[bytes]:
        """Return the next JSON objects of the response, at least one. Raises ApiError or _ClientGone."""
        stream, fold = self._stream, self._fold
        while True:
            if fold.error is not None:
                if was_rejected(stream):
                    self._metrics.rejected(fold.endpoint)
                raise self._ingress.observe(fold.error)
            await stream.ready()
            if stream.tokens and not self._first_s:
                self._first_s = runtime.monotonic_s()
                self._metrics.ttft.observe(self._first_s - self._began_s)
            if objects := fold.step(stream):
                return objects
            if fold.error is None and stream.interrupt_reason is not None:
                raise self._interruption(stream.interrupt_reason)

    def _interruption(self, reason: str) -> Exception:
        if reason == DISCONNECTED:
            return _ClientGone()
        if reason == TIMED_OUT:
            return deadline_exceeded(self._ingress.settings.timeout_s)
        return interruption(reason)

    def _start(self, content_type: bytes, length: int | None = None) -> dict[str, object]:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self._fold.request_id.encode()),
            (b"x-forebay-worker", self._stream.worker_id.encode()),
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.append((b"cache-control", b"no-cache"))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _count(self, status: str) -> None:
        metrics, fold, tokens = self._metrics, self._fold, self._stream.next_index
        metrics.ended(fold.endpoint, stream=fold.stream, status=status)
        if status != "success":
            return
        now_s = runtime.monotonic_s()
        metrics.duration.observe(now_s - self._began_s)
        metrics.input_tokens.observe(fold.prompt_tokens)
        metrics.output_tokens.observe(tokens)
        metrics.cached_tokens.observe(fold.cached_tokens)
        if tokens > 1:
            metrics.itl.observe((now_s - self._first_s) / (tokens - 1))


class _ClientGone(Exception):
    """The client disconnected."""


async def wait_for_disconnect(receive: Receive, on_disconnect: Callable[[str], None]) -> None:
    """Wait until the client disconnects, then call `on_disconnect` with the reason."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect(DISCONNECTED)
