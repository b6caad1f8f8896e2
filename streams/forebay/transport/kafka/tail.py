"""Follow Kafka partitions, with one `Poller` for all tails of the process.

A full buffer pauses only its own partition.
"""

from collections import deque
from collections.abc import Callable, Sequence

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from forebay import runtime
from forebay.transport.base import LogError, Record, Wake
from forebay.transport.kafka.consumer import AbsentRecord
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.poll import Poller
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.wire import Wire

BUFFER_RECORDS_MAX = 20_000
AT_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the maximum of Python's datetime
LOG_APPEND_TIME = 1  # Kafka's timestamp type of records that the broker stamped
NULL_VALUE = "its value is null"


class KafkaTail:
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
        if self._tails.failure is not None:
            raise LogError(str(self._tails.failure))
        buffer = self._buffer
        was_full = len(buffer) >= BUFFER_RECORDS_MAX
        taken = [record_of(self._topic, buffer.popleft()) for _ in range(min(limit, len(buffer)))]
        if was_full and len(buffer) < BUFFER_RECORDS_MAX:
            self._tails.resume(self._place)
        return taken

    def close(self) -> None:
        self._buffer.clear()
        self._tails.leave(self._place, self)

    def push(self, messages: list[ConsumerRecord]) -> None:
        position = self.position
        fresh = messages if messages[0].offset >= position else [item for item in messages if item.offset >= position]
        if fresh:
            self._buffer.extend(fresh)
            self.position = fresh[-1].offset + 1
            self.wake.set()

    @property
    def full(self) -> bool:
        return len(self._buffer) >= BUFFER_RECORDS_MAX


class KafkaTails:
    """All tails of a process. `failure` is the error that ended all of them, None while they work.

    `on_hop` is called with a topic and the seconds from the append of a record to its arrival in this process.
    """

    def __init__(self, settings: KafkaSettings, wire: Wire, on_hop: Callable[[str, float], None]) -> None:
        self.failure: LogError | None = None
        self._settings = settings
        self._on_hop = on_hop
        self._poller = Poller(wire, self._push, self._end)
        self._tails: dict[TopicPartition, list[KafkaTail]] = {}
        self._names: dict[TopicPartition, str] = {}

    def follow(self, topic: str, partition: int, offset: int, wake: Wake) -> KafkaTail:
        place = TopicPartition(self._settings.topic(topic), partition)
        tail = KafkaTail(self, place, topic, offset, wake)
        tails = self._tails.setdefault(place, [])
        tails.append(tail)
        self._names[place] = topic
        self._poller.seek(place, min(tail.position for tail in tails))
        return tail

    def leave(self, place: TopicPartition, tail: KafkaTail) -> None:
        tails = self._tails.get(place, [])
        if tail in tails:
            tails.remove(tail)
            if tails:
                self.resume(place)
            else:
                del self._tails[place]
                self._poller.remove(place)

    def resume(self, place: TopicPartition) -> None:
        """Resume polling a partition if none of its tails is full."""
        if not any(tail.full for tail in self._tails.get(place, [])):
            self._poller.resume(place)

    def lags(self) -> dict[tuple[str, int], int]:
        """Return the number of records that the slowest tail has not fetched yet, by (topic, partition)."""
        lags = {}
        for place, tails in self._tails.items():
            end = self._poller.ends.get(place)
            if end is not None:
                lags[self._names[place], place.partition] = max(0, end - min(tail.position for tail in tails))
        return lags

    def fail(self, error: LogError) -> None:
        self.failure = self.failure or error
        for tails in self._tails.values():
            for tail in tails:
                tail.wake.set()

    async def close(self) -> None:
        await self._poller.stop()

    def _push(self, place: TopicPartition, messages: list[ConsumerRecord]) -> None:
        for tail in self._tails[place]:
            tail.push(messages)
            if tail.full:
                self._poller.pause(place)
        if 0 < messages[-1].timestamp <= AT_MS_MAX:
            self._on_hop(self._names[place], runtime.wall_s() - messages[-1].timestamp / 1000)

    def _end(self, error: Exception) -> None:
        if isinstance(error, OffsetOutOfRangeError):
            places = ", ".join(f"{self._names.get(place, place)}@{offset}" for place, offset in error.args[0].items())
            reason = "retention removed them before they were read, or the broker lost them"
            self.fail(LogError(f"records are missing from the log ({reason}): {places}; check the retention"))
        else:
            self.fail(LogError(f"Kafka cannot be read: {explain(error)}"))


def record_of(topic: str, message: ConsumerRecord) -> Record:
    """Return a fetched message as a `Record`. Never raises, whatever the producer wrote."""
    fault, value = None, message.value
    if isinstance(message, AbsentRecord):
        fault = message.reason
    elif value is None:
        fault = NULL_VALUE
    at_us = min(max(message.timestamp, 0), AT_MS_MAX) * 1000
    headers, is_stamped = headers_of(message.headers), getattr(message, "timestamp_type", 0) == LOG_APPEND_TIME
    return Record(
        topic, message.partition, message.offset, at_us, value or b"", message.key, headers, fault, is_stamped
    )


def headers_of(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, str] | None:
    """Return record headers as text.

    A null value becomes an empty string, and bytes that are not UTF-8 are escaped. Of several headers with the same
    name, the last one wins.
    """
    if not headers:
        return None
    return {name: (value or b"").decode(errors="backslashreplace") for name, value in headers}
