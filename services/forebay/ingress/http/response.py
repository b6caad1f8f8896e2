"""Send a response to an HTTP client, as server-sent events or as one JSON object.

The head is sent with the first token, so a request that the router or an engine rejects gets an HTTP error status.
After `SILENT_S` without a token the head of a stream and then comments are sent, because proxies close silent
connections. A later error is the last event of the stream.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.events.request_ids import RequestLocation, public_id
from forebay.events.requests import RequestSubmitted
from forebay.ingress.access_log import add_fields
from forebay.ingress.commands import GRACE_S
from forebay.ingress.errors import ApiError, deadline_exceeded
from forebay.ingress.group import GroupClient
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.response_fold import ResponseFold, StreamEvent, was_rejected
from forebay.ingress.streams import Stream, interruption

PARTS_IN_FLIGHT_MAX = 64  # per client request, so that other requests are interleaved
DISCONNECTED = "client disconnected"
TIMED_OUT = "deadline"
COMMENT = b": keep-alive\n\n"
SILENT_S = 10.0  # proxies close connections that are silent for 30 to 60 s
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # nginx must not buffer events
EVENTS_MAX = 1_024  # of several choices; a client that reads more slowly lets output wait as token ids


class OneResponse(Response):
    """ASGI response that is one request on the log, which arrived at `began_s` of the monotonic clock.

    It is not a StreamingResponse of Starlette, because that class creates a task group for each response.
    """

    def __init__(self, group: GroupClient, fold: ResponseFold, stream: Stream, began_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._group = group
        self._metrics = group.metrics
        self._fold = fold
        self._stream = stream
        self._began_s = began_s
        self._first_s = 0.0
        self._parts = 1
        self._is_started = False
        self._is_silent = False  # no event was sent for `SILENT_S`
        self._sent_s = 0.0  # time of the last event on the clock of the event loop
        self._events: list[StreamEvent] = []  # before any output
        if stream.location is not None:
            self._begin(stream.location)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._stream
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
            self._close()
            self._metrics.inflight.dec()
            self._count(status)
            fold = self._fold
            ttft = {"ttft_s": round(self._first_s - self._began_s, 4)} if self._first_s else {}
            worker = {"worker": self._stream.worker_id} if self._stream.worker_id else {}
            add_fields(
                scope,
                **worker,
                prompt_tokens=fold.prompt_tokens,
                cached_tokens=fold.cached_tokens,
                output_tokens=fold.output_tokens,
                **ttft,
            )

    def _begin(self, location: RequestLocation) -> None:
        self._events = self._fold.begin(public_id(self._fold.request_id, location))

    def _close(self) -> None:
        stream, fold = self._stream, self._fold
        self._group.replies.close(fold.request_id)
        if stream.ended is None:
            self._group.cancel(fold.request_id, fold.cancel_reason or stream.interrupt_reason or DISCONNECTED)

    async def _send(self, send: Send) -> str:
        """Send the response or an error; return the status for metrics. Raises TimeoutError if the client stalls."""
        wait_s = self._group.settings.timeout_s + GRACE_S
        async with asyncio.timeout(None) as limit:
            deadline = asyncio.get_running_loop().call_later(wait_s, self._expire, limit)
            try:
                await (self._send_stream(send) if self._fold.stream else self._send_whole(send))
            except ApiError as error:
                self._metrics.reject(error.code)
                if self._is_started:
                    body = b"".join([event.encoded() for event in self._fold.error_events(error)])
                    await send({"type": "http.response.body", "body": body})
                else:
                    await error.send(send, self._fold.client_id, self._fold.error_body(error))
                return "error"
            finally:
                deadline.cancel()
        return "success"

    def _expire(self, limit: asyncio.Timeout) -> None:
        self._stream.interrupt(TIMED_OUT)
        # If the client does not read, the response blocks in `send`, which an interruption does not end.
        limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    async def _send_stream(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        self._watch()
        try:
            while True:
                events = await self._next()
                self._is_silent, self._sent_s = False, loop.time()
                if not self._is_started:
                    self._is_started = True
                    await send(self._start(b"text/event-stream; charset=utf-8"))
                body = b"".join([event.encoded() for event in events]) or COMMENT
                if self._fold.is_over and self._fold.error is None:
                    await send({"type": "http.response.body", "body": body + self._fold.done})
                    return
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._timer.cancel()

    def _watch(self) -> None:
        """Make `_next` return if no event was sent for `SILENT_S`, and check that again later."""
        loop = asyncio.get_running_loop()
        left_s = self._sent_s + SILENT_S - loop.time()
        if left_s <= 0:
            self._is_silent = True
            self._stream.notify()
        self._timer = loop.call_later(left_s if left_s > 0 else SILENT_S, self._watch)

    async def _send_whole(self, send: Send) -> None:
        (event,) = await self._next()
        self._is_started = True
        await send(self._start(b"application/json", len(event.data)))
        await send({"type": "http.response.body", "body": event.data})

    async def _next(self) -> list[StreamEvent]:
        """Return the next events of the response, none after a silence. Raises ApiError or _ClientGone."""
        stream, fold = self._stream, self._fold
        if events := self._events:
            self._events = []
            return events
        while True:
            if fold.error is not None:
                if was_rejected(stream):
                    self._metrics.rejected(fold.endpoint)
                raise self._group.observe(fold.error)
            await stream.ready()
            if stream.tokens:
                self._observe_tokens()
            if events := fold.step(stream):
                return events
            if fold.error is None and stream.interrupt_reason is not None:
                raise self._interruption(stream.interrupt_reason)
            if self._is_silent:
                return []

    def _observe_tokens(self) -> None:
        if not self._first_s:
            self._first_s = runtime.monotonic_s()
            self._metrics.ttft.observe(self._first_s - self._began_s)

    def _interruption(self, reason: str) -> Exception:
        if reason == DISCONNECTED:
            return _ClientGone()
        if reason == TIMED_OUT:
            return deadline_exceeded(self._group.settings.timeout_s)
        return interruption(reason)

    def _start(self, content_type: bytes, length: int | None = None) -> dict[str, object]:
        headers = [(b"content-type", content_type), (b"x-request-id", self._fold.client_id.encode())]
        if self._stream.worker_id:
            headers.append((b"x-forebay-worker", self._stream.worker_id.encode()))
        headers += STREAM_HEADERS if length is None else [(b"content-length", str(length).encode())]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    def _count(self, status: str) -> None:
        metrics, fold, tokens = self._metrics, self._fold, self._fold.output_tokens
        metrics.ended(fold.endpoint, stream=fold.stream, status=status)
        if status != "success":
            return
        now_s = runtime.monotonic_s()
        metrics.duration.observe(now_s - self._began_s)
        metrics.input_tokens.observe(fold.prompt_tokens)
        if fold.endpoint == EmbeddingBody.endpoint:
            return
        metrics.output_tokens.observe(tokens)
        metrics.cached_tokens.observe(fold.cached_tokens)
        if tokens > self._parts:
            metrics.itl.observe((now_s - self._first_s) / (tokens / self._parts - 1))


class PartsResponse(OneResponse):
    """ASGI response that is several requests on the log, its choices or inputs. Events are in the order of the log.

    If a part fails or the client disconnects, all parts in flight are cancelled. The output of a part waits in its
    stream while the client reads more slowly.
    """

    def __init__(
        self, group: GroupClient, fold: ResponseFold, parts: Sequence[RequestSubmitted], began_s: float
    ) -> None:
        # No event is dispatched to this stream. It is notified when that of a part changes.
        super().__init__(group, fold, Stream(), began_s)
        self._submissions = parts
        self._parts = len(parts)
        self._capacity = asyncio.Semaphore(PARTS_IN_FLIGHT_MAX)
        self._streams: dict[int, Stream] = {}
        self._over = [asyncio.Event() for _ in parts]
        # Changes of all parts that the fold has not taken, in the order of the reply slot: the part, the position of
        # its output after the change, and whether it has ended.
        self._changes: deque[tuple[int, int, bool]] = deque()
        self._has_begun = False
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission = self._group.front.admission
        # The middleware has admitted one request. The inputs of an embedding request count as one.
        more = 0 if self._fold.endpoint == EmbeddingBody.endpoint else self._parts - 1
        try:
            admission.enter(more)
        except ApiError as error:
            self._metrics.reject(error.code)
            self._metrics.rejected(self._fold.endpoint)
            await error.send(send, self._fold.client_id, self._fold.error_body(error))
            return
        work = asyncio.get_running_loop().create_task(self._run())
        try:
            await super().__call__(scope, receive, send)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            admission.leave(more)

    async def _run(self) -> None:
        """Run all parts. `_next` raises the error of the first one that cannot be submitted, which ends the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._parts):
                    tasks.create_task(self._run_part(index))
        except ExceptionGroup as errors:
            self._failure = errors.exceptions[0]
        self._stream.notify()

    async def _run_part(self, index: int) -> None:
        group, fold, event = self._group, self._fold, self._submissions[index]
        async with self._capacity:
            stream = await group.submit(event, partial(self._on_change, index))
            try:
                if not index:
                    assert stream.location is not None
                    self._begin(stream.location)
                    self._has_begun = True
                    self._stream.notify()
                await self._over[index].wait()
            finally:
                group.replies.close(event.request_id)
                if stream.ended is None:
                    stopped = "stop" if fold.is_part_over(index) else fold.cancel_reason
                    group.cancel(event.request_id, stopped or self._stream.interrupt_reason or DISCONNECTED)

    def _on_change(self, index: int, stream: Stream) -> None:
        self._streams[index] = stream  # perhaps before its append was acknowledged
        if stream.interrupt_reason is not None:
            self._stream.interrupt(stream.interrupt_reason)
        self._changes.append((index, stream.next_index, stream.ended is not None or stream.gap))
        self._stream.notify()

    def _close(self) -> None:
        """Do nothing, because `_run_part` cancels the requests."""

    async def _next(self) -> list[StreamEvent]:
        while True:
            if events := self._take():
                return events
            if self._failure is not None:
                raise self._failure
            if self._stream.interrupt_reason is not None:
                raise self._interruption(self._stream.interrupt_reason)
            if self._is_silent:
                return []
            await self._stream.ready()

    def _take(self) -> list[StreamEvent]:
        """Return the events of the next changes. Raises ApiError if the response ends with an error."""
        fold, events, self._events = self._fold, self._events, []
        if fold.error is not None:
            raise self._group.observe(fold.error)
        while self._has_begun and self._changes and len(events) < EVENTS_MAX and not fold.is_over:
            index, before, has_end = self._changes.popleft()
            stream = self._streams[index]
            if before:
                self._observe_tokens()
            self._stream.worker_id = self._stream.worker_id or stream.worker_id
            events += fold.step(stream, index, before=before, has_end=has_end)
            if fold.is_part_over(index):
                self._over[index].set()
            if fold.error is not None:
                if was_rejected(stream):
                    self._metrics.rejected(fold.endpoint)
                if not events:
                    raise self._group.observe(fold.error)
        return events


class _ClientGone(Exception):
    pass


async def wait_for_disconnect(receive: Receive, on_disconnect: Callable[[str], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect(DISCONNECTED)
