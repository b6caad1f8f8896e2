"""Implement the port `Log` on Kafka or Redpanda.

A log has one producer for journals and one for all other topics, one poller for all tails, and a consumer for reads.
Delivery is at least once and in order within a partition. The producers are idempotent, so a retry of the client does
not write a record twice. While the broker is unreachable, the producer retries until the broker accepts or rejects the
records. A rejection fails the log: its user must recover from the records that the broker has.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay.events.topics import DECISIONS
from forebay.runtime.metrics import counter, gauge
from forebay.transport.base import Draft, LogError, Record, Wake
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.poll import RETRY_S
from forebay.transport.kafka.producer import Producer
from forebay.transport.kafka.reader import KafkaReader
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import stop_within
from forebay.transport.kafka.tail import KafkaTail, KafkaTails
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.wire import Channel, Wire
from forebay.transport.kafka.writer import KafkaWriter, LenientWaiter, Waiter

logger = logging.getLogger(__name__)

FLUSH_S = 10.0  # time that closing the log waits for acknowledgements
DISCONNECT_S = 3.0


class KafkaLog:
    """The port `Log` on Kafka, used from the event loop that opened it.

    `on_hop` is called with a topic and the seconds from the append of a record to its arrival in this process.
    """

    def __init__(self, settings: KafkaSettings, wire: Wire, producer: Producer) -> None:
        self.settings = settings
        self.failure: LogError | None = None
        self.on_failure: Callable[[LogError], None] | None = None
        self.on_hop: Callable[[str, float], None] | None = None
        self._wire = wire
        self._producers = [producer]
        self._starting = asyncio.Lock()
        self._writer = KafkaWriter(self._producer_of, settings.topic, self._fail)
        self._following = Following(self._write, self._write_followers)
        self._tails = KafkaTails(settings, wire, self._hop)
        self._reader = KafkaReader(settings)
        self._closed = False

    @classmethod
    async def open(cls, settings: KafkaSettings) -> Self:
        """Connect to the broker. Raises KafkaUnusable if the broker is unreachable or rejects the connection."""
        wire = Wire(settings)
        producer = Producer(wire, Channel.APPENDS)
        try:
            await wire.start()
            await producer.start()
        except BaseException as error:
            await wire.close()
            if isinstance(error, KafkaError | OSError | TimeoutError):
                raise unreachable(settings, error) from error
            raise
        return cls(settings, wire, producer)

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Append records; see `Log.append`. Raises ValueError, and appends nothing, if a record is too large."""
        self._require_open()
        if not drafts:
            return []
        waiter = Waiter(len(drafts), asyncio.get_running_loop())
        self._writer.write(drafts, waiter)
        return await waiter.future

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        """Append without waiting; see `Log.append_soon`. A failure also shows in `on_failure`.

        `then` is appended even if `drafts` are dropped because their partition does not exist. Nothing is appended if
        ValueError (a record is too large) or LogFull (too many bytes wait for the broker) is raised.
        """
        self._require_open()
        reserved = self._writer.reserve(then)
        try:
            self._following.append(drafts, then)
        except (LogError, ValueError):
            self._writer.release(reserved)
            raise

    async def flush(self) -> None:
        """Wait until all records appended so far are acknowledged or dropped. Raises LogError if Kafka rejects one."""
        self._require_open()
        await self._flush()
        if self.failure is not None:
            raise LogError(str(self.failure))

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> KafkaTail:
        self._require_open()
        return self._tails.follow(topic, partition, offset, wake)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        return await self._reader.read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        return await self._reader.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        return await self._reader.end(topic, partition)

    def lags(self) -> dict[tuple[str, int], int]:
        """Return the number of records not fetched yet, by (topic, partition)."""
        return self._tails.lags()

    @property
    def refused(self) -> int:
        """Number of records dropped because their partition does not exist."""
        return self._writer.refused

    async def close(self) -> None:
        """Write pending records and disconnect. Give up after `FLUSH_S` if the broker does not respond."""
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._flush()
            except TimeoutError:
                unwritten = self._writer.buffered
                logger.warning("Kafka did not acknowledge %d bytes of records, which may be lost", unwritten)
        await self._writer.cancel()
        stops = [self._tails.close(), self._reader.close(), *(producer.stop() for producer in self._producers)]
        await stop_within(DISCONNECT_S, *stops)
        # A connection closes once its last bytes are sent, so it stays open if the broker does not read them.
        await stop_within(DISCONNECT_S, self._wire.close())

    async def _producer_of(self, topic: str) -> Producer:
        """Return the producer of a topic. Journals have their own, because a producer has one request in flight."""
        if topic != DECISIONS.name:
            return self._producers[0]
        async with self._starting:
            while len(self._producers) == 1:
                producer = Producer(self._wire, Channel.JOURNAL)
                try:
                    await producer.start()
                    self._producers.append(producer)
                except (KafkaError, OSError) as error:  # the broker was reachable before, so the error is transient
                    logger.warning("cannot start a Kafka producer for %s, retrying: %s", topic, explain(error))
                    await asyncio.sleep(RETRY_S)
            return self._producers[1]

    async def _flush(self) -> None:
        await self._writer.flush()
        while self._following:
            await asyncio.sleep(0.001)  # an acknowledgement is passed on in the next iteration of the event loop
            await self._writer.flush()

    def _write(self, drafts: Sequence[Draft], on_durable: Callable[[], None] | None) -> None:
        if self.failure is not None:
            return
        if on_durable is None:
            self._writer.write(drafts, None)
            return
        # If the followers of a dropped record waited for ever, later ones would, too.
        waiter = LenientWaiter(len(drafts), asyncio.get_running_loop())

        def done(future: "asyncio.Future[list[int]]") -> None:
            if not future.cancelled() and future.exception() is None:
                on_durable()

        self._writer.write(drafts, waiter)
        waiter.future.add_done_callback(done)

    def _write_followers(self, drafts: Sequence[Draft]) -> None:
        if self.failure is None:
            self._writer.write_reserved(drafts, None)

    def _require_open(self) -> None:
        if self.failure is not None:
            raise LogError(str(self.failure))
        if self._closed:
            raise LogError("the log is closed")

    def _fail(self, error: LogError) -> None:
        if self.failure is not None:
            return
        logger.error("%s", error)
        self.failure = error
        self._following.clear()
        self._writer.fail(error)
        self._tails.fail(error)
        if self.on_failure is not None:
            self.on_failure(error)

    def _hop(self, topic: str, seconds: float) -> None:
        if self.on_hop is not None:
            self.on_hop(topic, seconds)


Write = Callable[[Sequence[Draft], Callable[[], None] | None], None]
"""Appends drafts without waiting, and calls the second argument later, once all of them are durable or were dropped.

It never calls that argument if the log fails."""
WriteFollowers = Callable[[Sequence[Draft]], None]
"""Appends drafts that waited. It must not raise, because no caller waits for them any more."""


class _Entry:
    __slots__ = ("drafts", "is_due")

    def __init__(self, drafts: Sequence[Draft], *, is_due: bool) -> None:
        self.drafts = drafts
        self.is_due = is_due


class Following:
    """Queue of records that wait until earlier records are durable. They are appended in the order of the calls."""

    def __init__(self, write: Write, write_followers: WriteFollowers) -> None:
        self._write = write
        self._write_followers = write_followers
        self._waiting: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, drafts: Sequence[Draft], then: Sequence[Draft]) -> None:
        """Append `drafts` now, and `then` once they and the `then` of all earlier calls are durable or appended."""
        if not then:
            self._write(drafts, None)
            return
        entry = _Entry(then, is_due=not drafts)
        if drafts:
            self._write(drafts, lambda: self._on_durable(entry))
        self._waiting.append(entry)  # after the write, which may raise
        self._append_due()

    def clear(self) -> None:
        self._waiting.clear()

    def _on_durable(self, entry: _Entry) -> None:
        entry.is_due = True
        self._append_due()

    def _append_due(self) -> None:
        while self._waiting and self._waiting[0].is_due:
            self._write_followers(self._waiting.popleft().drafts)


HOP_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class KafkaMetrics(Collector):
    """Prometheus metrics of one Kafka log. The constructor registers them in `registry` and sets `log.on_hop`."""

    def __init__(self, log: KafkaLog, registry: CollectorRegistry) -> None:
        self._log = log
        self._hops = Histogram(
            "forebay_hop_seconds",
            "seconds from the append of a record to its arrival in this process; the newest record of each fetch",
            ["topic"],
            buckets=HOP_BUCKETS_S,
            registry=registry,
        )
        self._skewed = Counter(
            "forebay_hop_negative",
            "records whose append time is later than their arrival, because the clocks of two machines differ",
            ["topic"],
            registry=registry,
        )
        log.on_hop = self._on_hop
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        lags = {(topic, str(partition)): records for (topic, partition), records in sorted(self._log.lags().items())}
        text = "records not fetched yet, by partition"
        yield gauge("forebay_kafka_consumer_lag", text, lags, "topic", "partition")
        text = "records dropped because their partition does not exist"
        yield counter("forebay_kafka_refused_records", text, self._log.refused)

    def _on_hop(self, topic: str, seconds: float) -> None:
        # Kafka's timestamps are whole milliseconds, rounded down.
        if seconds < -0.001:
            self._skewed.labels(topic).inc()
        self._hops.labels(topic).observe(max(0.0, seconds))
