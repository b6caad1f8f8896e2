"""Ids of traces and spans, in the format of W3C Trace Context. They follow from what the log says about a request.

So every process knows the ids without asking another one, and a span that is exported twice has the same id.
"""

import re
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from forebay.events.requests import RequestSubmitted

# W3C Trace Context, version 00, or a later version without further fields.
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-[0-9a-f]{2}")


def trace_id_of(request_id: str, reply_key: int, traceparent: str) -> str:
    """Return the id of a request's trace: that of the client's trace context, if it sent one, otherwise a hash."""
    context = TRACEPARENT.fullmatch(traceparent)
    return xxh3_128_hexdigest(f"{request_id}\0{reply_key}".encode()) if context is None else context[1]


class TraceIds(NamedTuple):
    """Ids of the trace of a request at an offset of `requests`. A request that is run twice has one trace.

    Attributes:
        trace: id of the trace.
        parent: span of the client; empty if the client sent no trace context.
    """

    trace: str
    parent: str
    seed: str

    @classmethod
    def of(cls, event: RequestSubmitted, offset: int) -> "TraceIds":
        """Return the ids of a request that was submitted at this offset."""
        trace = trace_id_of(event.request_id, event.reply_key, event.traceparent)
        context = TRACEPARENT.fullmatch(event.traceparent)
        return cls(trace, "" if context is None else context[2], f"{event.request_id}\0{event.reply_key}\0{offset}")

    def span(self, name: str = "", attempt: int = 0) -> str:
        """Return the id of a span. The empty name stands for the whole request, that of a stage for its attempt."""
        return xxh3_64_hexdigest(f"{self.seed}\0{name}\0{attempt}".encode())


def attempt_context(event: RequestSubmitted, offset: int, stage: str, attempt: int) -> str:
    """Return the trace context for the engine of an attempt, sampled unless that of the client is not."""
    ids = TraceIds.of(event, offset)
    return f"00-{ids.trace}-{ids.span(stage, attempt)}-{event.traceparent[-2:] if ids.parent else '01'}"
