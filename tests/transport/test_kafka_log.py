"""`KafkaLog`: bounds while a broker does not respond, its start and end, and the verdict on every error of Kafka."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import pytest
from aiokafka import TopicPartition, errors
from aiokafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError

from forebay.events.topics import FIXED_TOPICS, PROGRESS, TOKENS
from forebay.transport import patience
from forebay.transport.base import Draft, LogError, LogFull, LogUnavailable
from forebay.transport.kafka import log as log_module
from forebay.transport.kafka import producer as kafka
from forebay.transport.kafka import wire
from forebay.transport.kafka import writer as writer_module
from forebay.transport.kafka.errors import CLIENT_ERRORS, PERMANENT_CODES, error_of, is_transient, log_error
from forebay.transport.kafka.group import query_with_retry
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole, stop_within
from forebay.transport.kafka.topics import TopicPlan, planned
from tests.system import until

LIMIT = 10_000
SIZE = 1_000  # bytes of a record
PATIENCE_S = 20.0


class Wire:
    """Connections to a broker that does not respond until `is_back` is set."""

    def __init__(self) -> None:
        self.is_back = asyncio.Event()

    async def partitions(self, topic: str) -> set[int]:
        del topic
        await self.is_back.wait()
        return {0}

    async def close(self) -> None:
        self.is_back.set()


class Producer:
    """Producer of that broker. `written` has the values of each topic."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.written: dict[str, list[bytes]] = {}

    async def append(self, place: TopicPartition, drafts: Sequence[tuple[Draft, int]], size: int) -> int:
        assert place.partition == 0
        assert size == sum(len(one.value) for one, _ in drafts)
        values = self.written.setdefault(place.topic, [])
        values += [one.value for one, _ in drafts]
        return len(values) - len(drafts)

    async def stop(self) -> None:
        pass


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
async def log(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KafkaLog]:
    monkeypatch.setattr(writer_module, "BUFFER_BYTES_MAX", LIMIT)
    log = KafkaLog(
        KafkaSettings("127.0.0.1:1", "n"), cast("wire.Wire", producer.wire), cast("kafka.Producer", producer)
    )
    yield log
    producer.wire.is_back.set()
    await log.close()


def draft(topic: str, value: int, size: int = SIZE) -> Draft:
    return Draft(topic, 0, str(value).encode().rjust(size))


def append_until_full(log: KafkaLog) -> int:
    """Append pairs of records of which one follows the other, and return how many pairs the log accepted."""
    for number in range(LIMIT):
        try:
            log.append_soon([draft(TOKENS.name, number)], then=[draft(PROGRESS.name, number)])
        except LogFull:
            return number
    raise AssertionError("the log accepts any number of records")


async def test_records_that_follow_others_count_towards_the_bound(log: KafkaLog, producer: Producer) -> None:
    count = append_until_full(log)
    assert count == LIMIT // (2 * SIZE)
    producer.wire.is_back.set()
    await until(lambda: len(producer.written.get("n.progress", ())) == count)
    assert [int(value) for value in producer.written["n.progress"]] == list(range(count))
    assert append_until_full(log) == count


async def test_a_rejected_append_leaves_no_bytes_counted(log: KafkaLog, producer: Producer) -> None:
    for _ in range(20):
        with pytest.raises(LogFull):
            log.append_soon([draft(TOKENS.name, 0, LIMIT)], then=[draft(PROGRESS.name, 0)])
    log.append_soon([draft(TOKENS.name, 0, LIMIT - 1)])
    with pytest.raises(LogFull):
        log.append_soon([draft(TOKENS.name, 0, 2)])
    producer.wire.is_back.set()
    assert await log.append([draft(TOKENS.name, 1, 1)]) == [1]
    assert len(producer.written["n.tokens"]) == 2
    assert "n.progress" not in producer.written


async def test_a_follower_that_is_too_large_rejects_the_whole_append(log: KafkaLog, producer: Producer) -> None:
    with pytest.raises(ValueError, match="the limit is"):
        log.append_soon([draft(TOKENS.name, 0)], then=[draft(PROGRESS.name, 0, writer_module.RECORD_BYTES_MAX + 1)])
    producer.wire.is_back.set()
    assert await log.append([draft(TOKENS.name, 1)]) == [0]
    assert log.failure is None


async def test_closing_a_log_ends_if_its_connections_stay_open(
    log: KafkaLog, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung broker does not read the last bytes that were sent, so the connection does not close."""

    async def close() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(log_module, "DISCONNECT_S", 0.0)
    monkeypatch.setattr(producer.wire, "close", close)
    async with asyncio.timeout(PATIENCE_S):
        await log.close()


async def test_a_cancelled_start_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    class SilentWire:
        """Connections to a broker that assigns no producer id."""

        def __init__(self, settings: KafkaSettings) -> None:
            del settings

        async def start(self) -> None:
            pass

        async def producer_id(self) -> wire.ProducerId:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            closed.set()

    monkeypatch.setattr(log_module, "Wire", SilentWire)
    opening = asyncio.create_task(KafkaLog.open(KafkaSettings("127.0.0.1:1", "n")))
    await asked.wait()
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert closed.is_set()


class Client:
    """A client that connects once allowed, and counts its calls."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.starting = asyncio.Event()
        self.let_in = asyncio.Event()

    async def start(self) -> None:
        self.notes.append("starts")
        self.starting.set()
        try:
            await self.let_in.wait()
        except asyncio.CancelledError:
            self.notes.append("is cancelled")
            raise
        self.notes.append("is connected")

    async def stop(self) -> None:
        self.notes.append("is stopped")


async def test_a_started_client_is_not_stopped() -> None:
    client = Client()
    client.let_in.set()
    await start_whole(client.start, client.stop)
    assert client.notes == ["starts", "is connected"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_cancelled_start_completes_unless_it_hangs_and_the_client_is_stopped(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    client = Client()
    starting = asyncio.create_task(start_whole(client.start, client.stop))
    await client.starting.wait()
    starting.cancel()
    if hangs:
        monkeypatch.setattr("forebay.transport.kafka.start.CANCEL_GRACE_S", 0.01)
    else:
        client.let_in.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert client.notes == ["starts", "is cancelled" if hangs else "is connected", "is stopped"]


async def test_a_failing_start_raises_its_error_and_stops_the_client() -> None:
    client = Client()

    async def refused() -> None:
        raise OSError("connection refused")

    with pytest.raises(OSError, match="connection refused"):
        await start_whole(refused, client.stop)
    assert client.notes == ["is stopped"]


async def test_clients_are_stopped_whatever_their_stop_raises() -> None:
    stopped: list[str] = []

    async def cancelled() -> None:
        raise asyncio.CancelledError  # aiokafka awaits tasks that it has cancelled

    async def failed() -> None:
        raise RuntimeError("a task failed before")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("cancelled")

    async def ends() -> None:
        stopped.append("ended")

    await stop_within(0.01, cancelled(), failed(), hangs(), ends())
    assert stopped == ["ended", "cancelled"]


def test_every_topic_is_planned_with_partitions() -> None:
    counts = {topic.name: partitions for topic, partitions, _ in planned(TopicPlan(), ["default"])}
    assert set(counts) == {topic.name for topic in FIXED_TOPICS} | {"work.default"}
    assert all(counts.values())


# What `Errors.values()` of Kafka 4.1 marks as RetriableException.
RETRIABLE = {
    *(2, 3, 5, 6, 7, 9, 13, 14, 15, 16, 19, 20, 41, 51, 56, 70, 71, 72, 74, 75, 78, 80, 83, 84, 88, 89, 100, 103, 106),
    *(122, 123, 133),
}
CODES = range(-1, 134)  # of Kafka 4.1
# Also what a broker returns while it starts, stops or is overloaded, and to a member that has to join again.
TRANSIENT = {
    *(-1, 2, 3, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 19, 20, 22, 25, 27, 41, 51, 52, 56, 60, 70, 71, 72, 74),
    *(75, 77, 78, 79, 80, 81, 83, 84, 88, 89, 100, 102, 103, 106, 107, 108, 110, 113, 116, 122, 123, 124),
    *(129, 131, 133),
}
NEWER_CODE = 30_000
DENIED = {29, 30, 31, 53, 58}
PATIENCE_S = 20.0


def client_errors() -> Iterator[type[KafkaError]]:
    """Yield each error class of aiokafka that does not stand for a code of the protocol."""
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, KafkaError) and not issubclass(kind, BrokerResponseError):
            yield kind


def test_codes_that_a_retry_may_help_are_not_permanent() -> None:
    assert PERMANENT_CODES.keys() == set(CODES) - TRANSIENT
    assert TRANSIENT >= RETRIABLE
    assert PERMANENT_CODES.keys() >= DENIED


@pytest.mark.parametrize("kind", list(client_errors()), ids=lambda kind: kind.__name__)
def test_every_error_class_of_the_client_has_a_verdict(kind: type[KafkaError]) -> None:
    assert kind in CLIENT_ERRORS, f"decide in forebay.transport.kafka.errors whether {kind.__name__} is transient"
    assert CLIENT_ERRORS[kind] or not kind.retriable, "aiokafka repeats the request itself"


def test_every_broker_error_class_of_the_client_stands_for_a_code() -> None:
    kinds: list[tuple[str, Any]] = inspect.getmembers(errors, inspect.isclass)
    for name, kind in kinds:
        if issubclass(kind, BrokerResponseError) and kind is not BrokerResponseError:
            assert kind.errno in CODES, name
            assert not (kind.retriable and kind.errno in PERMANENT_CODES), name


@pytest.mark.parametrize("code", [code for code in CODES if code])
def test_an_error_keeps_its_code(code: int) -> None:
    error = error_of(code, "requests/0")
    assert error.errno == code
    assert "requests/0" in str(error)
    assert is_transient(error) == (code not in PERMANENT_CODES)


def test_a_code_of_a_newer_broker_is_transient() -> None:
    assert is_transient(error_of(NEWER_CODE))
    assert str(NEWER_CODE) in str(error_of(NEWER_CODE))


@pytest.mark.parametrize("error", [OSError("x"), TimeoutError("x"), ConnectionResetError("x"), KafkaTimeoutError("x")])
def test_a_broken_connection_is_transient(error: Exception) -> None:
    assert type(log_error(error, "text")) is LogUnavailable


@pytest.mark.parametrize("error", [ValueError("x"), errors.IllegalOperation("x"), errors.ConsumerStoppedError("x")])
def test_an_error_of_a_program_is_permanent(error: Exception) -> None:
    assert not is_transient(error)


@pytest.mark.parametrize(
    "error",
    [*(error_of(code) for code in CODES if code), *(kind("x") for kind in client_errors()), OSError("x")],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'errno', '')}",
)
async def test_a_query_is_repeated_until_it_succeeds_or_fails_for_good(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.0)
    raised = [error, error]

    async def query() -> str:
        if raised:
            raise raised.pop()
        return "found"

    async with asyncio.timeout(PATIENCE_S):
        if is_transient(error):
            assert await query_with_retry(query, "x cannot be read") == "found"
        else:
            with pytest.raises(LogError, match="x cannot be read"):
                await query_with_retry(query, "x cannot be read")
            assert len(raised) == 1
