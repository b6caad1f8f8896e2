"""Ids of traces and spans follow from the log, and continue the trace of the client."""

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.requests import RequestSubmitted
from forebay.events.trace_ids import TRACEPARENT, TraceIds, attempt_context, trace_id_of
from forebay.events.work import WorkItem
from tests.harness.samples import example

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0b0902b7"
CONTEXT = f"00-{TRACE}-{SPAN}-01"
traces = st.sampled_from(["", CONTEXT, f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01"]) | st.text(max_size=60)


def submitted(traceparent: str, request_id: str = "r") -> RequestSubmitted:
    event: RequestSubmitted = example(RequestSubmitted, full=False)
    return msgspec.structs.replace(event, request_id=request_id, traceparent=traceparent)


@given(traces, st.integers(0, 1 << 40), st.sampled_from(["", "decode"]), st.integers(0, 3))
def test_ids_are_those_of_the_format_and_depend_on_the_log_alone(
    traceparent: str, offset: int, stage: str, attempt: int
) -> None:
    event = submitted(traceparent)
    ids = TraceIds.of(event, offset)
    assert re.fullmatch("[0-9a-f]{32}", ids.trace)
    assert re.fullmatch("[0-9a-f]{16}", ids.span(stage, attempt))
    assert ids == TraceIds.of(event, offset)
    assert bool(ids.parent) == (traceparent == CONTEXT or TRACEPARENT.fullmatch(traceparent) is not None)
    context = attempt_context(event, offset, stage, attempt)
    assert context == f"00-{ids.trace}-{ids.span(stage, attempt)}-{traceparent[-2:] if ids.parent else '01'}"


def test_the_trace_of_the_client_goes_on() -> None:
    ids = TraceIds.of(submitted(CONTEXT), 7)
    assert (ids.trace, ids.parent) == (TRACE, SPAN)
    assert attempt_context(submitted(CONTEXT), 7, "decode", 1).startswith(f"00-{TRACE}-")


def test_spans_of_stages_attempts_and_runs_differ() -> None:
    runs = [TraceIds.of(submitted("", name), offset) for name in ("a", "b") for offset in (1, 2)]
    spans = {ids.span(stage, attempt) for ids in runs for stage in ("prefill", "decode") for attempt in (1, 2)}
    assert len(spans) == len(runs) * 4
    assert [one.trace == runs[0].trace for one in runs] == [True, True, False, False]


def test_log_records_about_an_item_have_the_trace_of_its_request() -> None:
    item: WorkItem = example(WorkItem, full=False)
    trace = trace_id_of(item.request_id, item.reply_key, item.traceparent)
    assert item.log_extra == {"fields": {"trace_id": trace}}
