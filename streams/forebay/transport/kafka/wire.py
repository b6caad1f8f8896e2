"""Produce and fetch requests of the Kafka protocol, on connections that aiokafka's client opens.

aiokafka's producer and consumer need several tasks and timers per request: half of the CPU time of a hop and of its
latency. So tails and appends send their requests here. aiokafka connects, authenticates and refreshes metadata. ADR
0024 has the measurements.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, NodeNotReadyError, TopicAuthorizationFailedError, UnknownTopicOrPartitionError
from aiokafka.protocol.transaction import InitProducerIdRequest

from forebay import runtime
from forebay.transport.kafka.connection import BrokerConnection
from forebay.transport.kafka.errors import error_of
from forebay.transport.kafka.protocol import FETCH, PRODUCE, fetch_body, fetched, produce_body, produced
from forebay.transport.kafka.settings import REQUEST_MS, RETRY_BACKOFF_MS, KafkaSettings
from forebay.transport.kafka.start import start_whole

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
    """What a broker returned for one partition. The last record batch may be truncated."""

    place: TopicPartition
    error: Exception | None
    end: int
    data: bytes


class Wire:
    def __init__(self, settings: KafkaSettings) -> None:
        self._client = AIOKafkaClient(
            **settings.client_options(),
            metadata_max_age_ms=METADATA_MS,
            connections_max_idle_ms=None,  # aiokafka does not see the requests of `BrokerConnection`
        )
        self._connections: dict[tuple[int, Channel], BrokerConnection] = {}
        self._missing_s: dict[str, float] = {}  # when the brokers first did not know a topic

    async def start(self) -> None:
        """Connect. Raises KafkaError, OSError or TimeoutError."""
        async with asyncio.timeout(REQUEST_MS / 1000):
            await start_whole(self._client.bootstrap, self._client.close)

    async def close(self) -> None:
        await self._client.close()

    def leader(self, place: TopicPartition) -> int | None:
        """Return the broker that leads a partition, None if no leader is known."""
        leader: int | None = self._client.cluster.leader_for_partition(place)
        return None if leader == -1 else leader

    async def partitions(self, topic: str) -> set[int]:
        """Return the partitions of a topic. Waits while no broker responds.

        Raises KafkaError if the brokers have not known the topic for `REQUEST_MS`, or it may not be described.
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

        Raises TopicAuthorizationFailedError if one of `topics` may not be described.
        """
        for topic in topics:
            self._client.add_topic(topic)
        if await self._client.force_metadata_update():
            self._note_missing()
        denied = self._client.cluster.unauthorized_topics.intersection(topics)
        if denied:
            raise TopicAuthorizationFailedError(", ".join(sorted(denied)))

    def gone(self, topic: str) -> KafkaError | None:
        """Return an error if a topic was deleted: brokers responded, and none knew the topic for `REQUEST_MS`."""
        since_s = self._missing_s.get(topic, math.inf)
        if self._client.cluster.partitions_for_topic(topic) or runtime.monotonic_s() - since_s < REQUEST_MS / 1000:
            return None
        return UnknownTopicOrPartitionError(f"the topic {topic} was deleted; see `forebay topics create --upgrade`")

    def _note_missing(self) -> None:
        cluster, before, now_s = self._client.cluster, self._missing_s, runtime.monotonic_s()
        missing = [topic for topic in self._client._topics if not cluster.partitions_for_topic(topic)]
        self._missing_s = {topic: before.get(topic, now_s) for topic in missing}

    async def producer_id(self) -> ProducerId:
        response = await self._client.send(self._client.get_random_node(), InitProducerIdRequest(None, -1))
        if response.error_code:
            raise error_of(response.error_code)
        return ProducerId(response.producer_id, response.producer_epoch)

    async def produce(
        self, node: int, channel: Channel, batches: Mapping[TopicPartition, bytes]
    ) -> dict[TopicPartition, int | KafkaError]:
        """Append one batch per partition. Return the offset of the first record, or the error of the broker.

        Raises KafkaError if no response arrived, so the batches may have been appended.
        """
        connection = await self._connection(node, channel)
        version = connection.version_of(PRODUCE)
        body = produce_body(batches, REQUEST_MS)
        results = await connection.request(PRODUCE, version, body, partial(produced, version))
        return {place: _error(code, place) if code else offset for place, code, offset in results}

    async def fetch(
        self, node: int, channel: Channel, offsets: Mapping[TopicPartition, int], wait_ms: int
    ) -> list[Fetched]:
        """Return records from these offsets. Without any the broker responds after `wait_ms`.

        The broker fills the response in the order of `offsets`. Raises KafkaError if no response arrived, or the broker
        rejected the request.
        """
        connection = await self._connection(node, channel)
        body = fetch_body(offsets, wait_ms, FETCH_BYTES_MAX, PARTITION_BYTES_MAX)
        code, partitions = await connection.request(FETCH, connection.version_of(FETCH), body, fetched)
        if code:
            raise error_of(code)
        return [
            Fetched(place, _error(code, place) if code else None, end, data) for place, code, end, data in partitions
        ]

    async def _connection(self, node: int, channel: Channel) -> BrokerConnection:
        connection = self._connections.get((node, channel))
        if connection is not None and connection.is_open:
            return connection
        if not await self._client.ready(node, group=channel):
            raise NodeNotReadyError(f"the broker {node} cannot be reached")
        connection = self._connections.get((node, channel))
        if connection is None or not connection.is_open:  # otherwise another request has connected meanwhile
            opened = self._client._conns.get((node, channel))
            if opened is None or not opened.connected():  # a broker that shuts down closes it after its first response
                raise NodeNotReadyError(f"the broker {node} closed the connection")
            connection = BrokerConnection(opened, REQUEST_MS / 1000)
            self._connections[node, channel] = connection
        return connection


def _error(code: int, place: TopicPartition) -> KafkaError:
    return error_of(code, f"{place.topic}/{place.partition}")
