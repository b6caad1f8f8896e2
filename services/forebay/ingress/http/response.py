"""Send a response to an HTTP client, as server-sent events or as one JSON object.

The head is sent with the first token, so a request that the router or an engine rejects gets an HTTP error status.
After `SILENT_S` without a token the head of a stream and then comments are sent, because proxies close silent
connections. A later error is the last event of the stream. With an idempotency key the head waits for the first event,
because the owner may locate an earlier request.

If the client of a stream disconnects, its request is cancelled only after a grace time, in which the client may resume
the stream here or at another ingress. If the server stops, the owner waits for this time. A request that outlives its
connection is rendered to its end without a client, because only the rendering finds stop strings.
"""

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.core.state.reply_slot import apply
from forebay.events.request_ids import RequestLocation, public_id
from forebay.events.requests import RequestSubmitted, reply_key_of
from forebay.events.trace_ids import trace_id_of
from forebay.ingress.access_log import add_fields
from forebay.ingress.commands import GRACE_S
from forebay.ingress.errors import ID_HEADERS, ApiError, deadline_exceeded
from forebay.ingress.finder import FoundRequest
from forebay.ingress.formatter import StreamEvent
from forebay.ingress.front import BACKGROUND_MAX
from forebay.ingress.group import GroupClient
from forebay.ingress.limits import Reservation
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.prepare import part_nonce, tie_seed_of
from forebay.ingress.recorder import RecordedStream, Recorder
from forebay.ingress.response_fold import ResponseFold, was_rejected
from forebay.ingress.streams import Stream, View, interruption
from forebay.transport.answers import AnswerTooLarge
from forebay.transport.base import LogError

logger = logging.getLogger(__name__)

PARTS_IN_FLIGHT_MAX = 64  # per client request, so that other requests are interleaved
DISCONNECTED = "client disconnected"
REPEATED = "an earlier request has the same idempotency key"
TIMED_OUT = "deadline"
EVENTS = b"text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
READ_S = 30.0  # time to read a response from the log, also after the deadline of its request
SILENT_S = 10.0  # proxies close connections that are silent for 30 to 60 s
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # nginx must not buffer events
EVENTS_MAX = 1_024  # of several choices; a client that reads more slowly lets output wait as token ids


# Returns the response of the request at a location, which has the same idempotency key.
Replay = Callable[[RequestLocation], Awaitable[Response]]


class OneResponse(Response):
    """ASGI response that is one request on the log, which arrived at `began_s` of the monotonic clock.

    It is not a StreamingResponse of Starlette, because that class creates a task group for each response.

    Args:
        first: the first part of the request.
        stream: receives the output.
        recorder: records the output for a kept answer.
        replay: used if the owner locates an earlier request with the same idempotency key.

    Attributes:
        reservation: what the request counts for the limits of its API key.
    """

    def __init__(
        self,
        group: GroupClient,
        fold: ResponseFold,
        first: RequestSubmitted,
        stream: Stream,
        began_s: float,
        *,
        recorder: Recorder | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.background = None
        self.reservation = Reservation()
        self._group = group
        self._metrics = group.metrics
        self._fold = fold
        self._first = first
        self._stream = stream
        self._recorder = recorder
        self._replay = replay
        self._is_in_background = False
        self._fields: dict[str, Any] = {}  # of the access log
        self._located: RequestLocation | None = None  # the earlier request with the same idempotency key
        self._more_headers: Sequence[tuple[bytes, bytes]] = ()  # additional ones
        self._location = RequestLocation(0, 0)
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
        watch = asyncio.get_running_loop().create_task(wait_for_disconnect(receive, self._on_disconnect))
        self._metrics.inflight.inc()
        status = "error"
        try:
            status = await self._send(send)
        except (_ClientGone, TimeoutError):
            status = "cancelled"
            self._metrics.disconnected.inc()
        except _Repeated:
            status = ""
        finally:
            watch.cancel()
            self._close()
            self._metrics.inflight.dec()
            self._group.front.in_background -= self._is_in_background
            self._settle()
            if status:
                self._count(status)
            self._add_fields(scope)
        if not status:
            assert self._replay is not None, "only requests with an idempotency key are located"
            assert self._located is not None
            replayed = await self._replay(self._located)
            await replayed(scope, receive, send)
        elif self._recorder is not None:
            await self._keep(self._recorder)

    def _settle(self) -> None:
        """Count the tokens used for the limits of the API key; all reserved ones if the request may still run."""
        fold = self._fold
        has_run = bool(fold.output_tokens or self._stream.worker_id)
        if self._located is not None or (fold.error is not None and not has_run):
            self.reservation.release()
        else:
            # Until its end, or until the grace time is over.
            may_run = not fold.is_over and (self._outlives or (self._is_started and fold.stream))
            self.reservation.end(None if may_run else fold.prompt_tokens + fold.output_tokens)

    def _add_fields(self, scope: Scope) -> None:
        fold, fields, first = self._fold, self._fields, self._first
        fields["trace_id"] = trace_id_of(first.request_id, first.reply_key, first.traceparent)
        if self._stream.worker_id:
            fields["worker"] = self._stream.worker_id
        if self._first_s:
            fields["ttft_s"] = round(self._first_s - self._began_s, 4)
        tokens = {"prompt_tokens": fold.prompt_tokens, "cached_tokens": fold.cached_tokens}
        add_fields(scope, **fields, **tokens, output_tokens=fold.output_tokens)

    def _on_disconnect(self, reason: str) -> None:
        """End the response, or render the rest of it in the background if its request outlives the connection."""
        front = self._group.front
        if self._outlives and front.in_background < BACKGROUND_MAX:
            self._is_in_background = True
            front.in_background += 1
        else:
            self._stream.interrupt(reason)

    @property
    def _outlives(self) -> bool:
        return not self._first.ingress_incarnation

    @property
    def _may_be_located(self) -> bool:
        """Whether the owner may still locate an earlier request, whose response has another head."""
        return not self._is_started and self._replay is not None and self._first.idempotency_key > 0

    def _begin(self, location: RequestLocation) -> None:
        self._location = location
        self._events = self._fold.begin(public_id(self._fold.request_id, location))

    def _close(self) -> None:
        self._group.replies.close(self._fold.request_id)
        self._end(self._first.request_id, self._stream, 0)

    def _end(self, request_id: str, stream: Stream, index: int) -> None:
        """Cancel a request on the log that has not ended, unless a client may still read its output."""
        if stream.ended is not None or stream.located is not None:
            return
        cancel, fold, cut = self._group.cancel, self._fold, self._stream.interrupt_reason
        output_tokens = fold.passed_tokens(index)
        if fold.is_part_over(index):
            cancel(request_id, "stop", is_complete=True, output_tokens=output_tokens)
        elif fold.is_over:
            cancel(request_id, fold.cancel_reason, output_tokens=output_tokens)
        elif self._located is not None:
            cancel(request_id, REPEATED, output_tokens=0)
        elif cut == TIMED_OUT or not self._outlives:
            self._abandon(request_id, cut, output_tokens)

    def _abandon(self, request_id: str, cut: str | None, output_tokens: int) -> None:
        """Cancel a request whose client reads no more, after the grace time if it may resume the stream."""
        if cut == TIMED_OUT:
            self._group.cancel(request_id, cut, output_tokens=output_tokens)
        elif not (self._is_started and self._fold.stream):
            # A repetition may wait for the response, too.
            self._group.cancel_unread(request_id, cut or DISCONNECTED, output_tokens)
        else:
            self._group.cancel_later(request_id, cut or DISCONNECTED, output_tokens)

    async def _keep(self, recorder: Recorder) -> None:
        """Keep the answer, if the log has all that leads to its end."""
        fold = self._fold
        if not fold.is_final or recorder.has_gap:
            return
        content = recorder.content(self._first, has_failed=fold.error is not None)
        try:
            await self._group.front.answers.store(fold.request_id, self._location, content)
        except (AnswerTooLarge, LogError) as error:
            logger.warning("the answer to %s is not kept: %s", fold.request_id, error)

    async def _send(self, send: Send) -> str:
        """Send the response or an error; return the status for metrics. Raises TimeoutError if the client stalls."""
        async with asyncio.timeout(None) as limit:
            deadline = asyncio.get_running_loop().call_later(self._wait_s, self._expire, limit)
            try:
                await (self._send_stream(send) if self._fold.stream else self._send_whole(send))
            except ApiError as error:
                self._metrics.reject(error.code)
                self._fields = {"error": error.code}
                if (events := self._failed(error)) is None:
                    await error.send(send, self._fold.client_id, self._fold.error_body(error))
                    return "error"
                if not self._is_started:
                    await send(self._start(EVENTS))
                await send({"type": "http.response.body", "body": b"".join([event.encoded() for event in events])})
                return "error"
            finally:
                deadline.cancel()
        return "success"

    @property
    def _wait_s(self) -> float:
        """Seconds until the response ends with an error."""
        return self._group.settings.timeout_s + GRACE_S

    def _expire(self, limit: asyncio.Timeout) -> None:
        self._stream.interrupt(TIMED_OUT)
        # If the client does not read, the response blocks in `send`, which an interruption does not end.
        limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    def _failed(self, error: ApiError) -> list[StreamEvent] | None:
        """Return the events with which the stream ends; None to respond with the HTTP status of the error."""
        return self._fold.error_events(error) if self._is_started else None

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
                    await send(self._start(EVENTS))
                body = b"".join([event.encoded() for event in events])
                if self._fold.is_over and self._fold.error is None:
                    await send({"type": "http.response.body", "body": body + self._fold.done})
                    return
                await send({"type": "http.response.body", "body": body or COMMENT, "more_body": True})
        finally:
            self._timer.cancel()

    def _watch(self) -> None:
        """Make `_next` return if no event was sent for `SILENT_S`, and check that again later."""
        loop = asyncio.get_running_loop()
        left_s = self._sent_s + SILENT_S - loop.time()
        if left_s <= 0 and not self._may_be_located:
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
        if self._events and not self._may_be_located:
            events, self._events = self._events, []
            return events
        while True:
            if fold.error is not None:
                if was_rejected(stream):
                    self._metrics.rejected(fold.endpoint)
                raise self._group.observe(fold.error, self._first.tenant)
            await stream.ready()
            if stream.located is not None:
                self._located = RequestLocation(stream.located.partition, stream.located.offset)
                raise _Repeated
            if stream.tokens:
                self._observe_tokens()
            if events := fold.step(stream):
                if self._events:
                    events, self._events = self._events + events, []
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
        headers = [(b"content-type", content_type)]
        headers += [(name.encode(), self._fold.client_id.encode()) for name in ID_HEADERS]
        if self._stream.worker_id:
            headers.append((b"x-forebay-worker", self._stream.worker_id.encode()))
        headers += self._more_headers
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


class _OrderedResponse(OneResponse):
    """ASGI response of several requests on the log, whose events are in the order of the log.

    The output of a part waits in its stream while the client reads more slowly.
    """

    _work: asyncio.Task[None]

    def __init__(
        self, group: GroupClient, fold: ResponseFold, first: RequestSubmitted, began_s: float, **options: Any
    ) -> None:
        # No event is dispatched to this stream. It is notified when that of a part changes.
        super().__init__(group, fold, first, Stream(), began_s, **options)
        self._parts = len(fold.ids)
        self._streams: dict[int, Stream] = {}
        self._over = [asyncio.Event() for _ in fold.ids]
        # Changes of all parts that the fold has not taken, in the order of the reply slot: the part, the position of
        # its output after the change, and whether it has ended.
        self._changes: deque[tuple[int, int, bool]] = deque()
        self._has_begun = False
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._work = asyncio.get_running_loop().create_task(self._run())
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Let the streams of the parts receive their output. An error in `_failure` ends the response."""

    def _close(self) -> None:
        self._work.cancel()

    def _begin(self, location: RequestLocation) -> None:
        super()._begin(location)
        self._has_begun = True
        self._stream.notify()

    def _new_stream(self, index: int, key: int) -> Stream:
        on_change = partial(self._on_change, index)
        if self._recorder is None:
            return Stream(key, on_change)
        return RecordedStream(key, self._fold.ids[index], self._recorder, on_change)

    def _on_change(self, index: int, stream: Stream) -> None:
        self._streams[index] = stream  # perhaps before its append was acknowledged
        if stream.interrupt_reason is not None:
            self._stream.interrupt(stream.interrupt_reason)
        if stream.located is not None and not index:
            self._located = RequestLocation(stream.located.partition, stream.located.offset)
        self._changes.append((index, stream.next_index, stream.ended is not None or stream.gap))
        self._stream.notify()

    async def _next(self) -> list[StreamEvent]:
        while True:
            events = self._take()
            if events or (self._fold.is_over and self._fold.error is None):
                return events
            if self._fold.is_over or (self._has_begun and self._changes):
                await asyncio.sleep(0)  # thousands of events that a client has received already are skipped
                continue
            if self._located is not None:
                raise _Repeated
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
            raise self._group.observe(fold.error, self._first.tenant)
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
                    raise self._group.observe(fold.error, self._first.tenant)
        return events


class PartsResponse(_OrderedResponse):
    """ASGI response that is several requests on the log, its choices or inputs.

    If a part fails or the client disconnects, all parts in flight are cancelled.
    """

    def __init__(
        self, group: GroupClient, fold: ResponseFold, parts: Sequence[RequestSubmitted], began_s: float, **options: Any
    ) -> None:
        super().__init__(group, fold, parts[0], began_s, **options)
        self._submissions = parts
        self._capacity = asyncio.Semaphore(PARTS_IN_FLIGHT_MAX)

    async def _run(self) -> None:
        """Run all parts. `_next` raises the error of the first one that cannot be submitted, which ends the others."""
        admission, endpoint = self._group.front.admission, self._fold.endpoint
        # The middleware has admitted one request. The inputs of an embedding request count as one.
        more = 0 if endpoint == EmbeddingBody.endpoint else self._parts - 1
        try:
            admission.enter(more, self._first.tenant)
        except ApiError as error:
            self._metrics.rejected(endpoint)
            self._failure = error
        else:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for index in range(self._parts):
                        tasks.create_task(self._run_part(index))
            except ExceptionGroup as errors:
                self._failure = errors.exceptions[0]
            finally:
                admission.leave(more)
        self._stream.notify()

    async def _run_part(self, index: int) -> None:
        event = self._submissions[index]
        async with self._capacity:
            stream = await self._group.submit(event, self._new_stream(index, event.reply_key))
            try:
                if not index:
                    assert stream.location is not None
                    self._begin(stream.location)
                await self._over[index].wait()
            finally:
                self._group.replies.close(event.request_id)
                self._end(event.request_id, stream, index)


class LastEvent(NamedTuple):
    """The last event of a stream that a client has received.

    Attributes:
        param: parameter with which the client named the event.
        text: id of the event, or its number from 0.
    """

    param: str
    text: str


class AttachedResponse(_OrderedResponse):
    """ASGI response that another connection or ingress began: its output is read from the log, or from its kept answer.

    Args:
        stream: whether to send a stream; None to send what the client of the request wanted.
        after: event after which the stream continues; None to begin with the first event.
        headers: additional headers.
    """

    def __init__(
        self,
        found: FoundRequest,
        began_s: float,
        *,
        stream: bool | None = None,
        after: LastEvent | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        replay: Replay | None = None,
    ) -> None:
        first, rendering = found.first, found.rendering
        if stream is None:
            stream = rendering.stream
        fold = found.loaded.fold(replace(first, rendering=replace(rendering, stream=stream)))
        recorder = Recorder() if rendering.is_kept and found.content is None else None
        super().__init__(found.loaded.group, fold, first, began_s, recorder=recorder, replay=replay)
        self._more_headers = headers
        self._found = found
        self._after = after
        self._received = 0  # number of events that were skipped, because the client has them
        self._resumes = after is not None
        self._last: list[StreamEvent] = []  # events of an error that ended the response
        self._has_all = False  # that was on the log when the client asked
        self._view: View | None = None

    async def _run(self) -> None:
        found, first = self._found, self._first
        keys = [reply_key_of(tie_seed_of(part_nonce(first.nonce, index))) for index in range(self._parts)]
        streams = {name: self._new_stream(index, keys[index]) for index, name in enumerate(self._fold.ids)}
        self._begin(found.location)
        try:
            if found.content is not None:
                for event in found.content.events:
                    for stream in apply(streams, event, event.group):
                        stream.notify()
            else:
                if not self._outlives:
                    for request_id in self._fold.ids:
                        self._group.resume(request_id)
                model = self._group.settings.model_name
                slots = self._group.front.slots
                self._view = await slots.view(first.reply_slot, model, streams, first.reply_from)
                await self._view.caught_up.wait()
        except (ApiError, LogError) as error:
            self._failure = error if isinstance(error, ApiError) else interruption(str(error))
        self._has_all = True
        self._stream.notify()

    def _close(self) -> None:
        super()._close()
        if self._view is not None:
            self._group.front.slots.close(self._view)
            for index, (request_id, stream) in enumerate(self._view.streams.items()):
                self._end(request_id, stream, index)

    def _abandon(self, request_id: str, cut: str | None, output_tokens: int) -> None:
        if cut != TIMED_OUT:  # after the deadline, only the owner ends the request
            self._group.cancel_later(request_id, cut or DISCONNECTED, output_tokens)

    def _take(self) -> list[StreamEvent]:
        fold = self._fold
        try:
            events = self._unsent(super()._take())
        except ApiError as error:
            if error is fold.error:
                self._last = self._unsent(fold.error_events(error))
            self._require_found()
            raise
        if fold.error is None and (fold.is_over or (self._has_all and not self._changes)):
            self._require_found()
        return events

    def _require_found(self) -> None:
        """Raise ApiError (400) if the client named an event that the log does not have yet."""
        if (after := self._after) is not None:
            raise ApiError(400, "unknown_event", f"the response has no event {after.text!r}", after.param)

    def _failed(self, error: ApiError) -> list[StreamEvent] | None:
        if error is not self._fold.error:
            return super()._failed(error)
        return self._last if self._is_started or self._resumes else None

    def _unsent(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """Return the events that the client has not received."""
        if self._after is None:
            return events
        for at, event in enumerate(events, 1):
            number, self._received = str(self._received), self._received + 1
            if self._after.text in (event.id, number):
                self._after = None
                return events[at:]
        return []

    @property
    def _wait_s(self) -> float:
        due_s = (self._first.at_us + self._first.timeout_us) / 1e6 + GRACE_S
        return max(READ_S, due_s - runtime.wall_s())

    def _observe_tokens(self) -> None:
        """Do nothing, because the times of a response are observed where it began."""

    def _count(self, status: str) -> None:
        self._metrics.ended("resume", stream=self._fold.stream, status=status)


class _Repeated(Exception):
    """The owner located an earlier request with the same idempotency key."""


class _ClientGone(Exception):
    pass


async def wait_for_disconnect(receive: Receive, on_disconnect: Callable[[str], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect(DISCONNECTED)
