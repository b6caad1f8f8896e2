"""`Log` on Kafka or Redpanda: a producer, one for journals, a consumer for all tails, one for reads.

Delivery is at least once and in order within a partition; the producer is idempotent, so a retry of the
client does not write twice. While the broker is away, records wait: an idempotent producer tries again until the
broker takes them or refuses them. A refusal ends the log: whoever wrote must recover from what the broker has.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from forebay.events.topics import DECISIONS
from forebay.transport.base import Draft, LogError, Record, Wake
from forebay.transport.kafka.reader import KafkaReader
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.tail import RETRY_S, KafkaTail, KafkaTails
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.writer import (
    BATCH_BYTES_MAX,
    HEADROOM_BYTES,
    RECORD_BYTES_MAX,
    KafkaWriter,
    Waiter,
    explain,
)

logger = logging.getLogger(__name__)

DELIVERY_MS = 30_000  # of one attempt; a broker may elect a leader or restart meanwhile
FLUSH_S = 10.0  # a log that is closed waits this long for acknowledgements
DISCONNECT_S = 3.0
METADATA_MS = 30_000  # topics grow: this is how soon a client hears of it


class KafkaLog:
    """`Log` on Kafka. Used from the event loop that opened it."""

    def __init__(self, settings: KafkaSettings, producer: AIOKafkaProducer) -> None:
        self.settings = settings
        self.failure: LogError | None = None
        self.on_failure: Callable[[LogError], None] | None = None
        self.on_hop: Callable[[str, float], None] | None = None
        self._producers = [producer]
        self._starting = asyncio.Lock()
        self._writer = KafkaWriter(self._producer_of, settings.topic, self._fail)
        self._tails = KafkaTails(settings, self._hop)
        self._reader = KafkaReader(settings)
        self._closed = False

    @classmethod
    async def open(cls, settings: KafkaSettings) -> Self:
        """Connect. Raises KafkaUnusable when there is no broker or it does not let us in."""
        try:
            producer = await _started(settings)
        except (KafkaError, OSError, TimeoutError) as error:
            raise unreachable(settings, error) from error
        return cls(settings, producer)

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Append and wait for the broker's acknowledgement; see `Log.append`.

        Raises ValueError for a record that no topic takes, and then nothing is appended.
        """
        self._require_open()
        if not drafts:
            return []
        waiter = Waiter(len(drafts), asyncio.get_running_loop())
        self._writer.write(drafts, waiter)
        return await waiter.future

    def append_soon(self, drafts: Sequence[Draft]) -> None:
        """Append without waiting. A failure ends the log: `append`, `failure` and `on_failure` tell."""
        self._require_open()
        self._writer.write(drafts, None)

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> KafkaTail:
        """Follow a partition from `offset`."""
        self._require_open()
        return self._tails.follow(topic, partition, offset, wake)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Up to `limit` records from `offset` on. Raises LogError also for records that retention removed."""
        return await self._reader.read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        """The oldest offset that the topic still holds. Raises LogError."""
        return await self._reader.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        """The offset that the next record will get. Raises LogError."""
        return await self._reader.end(topic, partition)

    def lags(self) -> dict[tuple[str, int], int]:
        """Records that the broker has and this process's tails do not yet, by (topic, partition)."""
        return self._tails.lags()

    @property
    def refused(self) -> int:
        """Records for partitions that do not exist."""
        return self._writer.refused

    async def close(self) -> None:
        """Write what is in line, and disconnect; without an answer of the broker, give up after a bounded time."""
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._writer.flush()
            except TimeoutError:
                unwritten = self._writer.unacknowledged_bytes
                logger.warning("%d bytes of records are not written: Kafka did not acknowledge them", unwritten)
        await self._writer.cancel()
        stops = [self._tails.close(), self._reader.close(), *(producer.stop() for producer in self._producers)]
        stopping = [asyncio.ensure_future(stop) for stop in stops]
        _, hanging = await asyncio.wait(stopping, timeout=DISCONNECT_S)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)

    async def _producer_of(self, topic: str) -> AIOKafkaProducer:
        """A producer has one request in flight; journals have their own, so that no decision waits behind work."""
        if topic != DECISIONS.name:
            return self._producers[0]
        async with self._starting:
            while len(self._producers) == 1:
                try:
                    self._producers.append(await _started(self.settings))
                except (KafkaError, OSError) as error:  # the broker answered before, so it is away and comes back
                    logger.warning("no producer for %s, trying again: %s", topic, explain(error))
                    await asyncio.sleep(RETRY_S)
            return self._producers[1]

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
        self._writer.fail(error)
        self._tails.fail(error)
        if self.on_failure is not None:
            self.on_failure(error)

    def _hop(self, topic: str, seconds: float) -> None:
        if self.on_hop is not None:
            self.on_hop(topic, seconds)


async def _started(settings: KafkaSettings) -> AIOKafkaProducer:
    """A producer that is connected. Raises KafkaError, OSError or TimeoutError."""
    options = settings.client_options()
    options["request_timeout_ms"] = DELIVERY_MS
    producer = AIOKafkaProducer(
        **options,
        enable_idempotence=True,
        acks="all",
        linger_ms=0,
        # aiokafka's lz4 is the slow, high compression one: 15 times the CPU.
        compression_type="snappy",
        max_batch_size=BATCH_BYTES_MAX,
        max_request_size=RECORD_BYTES_MAX + HEADROOM_BYTES,
        metadata_max_age_ms=METADATA_MS,
    )
    async with asyncio.timeout(DELIVERY_MS / 1000):
        await start_whole(producer.start, producer.stop)
    return producer
