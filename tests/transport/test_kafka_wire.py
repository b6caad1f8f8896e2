"""`Wire` against a broker whose responses the test writes."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from aiokafka import TopicPartition
from aiokafka.errors import (
    CorrelationIdError,
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
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

from forebay.transport.kafka import wire as module
from forebay.transport.kafka.errors import is_transient
from forebay.transport.kafka.requests import FETCH, PRODUCE
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.wire import Channel, Fetched, Wire
from infra.kafka.kafka import HOST
from tests.harness.local import free_ports

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
