"""Ids of traces and spans, in the format of W3C Trace Context. They follow from what the log says about a request.

So every process knows the ids without asking another one, and a span that is exported twice has the same id.
"""

from typing import NamedTuple

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from forebay.events.requests import RequestSubmitted


class TraceIds(NamedTuple):
    """Ids of a request's trace. `parent` is the span of the client, empty if the client sent no trace context."""

    trace: str
    parent: str
    seed: str

    def span(self, name: str = "", attempt: int = 0) -> str:
        """Return the id of a span. The empty name stands for the whole request, that of a stage for its attempt."""
        return xxh3_64_hexdigest(f"{self.seed}\0{name}\0{attempt}".encode())


def trace_ids_of(submitted: RequestSubmitted, offset: int) -> TraceIds:
    """Return the ids of a request at an offset of `requests`. Its trace is that of the client, if it sent one."""
    seed = f"{submitted.request_id}\0{submitted.reply_key}\0{offset}"
    if submitted.traceparent:
        _, trace, parent, _ = submitted.traceparent.split("-")
        return TraceIds(trace, parent, seed)
    return TraceIds(xxh3_128_hexdigest(seed.encode()), "", seed)
