"""The spans of requests, by the fold of a journal, compared with the derived states of the owner."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFinished
from forebay.events.requests import RequestCancelled
from forebay.events.topics import DECISIONS, REQUESTS
from forebay.events.trace_ids import attempt_context
from forebay.journal.folds import begin_of
from forebay.journal.traces import Span, Trace, TraceReader
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.replay.owner_histories import dense_history, log_with, owner_histories, played
from tests.replay.recorder import Recorder, disaggregated, fleet, outage
from tests.replay.request_times import SHOWN, Times, derived_times

DENSE = [dense_history(seed, 400) for seed in range(3)]


def times_of(traces: Sequence[Trace]) -> dict[str, list[Times]]:
    """Return name, begin and end of the spans in `SHOWN`, and the end of each request, by request id."""
    found: dict[str, list[Times]] = defaultdict(list)
    for trace in traces:
        spans = [(span.name, span.begin_us, span.end_us) for span in trace.spans if span.name in SHOWN]
        found[trace.request_id].append(sorted([*spans, ("end", trace.spans[0].end_us, trace.spans[0].end_us)]))
    return {name: sorted(several) for name, several in found.items()}


async def traces_of(log: SqliteLog, cuts: Sequence[int] = (), partition: int = 0) -> list[Trace]:
    """Return the traces of a journal, read by a new reader after each of these offsets."""
    begin, at, found = await begin_of(log, partition), 0, list[Trace]()
    end = await log.end(DECISIONS.name, partition)
    for cut in [*sorted(min(cut, end) for cut in cuts), end]:
        reader = TraceReader(log, partition, begin, at)
        while reader.position < cut:
            await reader.read(cut)
            found += reader.take()
        if reader.position > begin.journal_offset:
            begin, at = reader.next_begin(), reader.position
    return found


def check_shape(traces: Sequence[Trace]) -> None:
    """Check that each trace is complete: one root, unique ids, children inside of their parents."""
    ids = [span.span_id for trace in traces for span in trace.spans]
    assert len(set(ids)) == len(ids)
    for trace in traces:
        spans = {span.span_id: span for span in trace.spans}
        assert [span for span in trace.spans if span.parent_id not in spans] == [trace.spans[0]]
        for span in trace.spans[1:]:
            parent = spans[span.parent_id]
            assert parent.begin_us <= span.begin_us <= span.end_us <= parent.end_us
            assert not span.linked_id or spans[span.linked_id].name == "attempt"


@given(owner_histories, st.lists(st.integers(0, 150), max_size=4))
async def test_spans_have_the_times_of_the_owner_however_often_the_reader_is_restarted(
    history: list[tuple[str, Any]], cuts: list[int]
) -> None:
    await check_history(history, cuts)


@pytest.mark.parametrize("history", DENSE)
async def test_spans_have_the_times_of_the_owner_in_dense_histories(history: list[tuple[str, Any]]) -> None:
    await check_history(history, range(0, 400, 7))


async def check_history(history: list[tuple[str, Any]], cuts: Sequence[int]) -> None:
    with closing(await log_with(played(history))) as log:
        traces = await traces_of(log)
        assert times_of(traces) == await derived_times(log)
        check_shape(traces)
        assert await traces_of(log, cuts) == traces


@pytest.mark.parametrize("path", recordings.representative(), ids=lambda path: path.stem)
async def test_every_request_of_a_recording_has_one_complete_trace(path: Path) -> None:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        assert log.recording is not None
        for group in log.recording.groups:
            traces = await traces_of(log, partition=group.partition)
            assert times_of(traces) == await derived_times(log, CUSTOM, group.partition)
            check_shape(traces)
            assert await traces_of(log, range(0, 1_000, 13), group.partition) == traces


async def traces_by_id(made: Recorder) -> dict[str, Trace]:
    made.seal()
    with closing(await made.log()) as log:
        traces = await traces_of(log)
        check_shape(traces)
        assert await traces_of(log, range(len(made.journal))) == traces
        return {trace.request_id: trace for trace in traces}


def named(trace: Trace, name: str) -> list[Span]:
    return [span for span in trace.spans if span.name == name]


async def test_a_trace_shows_the_work_of_each_attempt_with_the_reported_transfer() -> None:
    made = disaggregated()
    made.ask("r", PROMPTS[0], tenant="acme", key_id="k")
    made.progress("r", PrefillFinished, 100)
    made.progress("r", FirstTokenEmitted, 300, transfer_us=200, cached_tokens=34, transferred_bytes=5)
    made.progress("r", RequestFinished, 1_000, finish_reason="stop", output_tokens=7, cached_tokens=34)
    trace = (await traces_by_id(made))["r"]
    zero = trace.spans[0].begin_us
    work = [(span.name, span.begin_us - zero, span.end_us - zero) for span in trace.spans]
    assert work == [
        ("chat m", 0, 1_400),
        ("ingress", 0, 0),
        ("decision", 0, 0),
        ("attempt", 0, 100),
        ("prefill", 0, 100),
        ("decision", 100, 100),
        ("attempt", 100, 1_400),
        ("kv_transfer", 100, 300),
        ("decode", 300, 1_400),
    ]
    prefill, decode = named(trace, "attempt")
    assert decode.linked_id == prefill.span_id
    assert (prefill.attributes["forebay.stage"], decode.attributes["forebay.stage"]) == ("prefill", "decode")
    assert [(event.name, event.at_us - zero) for event in decode.events] == [("first_token", 400)]
    assert decode.attributes["forebay.transferred_bytes"] == 5
    root = trace.spans[0].attributes
    assert root["gen_ai.response.finish_reasons"] == ["stop"]
    assert (root["gen_ai.usage.output_tokens"], root["gen_ai.usage.cache_read.input_tokens"]) == (7, 34)
    assert (root["forebay.tenant"], trace.tenant, root["forebay.state"]) == ("acme", "acme", "finished")


async def test_a_lost_worker_ends_its_attempt_and_a_stale_loss_does_not() -> None:
    made = fleet("a", "b")
    made("fleet", OwnershipAnnounced(owner_epoch=3))
    made.seal()
    made.ask("r", PROMPTS[0])
    first = made.world.requests.get("r")
    assert first is not None
    worker = first.worker_id
    lost = WorkerLost(owner_epoch=0, worker_id=worker, worker_epoch=first.worker_epoch)
    made("fleet", lost)
    made.seal()
    made("fleet", msgspec.structs.replace(lost, owner_epoch=3), 50)
    made.progress("r", RequestFinished, 1_000, finish_reason="stop")
    trace = (await traces_by_id(made))["r"]
    one, two = named(trace, "attempt")
    assert (one.error, two.error, two.linked_id) == ("worker_lost", "", one.span_id)
    assert (one.attributes["forebay.worker.id"], one.end_us - one.begin_us) == (worker, 60)
    assert two.begin_us == one.end_us
    assert not trace.spans[0].error


async def test_a_takeover_is_an_event_of_each_request_that_it_delayed() -> None:
    made, claimed_us = outage()
    made.progress("late", RequestFinished, 10, finish_reason="stop")
    made.ask("after", PROMPTS[0], at_us=claimed_us + 5_000)
    made.progress("after", RequestFinished, 10, finish_reason="stop")
    traces = await traces_by_id(made)
    for name in ("r", "done", "late"):
        (event,) = traces[name].spans[0].events
        assert (event.name, event.at_us, event.attributes["forebay.owner.id"]) == (
            "owner_claimed",
            claimed_us,
            "second",
        )
    assert traces["after"].spans[0].events == ()


async def test_a_trace_continues_that_of_the_client() -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0], traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    made.progress("r", RequestFinished, finish_reason="stop")
    trace = (await traces_by_id(made))["r"]
    assert (trace.trace_id, trace.spans[0].parent_id) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


async def test_an_invalid_trace_context_on_the_log_is_ignored() -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0], traceparent="not of W3C")
    made.progress("r", RequestFinished, finish_reason="stop")
    trace = (await traces_by_id(made))["r"]
    assert (len(trace.trace_id), trace.spans[0].parent_id) == (32, "")
    event = request("r", PROMPTS[0], traceparent="not of W3C")
    assert attempt_context(event, 0, "aggregated", 1).startswith(f"00-{trace.trace_id}-")


@pytest.mark.parametrize(("is_complete", "state", "reasons"), [(True, "finished", ["stop"]), (False, "aborted", None)])
async def test_a_response_that_the_client_ended_is_no_error(
    is_complete: bool, state: str, reasons: list[str] | None
) -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0])
    made("requests", RequestCancelled(request_id="r", is_complete=is_complete))
    root = (await traces_by_id(made))["r"].spans[0]
    assert (root.attributes["forebay.state"], root.error) == (state, "")
    assert root.attributes.get("gen_ai.response.finish_reasons") == reasons


async def test_a_decision_has_its_cost_and_the_runner_up() -> None:
    made = fleet("a", "b")
    made.ask("r", PROMPTS[0])
    made.progress("r", RequestFinished, finish_reason="stop")
    (decision,) = named((await traces_by_id(made))["r"], "decision")
    routed = next(record for record in made.journal if isinstance(record, RequestRouted))
    assert routed.runner_up is not None
    assert decision.attributes["forebay.cost"] == routed.terms.cost
    assert decision.attributes["forebay.runner_up.cost"] == routed.runner_up.terms.cost
    assert decision.attributes["forebay.runner_up.worker.id"] == routed.runner_up.worker_id


async def test_requests_whose_beginning_the_log_lacks_are_counted_and_have_no_trace() -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0])
    with closing(await made.log()) as log:
        begin = msgspec.structs.replace(await begin_of(log, 0), submitted=1)  # the submission counts as repeated
        reader = TraceReader(log, 0, begin, 0)
        await reader.read(await log.end(DECISIONS.name, 0))
    assert (reader.unknown, reader.oldest(), reader.traces) == (1, None, [])


async def test_more_requests_than_an_owner_has_in_flight_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.journal.traces.ACTIVE_REQUESTS_MAX", 1)
    made = fleet("a")
    for name in ("r1", "r2"):
        made.ask(name, PROMPTS[0])
    with closing(await made.log()) as log:
        reader = TraceReader(log, 0, await begin_of(log, 0), 0)
        await reader.read(await log.end(DECISIONS.name, 0))
    assert reader.overflowed == 1


async def test_a_submission_without_a_decision_does_not_keep_the_position_back() -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0])
    made("requests", request("r", PROMPTS[0]))  # the owner ignores the repetition
    made.seal()
    made.progress("r", RequestFinished, finish_reason="stop")
    made.seal()
    with closing(await made.log()) as log:
        end = await log.end(DECISIONS.name, 0)
        reader = TraceReader(log, 0, await begin_of(log, 0), 0)
        await reader.read(end)
        assert (reader.next_begin().journal_offset, len(reader.traces)) == (end, 1)


async def test_a_submission_keeps_the_position_back_until_the_records_of_its_event_end() -> None:
    made = fleet("a")
    made.ask("r", PROMPTS[0])
    with closing(await made.log()) as log:
        begin = await begin_of(log, 0)
    fold = TraceReader(log, 0, begin, 0)
    submitted = decode(REQUESTS, next(draft.value for draft in made.drafts if draft.topic == REQUESTS.name))
    other = next(record for record in made.journal if isinstance(record, RequestRouted))
    fold.begin_record(1, has_events=True)
    fold.apply_event(submitted, 0, begin)
    fold.apply_record(msgspec.structs.replace(other, request_id="other"))
    assert fold.oldest() == begin, "the decision about it may be the next record"
    fold.begin_record(2, has_events=False)
    fold.apply_record(other)
    assert fold.oldest() == begin
    fold.begin_record(3, has_events=True)
    fold.apply_event(submitted, 0, begin)
    assert fold.oldest() == begin
