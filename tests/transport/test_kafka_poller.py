"""`Poller` against brokers whose responses the test writes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    ReplicaNotAvailableError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from forebay.transport.kafka import poll as module
from forebay.transport.kafka.consumer import GAP_RECORDS_MAX, AbsentRecord
from forebay.transport.kafka.poll import CATCH_UP_MS, POLL_MS, Poller
from forebay.transport.kafka.wire import Channel, Fetched, Wire
from tests.transport.scripted_wire import A, B, C, ScriptedWire

NEVER_S = 3_600.0


def batch(first: int, count: int, last: int | None = None) -> bytes:
    """Return a batch of records whose values are their offsets. Compaction removed those after the last record."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 30)
    for index in range(count):
        builder.append(index, 1, None, b"%d" % (first + index), [])
    if last is not None:
        builder.append(last - first, 1, None, b"%d" % last, [])
    data = builder.build()
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


class Request:
    """Fetch request that waits for its response."""

    def __init__(self, node: int, channel: Channel, offsets: Mapping[TopicPartition, int], wait_ms: int) -> None:
        self.node = node
        self.channel = channel
        self.offsets = dict(offsets)
        self.wait_ms = wait_ms
        self.response: asyncio.Future[list[Fetched]] = asyncio.get_running_loop().create_future()

    def respond(self, results: Mapping[TopicPartition, bytes | Exception] | None = None, end: int = 0) -> None:
        self.response.set_result(
            [
                Fetched(place, None, end, result) if isinstance(result, bytes) else Fetched(place, result, -1, b"")
                for place, result in (results or {}).items()
            ]
        )


class FakeWire(ScriptedWire[Request]):
    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[TopicPartition, list[ConsumerRecord]]] = []
        self.errors: list[Exception] = []
        self.refreshed: list[list[str]] = []
        self.refusal: KafkaError | None = None

    async def refresh(self, topics: Sequence[str] = ()) -> None:
        self.refreshed.append(list(topics))
        if self.refusal is not None and topics:
            raise self.refusal

    async def fetch(
        self, node: int, channel: Channel, offsets: Mapping[TopicPartition, int], wait_ms: int
    ) -> list[Fetched]:
        request = Request(node, channel, offsets, wait_ms)
        self.sent.put_nowait(request)
        return await request.response

    def push(self, place: TopicPartition, records: list[ConsumerRecord]) -> None:
        self.runs.append((place, records))

    def offsets(self, wanted: TopicPartition) -> list[int]:
        """Return the offsets received of a partition, and check the records."""
        found = [record for place, records in self.runs if place == wanted for record in records]
        for record in found:
            assert isinstance(record, AbsentRecord) or record.value == b"%d" % record.offset
        return [record.offset for record in found]


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
async def poller(wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Poller]:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    poller = Poller(cast("Wire", wire), wire.push, wire.errors.append)
    yield poller
    await poller.stop()


async def test_each_broker_gets_one_poll_of_its_partitions(poller: Poller, wire: FakeWire) -> None:
    wire.leaders[C] = 1
    for place, offset in ((A, 0), (B, 5), (C, 9)):
        poller.seek(place, offset)
    requests = {request.node: request for request in [await wire.next_request(), await wire.next_request()]}
    assert {node: request.offsets for node, request in requests.items()} == {0: {A: 0, B: 5}, 1: {C: 9}}
    assert {(one.channel, one.wait_ms) for one in requests.values()} == {(Channel.POLL, POLL_MS)}
    requests[0].respond({A: batch(0, 3)}, end=4)
    again = await wire.next_request()
    assert (again.node, again.offsets) == (0, {A: 3, B: 5})
    assert poller.ends == {A: 4}
    again.respond({A: batch(3, 1), B: batch(5, 1)})
    assert (await wire.next_request()).offsets == {A: 4, B: 6}
    assert (wire.offsets(A), wire.offsets(B), wire.offsets(C)) == ([0, 1, 2, 3], [5], [])
    assert await wire.settled()


async def test_an_added_partition_is_fetched_until_a_poll_includes_it(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    poll = await wire.next_request()
    poller.seek(B, 0)
    first = await wire.next_request()
    assert (first.channel, first.wait_ms, first.offsets) == (Channel.CATCH_UP, CATCH_UP_MS, {B: 0})
    first.respond({B: batch(0, 2)})
    second = await wire.next_request()
    assert (second.channel, second.offsets) == (Channel.CATCH_UP, {B: 2})
    poll.respond()
    assert (await wire.next_request()).offsets == {A: 0, B: 2}
    second.respond()
    assert await wire.settled()
    assert wire.offsets(B) == [0, 1]


async def test_records_of_two_responses_are_passed_on_once(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    poll = await wire.next_request()
    poller.seek(B, 0)
    catch_up = await wire.next_request()
    poll.respond()
    poll = await wire.next_request()
    assert poll.offsets == {A: 0, B: 0}
    poll.respond({B: batch(0, 2)})
    await wire.next_request()
    catch_up.respond({B: batch(0, 3)})
    assert await wire.settled()
    assert wire.offsets(B) == [0, 1, 2]


async def test_seeking_backwards_drops_the_response_in_flight(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 5)
    poll = await wire.next_request()
    poller.seek(A, 1)
    catch_up = await wire.next_request()
    assert (catch_up.channel, catch_up.offsets) == (Channel.CATCH_UP, {A: 1})
    poll.respond({A: batch(5, 1)})
    assert (await wire.next_request()).offsets == {A: 1}
    catch_up.respond({A: batch(1, 5)})
    assert await wire.settled()
    assert wire.offsets(A) == [1, 2, 3, 4, 5]


async def test_a_paused_partition_is_fetched_after_its_resumption(poller: Poller, wire: FakeWire) -> None:
    for place in (A, B):
        poller.seek(place, 0)
    poll = await wire.next_request()
    poller.pause(A)
    poll.respond({A: batch(0, 1), B: batch(0, 1)})
    poll = await wire.next_request()
    assert poll.offsets == {B: 1}
    poller.resume(A)
    catch_up = await wire.next_request()
    assert (catch_up.channel, catch_up.offsets) == (Channel.CATCH_UP, {A: 0})
    catch_up.respond({A: batch(0, 1)})
    await wire.settled()
    assert (wire.offsets(A), wire.offsets(B)) == ([0], [0])


async def test_a_removed_partition_is_fetched_no_longer(poller: Poller, wire: FakeWire) -> None:
    for place in (A, B):
        poller.seek(place, 0)
    poll = await wire.next_request()
    poller.remove(A)
    poll.respond({A: batch(0, 1)})
    poll = await wire.next_request()
    assert poll.offsets == {B: 0}
    poller.remove(B)
    poll.respond({B: batch(0, 1)})
    assert await wire.settled()
    assert (wire.runs, poller.ends) == ([], {})


async def test_a_partition_is_followed_to_a_leader_that_no_error_announced(poller: Poller, wire: FakeWire) -> None:
    for place in (A, B):
        poller.seek(place, 0)
    poll = await wire.next_request()
    wire.leaders[A] = 1  # by metadata that another request refreshed
    poll.respond()
    requests = {request.node: request for request in [await wire.next_request(), await wire.next_request()]}
    assert {node: request.offsets for node, request in requests.items()} == {0: {B: 0}, 1: {A: 0}}
    wire.leaders[A] = None
    requests[1].respond()
    await wire.settled()
    assert wire.refreshed[-1] == [A.topic]
    wire.leaders[A] = 2
    moved = await wire.next_request()
    assert (moved.node, moved.offsets) == (2, {A: 0})


async def test_the_leader_of_a_new_partition_is_searched(poller: Poller, wire: FakeWire) -> None:
    wire.leaders[A] = None
    poller.seek(A, 0)
    assert await wire.settled()
    assert wire.refreshed[0] == [A.topic]
    wire.leaders[A] = 1
    assert (await wire.next_request()).node == 1


async def test_a_failed_partition_rests_while_others_are_polled(
    poller: Poller, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", NEVER_S)
    for place in (A, B):
        poller.seek(place, 0)
    (await wire.next_request()).respond({A: NotLeaderForPartitionError(), B: batch(0, 1)})
    poll = await wire.next_request()
    assert poll.offsets == {B: 1}
    await wire.settled()
    assert wire.refreshed == [[]]
    poll.respond({B: batch(1, 1)})
    assert (await wire.next_request()).offsets == {B: 2}
    assert wire.offsets(B) == [0, 1]


async def test_a_failed_partition_is_fetched_again(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    request = await wire.next_request()
    wire.leaders[A] = 1
    request.respond({A: NotLeaderForPartitionError()})
    request = await wire.next_request()
    assert (request.node, request.offsets) == (1, {A: 0})
    request.respond({A: batch(0, 1)})
    await wire.settled()
    assert wire.offsets(A) == [0]
    assert not wire.errors


async def test_a_lost_connection_is_renewed(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    for _ in range(3):
        (await wire.next_request()).response.set_exception(KafkaConnectionError("lost"))
    (await wire.next_request()).respond({A: batch(0, 1)})
    assert (await wire.next_request()).offsets == {A: 1}
    assert wire.refreshed == [[], [], []]
    assert not wire.errors


async def test_a_partition_with_records_comes_last_in_the_next_request(poller: Poller, wire: FakeWire) -> None:
    """Otherwise a batch larger than the limit of a partition would wait until no other partition has records."""
    for place in (A, B, C):
        poller.seek(place, 0)
    (await wire.next_request()).respond({A: batch(0, 1)})
    request = await wire.next_request()
    assert list(request.offsets) == [B, C, A]
    request.respond({C: batch(0, 1)})
    assert list((await wire.next_request()).offsets) == [B, A, C]


async def test_a_truncated_batch_does_not_make_the_poll_spin(
    poller: Poller, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", NEVER_S)
    poller.seek(A, 0)
    (await wire.next_request()).respond({A: batch(0, 1)[:-1]})
    assert await wire.settled()
    assert not wire.errors


async def test_a_gap_is_passed_on_in_parts(poller: Poller, wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS_MAX", 100)
    poller.seek(A, 0)
    data = batch(0, 10, last=249)
    for offset in (0, 100, 200):
        request = await wire.next_request()
        assert request.offsets == {A: offset}
        request.respond({A: data})
    assert (await wire.next_request()).offsets == {A: 250}
    assert wire.offsets(A) == list(range(250))
    assert max(len(records) for _, records in wire.runs) == 100


@pytest.mark.parametrize(
    ("first", "count", "received"), [(0, 4, [2, 3]), (GAP_RECORDS_MAX + 3, 1, [GAP_RECORDS_MAX + 3])]
)
async def test_records_before_the_position_and_a_gap_over_the_limit_are_skipped(
    poller: Poller, wire: FakeWire, first: int, count: int, received: list[int]
) -> None:
    poller.seek(A, 2)
    (await wire.next_request()).respond({A: batch(first, count)})
    assert (await wire.next_request()).offsets == {A: received[-1] + 1}
    assert wire.offsets(A) == received


@pytest.mark.parametrize("error", [UnknownError(), ReplicaNotAvailableError()])
async def test_an_unknown_error_is_logged_once_and_retried(
    poller: Poller, wire: FakeWire, error: KafkaError, caplog: pytest.LogCaptureFixture
) -> None:
    poller.seek(A, 0)
    with caplog.at_level(logging.WARNING, module.__name__):
        for _ in range(3):
            (await wire.next_request()).respond({A: error})
        (await wire.next_request()).respond({A: batch(0, 1)})
        (await wire.next_request()).respond({A: error})
        await wire.next_request()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot fetch n.requests/0 yet, retrying: {error}"
    ] * 2
    assert wire.offsets(A) == [0]
    assert not wire.errors


async def test_a_final_error_ends_all_polls_once(poller: Poller, wire: FakeWire) -> None:
    wire.leaders[B] = 1
    for place in (A, B):
        poller.seek(place, 0)
    first, second = await wire.next_request(), await wire.next_request()
    refusal = TopicAuthorizationFailedError(A.topic)
    first.respond({A: refusal})
    second.respond({B: TopicAuthorizationFailedError(B.topic)})
    assert await wire.settled()
    assert wire.errors == [refusal]
    poller.seek(C, 0)
    assert await wire.settled()


@pytest.mark.parametrize("error", [UnsupportedVersionError(), ValueError("the response cannot be decoded")])
async def test_a_rejected_request_and_an_unexpected_error_end_all_polls(
    poller: Poller, wire: FakeWire, error: Exception
) -> None:
    poller.seek(A, 0)
    (await wire.next_request()).response.set_exception(error)
    assert await wire.settled()
    assert wire.errors == [error]


async def test_a_topic_that_may_not_be_described_ends_all_polls(poller: Poller, wire: FakeWire) -> None:
    wire.leaders[A] = None
    wire.refusal = TopicAuthorizationFailedError(A.topic)
    poller.seek(A, 0)
    await wire.settled()
    assert wire.errors == [wire.refusal]


async def test_a_deleted_topic_ends_all_polls(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    request = await wire.next_request()
    wire.leaders[A] = None
    wire.deleted.add(A.topic)
    request.respond({A: UnknownTopicOrPartitionError()})
    await wire.settled()
    (error,) = wire.errors
    assert "deleted" in str(error)


async def test_missing_records_are_an_error_at_the_position_only(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    poll = await wire.next_request()
    poller.seek(A, 3)
    poll.respond({A: OffsetOutOfRangeError()})
    poll = await wire.next_request()
    assert not wire.errors
    assert poll.offsets == {A: 3}
    poll.respond({A: OffsetOutOfRangeError()})
    assert await wire.settled()
    assert [error.args for error in wire.errors] == [({A: 3},)]


async def test_stop_ends_requests(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 0)
    poll = await wire.next_request()
    poller.seek(B, 0)
    catch_up = await wire.next_request()
    await poller.stop()
    assert (poll.response.cancelled(), catch_up.response.cancelled()) == (True, True)
    poller.seek(C, 0)
    assert await wire.settled()


async def test_the_end_of_a_quiet_partition_is_known(poller: Poller, wire: FakeWire) -> None:
    poller.seek(A, 4)
    (await wire.next_request()).respond({A: b""}, end=4)
    assert ((await wire.next_request()).offsets, poller.ends, wire.runs) == ({A: 4}, {A: 4}, [])
