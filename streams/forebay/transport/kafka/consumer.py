"""The one kind of Kafka consumer in forebay: it delivers something for every offset, and no record stops it.

Theory of operation. forebay counts records, so a partition must be dense: `consumed` in the journal says how many
records of a topic were applied, not which. A partition of Kafka is not dense: markers of transactions, aborted records
and compacted ones take offsets of which a client hears nothing. So such an offset, and one whose record cannot be
read, is delivered as an `AbsentRecord` that says why.

aiokafka has no setting for this. Its fetcher looks up the two classes that turn bytes into records in its own module,
so this module replaces both there, for all consumers of the process.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.consumer import fetcher

from forebay.transport.kafka.batches import BatchHead, BatchUnreadable, frames_of, head_of, records_of

logger = logging.getLogger(__name__)

REMOVED = "it was removed from the log"
MARKER = "it is a marker of a transaction"
ABORTED = "its transaction was aborted"
# More than any batch holds, so only compaction or a damaged offset leaves so many. They are passed over, and readers
# that count records then say how many are missing.
GAP_RECORDS_MAX = 1_000_000
NO_TYPE = 0  # Kafka's timestamp type "create time"


@dataclass
class AbsentRecord(ConsumerRecord):  # type: ignore[misc]  # aiokafka ships no types
    """Stands for an offset without a readable record.

    Attributes:
        reason: why there is none, fit for a dead letter.
        is_gap: whether no producer's record is missing: nothing was lost.
    """

    reason: str = ""
    is_gap: bool = False


class Batches:
    """The fetched bytes of a partition as batches. It has the interface of aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._size = len(data)
        self._frames = frames_of(data)
        self._next = next(self._frames, None)

    def size_in_bytes(self) -> int:
        """Return how much was fetched."""
        return self._size

    def has_next(self) -> bool:
        """Whether there is another whole batch."""
        return self._next is not None

    def next_batch(self) -> memoryview | None:
        """Return the next batch as it was fetched."""
        frame, self._next = self._next, next(self._frames, None)
        return frame


class DenseRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """Iterates over the records of a fetched partition: one for each offset from the one that was asked for."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        while (frame := self._records.next_batch()) is not None:
            head = head_of(frame)
            # In format versions 0 and 1 the frame of a compressed batch has the offset of its last record.
            if head.magic > 1:
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
        for record in records:
            # Format versions 0 and 1 do not say where a batch ends.
            if record.offset < self.next_fetch_offset or (record.offset >= head.next_offset and head.magic > 1):
                continue
            yield from self._absent(record.offset, reason or REMOVED, is_gap=not reason)
            self.next_fetch_offset = record.offset + 1
            yield self._consumer_record(self._tp, record)
        yield from self._absent(head.next_offset, reason or REMOVED, is_gap=not reason)

    def _gap(self, frame: memoryview, head: BatchHead) -> str:
        """Why the batch holds no records for this consumer; empty text when it does."""
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
        except Exception:  # noqa: BLE001 - a marker that cannot be read aborts nothing
            return False

    def _absent(self, end: int, reason: str, *, is_gap: bool) -> Iterator[ConsumerRecord]:
        """Deliver an absent record for each offset before `end` that was not delivered."""
        if end - self.next_fetch_offset > GAP_RECORDS_MAX:
            logger.error("%s has no records from %d to %d", self._tp, self.next_fetch_offset, end - 1)
            self.next_fetch_offset = end
        while (offset := self.next_fetch_offset) < end:
            self.next_fetch_offset = offset + 1
            place = (self._tp.topic, self._tp.partition, offset, -1, NO_TYPE)
            yield AbsentRecord(*place, None, None, None, -1, -1, (), reason=reason, is_gap=is_gap)


fetcher.MemoryRecords = Batches
fetcher.PartitionRecords = DenseRecords


class DenseConsumer(AIOKafkaConsumer):  # type: ignore[misc]
    """An `AIOKafkaConsumer` that no record stops: see the module."""
