"""Send traces to a receiver of OpenTelemetry by OTLP over HTTP, encoded as protobuf."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from prometheus_client import CollectorRegistry, Counter

from forebay.journal.traces import Attributes, Span, Trace
from forebay.live.spans import SpanSettings

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
RETRY_S, RETRY_S_MAX = 1.0, 60.0
UNUSABLE = (400, 413)  # a repetition of the same request would be rejected again
SERVICE = "forebay"


class OtlpSender:
    """Sends traces, and tries again until the receiver has accepted or finally rejected all of them.

    Attributes:
        problem: why the receiver does not accept spans at present; empty if it does.
    """

    def __init__(self, settings: SpanSettings, namespace: str, registry: CollectorRegistry) -> None:
        self._url = settings.url
        self._console_url = settings.console_url
        self._resource: Attributes = {"service.name": SERVICE, "service.namespace": namespace}
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S)
        self.problem = ""
        self._sent = Counter("forebay_spans_sent", "spans that the receiver accepted", registry=registry)
        self._rejected = Counter("forebay_spans_rejected", "spans that the receiver rejected", registry=registry)

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, traces: Sequence[Trace]) -> None:
        left, retry_s = deque([traces]), RETRY_S
        while left:
            batch = left[0]
            problem, status, after_s = await self._post(batch)
            if not problem:
                left.popleft()
                retry_s = RETRY_S
            elif status in UNUSABLE and len(batch) > 1:
                left.popleft()
                left.extendleft((batch[len(batch) // 2 :], batch[: len(batch) // 2]))
            elif status in UNUSABLE:
                left.popleft()
                self._rejected.inc(len(batch[0].spans))
                logger.error("the receiver rejects the trace %s: %s", batch[0].trace_id, problem)
            else:
                if problem != self.problem:
                    logger.warning("spans wait for the receiver %s: %s", self._url, problem)
                self.problem = problem
                await asyncio.sleep(max(retry_s, after_s))
                retry_s = min(2 * retry_s, RETRY_S_MAX)

    async def _post(self, traces: Sequence[Trace]) -> tuple[str, int, float]:
        """Send traces. Return why they were not accepted, the status, and the seconds that the receiver asks for."""
        content = encoded(traces, self._resource, self._console_url)
        try:
            response = await self._client.post(
                self._url, content=content, headers={"content-type": "application/x-protobuf"}
            )
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}".strip(), 0, 0.0
        if not response.is_success:
            after = response.headers.get("retry-after", "")
            return f"status {response.status_code}", response.status_code, int(after[:9]) if after.isdecimal() else 0.0
        self.problem = ""
        rejected, text = _partial_success(response.content)
        if rejected or text:
            logger.warning("the receiver rejected %d spans: %s", rejected, text)
        self._rejected.inc(rejected)
        self._sent.inc(sum(len(trace.spans) for trace in traces) - rejected)
        return "", 0, 0.0


def _partial_success(content: bytes) -> tuple[int, str]:
    try:
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except DecodeError:
        return 0, ""  # some receivers answer with text
    return partial.rejected_spans, partial.error_message


def encoded(traces: Sequence[Trace], resource: Attributes, console_url: str = "") -> bytes:
    """Return an export request. The spans of requests link to the console, if there is one."""
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    of_resource.resource.attributes.extend(_attributes(resource))
    scope = of_resource.scope_spans.add()
    scope.scope.name = SERVICE
    for trace in traces:
        scope.spans.extend(_message(trace, span) for span in trace.spans)
        if console_url:
            link = f"{console_url}/#/requests/by-id?id={quote(trace.request_id, safe='')}"
            scope.spans[-len(trace.spans)].attributes.add(key="forebay.console.url", value=_value(link))
    return bytes(request.SerializeToString())


def _message(trace: Trace, span: Span) -> SpanMessage:
    trace_id = bytes.fromhex(trace.trace_id)
    is_root = span is trace.spans[0]
    message = SpanMessage(
        trace_id=trace_id,
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        name=span.name,
        kind=SpanMessage.SPAN_KIND_SERVER if is_root else SpanMessage.SPAN_KIND_INTERNAL,
        start_time_unix_nano=_nanoseconds(span.begin_us),
        end_time_unix_nano=_nanoseconds(span.end_us),
        attributes=_attributes(span.attributes),
        events=[
            SpanMessage.Event(
                time_unix_nano=_nanoseconds(event.at_us), name=event.name, attributes=_attributes(event.attributes)
            )
            for event in span.events
        ],
    )
    if span.linked_id:
        message.links.add(trace_id=trace_id, span_id=bytes.fromhex(span.linked_id))
    if span.error:
        message.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=span.error))
    return message


def _nanoseconds(us: int) -> int:
    return min(max(us, 0) * 1_000, (1 << 64) - 1)  # a time on the log may be any number


def _attributes(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in attributes.items()]


def _value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
        case _:
            return AnyValue(string_value=value)
