"""A consumer group on one topic: who reads which partition, what came, how far everybody got.

Offsets are committed with a line of metadata, so that whoever takes a partition over also knows what went
with it. Rebalances are eager: every partition is revoked, then assigned anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, TypeVar

import msgspec
from aiokafka import ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, CoordinatorNotAvailableError, IllegalStateError, KafkaError

from forebay.transport.base import LogError, Record
from forebay.transport.kafka.consumer import AbsentRecord, DenseConsumer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.tail import FETCH_WAIT_MS, RETRY_S, record_of
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.writer import explain

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

SESSION_MS = 10_000  # a member that is silent for this long is gone
POLL_MS = 100  # `take` comes back by itself, so that its caller sees positions move past what is no record
HEARTBEAT_MS = 1_000  # also how soon a member hears of a rebalance, during which nobody reads
COMMIT_S = 5.0  # the last commit of a member that leaves is not worth more


class Committed(msgspec.Struct, frozen=True):
    """How far the group got in a partition: the next offset to handle, and what was noted with it."""

    offset: int
    metadata: str


class Members(Protocol):
    """Hears of assignments. Both calls must be quick: the whole group waits for them."""

    def assigned(self, partitions: Collection[int]) -> None:
        """These are ours from now on; they are paused until `resume`."""

    async def revoked(self, partitions: Collection[int]) -> None:
        """These are no longer ours once this returns; the last chance to commit."""


class KafkaGroup:
    """One member of a group. `topic` is named without namespace; so is the group, `name`."""

    def __init__(self, settings: KafkaSettings, topic: str, name: str) -> None:
        self._settings = settings
        self._topic = topic
        self._full = settings.topic(topic)
        self._name = settings.topic(name)
        self._consumer: DenseConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None

    async def start(self, members: Members) -> None:
        """Join. Raises KafkaUnusable when there is no broker or it does not let us in."""
        self._admin = AIOKafkaAdminClient(**self._settings.client_options())
        self._consumer = DenseConsumer(
            **self._settings.client_options(),
            group_id=self._name,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            isolation_level="read_committed",
        )
        try:
            await start_whole(self._admin.start, self._admin.close)
            await start_whole(self._consumer.start, self._consumer.stop)
            self._consumer.subscribe([self._full], listener=_Listener(self, members))
        except (KafkaError, OSError) as error:
            await self.stop()
            raise unreachable(self._settings, error) from error

    async def stop(self) -> None:
        """Leave the group at once: the others take over without waiting for the session to end."""
        if self._consumer is not None:
            await self._consumer.stop()
        if self._admin is not None:
            await self._admin.close()

    async def take(self) -> dict[int, list[Record]]:
        """What came, by partition; waits up to `POLL_MS` for it. Raises LogError.

        Offsets that hold no producer's record, as those of a transaction's marker, show in `position` alone.
        """
        try:
            fetched = await self._member.getmany(timeout_ms=POLL_MS)
        except KafkaError as error:
            if not error.retriable:
                raise LogError(f"{self._full} cannot be read from Kafka: {explain(error)}") from error
            await asyncio.sleep(RETRY_S)
            return {}
        return {
            place.partition: [record_of(self._topic, message) for message in messages if not _is_gap(message)]
            for place, messages in fetched.items()
        }

    def pause(self, partition: int) -> None:
        """Take nothing of this partition until `resume`."""
        self._switch(partition, on=False)

    def resume(self, partition: int) -> None:
        """Go on taking."""
        self._switch(partition, on=True)

    def seek(self, partition: int, offset: int) -> None:
        """The next record to take. Only for a partition that is ours."""
        if self._is_ours(partition):
            self._member.seek(self._place(partition), offset)

    async def position(self, partition: int) -> int:
        """The offset that `take` has reached, also past what is no record; -1 for a partition that is not ours."""
        if not self._is_ours(partition):
            return -1
        try:
            position: int = await self._member.position(self._place(partition))
        except IllegalStateError:  # revoked meanwhile
            return -1
        return position

    async def bounds(self, partition: int) -> tuple[int, int]:
        """The oldest offset there is, and the one that the next record will get. Raises LogError."""
        place = self._place(partition)

        async def ask() -> tuple[int, int]:
            begin: int = (await self._member.beginning_offsets([place]))[place]
            end: int = (await self._member.end_offsets([place]))[place]
            return begin, end

        return await patiently(ask, f"{self._full} does not tell its offsets")

    async def committed(self, partition: int) -> Committed | None:
        """How far the group got, None when it never committed. Raises LogError."""
        place = self._place(partition)

        async def ask() -> Committed | None:
            assert self._admin is not None
            found = (await self._admin.list_consumer_group_offsets(self._name, partitions=[place])).get(place)
            if found is None:  # aiokafka drops the error of the whole response; no commit would be offset -1
                raise CoordinatorNotAvailableError
            return None if found.offset < 0 else Committed(found.offset, found.metadata or "")

        return await patiently(ask, f"the group {self._name} does not tell its offsets")

    async def commit(self, offsets: Mapping[int, Committed]) -> bool:
        """Note how far we got; False when partitions moved meanwhile. Raises LogError."""
        if not offsets:
            return True
        if not all(self._is_ours(partition) for partition in offsets):
            return False
        places = {self._place(number): (one.offset, one.metadata) for number, one in offsets.items()}
        try:
            await self._member.commit(places)
        except (CommitFailedError, IllegalStateError) as error:
            logger.info("the group %s has moved on, nothing is committed: %s", self._name, explain(error))
            return False
        except (KafkaError, OSError) as error:
            raise LogError(f"the group {self._name} cannot commit: {explain(error)}") from error
        return True

    async def commit_last(self, offsets: Mapping[int, Committed]) -> None:
        """Commit before partitions are given up. What fails here is only done again by others."""
        try:
            async with asyncio.timeout(COMMIT_S):
                await self.commit(offsets)
        except (LogError, TimeoutError) as error:
            logger.warning("the last commit of the group %s failed: %s", self._name, error)

    @property
    def _member(self) -> DenseConsumer:
        assert self._consumer is not None, "the group is started first"
        return self._consumer

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._full, partition)

    def _is_ours(self, partition: int) -> bool:
        return self._place(partition) in self._member.assignment()

    def _switch(self, partition: int, *, on: bool) -> None:
        if self._is_ours(partition):
            (self._member.resume if on else self._member.pause)(self._place(partition))


async def patiently(ask: Callable[[], Awaitable[Answer]], trouble: str) -> Answer:
    """Ask Kafka, again while what goes wrong may pass, as when the broker is away. Raises LogError for what does not.

    The error begins with `trouble`. Whoever asks is cancelled when it leaves the group, or when its process ends.
    """
    while True:
        try:
            return await ask()
        except (KafkaError, OSError) as error:
            if not (isinstance(error, OSError) or error.retriable):
                raise LogError(f"{trouble}: {explain(error)}") from error
            logger.warning("%s, trying again: %s", trouble, explain(error))
            await asyncio.sleep(RETRY_S)


def _is_gap(message: ConsumerRecord) -> bool:
    return isinstance(message, AbsentRecord) and message.is_gap


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types for it
    """aiokafka's callbacks in our words."""

    def __init__(self, group: KafkaGroup, members: Members) -> None:
        self._group = group
        self._members = members

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        partitions = sorted(place.partition for place in assigned)
        for partition in partitions:
            self._group.pause(partition)
        self._members.assigned(partitions)

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._members.revoked(sorted(place.partition for place in revoked))
