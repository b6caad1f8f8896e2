"""Stand-in for `Wire`: produce and fetch requests of one simulated process, with record batches in Kafka's format."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiokafka.errors import (
    BrokerResponseError,
    KafkaConnectionError,
    KafkaError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.structs import ConsumerRecord, TopicPartition

from forebay.transport.base import Draft
from forebay.transport.kafka.batches import HEAD
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.wire import METADATA_MS, Channel, Fetched, ProducerId
from tests.faults.broker import FETCH_MAX, LATE_S, LATE_S_MIN
from tests.faults.kafka.client import FakeClient
from tests.faults.kafka.server import Fetch, place_of

LEFT_OUT = 0.1  # share of the partitions that a response leaves out, because it has a size limit
UNCOMPRESSED, MAGIC = 0, 2

Results = dict[TopicPartition, int | KafkaError]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Batch as the broker reads it, with the times of its records in microseconds."""

    drafts: list[tuple[Draft, int]]
    sequence: tuple[int, int]


class FakeWire(FakeClient):
    """Connections of one simulated process."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(**settings.client_options(), metadata_max_age_ms=METADATA_MS)
        self._unacknowledged: dict[TopicPartition, None] = {}

    async def start(self) -> None:
        await self.bootstrap()
        self.host.kafka.producers.append(self)

    async def close(self) -> None:
        self.closed = True
        self.cancel_tasks()

    def is_appending(self, topic: str) -> bool:
        """Return whether the process runs and has sent batches for a topic (full name) without acknowledgement."""
        return self.host.process.alive and any(place.topic == topic for place in self._unacknowledged)

    async def partitions(self, topic: str) -> set[int]:
        """Return the known partitions of a topic. Raises UnknownTopicOrPartitionError if the cluster lacks it."""
        while True:
            try:
                return set(range(await self.counted(topic)))
            except UnknownTopicOrPartitionError:
                if self.host.kafka.count(topic) is None:
                    raise

    async def refresh(self, topics: Sequence[str] = ()) -> None:
        del topics
        await self.force_metadata_update()

    def gone(self, topic: str) -> KafkaError | None:
        """Return None, because no topic is deleted."""

    async def producer_id(self) -> ProducerId:
        """Return the id for a new producer. Raises KafkaConnectionError."""
        await self.round_trip()
        return ProducerId(self.host.kafka.new_producer_id(), 0)

    # Appends

    async def produce(self, node: int, channel: Channel, batches: Mapping[TopicPartition, bytes]) -> Results:
        del channel
        self._unacknowledged.update(dict.fromkeys(batches))
        response: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        # The harness delivers it: what was sent arrives, even if the process is killed or paused meanwhile.
        parsed = {place: _parsed(place, data) for place, data in batches.items()}
        self.broker.loop.call_main_later(self.hop_s(), self._arrive, node, parsed, response)
        results = await response
        for place, result in results.items():
            if isinstance(result, int) or not result.retriable:
                del self._unacknowledged[place]
        return results

    def _arrive(self, node: int, batches: Mapping[TopicPartition, _Batch], response: "asyncio.Future[Results]") -> None:
        process, faults, kafka = self.host.process, self.host.faults, self.host.kafka
        if not self.is_reachable:
            process.call_later(self.hop_s(), _lose, response)
            return
        results: Results = {}
        for place, batch in batches.items():
            try:
                results[place] = kafka.append(node, place, faults, process.label, batch.drafts, batch.sequence)
            except BrokerResponseError as error:
                results[place] = error
        delay_s = self.hop_s()
        if faults.take("append_without_ack"):
            process.call_later(delay_s, _lose, response)
            return
        if faults.take("ack_late"):
            delay_s += LATE_S_MIN + LATE_S * self.broker.chance()
        process.call_later(delay_s, self._respond, response, results)

    def _respond(self, response: "asyncio.Future[Results]", results: Results) -> None:
        if not self.is_reachable:
            _lose(response)
        elif not response.done():
            response.set_result(results)

    # Fetches

    async def fetch(
        self, node: int, channel: Channel, offsets: Mapping[TopicPartition, int], wait_ms: int
    ) -> list[Fetched]:
        del channel
        response: asyncio.Future[list[Fetched]] = asyncio.get_running_loop().create_future()
        until_s = self.broker.loop.time() + wait_ms / 1000

        def serve(fetch: Fetch) -> None:
            self._serve(fetch, response, until_s)

        fetch = Fetch(node, dict(offsets), serve)
        self.broker.loop.call_main_later(self.hop_s(), serve, fetch)
        self.broker.loop.call_main_later(wait_ms / 1000, self._expire, fetch)
        try:
            return await response
        finally:
            fetch.is_over = True
            self.host.kafka.release(fetch)

    def _expire(self, fetch: Fetch) -> None:
        if self.host.kafka.release(fetch):
            fetch.serve(fetch)

    def _serve(self, fetch: Fetch, response: "asyncio.Future[list[Fetched]]", until_s: float) -> None:
        """Answer a fetch at its node, or hold it until there is a record."""
        if fetch.is_over or not self.host.process.alive:
            return
        if not self.is_reachable:
            self.host.process.call_later(self.hop_s(), _lose, response)
            return
        faults = self.host.faults
        results, is_left_out = [], False
        for place, offset in fetch.offsets.items():
            result = self._result(fetch.node, place, offset)
            if result is not None and result.error is None and self.broker.chance() < LEFT_OUT:
                is_left_out = True
            elif result is not None:
                results.append(result)
        if results or is_left_out or self.broker.loop.time() >= until_s or faults.take("spurious_wake"):
            self.host.process.call_later(self.hop_s() + faults.lag_s, self._deliver, response, results)
        else:
            self.host.kafka.hold(fetch)

    def _result(self, node: int, place: TopicPartition, offset: int) -> Fetched | None:
        """Return what the node has for a partition, None if it has nothing new."""
        kafka, faults = self.host.kafka, self.host.faults
        messages = kafka.messages(place)
        try:
            kafka.require_leader(node, place)
        except NotLeaderForPartitionError as error:
            return Fetched(place, error, -1, b"")
        if offset > len(messages):
            return Fetched(place, OffsetOutOfRangeError({place: offset}), -1, b"")
        if faults.take("read_failed"):
            return Fetched(place, TopicAuthorizationFailedError(place.topic), -1, b"")
        if offset == len(messages):
            return None
        limit = FETCH_MAX
        if faults.truncates:
            faults.fired("truncated_fetch")
            limit = 1
        return Fetched(place, None, len(messages), _encoded(messages[offset : offset + limit]))

    def _deliver(self, response: "asyncio.Future[list[Fetched]]", results: list[Fetched]) -> None:
        if not self.is_reachable:
            _lose(response)
        elif not response.done():
            response.set_result(results)


def _lose(response: "asyncio.Future[Results] | asyncio.Future[list[Fetched]]") -> None:
    """Report that the connection broke, so that it is unknown whether the request was served."""
    if not response.done():
        response.set_exception(KafkaConnectionError("the connection was lost (injected)"))


def _parsed(place: TopicPartition, data: bytes) -> _Batch:
    topic, partition = place_of(place)
    fields = HEAD.unpack_from(data)
    producer_id, base_sequence = fields[9], fields[11]
    drafts = []
    for record in DefaultRecordBatch(data):
        headers = {name: value.decode() for name, value in record.headers} or None
        drafts.append((Draft(topic, partition, record.value, record.key, headers), record.timestamp * 1000))
    return _Batch(drafts, (producer_id, base_sequence))


def _encoded(messages: Sequence[ConsumerRecord]) -> bytes:
    builder = DefaultRecordBatchBuilder(MAGIC, UNCOMPRESSED, 0, -1, -1, -1, 1 << 30)
    for index, message in enumerate(messages):
        builder.append(index, message.timestamp, message.key, message.value, list(message.headers))
    data = builder.build()
    # The checksum does not cover the offset.
    data[:8] = messages[0].offset.to_bytes(8, "big")
    return bytes(data)
