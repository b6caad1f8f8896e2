"""Readers that follow partitions of Kafka: one consumer a process for all of them, drained at once.

A consumer has one fetch in flight, and leaves out of it what it still holds records of. So whatever came
is moved into the tails' own buffers at once; a buffer that is full pauses its partition alone.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from forebay.transport.base import LogError, Record, Wake
from forebay.transport.kafka.consumer import AbsentRecord, DenseConsumer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.writer import explain

FETCH_WAIT_MS = 20  # how long a fetch may sleep over quiet partitions, and so the most that a new tail waits
POLL_MS = 1_000  # the pump wakes by itself, to see that it should end
BUFFER_RECORDS_MAX = 20_000
RETRY_S = 0.2  # after an error of the broker that passes
AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the last that dates of Python can show
NULL_VALUE = "its value is null"


class KafkaTail:
    """Follows one partition from an offset on."""

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
        """Up to `limit` next records, at once. Raises LogError when the partition cannot be followed any more."""
        if self._tails.failure is not None:
            raise LogError(str(self._tails.failure))
        buffer = self._buffer
        was_full = len(buffer) >= BUFFER_RECORDS_MAX
        taken = [record_of(self._topic, buffer.popleft()) for _ in range(min(limit, len(buffer)))]
        if was_full and len(buffer) < BUFFER_RECORDS_MAX:
            self._tails.resume(self._place)
        return taken

    def close(self) -> None:
        """Stop following."""
        self._buffer.clear()
        self._tails.leave(self._place, self)

    def push(self, messages: list[ConsumerRecord]) -> None:
        """Take in what was fetched and is new to this tail."""
        position = self.position
        fresh = messages if messages[0].offset >= position else [one for one in messages if one.offset >= position]
        if fresh:
            self._buffer.extend(fresh)
            self.position = fresh[-1].offset + 1
            self.wake.set()

    @property
    def full(self) -> bool:
        """Whether it takes no more for now."""
        return len(self._buffer) >= BUFFER_RECORDS_MAX


class KafkaTails:
    """Every tail of a process. `on_hop` hears, by topic, how long records took from producer to here, in seconds."""

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
        """A new tail."""
        place = TopicPartition(self._settings.topic(topic), partition)
        tail = KafkaTail(self, place, topic, offset, wake)
        self._tails.setdefault(place, []).append(tail)
        self._names[place] = topic
        self._assign()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="kafka tails")
        return tail

    def leave(self, place: TopicPartition, tail: KafkaTail) -> None:
        """A tail is closed."""
        tails = self._tails.get(place, [])
        if tail in tails:
            tails.remove(tail)
        if not tails and self._tails.pop(place, None) is not None:
            self._assign()

    def resume(self, place: TopicPartition) -> None:
        """A tail has room again."""
        if self._consumer is not None and not any(tail.full for tail in self._tails.get(place, [])):
            self._consumer.resume(place)

    def lags(self) -> dict[tuple[str, int], int]:
        """How many records each followed partition holds that were not fetched yet."""
        lags = {}
        if self._consumer is not None:
            for place, tails in self._tails.items():
                end = self._consumer.highwater(place)
                if end is not None:
                    lags[self._names[place], place.partition] = max(0, end - min(tail.position for tail in tails))
        return lags

    def fail(self, error: LogError) -> None:
        """Tell every reader at its next look."""
        self.failure = self.failure or error
        for tails in self._tails.values():
            for tail in tails:
                tail.wake.set()

    async def close(self) -> None:
        """Stop fetching."""
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
        # A new assignment forgets the positions of the old one.
        consumer.assign(list(self._tails))
        for place, tails in self._tails.items():
            consumer.seek(place, min(tail.position for tail in tails))

    async def _run(self) -> None:
        try:
            consumer = await self._started()
            self._consumer = consumer  # not before: one that is still starting cannot seek
            self._assign()
            while True:
                await self._fetch(consumer)
        except Exception as error:  # whatever ends the pump, a reader must not wait for ever
            self.fail(LogError(f"Kafka cannot be read: {explain(error)}"))
            raise

    async def _started(self) -> DenseConsumer:
        """Start a consumer, again while the broker is away. Raises KafkaError."""
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
            reason = "removed by retention before they were read, or lost by the broker"
            self.fail(LogError(f"records are not in the log ({reason}): {places}"))
            await asyncio.Event().wait()
            return
        except KafkaError as error:
            if not getattr(error, "retriable", False):
                raise
            await asyncio.sleep(RETRY_S)
            return
        now_s = time.time()
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
    """Return a fetched message as the port has it, whatever its producer wrote; it never raises."""
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
    """Return headers as text: a null value is empty, bytes that are not UTF-8 are escaped, the last of a name wins."""
    if not headers:
        return None
    return {name: (value or b"").decode(errors="backslashreplace") for name, value in headers}
