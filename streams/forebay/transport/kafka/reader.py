"""Read Kafka partitions at any offset, for recovery and replay, with one consumer for all partitions.

The consumer pauses all partitions except the one being read. Prefetched records are kept, so reading several partitions
page by page does not fetch a record twice.
"""

import asyncio

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS, TOKENS
from forebay.transport.base import LogError, LogUnavailable, Record, RecordsRemoved
from forebay.transport.kafka.consumer import DenseConsumer
from forebay.transport.kafka.errors import explain, log_error
from forebay.transport.kafka.settings import REQUEST_MS, KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.tail import record_of

POLL_MS = 100  # between two checks whether compaction removed the remaining records
FETCH_BYTES = 4 << 20
# After the newest records of a partition, aiokafka fetches again. Until the broker has answered that, it gets no fetch
# for another partition.
FETCH_WAIT_MS = 10
TRIES_MAX = REQUEST_MS // POLL_MS


class KafkaReader:
    """Reader of records at any offset. Concurrent calls are serialised."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._consumer: DenseConsumer | None = None
        self._closed = False
        self._topics = {settings.topic(topic.name) for topic in (*INPUTS, DECISIONS, SNAPSHOTS, TOKENS)}
        self._positions: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records from `offset`, none at the end. Raises LogError."""
        place = TopicPartition(self._settings.topic(topic), partition)
        if limit <= 0:
            return []
        async with self._turn:
            try:
                consumer = await self._started()
                await _know(consumer, place)
                if offset >= self._ends.get(place, 0):
                    self._ends[place] = (await consumer.end_offsets([place]))[place]
                if offset >= self._ends[place]:
                    return []
                return await self._fetch(consumer, place, topic, offset, limit)
            except OffsetOutOfRangeError as error:
                text = f"{topic}/{partition} no longer holds offset {offset}: check the retention of the topic"
                raise RecordsRemoved(text) from error
            except (KafkaError, OSError) as error:
                text = f"{topic}/{partition} cannot be read from Kafka: {explain(error)}"
                raise log_error(error, text) from error

    async def end(self, topic: str, partition: int) -> int:
        return await self._offset(topic, partition, "end", "end_offsets")

    async def begin(self, topic: str, partition: int) -> int:
        return await self._offset(topic, partition, "first", "beginning_offsets")

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._consumer is not None:
                await self._consumer.stop()

    async def _offset(self, topic: str, partition: int, name: str, query: str) -> int:
        place = TopicPartition(self._settings.topic(topic), partition)
        try:
            consumer = await self._started()
            await _know(consumer, place)
            found: dict[TopicPartition, int] = await getattr(consumer, query)([place])
        except (KafkaError, OSError) as error:
            text = f"the {name} offset of {topic}/{partition} cannot be read from Kafka: {explain(error)}"
            raise log_error(error, text) from error
        return found[place]

    async def _started(self) -> DenseConsumer:
        async with self._starting:
            if self._closed:
                raise LogError("the log is closed")
            if self._consumer is None:
                consumer = DenseConsumer(
                    **self._settings.client_options(),
                    max_partition_fetch_bytes=FETCH_BYTES,
                    fetch_max_wait_ms=FETCH_WAIT_MS,
                    auto_offset_reset="none",
                    enable_auto_commit=False,
                )
                await start_whole(consumer.start, consumer.stop)
                self._keep_topics(consumer)
                # aiokafka delays fetches by 100 ms while it keeps records of another partition, so that a slow user
                # does not prefetch everything. Here only one partition is fetched at a time. There is no setting.
                consumer._fetcher._prefetch_backoff = 0.0
                self._consumer = consumer
            return self._consumer

    def _keep_topics(self, consumer: DenseConsumer) -> None:
        """Let the client keep the metadata of all topics that are read.

        aiokafka keeps only those of assigned partitions. It takes a quarter of a second to find the leader of another
        one, and a new owner reads the ends of all of its input topics.
        """
        consumer._client.set_topics(self._topics)

    async def _fetch(
        self, consumer: DenseConsumer, place: TopicPartition, topic: str, offset: int, limit: int
    ) -> list[Record]:
        if place not in consumer.assignment():
            consumer.assign([*consumer.assignment(), place])
            self._topics.add(place.topic)
            self._keep_topics(consumer)
            consumer.pause(*consumer.assignment())
            self._positions.clear()
        if self._positions.get(place) != offset:
            consumer.seek(place, offset)
        consumer.resume(place)
        try:
            for _ in range(TRIES_MAX):
                fetched = await consumer.getmany(place, timeout_ms=POLL_MS, max_records=limit)
                messages = fetched.get(place, [])
                if messages:
                    self._positions[place] = messages[-1].offset + 1
                    return [record_of(topic, message) for message in messages]
                if await consumer.position(place) >= self._ends[place]:
                    return []  # compaction may have removed the last records of the partition
        finally:
            consumer.pause(place)
        raise LogUnavailable(
            f"{topic}/{place.partition} returned no record at offset {offset} for {REQUEST_MS} ms; check the broker"
        )


async def _know(consumer: DenseConsumer, place: TopicPartition) -> None:
    """Fetch the metadata of a topic, because aiokafka would wait for `RETRY_BACKOFF_MS` if a request needs it first."""
    known = consumer.partitions_for_topic(place.topic)
    if not known:
        await consumer._client.add_topic(place.topic)
    elif place.partition not in known:  # a router may have added it
        await consumer._client.force_metadata_update()
