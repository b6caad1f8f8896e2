"""`Producer` against brokers that check the sequence numbers of batches as Kafka does."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    OutOfOrderSequenceNumber,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.record.default_records import DefaultRecordBatch

from forebay.transport.base import Draft
from forebay.transport.kafka import producer as module
from forebay.transport.kafka.batches import HEAD
from forebay.transport.kafka.producer import COMPRESSED_BYTES_MIN, Producer
from forebay.transport.kafka.wire import Channel, ProducerId, Wire
from tests.transport.scripted_wire import PATIENCE_S, A, B, C, ScriptedWire

PRODUCER = ProducerId(7, 3)

Results = Mapping[TopicPartition, int | Exception]


class Cluster:
    """Brokers that append batches, and recognise repeated ones by their sequence numbers."""

    def __init__(self) -> None:
        self.values: dict[TopicPartition, list[bytes]] = {}
        self.next: dict[TopicPartition, int] = {}
        self.codecs: list[int] = []
        self._offsets: dict[tuple[TopicPartition, int], int] = {}

    def append(self, place: TopicPartition, data: bytes) -> int | Exception:
        """Return the offset of a batch, or the error that a broker would return."""
        batch, fields = DefaultRecordBatch(data), HEAD.unpack_from(data)
        assert batch.validate_crc()
        assert (fields[9], fields[10]) == PRODUCER
        first, values = fields[11], [record.value for record in batch]
        known = self._offsets.get((place, first))
        if known is not None:
            return known
        if first != self.next.get(place, 0):
            error: Exception = OutOfOrderSequenceNumber()
            return error
        self.codecs.append(batch.compression_type)
        stored = self.values.setdefault(place, [])
        self._offsets[place, first] = len(stored)
        stored += values
        self.next[place] = (first + len(values)) % module.SEQUENCES
        return len(stored) - len(values)


class Request:
    """Produce request that waits for its response."""

    def __init__(self, cluster: Cluster, node: int, batches: Mapping[TopicPartition, bytes]) -> None:
        self.node = node
        self.batches = dict(batches)
        self.response: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self._cluster = cluster

    def serve(self, errors: Results | None = None) -> None:
        """Append all batches, except those of partitions with an error, and respond."""
        failed = errors or {}
        served = {
            place: self._cluster.append(place, data) for place, data in self.batches.items() if place not in failed
        }
        self.response.set_result({**served, **failed})

    def lose(self, *, is_appended: bool) -> None:
        """Break the connection, before or after the batches are appended."""
        if is_appended:
            for place, data in self.batches.items():
                self._cluster.append(place, data)
        self.response.set_exception(KafkaConnectionError("lost"))


class FakeWire(ScriptedWire[Request]):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.metadata = asyncio.Event()  # while it is not set, metadata requests wait
        self.metadata.set()
        self.refreshes = 0

    async def producer_id(self) -> ProducerId:
        return PRODUCER

    async def refresh(self, topics: Sequence[str] = ()) -> None:
        assert not topics
        self.refreshes += 1
        await self.metadata.wait()

    async def produce(self, node: int, channel: Channel, batches: Mapping[TopicPartition, bytes]) -> Results:
        assert channel is Channel.APPENDS
        request = Request(self.cluster, node, batches)
        self.sent.put_nowait(request)
        return await request.response


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
async def producer(wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Producer]:
    monkeypatch.setattr(module, "RETRY_BACKOFF_MS", 0)
    producer = Producer(cast("Wire", wire), Channel.APPENDS)
    await producer.start()
    yield producer
    await producer.stop()


def append(producer: Producer, place: TopicPartition, *values: bytes) -> asyncio.Task[int]:
    drafts = [(Draft("requests", place.partition, value), 1) for value in values]
    return asyncio.create_task(producer.append(place, drafts, sum(map(len, values))))


async def result(task: asyncio.Task[int]) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await task


async def served(producer: Producer, wire: FakeWire, place: TopicPartition, *values: bytes) -> int:
    """Append values that the broker accepts, and return the offset of the first one."""
    task = append(producer, place, *values)
    (await wire.next_request()).serve()
    return await result(task)


async def test_offsets_and_sequence_numbers_follow_the_appends(producer: Producer, wire: FakeWire) -> None:
    for number, offset in enumerate((0, 2, 4)):
        assert await served(producer, wire, A, b"%d" % number, b"x") == offset
    assert wire.cluster.values[A] == [b"0", b"x", b"1", b"x", b"2", b"x"]


async def test_batches_that_are_ready_together_share_a_request_per_broker(producer: Producer, wire: FakeWire) -> None:
    wire.leaders[C] = 1
    tasks = [append(producer, place, b"v") for place in (A, B, C)]
    requests = [await wire.next_request(), await wire.next_request()]
    assert {request.node: set(request.batches) for request in requests} == {0: {A, B}, 1: {C}}
    for request in requests:
        request.serve()
    assert [await result(task) for task in tasks] == [0, 0, 0]


async def test_a_broker_has_one_request_in_flight(producer: Producer, wire: FakeWire) -> None:
    first = append(producer, A, b"1")
    request = await wire.next_request()
    second = append(producer, B, b"2")
    assert await wire.settled()
    request.serve()
    (await wire.next_request()).serve()
    assert [await result(first), await result(second)] == [0, 0]


@pytest.mark.parametrize("is_appended", [True, False])
async def test_a_batch_without_response_is_written_once(producer: Producer, wire: FakeWire, is_appended: bool) -> None:
    task = append(producer, A, b"1")
    request = await wire.next_request()
    request.lose(is_appended=is_appended)
    again = await wire.next_request()
    assert again.batches == request.batches
    assert wire.refreshes == 1
    again.serve()
    assert await result(task) == 0
    assert wire.cluster.values[A] == [b"1"]


async def test_batches_wait_while_no_leader_is_known(producer: Producer, wire: FakeWire) -> None:
    wire.leaders[A] = None
    wire.metadata.clear()
    tasks = [append(producer, A, b"1"), append(producer, B, b"2")]
    request = await wire.next_request()
    assert list(request.batches) == [B]
    request.serve()
    assert await result(tasks[1]) == 0
    wire.leaders[A] = 1
    wire.metadata.set()
    (await wire.next_request()).serve()
    assert await result(tasks[0]) == 0


async def test_an_append_to_a_deleted_topic_fails(producer: Producer, wire: FakeWire) -> None:
    wire.leaders[A] = None
    task = append(producer, A, b"1")
    assert await wire.settled()
    wire.deleted.add(A.topic)
    with pytest.raises(UnknownTopicOrPartitionError):
        await result(task)


async def test_an_error_of_one_partition_does_not_delay_others(producer: Producer, wire: FakeWire) -> None:
    tasks = [append(producer, A, b"1"), append(producer, B, b"2")]
    wire.metadata.clear()
    (await wire.next_request()).serve({A: NotEnoughReplicasError()})
    assert await result(tasks[1]) == 0
    third = append(producer, B, b"3")
    request = await wire.next_request()
    assert list(request.batches) == [B]
    request.serve()
    assert await result(third) == 1
    wire.metadata.set()
    (await wire.next_request()).serve()
    assert await result(tasks[0]) == 0


async def test_a_broker_without_connection_gets_no_further_requests(producer: Producer, wire: FakeWire) -> None:
    wire.metadata.clear()
    tasks = [append(producer, A, b"1")]
    (await wire.next_request()).lose(is_appended=False)
    tasks.append(append(producer, B, b"2"))
    assert await wire.settled()
    wire.metadata.set()
    request = await wire.next_request()
    assert set(request.batches) == {A, B}
    request.serve()
    assert [await result(task) for task in tasks] == [0, 0]


async def test_a_response_may_lack_partitions(producer: Producer, wire: FakeWire) -> None:
    tasks = [append(producer, A, b"1"), append(producer, B, b"2")]
    request = await wire.next_request()
    request.response.set_result({B: wire.cluster.append(B, request.batches[B])})
    assert await result(tasks[1]) == 0
    again = await wire.next_request()
    assert list(again.batches) == [A]
    again.serve()
    assert await result(tasks[0]) == 0


async def test_a_rejected_batch_fails_its_append_only(producer: Producer, wire: FakeWire) -> None:
    tasks = [append(producer, A, b"1"), append(producer, B, b"2")]
    (await wire.next_request()).serve({A: TopicAuthorizationFailedError("n.requests")})
    with pytest.raises(TopicAuthorizationFailedError, match=r"n\.requests"):
        await result(tasks[0])
    assert await result(tasks[1]) == 0
    with pytest.raises(OutOfOrderSequenceNumber):
        await served(producer, wire, A, b"3")
    assert A not in wire.cluster.values


async def test_an_unexpected_error_fails_the_appends(producer: Producer, wire: FakeWire) -> None:
    task = append(producer, A, b"1")
    (await wire.next_request()).response.set_exception(ValueError("the response cannot be decoded"))
    with pytest.raises(KafkaError, match="ValueError: the response cannot be decoded"):
        await result(task)
    assert await served(producer, wire, B, b"2") == 0


@pytest.mark.parametrize("way", ["served", "lost", "lost after append", "wrong leader"])
async def test_a_cancelled_append_leaves_no_gap(producer: Producer, wire: FakeWire, way: str) -> None:
    cancelled = append(producer, A, b"1")
    request = await wire.next_request()
    cancelled.cancel()
    later = append(producer, A, b"2")
    # The new leader is known at once, so its connection is free.
    wire.leaders[A] = 1 if way == "wrong leader" else 0
    assert await wire.settled()
    match way:
        case "served":
            request.serve()
        case "wrong leader":
            request.serve({A: NotLeaderForPartitionError()})
        case _:
            request.lose(is_appended=way == "lost after append")
    while not later.done():
        (await wire.next_request()).serve()
        await wire.settled()
    assert await result(later) == 1
    assert wire.cluster.values[A] == [b"1", b"2"]


async def test_a_cancelled_append_is_sent_also_if_it_waits(producer: Producer, wire: FakeWire) -> None:
    other = append(producer, B, b"0")
    busy = await wire.next_request()
    cancelled = append(producer, A, b"1")
    assert await wire.settled()
    cancelled.cancel()
    later = append(producer, A, b"2")
    assert await wire.settled()
    busy.serve()
    for _ in range(2):
        request = await wire.next_request()
        assert list(request.batches) == [A]
        request.serve()
    assert [await result(other), await result(later)] == [0, 1]


async def test_an_append_that_cannot_be_encoded_leaves_no_gap(producer: Producer, wire: FakeWire) -> None:
    with pytest.raises(UnicodeEncodeError):
        await producer.append(A, [(Draft("requests", 0, b"v", None, {"name": "\ud800"}), 1)], 1)
    assert await served(producer, wire, A, b"1") == 0


async def test_sequence_numbers_begin_again_after_the_last_one(
    producer: Producer, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.SEQUENCES == 2**31  # as many as the field of the batch format has
    monkeypatch.setattr(module, "SEQUENCES", 5)
    for offset in (0, 3, 6):
        assert await served(producer, wire, A, b"1", b"2", b"3") == offset
    assert wire.cluster.next[A] == 4


async def test_a_request_is_bounded(producer: Producer, wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_BYTES_MAX", 1_000)
    places = [TopicPartition("n.requests", number) for number in range(6)]
    tasks = [append(producer, place, bytes(400)) for place in places]
    large = append(producer, TopicPartition("n.requests", 6), b"x" * 1_001)
    for count in (2, 2, 2, 1):
        request = await wire.next_request()
        assert len(request.batches) == count
        request.serve()
    assert [await result(task) for task in (*tasks, large)] == [0] * 7


async def test_only_large_batches_are_compressed(producer: Producer, wire: FakeWire) -> None:
    for size in (COMPRESSED_BYTES_MIN - 1, COMPRESSED_BYTES_MIN):
        await served(producer, wire, A, bytes(size))
    assert wire.cluster.codecs == [module.NO_CODEC, module.SNAPPY]


async def test_start_repeats_a_transient_error_only(wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_BACKOFF_MS", 0)
    errors: list[KafkaError] = [KafkaConnectionError(), KafkaConnectionError()]

    async def producer_id() -> ProducerId:
        if errors:
            raise errors.pop(0)
        return PRODUCER

    monkeypatch.setattr(wire, "producer_id", producer_id)
    await Producer(cast("Wire", wire), Channel.APPENDS).start()
    assert not errors
    errors = [TopicAuthorizationFailedError(), KafkaConnectionError()]
    with pytest.raises(TopicAuthorizationFailedError):
        await Producer(cast("Wire", wire), Channel.APPENDS).start()
    assert len(errors) == 1


async def test_stop_ends_requests_and_pauses(producer: Producer, wire: FakeWire) -> None:
    wire.leaders[B] = None
    wire.metadata.clear()
    tasks = [append(producer, A, b"1"), append(producer, B, b"2")]
    request = await wire.next_request()
    await producer.stop()
    assert request.response.cancelled()
    wire.metadata.set()
    wire.leaders[B] = 0
    assert await wire.settled()
    for task in tasks:
        task.cancel()
