"""Stand-in for `AIOKafkaProducer`.

Like aiokafka's sender, it has one request in flight per node, with at most one batch per partition. A batch gets its
sequence number when it is first sent. A retry waits for the backoff while its node gets no other request. Batches of an
idempotent producer are retried for ever, others until the request timeout.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from aiokafka.errors import (
    BrokerResponseError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerClosed,
)
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.structs import RecordMetadata, TopicPartition

from forebay import runtime
from forebay.transport.base import Draft
from tests.faults.broker import LATE_S, LATE_S_MIN
from tests.faults.kafka.client import FakeClient
from tests.faults.kafka.server import CREATE_TIME, place_of

NO_CODEC = 0
Headers = Sequence[tuple[str, bytes]]


class WireBuilder(BatchBuilder):  # type: ignore[misc]  # aiokafka ships no types
    """The builder of aiokafka, with its bytes. Unlike in production they are not compressed, which would take long."""

    def data(self) -> bytes:
        """Return the batch as bytes."""
        return bytes(self._build())


class _Batch:
    """A batch that waits for its acknowledgement."""

    def __init__(self, place: TopicPartition, builder: WireBuilder, began_s: float) -> None:
        self.place = place
        self.builder = builder
        self.began_s = began_s
        self.future: asyncio.Future[RecordMetadata | None] = asyncio.get_running_loop().create_future()
        self.parts: list[asyncio.Future[RecordMetadata]] = []
        self.sequence: tuple[int, int] | None = None
        self.is_sealed = False
        self._drafts: list[tuple[Draft, int]] = []

    def drafts(self) -> list[tuple[Draft, int]]:
        """Return the records of the batch as they are on the wire, with their times in microseconds."""
        if not self._drafts:
            topic, partition = place_of(self.place)
            for record in DefaultRecordBatch(self.builder.data()):
                headers = {name: value.decode() for name, value in record.headers} or None
                draft = Draft(topic, partition, record.value, record.key, headers)
                self._drafts.append((draft, record.timestamp * 1000))
        return self._drafts

    def done(self, offset: int) -> None:
        """Resolve the futures of the batch and of its records."""
        if not self.future.done():
            self.future.set_result(self._metadata(offset))
        for index, part in enumerate(self.parts):
            if not part.done():
                part.set_result(self._metadata(offset + index))

    def fail(self, error: KafkaError) -> None:
        """Fail the futures of the batch and of its records."""
        if not self.future.done():
            self.future.set_exception(error)
        for part in self.parts:
            if not part.done():
                part.set_exception(error)
        if self.parts:
            self.future.exception()  # its error is known from the records

    def _metadata(self, offset: int) -> RecordMetadata:
        return RecordMetadata(*self.place, self.place, offset, -1, CREATE_TIME, 0)


class FakeProducer(FakeClient):
    """Producer of one simulated process."""

    def __init__(
        self,
        *,
        enable_idempotence: bool = False,
        max_batch_size: int = 16_384,
        max_request_size: int = 1 << 20,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._is_idempotent = enable_idempotence
        self._max_batch_size = max_batch_size
        self._max_request_size = max_request_size
        self._producer_id: int | None = None
        self._sequences: dict[TopicPartition, int] = {}
        self._queues: dict[TopicPartition, deque[_Batch]] = {}
        self._unacknowledged: dict[_Batch, None] = {}
        self._busy: set[int] = set()
        self._muted: dict[TopicPartition, None] = {}
        self._is_draining = False
        self._partitioner = DefaultPartitioner()

    async def start(self) -> None:
        """Connect, and get a producer id if the producer is idempotent. Raises KafkaConnectionError."""
        self.count_call()
        await self.bootstrap()
        self.host.kafka.producers.append(self)
        while self._is_idempotent and self._producer_id is None:
            try:
                await self.round_trip()
                self._producer_id = self.host.kafka.new_producer_id()
            except KafkaConnectionError:
                await self.force_metadata_update()

    def is_appending(self, topic: str) -> bool:
        """Return whether the process runs and has batches for a topic, by its full name, without acknowledgement."""
        return self.host.process.alive and any(batch.place.topic == topic for batch in self._unacknowledged)

    async def stop(self) -> None:
        """Wait until every batch is acknowledged or failed, and disconnect."""
        if self.closed:
            return
        self.closed = True
        futures = [batch.future for batch in self._unacknowledged]
        if futures:
            await asyncio.wait(futures)
        self.cancel_tasks()

    async def send(
        self, topic: str, value: bytes, key: bytes, *, headers: Headers = ()
    ) -> "asyncio.Future[RecordMetadata]":
        """Queue a record, and return a future for its offset. Raises KafkaError if the topic is unknown."""
        self.count_call()
        count = await self.counted(topic)
        if len(value) + len(key) > self._max_request_size:
            raise MessageSizeTooLargeError(f"the message has {len(value)} bytes")
        numbers = list(range(count))
        place = TopicPartition(topic, self._partitioner(key, numbers, numbers))
        queue = self._queues.get(place)
        batch = queue[-1] if queue else None
        at_ms = runtime.wall_ns() // 1_000_000
        if (
            batch is None
            or batch.is_sealed
            or batch.builder.append(timestamp=at_ms, key=key, value=value, headers=headers) is None
        ):
            batch = self._queue(place, WireBuilder(self._max_batch_size, NO_CODEC))
            batch.builder.append(timestamp=at_ms, key=key, value=value, headers=headers)
        part: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        batch.parts.append(part)
        return part

    def _queue(self, place: TopicPartition, builder: BatchBuilder) -> _Batch:
        if self.closed:
            raise ProducerClosed
        batch = _Batch(place, builder, self.broker.loop.time())
        self._queues.setdefault(place, deque()).append(batch)
        self._unacknowledged[batch] = None
        batch.future.add_done_callback(lambda _: self._unacknowledged.pop(batch, None))
        self._drain_soon()
        return batch

    def _drain_soon(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self.host.process.call_soon(self._drain)

    def _drain(self) -> None:
        """Send the first batch of each partition whose node has no request in flight."""
        self._is_draining = False
        requests: dict[int, list[_Batch]] = {}
        for place in list(self._queues):
            node = self.leader(place)
            if place in self._muted or node in self._busy:
                continue
            batch = self._queues[place].popleft()
            if not self._queues[place]:
                del self._queues[place]
            batch.is_sealed = True
            count = batch.builder.record_count()
            if not count:
                batch.future.set_result(None)
                continue
            if self._producer_id is not None and batch.sequence is None:
                first = self._sequences.get(place, 0)
                self._sequences[place] = first + count
                batch.sequence = self._producer_id, first
            requests.setdefault(node, []).append(batch)
        for node, batches in requests.items():
            self._busy.add(node)
            self._muted.update(dict.fromkeys(batch.place for batch in batches))
            # The harness delivers it: what was sent arrives, even if the process is killed or paused meanwhile.
            self.broker.loop.call_main_later(self.hop_s(), self._arrive, node, batches)

    def _arrive(self, node: int, batches: list[_Batch]) -> None:
        process, faults = self.host.process, self.host.faults
        if not self.is_reachable:
            process.call_later(self.hop_s(), self._lost, node, batches)
            return
        results: list[int | BrokerResponseError] = []
        for batch in batches:
            try:
                offset = self.host.kafka.append(
                    node, batch.place, faults, process.label, batch.drafts(), batch.sequence
                )
                results.append(offset)
            except BrokerResponseError as error:
                results.append(error)
        delay_s = self.hop_s()
        if faults.take("append_without_ack"):
            process.call_later(delay_s, self._lost, node, batches)
            return
        if faults.take("ack_late"):
            delay_s += LATE_S_MIN + LATE_S * self.broker.chance()
        process.call_later(delay_s, self._respond, node, batches, results)

    def _lost(self, node: int, batches: list[_Batch]) -> None:
        """Retry after the connection broke. The client does not know whether the node has appended the batches."""
        error = KafkaConnectionError("the connection was lost (injected)")
        self._settle(node, batches, [error] * len(batches))

    def _respond(self, node: int, batches: list[_Batch], results: list[int | BrokerResponseError]) -> None:
        if self.is_reachable:
            self._settle(node, batches, results)
        else:
            self._lost(node, batches)

    def _settle(self, node: int, batches: list[_Batch], results: Sequence[int | KafkaError]) -> None:
        retried: list[_Batch] = []
        has_old_metadata = False
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, int):
                batch.done(result)
            elif result.retriable and (self._is_idempotent or not self._has_expired(batch)):
                retried.append(batch)
                has_old_metadata = has_old_metadata or result.invalid_metadata
            else:
                batch.fail(result)
        if retried:
            self.spawn(self._retry(node, batches, retried, has_old_metadata=has_old_metadata))
        else:
            self._release(node, batches)

    def _has_expired(self, batch: _Batch) -> bool:
        return self.broker.loop.time() - batch.began_s > self.request_timeout_s

    async def _retry(self, node: int, batches: list[_Batch], retried: list[_Batch], *, has_old_metadata: bool) -> None:
        updating = self.start_task(self.force_metadata_update()) if has_old_metadata else None
        await asyncio.sleep(self.backoff_s)
        for batch in retried:
            self._queues.setdefault(batch.place, deque()).appendleft(batch)
        if updating is not None:
            await updating
        self._release(node, batches)

    def _release(self, node: int, batches: list[_Batch]) -> None:
        self._busy.discard(node)
        for batch in batches:
            self._muted.pop(batch.place, None)
        self._drain_soon()
