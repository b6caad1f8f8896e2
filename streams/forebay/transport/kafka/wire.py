"""Produce and fetch requests of the Kafka protocol, on the connections of aiokafka's client.

aiokafka's producer and consumer need several tasks and timers per request: half of the CPU time of a hop and of its
latency. So tails and appends send their requests here. aiokafka connects, authenticates, refreshes metadata, and
encodes and decodes the requests. ADR 0024 has the measurements.

Format: https://kafka.apache.org/protocol, requests Produce, Fetch and InitProducerId.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    KafkaError,
    NodeNotReadyError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from forebay import runtime
from forebay.transport.kafka.settings import REQUEST_MS, RETRY_BACKOFF_MS, KafkaSettings
from forebay.transport.kafka.start import start_whole

ALL_REPLICAS = -1
FETCH_BYTES_MAX = 50 << 20  # of one response
PARTITION_BYTES_MAX = 1 << 20  # of one partition in a response, unless its first batch is larger
METADATA_MS = 30_000  # added partitions and leaders that moved are noticed within this time


class Channel(Enum):
    """A connection per broker. A broker answers the requests of a connection one after the other."""

    JOURNAL = "journal"
    APPENDS = "appends"
    POLL = "poll"
    CATCH_UP = "catch-up"


class ProducerId(NamedTuple):
    """Identity by which the broker recognises repeated batches of a producer."""

    number: int
    epoch: int


class Fetched(NamedTuple):
    """What a broker returned for one partition.

    Attributes:
        place: The partition.
        error: Why it returned no records, None without an error.
        end: Offset of the next record to be appended, -1 after an error.
        data: Record batches, of which the last one may be truncated; empty without new records.
    """

    place: TopicPartition
    error: Exception | None
    end: int
    data: bytes


class Wire:
    """Connections of a process to the brokers."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._client = AIOKafkaClient(**settings.client_options(), metadata_max_age_ms=METADATA_MS)

    async def start(self) -> None:
        """Connect. Raises KafkaError, OSError or TimeoutError."""
        async with asyncio.timeout(REQUEST_MS / 1000):
            await start_whole(self._client.bootstrap, self._client.close)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()

    def leader(self, place: TopicPartition) -> int | None:
        """Return the broker that leads a partition, None if no leader is known."""
        leader: int | None = self._client.cluster.leader_for_partition(place)
        return None if leader == -1 else leader

    async def partitions(self, topic: str) -> set[int]:
        """Return the partitions of a topic. Waits while no broker responds.

        Raises:
            KafkaError: The brokers have not known the topic for `REQUEST_MS`, or it may not be described.
        """
        cluster, until_s = self._client.cluster, math.inf
        while (known := cluster.partitions_for_topic(topic)) is None:
            if topic in cluster.unauthorized_topics:
                raise TopicAuthorizationFailedError(topic)
            if runtime.monotonic_s() >= until_s:
                raise UnknownTopicOrPartitionError(topic)
            if until_s < math.inf:
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)
            self._client.add_topic(topic)
            if not await self._client.force_metadata_update():
                until_s = math.inf
                await asyncio.sleep(RETRY_BACKOFF_MS / 1000)
            elif until_s == math.inf:
                until_s = runtime.monotonic_s() + REQUEST_MS / 1000
        partitions: set[int] = known
        return partitions

    async def refresh(self, topics: Sequence[str] = ()) -> None:
        """Fetch the metadata of all topics in use, and of `topics`. Raises nothing if no broker responds.

        Raises:
            TopicAuthorizationFailedError: One of `topics` may not be described.
        """
        for topic in topics:
            self._client.add_topic(topic)
        await self._client.force_metadata_update()
        denied = self._client.cluster.unauthorized_topics.intersection(topics)
        if denied:
            raise TopicAuthorizationFailedError(", ".join(sorted(denied)))

    async def producer_id(self) -> ProducerId:
        """Return the id for a new producer. Raises KafkaError."""
        response = await self._client.send(self._client.get_random_node(), InitProducerIdRequest(None, -1))
        if response.error_code:
            raise for_code(response.error_code)()
        return ProducerId(response.producer_id, response.producer_epoch)

    async def produce(
        self, node: int, channel: Channel, batches: Mapping[TopicPartition, bytes]
    ) -> dict[TopicPartition, int | KafkaError]:
        """Append one batch per partition.

        Returns:
            For each partition the offset of the first record, or the error of the broker.

        Raises:
            KafkaError: no response arrived, so the batches may have been appended.
        """
        by_topic: dict[str, list[tuple[int, bytes]]] = {}
        for (topic, partition), batch in batches.items():
            by_topic.setdefault(topic, []).append((partition, batch))
        request = ProduceRequest(None, ALL_REPLICAS, REQUEST_MS, list(by_topic.items()))
        response = await self._client.send(node, request, group=channel)
        return {
            TopicPartition(topic, partition): _error(code, topic, partition) if code else offset
            for topic, partitions in response.topics
            for partition, code, offset, *_ in partitions
        }

    async def fetch(
        self, node: int, channel: Channel, offsets: Mapping[TopicPartition, int], wait_ms: int
    ) -> list[Fetched]:
        """Return records of partitions from these offsets. Without any the broker responds after `wait_ms`.

        The broker fills the response in the order of `offsets`.

        Raises:
            KafkaError: no response arrived, or the broker rejected the request.
        """
        # A topic begins again where another one interrupts it, because the order of the partitions matters.
        by_topic: list[tuple[str, list[tuple[int, int, int]]]] = []
        for (topic, partition), offset in offsets.items():
            if not by_topic or by_topic[-1][0] != topic:
                by_topic.append((topic, []))
            by_topic[-1][1].append((partition, offset, PARTITION_BYTES_MAX))
        request = FetchRequest(wait_ms, 1, FETCH_BYTES_MAX, 0, by_topic)
        response = await self._client.send(node, request, group=channel)
        if code := getattr(response, "error_code", 0):
            raise for_code(code)
        return [
            Fetched(
                TopicPartition(topic, partition), _error(code, topic, partition) if code else None, end, data or b""
            )
            for topic, partitions in response.topics
            for partition, code, end, *_, data in partitions
        ]


def _error(code: int, topic: str, partition: int) -> KafkaError:
    error: KafkaError = for_code(code)(f"{topic}/{partition}")
    return error


def is_transient(error: Exception) -> bool:
    """Return whether a later request may succeed although this one failed."""
    return isinstance(error, OSError | TimeoutError | NodeNotReadyError) or bool(getattr(error, "retriable", False))
