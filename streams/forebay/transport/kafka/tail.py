"""Follow Kafka partitions with one consumer for all tails of the process.

A consumer has one fetch in flight, and does not fetch partitions of which it still holds records. Fetched records are
therefore moved into the buffers of the tails immediately. A full buffer pauses only its own partition.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from forebay import runtime
from forebay.transport.base import LogError, Record, Wake
from forebay.transport.kafka.consumer import AbsentRecord, DenseConsumer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.writer import explain

FETCH_WAIT_MS = 20  # maximum time that the broker delays a fetch without new records, and with it a new tail
POLL_MS = 1_000  # the fetch loop wakes after this time, to notice that it should end
BUFFER_RECORDS_MAX = 20_000
RETRY_S = 0.2  # pause after a transient error of the broker
AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the maximum of Python's datetime
NULL_VALUE = "its value is null"


class KafkaTail:
    """Tail of one partition from a given offset.

    Attributes:
        position: Offset of the next record to buffer.
        wake: Set whenever records become ready.
    """

    def __init__(self, tails: "KafkaTails", place: TopicPartition, topic: str, offset: int, wake: Wake) -> None:
        self.position = offset
        self.wake = wake
        self._tails = tails
        self._place = place
        self._topic = topic
        self._buffer: deque[ConsumerRecord] = deque()

    def __len__(self) -> int:
        if self._tails.failure is not None:
            return 1
        return len(self._buffer)

    def take(self, limit: int) -> list[Record]:
        """Return up to `limit` next records without waiting. Raises LogError if the tail failed."""
        if self._tails.failure is not None:
            raise LogError(str(self._tails.failure))
        buffer = self._buffer
        was_full = len(buffer) >= BUFFER_RECORDS_MAX
        taken = [record_of(self._topic, buffer.popleft()) for _ in range(min(limit, len(buffer)))]
        if was_full and len(buffer) < BUFFER_RECORDS_MAX:
            self._tails.resume(self._place)
        return taken

    def close(self) -> None:
        """Stop following the partition."""
        self._buffer.clear()
        self._tails.leave(self._place, self)

    def push(self, messages: list[ConsumerRecord]) -> None:
        """Buffer the fetched records that this tail does not have yet."""
        position = self.position
        fresh = messages if messages[0].offset >= position else [item for item in messages if item.offset >= position]
        if fresh:
            self._buffer.extend(fresh)
            self.position = fresh[-1].offset + 1
            self.wake.set()

    @property
    def full(self) -> bool:
        """Whether the buffer is full."""
        return len(self._buffer) >= BUFFER_RECORDS_MAX


class KafkaTails:
    """All tails of a process, fed by one consumer.

    `on_hop` is called with a topic and the seconds from the append of a record to its arrival in this process.

    Attributes:
        failure: Error that ended all tails, None while they work.
    """

    def __init__(self, settings: KafkaSettings, on_hop: Callable[[str, float], None]) -> None:
        self.failure: LogError | None = None
        self._settings = settings
        self._on_hop = on_hop
        self._consumer: DenseConsumer | None = None
        self._tails: dict[TopicPartition, list[KafkaTail]] = {}
        self._names: dict[TopicPartition, str] = {}
        self._pump: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def follow(self, topic: str, partition: int, offset: int, wake: Wake) -> KafkaTail:
        """Return a new tail of a partition from `offset`."""
        place = TopicPartition(self._settings.topic(topic), partition)
        tail = KafkaTail(self, place, topic, offset, wake)
        self._tails.setdefault(place, []).append(tail)
        self._names[place] = topic
        self._assign()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="kafka tails")
        return tail

    def leave(self, place: TopicPartition, tail: KafkaTail) -> None:
        """Remove a closed tail."""
        tails = self._tails.get(place, [])
        if tail in tails:
            tails.remove(tail)
        if not tails and self._tails.pop(place, None) is not None:
            self._assign()

    def resume(self, place: TopicPartition) -> None:
        """Resume fetching a partition if none of its tails is full."""
        if self._consumer is not None and not any(tail.full for tail in self._tails.get(place, [])):
            self._consumer.resume(place)

    def lags(self) -> dict[tuple[str, int], int]:
        """Return the number of records that the slowest tail has not fetched yet, by (topic, partition)."""
        lags = {}
        if self._consumer is not None:
            for place, tails in self._tails.items():
                end = self._consumer.highwater(place)
                if end is not None:
                    lags[self._names[place], place.partition] = max(0, end - min(tail.position for tail in tails))
        return lags

    def fail(self, error: LogError) -> None:
        """Fail all tails: their next `take` raises the error."""
        self.failure = self.failure or error
        for tails in self._tails.values():
            for tail in tails:
                tail.wake.set()

    async def close(self) -> None:
        """Stop fetching for all tails."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        if self._consumer is not None:
            await self._consumer.stop()

    def _assign(self) -> None:
        self._changed.set()
        consumer = self._consumer
        if consumer is None:
            return
        # `assign` resets the positions, so seek again.
        consumer.assign(list(self._tails))
        for place, tails in self._tails.items():
            consumer.seek(place, min(tail.position for tail in tails))

    async def _run(self) -> None:
        try:
            consumer = await self._started()
            self._consumer = consumer  # set after the start, because a starting consumer cannot seek
            self._assign()
            while True:
                await self._fetch(consumer)
        except Exception as error:  # readers must not wait for ever, whatever error ends this loop
            self.fail(LogError(f"Kafka cannot be read: {explain(error)}"))
            raise

    async def _started(self) -> DenseConsumer:
        """Start a consumer, retrying while the broker is unreachable.

        Raises KafkaError if Kafka reports an error that a retry cannot fix.
        """
        while True:
            consumer = DenseConsumer(
                **self._settings.client_options(),
                fetch_max_wait_ms=FETCH_WAIT_MS,
                auto_offset_reset="none",
                enable_auto_commit=False,
            )
            try:
                await start_whole(consumer.start, consumer.stop)
            except KafkaError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return consumer

    async def _fetch(self, consumer: DenseConsumer) -> None:
        if not self._tails:
            self._changed.clear()
            await self._changed.wait()
        try:
            fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=BUFFER_RECORDS_MAX)
        except OffsetOutOfRangeError as error:
            places = ", ".join(f"{self._names.get(place, place)}@{offset}" for place, offset in error.args[0].items())
            reason = "retention removed them before they were read, or the broker lost them"
            self.fail(LogError(f"records are missing from the log ({reason}): {places}; check the retention"))
            await asyncio.Event().wait()
            return
        except KafkaError as error:
            if not getattr(error, "retriable", False):
                raise
            await asyncio.sleep(RETRY_S)
            return
        now_s = runtime.wall_s()
        for place, messages in fetched.items():
            if not messages or place not in self._tails:
                continue
            for tail in self._tails[place]:
                tail.push(messages)
                if tail.full:
                    consumer.pause(place)
            if 0 < messages[-1].timestamp <= AT_MS_MAX:
                self._on_hop(self._names[place], now_s - messages[-1].timestamp / 1000)


def record_of(topic: str, message: ConsumerRecord) -> Record:
    """Return a fetched message as a `Record`. Never raises, whatever the producer wrote."""
    fault, value = None, message.value
    if isinstance(message, AbsentRecord):
        fault = message.reason
    elif value is None:
        fault = NULL_VALUE
    at_us = min(max(message.timestamp, 0), AT_MS_MAX) * 1000
    return Record(
        topic, message.partition, message.offset, at_us, value or b"", message.key, headers_of(message.headers), fault
    )


def headers_of(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, str] | None:
    """Return record headers as text, or None if there are none.

    A null value becomes an empty string, and bytes that are not UTF-8 are escaped. Of several headers with the same
    name, the last one wins.
    """
    if not headers:
        return None
    return {name: (value or b"").decode(errors="backslashreplace") for name, value in headers}
