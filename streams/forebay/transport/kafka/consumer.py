"""Consume Kafka partitions densely: deliver one record per offset, whatever producers wrote.

Theory of operation. forebay counts records, so its partitions must be dense: `consumed` in the journal is the number of
applied records of a topic. A Kafka partition is not dense. Transaction markers, aborted records and compacted records
occupy offsets that a client never receives. This consumer delivers an `AbsentRecord` with the reason for every such
offset, and for every record that cannot be read.

aiokafka has no setting for this. Its fetcher looks up the two classes that parse records in its own module. This module
replaces both classes there, for all consumers of the process.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.consumer import fetcher

from forebay.transport.kafka.batches import BatchHead, BatchUnreadable, frames_of, head_of, records_of

logger = logging.getLogger(__name__)

REMOVED = "it was removed from the log"
MARKER = "it is a transaction marker"
ABORTED = "its transaction was aborted"
# More than any batch holds, so only compaction or a damaged offset leaves such a gap. The consumer skips it, and
# readers that count records report how many are missing.
GAP_RECORDS_MAX = 1_000_000
NO_TYPE = 0  # Kafka's timestamp type "create time"


@dataclass
class AbsentRecord(ConsumerRecord):  # type: ignore[misc]  # aiokafka ships no types
    """Placeholder for an offset without a readable record, with the reason for a dead letter.

    If it `is_gap`, the offset is a marker, or its record was aborted or removed. If not, a record was lost.
    """

    reason: str = ""
    is_gap: bool = False


class Batches:
    """Fetched bytes of a partition, split into batches, with the interface of aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._size = len(data)
        self._frames = frames_of(data)
        self._next = next(self._frames, None)

    def size_in_bytes(self) -> int:
        return self._size

    def has_next(self) -> bool:
        return self._next is not None

    def next_batch(self) -> memoryview | None:
        frame, self._next = self._next, next(self._frames, None)
        return frame


class DenseRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """Records of a fetched partition, one per offset from the requested offset."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        while (frame := self._records.next_batch()) is not None:
            head = head_of(frame)
            if self.next_fetch_offset < head.base_offset:
                yield from self._absent(head.base_offset, REMOVED, is_gap=True)
            yield from self._records_of(frame, head)

    def _records_of(self, frame: memoryview, head: BatchHead) -> Iterator[ConsumerRecord]:
        if gap := self._gap(frame, head):
            yield from self._absent(head.next_offset, gap, is_gap=True)
            return
        try:
            records, reason = records_of(frame, head, check_crcs=self._check_crcs)
        except BatchUnreadable as error:
            records, reason = [], str(error)
        place, next_offset = self._tp, head.next_offset
        for record in records:
            offset = record.offset
            if not self.next_fetch_offset <= offset < next_offset:
                continue
            if offset > self.next_fetch_offset:
                yield from self._absent(offset, reason or REMOVED, is_gap=not reason)
            self.next_fetch_offset = offset + 1
            yield self._consumer_record(place, record)
        if self.next_fetch_offset < next_offset:
            yield from self._absent(next_offset, reason or REMOVED, is_gap=not reason)

    def _gap(self, frame: memoryview, head: BatchHead) -> str:
        """Return why the batch holds no records for this consumer; an empty string if it does."""
        if self._isolation_level == fetcher.READ_COMMITTED and head.producer_id is not None:
            self._consume_aborted_up_to(head.base_offset)
            if head.is_control and self._aborts(frame, head):
                self._aborted_producers.discard(head.producer_id)
            if head.is_transactional and not head.is_control and head.producer_id in self._aborted_producers:
                return ABORTED
        return MARKER if head.is_control else ""

    def _aborts(self, frame: memoryview, head: BatchHead) -> bool:
        try:
            records, _ = records_of(frame, head, check_crcs=self._check_crcs)
            return any(fetcher.ControlRecord.parse(record.key) == fetcher.ABORT_MARKER for record in records)
        except Exception:  # noqa: BLE001 - an unreadable marker does not abort a transaction
            return False

    def _absent(self, end: int, reason: str, *, is_gap: bool) -> Iterator[ConsumerRecord]:
        """Deliver an absent record for each offset before `end` that was not delivered."""
        if end - self.next_fetch_offset > GAP_RECORDS_MAX:
            logger.error(
                "%s has no records at offsets %d to %d; skipped them",
                self._tp,
                self.next_fetch_offset,
                end - 1,
            )
            self.next_fetch_offset = end
        while (offset := self.next_fetch_offset) < end:
            self.next_fetch_offset = offset + 1
            place = (self._tp.topic, self._tp.partition, offset, -1, NO_TYPE)
            yield AbsentRecord(*place, None, None, None, -1, -1, (), reason=reason, is_gap=is_gap)


fetcher.MemoryRecords = Batches
fetcher.PartitionRecords = DenseRecords


class DenseConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """An `AIOKafkaConsumer` that delivers one record per offset and does not stop at malformed records."""
