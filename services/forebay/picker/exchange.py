"""One request on its way through a gateway: the owner selects its server, and progress events follow its answer.

Theory of operation. All bodies are `FULL_DUPLEX_STREAMED`: the gateway sends parts as they come, and the picker returns
parts when it wants. It answers the headers of a request only after it has read the body and the owner has decided. The
parts of an answer go to the client at once; only an event with token counts, for which the picker asked, is left out.

The picker reports progress in the name of the worker of the server. An answer whose gateway goes away before its end is
cancelled on the log, because client and gateway cannot be told apart.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.progress import (
    AttemptMoved,
    AttemptRejected,
    FirstTokenEmitted,
    OutputGrown,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
)
from forebay.events.request_ids import NUMBER_BYTES, http_request_id
from forebay.events.requests import ENDPOINTS_MAX, RequestSubmitted
from forebay.events.tokens import DestinationSelected
from forebay.events.topics import PROGRESS
from forebay.events.versions import may_write
from forebay.ingress.body_limits import BOM
from forebay.ingress.errors import ApiError
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import CLIENT_ID_BYTES, BodyReader
from forebay.ingress.openai.requests import CHAT_PATH, REQUEST_ID, TEXT_PATH, ChatBody, TextBody
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.streams import Stream, interruption
from forebay.picker.answer import EVENT_STREAM, Answer, with_usage
from forebay.picker.messages import (
    FULL_DUPLEX,
    ProcessingResponse,
    body_parts,
    header_mutation,
    headers_of,
    metadata,
    texts_of,
)
from forebay.picker.servers import Fallback
from forebay.transport.base import Draft, LogError
from forebay.workers.engines.attached.errors import message_of

logger = logging.getLogger(__name__)

# The protocol between gateways and endpoint pickers of the Gateway API Inference Extension.
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
ADDRESS = "envoy.filters.http.ext_proc", "upstream.address"  # an attribute, for gateways that do not set SERVED

KINDS: dict[str, type[ChatBody | TextBody]] = {CHAT_PATH: ChatBody, TEXT_PATH: TextBody}
OWNER_CHECK_S = 0.5  # interval in which a request that waits for its server checks that there is an owner
MOVED_S = 2.0  # for the owner's answer to a move, while the client waits for the headers
ERROR_BYTES_MAX = 64 << 10
SERVER_LOST = "pinned_worker_lost"  # error code of the owner when it loses the selected server
OK, TOO_MANY, SERVER_ERROR = 200, 429, 500


class Exchange:
    """One request and its answer. `close` must be called at its end."""

    def __init__(self, fallback: Fallback) -> None:
        self._fallback = fallback
        self._front = fallback.models.front
        self._front.admission.enter()
        self._reader = BodyReader(self._front.bodies)
        self._headers: dict[str, str] = {}
        self._endpoints: tuple[str, ...] = ()
        self._raw = bytearray()
        self._model = ""
        self._group: GroupClient | None = None
        self._stream: Stream | None = None
        self._submitted: RequestSubmitted | None = None
        self._attempt: DestinationSelected | None = None  # None before it is known, and once the books have ended
        self._status = OK
        self._retry_after = ""
        self._answer = Answer(is_stream=False, hides_usage=False)
        self._hides_usage = False
        self._error = b""
        self._reported = 0  # output tokens, at the last event about them

    def close(self) -> None:
        """Cancel the request on the log if its answer has not ended."""
        self._reader.__exit__()
        self._front.admission.leave()
        self._cancel("the gateway ended the request")

    async def respond(self, message: Any) -> list[Any]:
        """Return the messages that follow from one of the gateway. Raises ApiError if the request is rejected."""
        if message.HasField("request_headers"):
            self._begin(message)
            return []
        if message.HasField("request_body"):
            self._raw += message.request_body.body
            self._reader.hold(len(self._raw))
            return await self._send(is_last=True) if message.request_body.end_of_stream else []
        if message.HasField("request_trailers"):
            return [*await self._send(is_last=False), ProcessingResponse(request_trailers={})]
        if message.HasField("response_headers"):
            await self._begin_answer(message)
            return [ProcessingResponse(response_headers={})]
        if message.HasField("response_body"):
            body = message.response_body
            return list(self._pass(body.body, is_last=body.end_of_stream))
        return [*self._pass(b"", is_last=True, has_trailers=True), ProcessingResponse(response_trailers={})]

    # Request

    def _begin(self, message: Any) -> None:
        self._headers = headers_of(message.request_headers)
        self._endpoints = tuple(texts_of(message.metadata_context.filter_metadata, *SUBSET))[:ENDPOINTS_MAX]
        modes = message.protocol_config
        if (modes.request_body_mode, modes.response_body_mode) != (FULL_DUPLEX, FULL_DUPLEX):
            text = "the filter ext_proc must have FULL_DUPLEX_STREAMED as request_body_mode and response_body_mode"
            raise ApiError(500, "gateway_misconfigured", text)
        if self.path not in KINDS or message.request_headers.end_of_stream:
            text = f"the picker routes POST requests of {' and '.join(KINDS)} only; let other routes skip the filter"
            raise ApiError(404, "unknown_path", text)

    @property
    def path(self) -> str:
        return self._headers.get(":path", "").partition("?")[0]

    async def _send(self, *, is_last: bool) -> list[Any]:
        body, self._raw = bytes(self._raw).removeprefix(BOM), bytearray()
        try:
            try:
                self._attempt = await self._select(body)
            except ApiError as error:
                if error.code != SERVER_LOST:
                    raise
                self._leave()
                self._attempt = await self._select(body)  # no server has the request yet
            body, self._hides_usage = with_usage(body)
            where = ",".join(filter(None, (self._attempt.endpoint, self._attempt.fallback)))
            self._fallback.count("picked")
        except ApiError as error:
            self._cancel(error.message)
            where = self._fallback.endpoint(error, self._model, self._endpoints)
        self._reader.__exit__()  # the answer may take minutes
        # A compressed answer could not be followed.
        mutation = header_mutation({DESTINATION: where}, remove=("accept-encoding",))
        headers = {"response": {"header_mutation": mutation, "clear_route_cache": True}}
        namespace = metadata(SERVED[0], DESTINATION, where)
        first = ProcessingResponse(request_headers=headers, dynamic_metadata=namespace)
        return [first, *body_parts("request_body", body, is_last=is_last)]

    async def _select(self, raw: bytes) -> DestinationSelected:
        """Submit the request, and return the server that the owner selects. Raises ApiError."""
        front = self._front
        front.bodies.limits.require(raw)
        await front.admission.turn(len(raw))
        body = front.parse(KINDS[self.path], raw)
        self._model = body.model
        given = self._headers.get("x-request-id", "")
        client_id = given if REQUEST_ID.fullmatch(given) else runtime.random_bytes(CLIENT_ID_BYTES).hex()
        request_id = http_request_id(client_id, runtime.random_int(NUMBER_BYTES))
        model, name = await self._fallback.models.find(body.model, request_id)
        group = model.group
        group.require_capacity(body.endpoint)
        owner = group.ready.presence.owner
        if owner is None or not may_write(AttemptMoved, owner.events_version):
            text = "the router of this model does not know requests of gateways; upgrade all routers"
            raise ApiError(503, "router_too_old", text)
        prepared = await model.prepare(body, self._headers.items(), name)
        event = self._submission(group, request_id, prepared[0])  # the server runs all choices of the request
        self._stream = await group.submit(event)
        self._group, self._submitted = group, event
        return await self._destination()

    def _submission(self, group: GroupClient, request_id: str, prepared: PreparedRequest) -> RequestSubmitted:
        settings = group.settings
        event = prepared.submission(
            request_id,
            reply_slot=settings.reply_slot,
            reply_from=group.replies.position,
            nonce=runtime.random_int(8),
            at_us=runtime.wall_us(),
            ingress_id=settings.ingress_id,
            incarnation=settings.incarnation,
        )
        routing = msgspec.structs.replace(event.routing, endpoints=self._endpoints)
        return msgspec.structs.replace(event, delivery="external", routing=routing, rendering=None)

    async def _destination(self) -> DestinationSelected:
        """Wait for the next server that the owner selects. Raises ApiError if it rejects or aborts the request."""
        group, stream = self._group, self._stream
        assert group is not None and stream is not None
        while True:
            try:
                async with asyncio.timeout(OWNER_CHECK_S):
                    await stream.ready()
            except TimeoutError:
                group.require_owner()
                continue
            if stream.ended is not None:
                found = stream.ended.error
                assert found is not None, "nobody ends an external request without an error"
                error = ApiError(found.status, found.code, found.message)
                if found.retry_after_s:
                    error.retry_after_s = found.retry_after_s
                raise group.observe(error)
            if stream.destination is None:
                raise interruption(stream.interrupt_reason)
            selected, stream.destination = stream.destination, None
            return selected

    # Answer

    async def _begin_answer(self, message: Any) -> None:
        headers = headers_of(message.response_headers)
        self._status = int(headers.get(":status", OK))
        self._retry_after = headers.get("retry-after", "")
        is_stream = headers.get("content-type", "").startswith(EVENT_STREAM)
        self._answer = Answer(is_stream=is_stream, hides_usage=self._hides_usage)
        served = texts_of(message.attributes, *ADDRESS)
        served = texts_of(message.metadata_context.filter_metadata, *SERVED) or served
        if self._attempt is not None and served and served[0] != self._attempt.endpoint:
            await self._move(served[0])
        if message.response_headers.end_of_stream:
            self._end()

    async def _move(self, endpoint: str) -> None:
        """Let the owner book the request at the server that the gateway used."""
        self._report(AttemptMoved, endpoint=endpoint)
        self._fallback.count("moved")
        self._attempt = None
        with contextlib.suppress(ApiError, TimeoutError):  # then the answer goes on, and `close` ends the books
            async with asyncio.timeout(MOVED_S):
                self._attempt = await self._destination()

    def _pass(self, body: bytes, *, is_last: bool, has_trailers: bool = False) -> Iterator[Any]:
        """Yield the bytes that the client gets of the next bytes of the answer, and report the progress."""
        if self._status == OK:
            body = self._answer.feed(body, is_last=is_last)
            self._report_output()
        else:
            self._error += body[: ERROR_BYTES_MAX - len(self._error)]
        if is_last:
            self._end()
        if body or (is_last and not has_trailers):
            yield from body_parts("response_body", body, is_last=is_last and not has_trailers)

    def _report_output(self) -> None:
        attempt, tokens = self._attempt, self._answer.output_tokens
        if attempt is None or not tokens or not self._answer.is_stream:
            return
        if not self._reported:
            self._report(FirstTokenEmitted, cached_tokens=attempt.cached_tokens)
            self._reported = tokens
        elif attempt.report_every and tokens // attempt.report_every > self._reported // attempt.report_every:
            self._report(OutputGrown, output_tokens=tokens)
            self._reported = tokens

    def _end(self) -> None:
        """Report the end of the answer."""
        attempt, answer, status = self._attempt, self._answer, self._status
        if attempt is None:
            return
        if status == OK:
            cached = attempt.cached_tokens if answer.cached_tokens is None else answer.cached_tokens
            tokens, reason = answer.output_tokens, answer.finish_reason
            self._report(RequestFinished, finish_reason=reason, output_tokens=tokens, cached_tokens=cached)
            self._fallback.count("finished" if answer.usage is not None else "finished_without_usage")
        else:
            text = f"the server responded with {status}: {message_of(self._error)}"
            if status == TOO_MANY or status >= SERVER_ERROR:
                after_s = int(self._retry_after[:9]) if self._retry_after.isdecimal() else 0
                self._report(AttemptRejected, error=text, status=status, code="engine_error", retry_after_s=after_s)
            else:
                self._report(RequestFailed, error=text)
            self._fallback.count("failed")
        self._leave()

    def _report(self, kind: type[ProgressEvent], **fields: Any) -> None:
        attempt, stream = self._attempt, self._stream
        assert attempt is not None and stream is not None and stream.location is not None
        event = kind(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            worker_id=attempt.worker_id,
            worker_epoch=attempt.worker_epoch,
            owner_epoch=attempt.owner_epoch,
            at_us=runtime.wall_us(),
            **fields,
        )
        try:
            self._front.log.append_soon([Draft(PROGRESS.name, stream.location.partition, encode(PROGRESS, event))])
        except LogError as error:  # the answer goes on without the books, which end at the deadline
            logger.warning("cannot report on request %s: %s", attempt.request_id, error)

    def _cancel(self, reason: str) -> None:
        """End the books, unless they have ended."""
        if self._group is not None and self._stream is not None and self._submitted is not None:
            if self._stream.ended is None:
                self._group.cancel(self._submitted.request_id, reason)
                self._fallback.count("cancelled")
            self._leave()

    def _leave(self) -> None:
        """Read no more about the request."""
        assert self._group is not None and self._submitted is not None
        self._group.replies.close(self._submitted.request_id)
        self._attempt = self._submitted = None
