"""An answer on its way to an HTTP client, streamed or whole.

Status and headers wait for the first token, so a refusal by the router or an engine is a real HTTP status.
"""

import asyncio
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.events.tokens import ResponseEnded, Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.ingress import GRACE_S, Ingress
from forebay.ingress.openai.render import ResponseFormatter, ServingInfo
from forebay.ingress.parsers.composer import Composer
from forebay.ingress.parsers.deltas import OutputDelta, merge_deltas
from forebay.ingress.streams import TOKENS_MISSING, Stream, interruption, was_rejected

DISCONNECTED = "client disconnected"
TIMED_OUT = "deadline"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What a client asked for, as far as its answer depends on it."""

    endpoint: str
    request_id: str
    prompt_tokens: int
    stream: bool
    usage_chunk: bool
    began_s: float


class CompletionResponse(Response):
    """Sends one answer. A Response of its own, because Starlette's streaming one costs a task group each."""

    def __init__(
        self, ingress: Ingress, asked: ResponseContext, stream: Stream, shape: ResponseFormatter, text: Composer
    ) -> None:
        self.status_code = 200
        self.background = None
        self._ingress = ingress
        self._metrics = ingress.metrics
        self._asked = asked
        self._stream = stream
        self._shape = shape
        self._text = text
        self._reason: str | None = None
        self._cached_tokens = 0
        self._first_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever happens, nothing is left running."""
        stream, asked = self._stream, self._asked
        watch = asyncio.get_running_loop().create_task(_until_disconnect(receive, stream))
        self._metrics.inflight.inc()
        status = "error"
        try:
            status = await self._send(send)
        except (_Gone, TimeoutError):
            status = "cancelled"
            self._metrics.disconnected.inc()
        finally:
            watch.cancel()
            self._ingress.replies.close(asked.request_id)
            if stream.ended is None:
                self._ingress.cancel(asked.request_id, self._reason or stream.interrupt_reason or DISCONNECTED)
            self._metrics.inflight.dec()
            self._count(status)

    async def _send(self, send: Send) -> str:
        """Send the answer or an error; the status to count. Raises TimeoutError when the client takes neither."""
        wait_s = self._ingress.settings.timeout_s + GRACE_S
        async with asyncio.timeout(None) as limit:
            deadline = asyncio.get_running_loop().call_later(wait_s, self._expire, limit)
            try:
                await (self._send_stream(send) if self._asked.stream else self._send_whole(send))
            except ApiError as error:
                self._metrics.refused.labels(error.code).inc()
                await error.send(send, self._asked.request_id)
                return "error"
            finally:
                deadline.cancel()
        return "success"

    def _expire(self, limit: asyncio.Timeout) -> None:
        self._stream.interrupt(TIMED_OUT)
        # A client that does not read holds the answer up in `send`, where an interruption is not seen.
        limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    async def _send_stream(self, send: Send) -> None:
        piece = await self._next()
        await send(self._start(b"text/event-stream; charset=utf-8"))
        first = True
        try:
            while True:
                body = b""
                if piece or first:
                    body = self._shape.delta(piece, first=first)
                    first = False
                if self._reason is not None:
                    await send({"type": "http.response.body", "body": body + self._closing()})
                    return
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                piece = await self._next()
        except ApiError as error:
            # The status is out already: the error is an event of the stream, which then ends.
            self._metrics.refused.labels(error.code).inc()
            await send({"type": "http.response.body", "body": b"data: " + error.encoded() + b"\n\n"})

    async def _send_whole(self, send: Send) -> None:
        pieces = []
        while self._reason is None:
            pieces.append(await self._next())
        body = self._shape.whole(merge_deltas(pieces), self._reason, self._usage(), self._served())
        await send(self._start(b"application/json", len(body)))
        await send({"type": "http.response.body", "body": body})

    async def _next(self) -> OutputDelta:
        """What is said next, perhaps nothing; sets the finish reason with the last. Raises ApiError or _Gone."""
        stream = self._stream
        await stream.ready()
        if stream.tokens:
            now_s = runtime.monotonic_s()
            if not self._first_s:
                self._first_s = now_s
                self._metrics.ttft.observe(now_s - self._asked.began_s)
            piece = self._text.push(*stream.take())
            if self._text.stopped:
                self._reason = self._text.reason("stop")
                return piece
            if stream.ended is None or stream.ended.error is not None:
                return piece
            end = self._finish(stream.ended)
            return merge_deltas([piece, end]) if end else piece
        if stream.ended is not None:
            return self._finish(stream.ended)
        if stream.interrupt_reason == DISCONNECTED:
            raise _Gone
        if stream.interrupt_reason == TIMED_OUT:
            raise ApiError(504, "deadline_exceeded", f"no answer within {self._ingress.settings.timeout_s:g} s")
        if stream.interrupt_reason == TOKENS_MISSING:
            raise ApiError(502, "tokens_missing", f"the answer has a gap after {stream.next_index} tokens")
        raise interruption(stream.interrupt_reason)

    def _finish(self, ended: ResponseEnded) -> OutputDelta:
        if ended.error is not None:
            if was_rejected(self._stream):
                self._metrics.rejected(self._asked.endpoint)
            raise self._ingress.to_api_error(ended.error)
        assert ended.usage is not None, "a response ends with its usage or an error"
        self._cached_tokens = ended.usage.cached_tokens
        said = self._text.finish()
        self._reason = self._text.reason(ended.finish_reason)
        return said

    def _closing(self) -> bytes:
        assert self._reason is not None
        usage = self._shape.usage(self._usage()) if self._asked.usage_chunk else b""
        return self._shape.last(self._reason, self._served()) + usage + DONE

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._asked.prompt_tokens,
            output_tokens=self._stream.next_index,
            cached_tokens=self._cached_tokens,
        )

    def _served(self) -> ServingInfo:
        stream = self._stream
        return ServingInfo(self._asked.request_id, stream.worker_id, stream.rank, stream.attempt, stream.prefilled)

    def _start(self, content_type: bytes, length: int | None = None) -> dict[str, object]:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self._asked.request_id.encode()),
            (b"x-forebay-worker", self._stream.worker_id.encode()),
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.append((b"cache-control", b"no-cache"))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _count(self, status: str) -> None:
        metrics, asked, tokens = self._metrics, self._asked, self._stream.next_index
        metrics.ended(asked.endpoint, stream=asked.stream, status=status)
        if status != "success":
            return
        now_s = runtime.monotonic_s()
        metrics.duration.observe(now_s - asked.began_s)
        metrics.input_tokens.observe(asked.prompt_tokens)
        metrics.output_tokens.observe(tokens)
        metrics.cached_tokens.observe(self._cached_tokens)
        if tokens > 1:
            metrics.itl.observe((now_s - self._first_s) / (tokens - 1))


class _Gone(Exception):
    """The client left."""


async def _until_disconnect(receive: Receive, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.interrupt(DISCONNECTED)
