"""Connection of one simulated process to the simulated Kafka cluster: round trips and metadata."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Never

from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    ReplicaNotAvailableError,
    RequestTimedOutError,
    UnknownError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from tests.faults.broker import Broker, Faults
from tests.faults.kafka.server import FakeKafka
from tests.faults.process import Process

NO_OFFSET = OffsetAndMetadata(-1, "")
DETECT_S = 0.02  # until a client notices that a connection is broken
# What a call raises if the broker dies, in turn.
CALL_ERRORS: tuple[type[Exception], ...] = (
    KafkaTimeoutError,
    KafkaConnectionError,
    UnknownError,
    NodeNotReadyError,
    ConnectionResetError,
    RequestTimedOutError,
    KafkaError,
    ReplicaNotAvailableError,
)


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """What the clients of one process share."""

    process: Process
    faults: Faults
    kafka: FakeKafka


HOST: ContextVar[Host] = ContextVar("host")


class FakeClient:
    """Base of the clients: what aiokafka's `AIOKafkaClient` does."""

    def __init__(self, **options: Any) -> None:
        self.host = HOST.get()
        self.closed = False
        self.epoch = 0
        self.broker: Broker = self.host.kafka.broker
        self.request_timeout_s: float = options["request_timeout_ms"] / 1000
        self.backoff_s: float = options["retry_backoff_ms"] / 1000
        self._age_s: float = options.get("metadata_max_age_ms", 300_000) / 1000
        self._refreshed_s = 0.0
        self._topics: dict[str, int] = {}
        self._refreshing: asyncio.Task[bool] | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def is_reachable(self) -> bool:
        """Whether a message between the process and the cluster arrives."""
        return not (self.broker.down or self.host.faults.cut)

    def hop_s(self) -> float:
        """Return the random duration of one step over the network."""
        return self.broker.hop_s(self.host.faults)

    def start_task(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of the process."""
        self._tasks[self.start_task(work)] = None

    def cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def count_call(self) -> None:
        """Count a call by a service. Raises an error of `CALL_ERRORS` if this call is to fail."""
        if number := self.host.faults.fails():
            raise CALL_ERRORS[number % len(CALL_ERRORS)]("injected")

    async def bootstrap(self) -> None:
        """Connect, and fetch metadata. Raises KafkaConnectionError."""
        await self.round_trip()
        self._refreshed()

    async def round_trip(self) -> None:
        """Send a small request, and wait for the response. Raises KafkaConnectionError if one of them is lost."""
        await asyncio.sleep(self.hop_s())
        if self.is_reachable:
            await asyncio.sleep(self.hop_s())
        if not self.is_reachable:
            await asyncio.sleep(DETECT_S)
            raise KafkaConnectionError("the broker cannot be reached (injected)")

    async def force_metadata_update(self) -> bool:
        """Fetch metadata, together with all callers that wait for them. Return whether that succeeded."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self.start_task(self._refresh())
        return await asyncio.shield(self._refreshing)

    async def counted(self, topic: str) -> int:
        """Return the number of partitions of a topic, from metadata that may be old.

        Raises UnknownTopicOrPartitionError for an unknown topic.
        """
        count = self._topics.get(topic)
        if count is not None:
            return count
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self.request_timeout_s
        while True:
            if await self.force_metadata_update():
                count = self.host.kafka.count(topic)
                if count is not None:
                    self._topics[topic] = count
                    return count
            if loop.time() > ends_s:
                raise UnknownTopicOrPartitionError
            await asyncio.sleep(self.backoff_s)

    def leader(self, place: TopicPartition) -> int:
        """Return the leader of a partition, from metadata that may be old."""
        if self.broker.loop.time() - self._refreshed_s > self._age_s and self.is_reachable:
            self._refreshed()
        return self.host.kafka.leader(place, self.epoch)

    def fail_in(self, started_s: float, error: KafkaError) -> Never:
        """Raise an error, or a timeout if the client has tried for the request timeout."""
        if self.broker.loop.time() - started_s > self.request_timeout_s:
            raise KafkaTimeoutError("the broker did not respond in time") from error
        raise error

    async def _refresh(self) -> bool:
        try:
            await self.round_trip()
        except KafkaConnectionError:
            await asyncio.sleep(self.backoff_s)
            return False
        self._refreshed()
        return True

    def _refreshed(self) -> None:
        self._refreshed_s = self.broker.loop.time()
        self.epoch = self.host.kafka.visible_epoch


class FakeAdmin(FakeClient):
    async def start(self) -> None:
        self.count_call()
        await self.bootstrap()

    async def close(self) -> None:
        self.closed = True

    async def list_topics(self) -> list[str]:
        self.count_call()
        await self.round_trip()
        return self.host.kafka.topics()

    async def list_consumer_group_offsets(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed positions, with offset -1 without a commit, or nothing after an error."""
        self.count_call()
        try:
            await self.round_trip()
        except KafkaConnectionError:
            return {}
        offsets = self.host.kafka.group(group).offsets
        return {place: offsets.get(place, NO_OFFSET) for place in partitions}
