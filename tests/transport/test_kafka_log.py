"""`KafkaLog` and its connections to brokers whose responses the test writes, and the verdict on each error of Kafka."""

import asyncio
import contextlib
import inspect
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
import uvloop
from aiokafka import TopicPartition, errors
from aiokafka.errors import (
    BrokerResponseError,
    CorrelationIdError,
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
)
from aiokafka.protocol.admin import ApiVersionResponse_v0
from aiokafka.protocol.fetch import FetchResponse_v11
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.protocol.produce import ProduceResponse_v7, ProduceResponse_v8
from cryptography import x509

from forebay.events.topics import FIXED_TOPICS, PROGRESS, TOKENS
from forebay.transport import patience
from forebay.transport.base import Draft, LogError, LogFull, LogUnavailable
from forebay.transport.kafka import log as log_module
from forebay.transport.kafka import wire as module
from forebay.transport.kafka import writer as writer_module
from forebay.transport.kafka.errors import CLIENT_ERRORS, PERMANENT_CODES, error_of, is_transient, log_error
from forebay.transport.kafka.group import query_with_retry
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.producer import Producer
from forebay.transport.kafka.protocol import FETCH, PRODUCE
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.start import start_whole, stop_within
from forebay.transport.kafka.topics import TopicPlan, planned
from forebay.transport.kafka.wire import Channel, Fetched, ProducerId, Wire
from infra.kafka.kafka import HOST
from tests.harness.local import free_ports
from tests.system import until

LIMIT = 10_000
SIZE = 1_000  # bytes of a record
PATIENCE_S = 20.0


class StalledWire:
    """Connections to a broker that does not respond until `is_back` is set."""

    def __init__(self) -> None:
        self.is_back = asyncio.Event()

    async def partitions(self, topic: str) -> set[int]:
        del topic
        await self.is_back.wait()
        return {0}

    async def close(self) -> None:
        self.is_back.set()


class StalledProducer:
    """Producer of that broker. `written` has the values of each topic."""

    def __init__(self) -> None:
        self.wire = StalledWire()
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
def producer() -> StalledProducer:
    return StalledProducer()


@pytest.fixture
async def log(producer: StalledProducer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KafkaLog]:
    monkeypatch.setattr(writer_module, "BUFFER_BYTES_MAX", LIMIT)
    log = KafkaLog(KafkaSettings("127.0.0.1:1", "n"), cast("Wire", producer.wire), cast("Producer", producer))
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


@pytest.mark.parametrize("given", [{}, {"sasl.password": "p"}, {"sasl.username": "u"}])
def test_a_protocol_with_a_password_needs_a_user(given: dict[str, str]) -> None:
    settings = KafkaSettings("127.0.0.1:1", "n", {"security.protocol": "SASL_SSL", **given})
    with pytest.raises(KafkaUnusable, match=r"SASL_SSL; set sasl\.username and sasl\.password"):
        settings.client_options()


async def test_records_that_follow_others_count_towards_the_bound(log: KafkaLog, producer: StalledProducer) -> None:
    count = append_until_full(log)
    assert count == LIMIT // (2 * SIZE)
    producer.wire.is_back.set()
    await until(lambda: len(producer.written.get("n.progress", ())) == count)
    assert [int(value) for value in producer.written["n.progress"]] == list(range(count))
    assert append_until_full(log) == count


async def test_a_rejected_append_leaves_no_bytes_counted(log: KafkaLog, producer: StalledProducer) -> None:
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


async def test_a_follower_that_is_too_large_rejects_the_whole_append(log: KafkaLog, producer: StalledProducer) -> None:
    with pytest.raises(ValueError, match="the limit is"):
        log.append_soon([draft(TOKENS.name, 0)], then=[draft(PROGRESS.name, 0, writer_module.RECORD_BYTES_MAX + 1)])
    producer.wire.is_back.set()
    assert await log.append([draft(TOKENS.name, 1)]) == [0]
    assert log.failure is None


async def test_closing_a_log_ends_if_its_connections_stay_open(
    log: KafkaLog, producer: StalledProducer, monkeypatch: pytest.MonkeyPatch
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

        async def producer_id(self) -> ProducerId:
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


TOPIC = "n.requests"
A, B = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
NODE, METADATA, API_VERSIONS = 0, 3, 18
NOT_AUTHORIZED, NOT_LEADER, OUT_OF_RANGE = 29, 6, 1
HEADER = struct.Struct(">hhi")
PATIENCE_S = 20.0


@dataclass(slots=True)
class Request:
    key: int
    version: int
    correlation_id: int
    body: bytes
    writer: asyncio.StreamWriter

    def frame(self, payload: bytes, correlation_id: int | None = None) -> bytes:
        """Return the bytes of a response."""
        content = struct.pack(">i", self.correlation_id if correlation_id is None else correlation_id) + payload
        return struct.pack(">i", len(content)) + content

    def respond(self, payload: bytes) -> None:
        self.writer.write(self.frame(payload))


class Broker:
    """Broker that answers metadata requests itself, and passes all others to the test."""

    def __init__(self) -> None:
        self.port = free_ports(1)
        self.versions = {PRODUCE: (3, 9), FETCH: (4, 17), METADATA: (0, 12)}
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.connections = 0
        self.closes_after_versions = False
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                content = await reader.readexactly(size)
                key, version, correlation_id = HEADER.unpack_from(content)
                (client_bytes,) = struct.unpack_from(">h", content, HEADER.size)
                request = Request(key, version, correlation_id, content[HEADER.size + 2 + client_bytes :], writer)
                if key == API_VERSIONS:
                    known = [(number, *span) for number, span in self.versions.items()]
                    request.respond(ApiVersionResponse_v0(0, known).encode())
                    if self.closes_after_versions:
                        writer.close()
                        return
                elif key == METADATA:
                    request.respond(self._metadata())
                else:
                    self.requests.put_nowait(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _metadata(self) -> bytes:
        parts: list[tuple[object, ...]] = [(0, place.partition, NODE, [NODE], [NODE], []) for place in (A, B)]
        brokers = [(NODE, HOST, self.port, None)]
        return bytes(MetadataResponse_v5(0, brokers, "cluster", NODE, [(0, TOPIC, False, parts)]).encode())

    async def next(self) -> Request:
        async with asyncio.timeout(PATIENCE_S):
            return await self.requests.get()

    def disconnect(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    broker = Broker()
    server = await asyncio.start_server(broker.serve, HOST, broker.port)
    async with server:
        yield broker
        broker.disconnect()


@pytest.fixture
async def wire(broker: Broker) -> AsyncIterator[Wire]:
    wire = Wire(KafkaSettings(f"{HOST}:{broker.port}", "n"))
    await wire.start()
    yield wire
    await wire.close()


Producing = asyncio.Task[dict[TopicPartition, int | KafkaError]]
Fetching = asyncio.Task[list[Fetched]]


def produce(wire: Wire) -> Producing:
    return asyncio.create_task(wire.produce(NODE, Channel.APPENDS, {A: b"one", B: b"two"}))


def fetch(wire: Wire) -> Fetching:
    return asyncio.create_task(wire.fetch(NODE, Channel.POLL, {A: 3, B: 5}, 500))


def produced(*codes: int) -> bytes:
    """Return a response of version 8 for partitions 0, 1, ... with these error codes and the offsets 10, 11, ..."""
    parts: list[tuple[object, ...]] = [
        (partition, code, 10 + partition, -1, 0, [], None) for partition, code in enumerate(codes)
    ]
    return bytes(ProduceResponse_v8([(TOPIC, parts)], 0).encode())


def records(data: bytes = b"batch", code: int = 0) -> bytes:
    parts: list[tuple[object, ...]] = [(0, code, 7, 7, 0, None, -1, data), (1, 0, 5, 5, 0, [], -1, b"")]
    return bytes(FetchResponse_v11(0, 0, 0, [(TOPIC, parts)]).encode())


async def require_served(broker: Broker, wire: Wire) -> None:
    fetching = fetch(wire)
    (await broker.next()).respond(records())
    assert await fetching == FETCHED


FETCHED = [Fetched(A, None, 7, b"batch"), Fetched(B, None, 5, b"")]


@pytest.mark.parametrize("version", [8, 7])
async def test_the_results_of_a_produce_request_are_returned_by_partition(
    broker: Broker, wire: Wire, version: int
) -> None:
    """An older broker gets an older request."""
    broker.versions[PRODUCE] = (0, version)
    producing = produce(wire)
    request = await broker.next()
    assert (request.key, request.version) == (PRODUCE, version)
    old = ProduceResponse_v7([(TOPIC, [(0, 0, 10, -1, 0), (1, NOT_LEADER, -1, -1, 0)])], 0).encode()
    request.respond(produced(0, NOT_LEADER) if version == 8 else old)
    results = await producing
    assert results[A] == 10
    assert isinstance(results[B], NotLeaderForPartitionError)


async def test_a_broker_that_closes_a_new_connection_is_asked_again(broker: Broker, wire: Wire) -> None:
    broker.closes_after_versions = True
    with pytest.raises((KafkaConnectionError, NodeNotReadyError)) as caught:
        await fetch(wire)
    assert is_transient(caught.value)
    broker.closes_after_versions = False
    await require_served(broker, wire)


async def test_a_broker_with_tls_gets_the_same_requests(tmp_path: Path) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST, key_type=trustme.KeyType.ECDSA).configure_cert(context)
    broker = Broker()
    properties = {"security.protocol": "SSL", "ssl.ca.location": str(tmp_path / "ca.pem")}
    wire = Wire(KafkaSettings(f"{HOST}:{broker.port}", "n", properties))
    async with await asyncio.start_server(broker.serve, HOST, broker.port, ssl=context):
        await wire.start()
        producing = produce(wire)
        (await broker.next()).respond(produced(0, 0))
        assert await producing == {A: 10, B: 11}
        large = b"x" * 300_000  # many TLS records
        fetching = fetch(wire)
        (await broker.next()).respond(records(large))
        assert (await fetching)[0].data == large
        await wire.close()
        broker.disconnect()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_new_connection_uses_renewed_certificates(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner, caplog.at_level("WARNING", "forebay"):
        runner.run(_renewals(tmp_path))
    (warning,) = [one.getMessage() for one in caplog.records if "certificates" in one.getMessage()]
    assert warning.endswith("the previous certificates stay in use")


async def _renewals(folder: Path) -> None:
    """Renew the certificate of a client, then the authority, while the client reconnects."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    broker, serials = Broker(), list[int]()

    def renew() -> int:
        """Write a certificate of the client, and return its number."""
        issued = authority.issue_cert("client", key_type=trustme.KeyType.ECDSA)
        issued.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
        return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number

    def trust() -> None:
        authority.cert_pem.write_to_path(folder / "ca.pem")
        authority.configure_trust(context)
        authority.issue_cert(HOST, key_type=trustme.KeyType.ECDSA).configure_cert(context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serials.append(int(writer.get_extra_info("peercert")["serialNumber"], 16))
        await broker.serve(reader, writer)

    async def reconnect() -> int:
        """Lose the connection, and return the number of the certificate that the client then sends."""
        fetching = fetch(client)
        await broker.next()
        broker.disconnect()
        assert isinstance((await asyncio.gather(fetching, return_exceptions=True))[0], KafkaConnectionError)
        await require_served(broker, client)
        return serials[-1]

    trust()
    numbers = [renew()]
    names = {"ssl.ca.location": "ca.pem", "ssl.certificate.location": "client.pem"}
    properties = {"security.protocol": "SSL", **{name: str(folder / file) for name, file in names.items()}}
    client = Wire(KafkaSettings(f"{HOST}:{broker.port}", "n", properties))
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        await asyncio.start_server(serve, HOST, broker.port, ssl=context),
        contextlib.AsyncExitStack() as stack,
    ):
        stack.callback(broker.disconnect)  # uvloop's server waits for its connections
        stack.push_async_callback(client.close)
        await client.start()
        assert set(serials) == {numbers[0]}
        numbers.append(renew())
        assert await reconnect() == numbers[1]
        whole = (folder / "client.pem").read_bytes()
        (folder / "client.pem").write_bytes(whole[: len(whole) // 2])
        assert [await reconnect() for _ in range(2)] == [numbers[1]] * 2
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        trust()
        numbers.append(renew())
        assert await reconnect() == numbers[2]


async def test_a_broker_without_a_supported_version_is_reported(broker: Broker, wire: Wire) -> None:
    broker.versions[FETCH] = (4, 10)
    with pytest.raises(IncompatibleBrokerVersion, match=r"4 to 10 of request 1, expected one of \(11,\)"):
        await fetch(wire)


async def test_fetched_partitions_are_returned_with_their_errors(broker: Broker, wire: Wire) -> None:
    fetching = fetch(wire)
    request = await broker.next()
    assert (request.key, request.version) == (FETCH, 11)
    request.respond(records())
    assert await fetching == FETCHED
    fetching = fetch(wire)
    (await broker.next()).respond(records(code=OUT_OF_RANGE))
    first, second = await fetching
    assert isinstance(first.error, OffsetOutOfRangeError)
    assert second == FETCHED[1]


async def test_an_error_of_a_whole_fetch_is_raised(broker: Broker, wire: Wire) -> None:
    fetching = fetch(wire)
    (await broker.next()).respond(FetchResponse_v11(0, NOT_AUTHORIZED, 0, []).encode())
    with pytest.raises(TopicAuthorizationFailedError):
        await fetching


async def test_a_response_may_arrive_in_pieces_and_together_with_the_next(broker: Broker, wire: Wire) -> None:
    first, second = fetch(wire), fetch(wire)
    requests = [await broker.next(), await broker.next()]
    large = b"x" * 300_000
    data = requests[0].frame(records(large)) + requests[1].frame(records())
    for piece in (data[:3], data[3:9], data[9:-20], data[-20:]):
        requests[0].writer.write(piece)
        await requests[0].writer.drain()
        await asyncio.sleep(0)
    assert (await first)[0] == Fetched(A, None, 7, large)
    assert await second == FETCHED


async def test_requests_of_a_channel_share_a_connection(broker: Broker, wire: Wire) -> None:
    for _ in range(3):
        await require_served(broker, wire)
    connections = broker.connections
    producing = produce(wire)
    (await broker.next()).respond(produced(0))
    await producing
    assert broker.connections == connections + 1


async def test_the_response_of_a_cancelled_request_is_dropped(broker: Broker, wire: Wire) -> None:
    cancelled = fetch(wire)
    earlier = await broker.next()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    fetching = fetch(wire)
    later = await broker.next()
    earlier.respond(records(b"of the cancelled request"))
    later.respond(records())
    assert await fetching == FETCHED


def _other_id(request: Request) -> bytes:
    return request.frame(records(), request.correlation_id + 1)


def _truncated(request: Request) -> bytes:
    return request.frame(records()[:-1])


def _announced_only(request: Request) -> bytes:
    return struct.pack(">ii", 0, request.correlation_id)


@pytest.mark.parametrize(
    ("spoiled", "error"),
    [
        (_other_id, CorrelationIdError),
        (_truncated, KafkaConnectionError),
        (_announced_only, KafkaConnectionError),
    ],
)
async def test_an_invalid_response_closes_the_connection_and_may_be_retried(
    broker: Broker, wire: Wire, spoiled: Callable[[Request], bytes], error: type[KafkaError]
) -> None:
    fetching = fetch(wire)
    request = await broker.next()
    connections = broker.connections
    request.writer.write(spoiled(request))
    with pytest.raises(error) as raised:
        await fetching
    assert is_transient(raised.value)
    await require_served(broker, wire)
    assert broker.connections > connections


async def test_a_lost_connection_fails_all_its_requests_and_the_next_one_reconnects(broker: Broker, wire: Wire) -> None:
    both = [fetch(wire), fetch(wire)]
    for _ in both:
        await broker.next()
    broker.disconnect()
    errors = await asyncio.gather(*both, return_exceptions=True)
    assert [type(error) for error in errors] == [KafkaConnectionError] * 2
    await require_served(broker, wire)


async def test_a_request_without_response_times_out(
    broker: Broker, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_MS", 100)
    fetching = fetch(wire)
    await broker.next()
    with pytest.raises(RequestTimedOutError) as raised:
        await fetching
    assert is_transient(raised.value)


async def test_closing_fails_requests_in_flight(broker: Broker) -> None:
    wire = Wire(KafkaSettings(f"{HOST}:{broker.port}", "n"))
    await wire.start()
    fetching = fetch(wire)
    await broker.next()
    await wire.close()
    with pytest.raises(KafkaConnectionError):
        await fetching
