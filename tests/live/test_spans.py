"""The export of spans: no trace is lost, a repeated one is identical, and the position follows what was accepted."""

import asyncio
from collections.abc import Sequence
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from forebay.events.progress import RequestFailed, RequestFinished
from forebay.events.topics import DECISIONS, SPANS
from forebay.journal.folds import begin_of
from forebay.journal.traces import Span, Trace, TraceReader
from forebay.live.spans import SpanExporter, SpanSettings
from forebay.processes.otlp import OtlpSender
from forebay.processes.spans import exporting_beside
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.otlp_receiver import OtlpReceiver, Reply, attributes_of, root_of
from tests.live.growing import Growing, history
from tests.replay.recorder import fleet
from tests.system import until

SETTINGS = SpanSettings("http://receiver/v1/traces")


class Receiver:
    """Accepts traces, or ends the exporter like a crash after it has accepted them."""

    def __init__(self) -> None:
        self.accepted: list[Trace] = []
        self.crashes = False

    async def export(self, traces: Sequence[Trace]) -> None:
        self.accepted += traces
        if self.crashes:
            raise LogError("the process was killed")


async def derived(log: SqliteLog) -> list[Trace]:
    reader = TraceReader(log, 0, await begin_of(log, 0), 0)
    await reader.read(await log.end(DECISIONS.name, 0), lambda: False)
    return reader.take()


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["on", "killed", "crashed", "stopped"])), max_size=12))
async def test_exporters_that_are_killed_lose_no_trace_and_repeat_identical_ones(steps: list[tuple[int, str]]) -> None:
    growing, receiver = Growing(history(12)), Receiver()
    with closing(growing.log) as log:
        await growing.begin()
        exporter = SpanExporter(log, 0, SETTINGS, receiver.export)
        for count, what in steps:
            await growing.grow(count)
            receiver.crashes = what == "crashed"
            with suppress(LogError):
                await exporter.advance(is_last=what == "stopped")
            if what != "on":
                exporter = SpanExporter(log, 0, SETTINGS, receiver.export)
        await growing.end()
        receiver.crashes = False
        while await exporter.advance(is_last=True):
            pass
        expected = await derived(log)
        assert len(expected) == 11
        assert {trace.request_id: trace for trace in receiver.accepted} == {one.request_id: one for one in expected}
        assert all(trace in expected for trace in receiver.accepted)
        assert exporter.behind == 0
        again = SpanExporter(log, 0, SETTINGS, receiver.export)
        receiver.accepted.clear()
        await again.advance(is_last=True)
        assert receiver.accepted == [], "a restart after a stop repeats nothing"


async def test_each_receiver_has_its_own_position() -> None:
    growing, first, second = Growing(history(4)), Receiver(), Receiver()
    with closing(growing.log) as log:
        await growing.begin()
        await growing.end()
        await log.append([Draft(SPANS.name, 0, b"no position")])
        await SpanExporter(log, 0, SETTINGS, first.export).advance(is_last=True)
        await SpanExporter(log, 0, SpanSettings("http://other"), second.export).advance(is_last=True)
        assert first.accepted == second.accepted == await derived(log)
        await SpanExporter(log, 0, SETTINGS, first.export).advance(is_last=True)
        assert len(first.accepted) == len(second.accepted)


async def test_the_position_is_committed_only_after_a_while_or_at_the_end() -> None:
    growing, receiver = Growing(history(4)), Receiver()
    with closing(growing.log) as log:
        await growing.begin()
        await growing.end()
        exporter = SpanExporter(log, 0, SETTINGS, receiver.export)
        await exporter.advance(is_last=False)
        assert await log.end(SPANS.name, 0) == 0
        for _ in range(2):
            await exporter.advance(is_last=True)
        assert await log.end(SPANS.name, 0) == 1


async def test_a_journal_that_retention_removed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    made = fleet("a")
    for number in range(3):
        made.ask(f"r{number}")
        made.progress(f"r{number}", RequestFinished, finish_reason="stop")
    made.snapshot()
    begin = len(made.journal) - 2
    made.ask("later")
    made.progress("later", RequestFinished, finish_reason="stop")
    made.seal()
    receiver = Receiver()
    with closing(await made.log()) as log:
        whole = await derived(log)
        log.trim(DECISIONS.name, 0, begin, 1_000)
        await SpanExporter(log, 0, SETTINGS, receiver.export).advance(is_last=True)
    assert receiver.accepted == whole[3:], "spans do not depend on where the log begins"
    assert "of control partition 0, which retention removed" in caplog.text


async def test_too_many_requests_in_flight_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.journal.traces.ACTIVE_REQUESTS_MAX", 1)
    made = fleet("a")
    for number in range(3):
        made.ask(f"r{number}")
    with closing(await made.log()) as log:
        exporter = SpanExporter(log, 0, SETTINGS, Receiver().export)
        for _ in range(2):
            await exporter.advance(is_last=False)
    assert exporter.overflowed == 2
    assert caplog.text.count("get no trace") == 1


def trace(number: int, *, tenant: str = "", error: str = "", us: int = 10) -> Trace:
    root = Span(name="chat m", span_id=f"{number:016x}", parent_id="", begin_us=0, end_us=us, error=error)
    return Trace(trace_id=f"{number:032x}", request_id=f"r{number}", tenant=tenant, spans=(root,))


@given(st.lists(st.integers(0, (1 << 128) - 1), max_size=200), st.floats(0, 1))
def test_a_sample_contains_every_smaller_sample(numbers: list[int], rate: float) -> None:
    traces = [trace(number) for number in numbers]
    taken = [replace(SETTINGS, rate=rate).takes(one) for one in traces]
    less = [replace(SETTINGS, rate=rate / 2).takes(one) for one in traces]
    assert all(one or not other for one, other in zip(taken, less, strict=True))
    assert all(SETTINGS.takes(one) for one in traces)
    assert not any(replace(SETTINGS, rate=0.0).takes(one) for one in traces)


def test_a_sample_has_its_share_of_random_ids() -> None:
    ids = [number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128) for number in range(1, 2_001)]
    assert 400 < sum(replace(SETTINGS, rate=0.25).takes(trace(number)) for number in ids) < 600


def test_errors_slow_requests_and_chosen_tenants_are_always_exported() -> None:
    settings = replace(SETTINGS, rate=0.0, slow_s=1.0, tenants=frozenset({"acme"}))
    assert settings.takes(trace(1, error="deadline"))
    assert settings.takes(trace(1, us=1_000_000))
    assert settings.takes(trace(1, tenant="acme"))
    assert not settings.takes(trace(1, tenant="umbrella", us=999_999))


async def sent(traces: Sequence[Trace], *replies: Reply) -> tuple[OtlpReceiver, str]:
    """Send traces to a receiver that gives these replies first. Return the receiver and the metrics of the sender."""
    registry = CollectorRegistry()
    async with OtlpReceiver() as receiver:
        receiver.replies += replies
        sender = OtlpSender(SpanSettings(f"{receiver.url}/v1/traces", console_url="http://console"), "space", registry)
        await sender.send(traces)
        await sender.close()
    return receiver, generate_latest(registry).decode()


async def test_the_receiver_gets_exactly_the_spans_of_the_log() -> None:
    made = fleet("a", "b")
    made.ask("r", tenant="acme", key_id="k", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    made.progress("r", RequestFinished, 1_000, finish_reason="stop", output_tokens=3)
    made.ask("failed")
    made.progress("failed", RequestFailed, error="a secret")
    made.seal()
    with closing(await made.log()) as log:
        traces = await derived(log)
    receiver, _ = await sent(traces)
    assert {one.trace_id: {span.span_id for span in one.spans} for one in traces} == {
        trace_id: set(spans) for trace_id, spans in receiver.traces.items()
    }
    for one in traces:
        got = receiver.traces[one.trace_id]
        root = root_of(got)
        for span in one.spans:
            message = got[span.span_id]
            assert (message.name, message.start_time_unix_nano) == (span.name, span.begin_us * 1_000)
            assert message.end_time_unix_nano == span.end_us * 1_000
            link = {"forebay.console.url": f"http://console/#/requests/by-id?id={one.request_id}"}
            assert attributes_of(message) == span.attributes | (link if message is root else {})
        assert root.parent_span_id.hex() == one.spans[0].parent_id
        assert (root.status.message, root.status.code) == (one.spans[0].error, 2 if one.spans[0].error else 0)
    assert [one.spans[0].error for one in traces] == ["", "engine_error"]
    assert receiver.resources == [{"service.name": "forebay", "service.namespace": "space"}]
    assert "secret" not in str(receiver.traces)


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_a_receiver_that_is_not_ready_gets_the_spans_again(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.processes.otlp.RETRY_S", 0.0)
    receiver, metrics = await sent([trace(1), trace(2)], Reply(status), Reply(status))
    assert len(receiver.requests) == 3
    assert len(receiver.traces) == 2
    assert "forebay_spans_sent_total 2.0" in metrics
    assert caplog.text.count(f"status {status}") == 1


async def test_the_time_that_the_receiver_asks_for_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("forebay.processes.otlp.asyncio.sleep", sleep)
    replies = [Reply(429, {"Retry-After": "7"}), Reply(503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})]
    await sent([trace(1)], *replies)
    assert [seconds for seconds in waited if seconds] == [7, 2.0]


async def test_a_trace_that_the_receiver_cannot_use_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    receiver, metrics = await sent(
        [trace(number) for number in range(1, 5)], Reply(413), Reply(200), Reply(400), Reply(400)
    )
    assert set(receiver.traces) == {trace(number).trace_id for number in (1, 2, 4)}
    assert "forebay_spans_rejected_total 1.0" in metrics
    assert f"rejects the trace {trace(3).trace_id}: status 400" in caplog.text


async def test_times_that_no_clock_has_do_not_stop_the_export() -> None:
    late = trace(1, us=1 << 70)
    early = replace(trace(2), spans=(replace(trace(2).spans[0], begin_us=-5),))
    receiver, _ = await sent([late, early])
    ends = {key: next(iter(spans.values())) for key, spans in receiver.traces.items()}
    assert ends[late.trace_id].end_time_unix_nano == (1 << 64) - 1
    assert ends[early.trace_id].start_time_unix_nano == 0


async def test_a_partial_success_is_counted_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    receiver, metrics = await sent([trace(1), trace(2)], Reply(rejects=1))
    assert len(receiver.requests) == 1
    assert "forebay_spans_sent_total 1.0" in metrics
    assert "forebay_spans_rejected_total 1.0" in metrics
    assert "rejected 1 spans: too old" in caplog.text


async def test_spans_wait_until_the_receiver_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.processes.otlp.RETRY_S", 0.0)
    receiver, registry = OtlpReceiver(), CollectorRegistry()
    sender = OtlpSender(SpanSettings(f"{receiver.url}/v1/traces", console_url="http://console"), "space", registry)
    sending = asyncio.create_task(sender.send([trace(1)]))
    await until(lambda: sender.problem)
    async with receiver:
        await sending
    await sender.close()
    assert len(receiver.traces) == 1


async def test_what_is_left_is_exported_when_the_process_ends() -> None:
    growing, registry = Growing(history(6)), CollectorRegistry()
    with closing(growing.log) as log:
        await growing.begin()
        async with OtlpReceiver() as receiver:
            settings = SpanSettings(f"{receiver.url}/v1/traces")
            async with exporting_beside(log, registry, settings, "embedded"):
                await growing.end()
            expected = await derived(log)
        assert {one.trace_id for one in expected} == set(receiver.traces)
        assert 'forebay_spans_behind_records{partition="0"} 0.0' in generate_latest(registry).decode()
        assert await log.end(SPANS.name, 0) == 1
