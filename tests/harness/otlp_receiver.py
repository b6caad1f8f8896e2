"""A receiver of traces by OTLP over HTTP, which decodes them with the messages of OpenTelemetry."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from infra.kafka.kafka import HOST
from tests.harness.local import free_ports

BODY_BYTES_MAX = 64 << 20


class Reply(NamedTuple):
    """Response instead of the acceptance of a request. `rejects` is the number of spans in a partial success."""

    status: int = 200
    headers: Mapping[str, str] = {}
    rejects: int = 0


class OtlpReceiver:
    """Keeps the spans that it has accepted, by trace and span id.

    Attributes:
        replies: responses to the next requests, which are then accepted only with status 200.
        requests: traces of each request, also of those that were not accepted.
        copies: how often each span was accepted.
        differing: ids of spans that were accepted again with other content.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[set[str]] = []
        self.traces: dict[str, dict[str, Span]] = {}
        self.copies: Counter[str] = Counter()
        self.differing: list[str] = []
        self.resources: list[dict[str, Any]] = []
        self._port = free_ports(1)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/traces", self._export)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _export(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        spans = [span for one in message.resource_spans for scope in one.scope_spans for span in scope.spans]
        self.requests.append({span.trace_id.hex() for span in spans})
        reply = self.replies.pop(0) if self.replies else Reply()
        if reply.status == 200:
            self.resources += [attributes_of(one.resource) for one in message.resource_spans]
            self._accept(spans)
        response = ExportTraceServiceResponse()
        if reply.rejects:
            response.partial_success.rejected_spans = reply.rejects
            response.partial_success.error_message = "too old"
        return web.Response(status=reply.status, headers=reply.headers, body=response.SerializeToString())

    def _accept(self, spans: Sequence[Span]) -> None:
        for span in spans:
            known = self.traces.setdefault(span.trace_id.hex(), {})
            span_id = span.span_id.hex()
            if span_id in known and known[span_id] != span:
                self.differing.append(span_id)
            known[span_id] = span
            self.copies[span_id] += 1


def attributes_of(message: Any) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    found = {}
    for one in message.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def root_of(trace: Mapping[str, Span]) -> Span:
    """Return the span of the request. Fails if there is more than one, or if children are not inside of parents."""
    (root,) = (span for span in trace.values() if span.kind == Span.SPAN_KIND_SERVER)
    for span in trace.values():
        if span is not root:
            parent = trace[span.parent_span_id.hex()]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano
    return root
