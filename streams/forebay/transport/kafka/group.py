"""Consume one topic as a member of a Kafka consumer group.

Offsets are committed with metadata, which the next member assigned to the partition reads. Rebalances are eager: all
partitions are revoked and then reassigned.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, TypeVar

import msgspec
from aiokafka import ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, CoordinatorNotAvailableError, IllegalStateError, KafkaError

from forebay import runtime
from forebay.transport.base import LogError, LogUnavailable, Record
from forebay.transport.kafka.consumer import AbsentRecord, DenseConsumer
from forebay.transport.kafka.errors import explain, is_transient, log_error
from forebay.transport.kafka.settings import REQUEST_MS, KafkaSettings
from forebay.transport.kafka.start import start_whole, stop_within
from forebay.transport.kafka.tail import record_of
from forebay.transport.kafka.topics import connected_admin, unreachable
from forebay.transport.patience import RETRY_S, until_available

logger = logging.getLogger(__name__)
Response = TypeVar("Response")

SESSION_MS = 10_000  # a member without heartbeats for this long leaves the group
POLL_MS = 100  # `take` returns after this time, so that its caller sees positions advance past gaps
# Maximum time that the broker delays a fetch without new records, and with it a rebalance, and records of a partition
# that the fetch in flight lacks. Both times become `QUIET_MS` once `take` has returned nothing for `QUIET_S`.
FETCH_WAIT_MS = 100
QUIET_S, QUIET_MS = 5.0, 500
HEARTBEAT_MS = 1_000  # members learn of a rebalance within this time, and no member reads during a rebalance
COMMIT_S = 5.0  # timeout of the last commit of a leaving member
STOP_S = 3.0  # timeout for leaving the group; the broker removes a member that did not leave after `SESSION_MS`


class Committed(msgspec.Struct, frozen=True):
    offset: int
    metadata: str


class RebalanceListener(Protocol):
    """Callbacks for rebalances. Both must return quickly, because the whole group waits for them."""

    def assigned(self, partitions: Collection[int]) -> None:
        """Take over newly assigned partitions, which are paused until `resume`."""

    async def revoked(self, partitions: Collection[int]) -> None:
        """Release revoked partitions. This is the last chance to commit their offsets."""


class KafkaGroup:
    """Member of a consumer group. The settings add the namespace to the names of the topic and the group."""

    def __init__(self, settings: KafkaSettings, topic: str, name: str) -> None:
        self._settings = settings
        self._topic = topic
        self._full = settings.topic(topic)
        self._name = settings.topic(name)
        self._consumer: DenseConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._busy_s = runtime.monotonic_s()  # when `take` last returned records
        self._failing_s: float | None = None  # since when every `take` has failed
        self._is_quiet = False

    async def start(self, listener: RebalanceListener) -> None:
        """Join the group. Raises KafkaUnusable if the broker is unreachable or rejects the connection."""
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
            self._consumer.subscribe([self._full], listener=_Listener(self, listener))
        except (KafkaError, OSError) as error:
            await self.stop()
            raise unreachable(self._settings, error) from error

    async def stop(self) -> None:
        """Leave the group, so that the other members take over without waiting for the session timeout."""
        clients = [self._consumer.stop()] if self._consumer is not None else []
        clients += [self._admin.close()] if self._admin is not None else []
        if clients:
            await stop_within(STOP_S, *clients)

    async def take(self) -> dict[int, list[Record]]:
        """Return the next records by partition, waiting up to `POLL_MS`.

        Offsets without a producer's record, for example of transaction markers, only advance `position`. Raises
        LogUnavailable if a new member can continue, and LogError if Kafka does not let this program read.
        """
        try:
            fetched = await self._member.getmany(timeout_ms=QUIET_MS if self._is_quiet else POLL_MS)
        except (KafkaError, OSError) as error:
            self._require_usable(error)
            await asyncio.sleep(RETRY_S)
            return {}
        self._failing_s = None
        self._watch_for_quiet(has_records=bool(fetched))
        return {
            place.partition: [record_of(self._topic, message) for message in messages if not _is_gap(message)]
            for place, messages in fetched.items()
        }

    def pause(self, partition: int) -> None:
        self._switch(partition, on=False)

    def resume(self, partition: int) -> None:
        self._switch(partition, on=True)

    def seek(self, partition: int, offset: int) -> None:
        """Set the offset of the next record, unless the partition is not assigned to this member."""
        if self._is_ours(partition):
            self._member.seek(self._place(partition), offset)

    async def position(self, partition: int) -> int:
        """Return the next offset that `take` will fetch; -1 if the partition is not assigned to this member."""
        if not self._is_ours(partition):
            return -1
        try:
            position: int = await self._member.position(self._place(partition))
        except IllegalStateError:  # revoked meanwhile
            return -1
        except KafkaError as error:  # of a task of aiokafka, which reports it here or to `take`
            self._require_usable(error)
            return -1
        return position

    async def bounds(self, partition: int) -> tuple[int, int]:
        """Return the oldest offset and the end offset of a partition. Raises LogError."""
        place = self._place(partition)

        async def query() -> tuple[int, int]:
            begin: int = (await self._member.beginning_offsets([place]))[place]
            end: int = (await self._member.end_offsets([place]))[place]
            return begin, end

        return await query_with_retry(query, f"the offsets of {self._full} cannot be read")

    async def committed(self, partition: int) -> Committed | None:
        """Return the committed position of the group. Raises LogError."""
        place = self._place(partition)

        async def query() -> Committed | None:
            assert self._admin is not None
            found = (await self._admin.list_consumer_group_offsets(self._name, partitions=[place])).get(place)
            if found is None:  # aiokafka drops the error of the response; a partition without a commit has offset -1
                raise CoordinatorNotAvailableError
            return None if found.offset < 0 else Committed(found.offset, found.metadata or "")

        return await query_with_retry(query, f"the committed offsets of the group {self._name} cannot be read")

    async def commit(self, offsets: Mapping[int, Committed]) -> bool:
        """Commit positions by partition; return False if a partition was revoked meanwhile, or Kafka is unavailable.

        Raises LogError if Kafka does not let the group commit.
        """
        if not offsets:
            return True
        if not all(self._is_ours(partition) for partition in offsets):
            return False
        places = {self._place(number): (position.offset, position.metadata) for number, position in offsets.items()}
        try:
            await self._member.commit(places)
        except (CommitFailedError, IllegalStateError) as error:
            logger.info("the group %s was rebalanced, so the commit was rejected: %s", self._name, explain(error))
            return False
        except (KafkaError, OSError) as error:
            text = f"the group {self._name} cannot commit: {explain(error)}"
            if not is_transient(error):
                raise LogError(text) from error
            logger.warning("%s; trying again", text)
            return False
        return True

    async def commit_last(self, offsets: Mapping[int, Committed]) -> None:
        """Commit before this member releases partitions. A failure is logged: the next member repeats some records."""
        try:
            async with asyncio.timeout(COMMIT_S):
                await self.commit(offsets)
        except (LogError, TimeoutError) as error:
            logger.warning("the last commit of the group %s failed: %s", self._name, error)

    def _require_usable(self, error: Exception) -> None:
        """Raise the error of a member that cannot continue."""
        text = f"{self._full} cannot be read from Kafka: {explain(error)}"
        now_s = runtime.monotonic_s()
        if self._failing_s is None:
            self._failing_s = now_s
        if not is_transient(error):
            raise LogError(text) from error
        # aiokafka does not start a task again that ended with an unexpected error, and then reports it for ever.
        if type(error) is KafkaError or now_s - self._failing_s > REQUEST_MS / 1000:
            raise LogUnavailable(text) from error

    def _watch_for_quiet(self, *, has_records: bool) -> None:
        now_s = runtime.monotonic_s()
        if has_records:
            self._busy_s = now_s
        is_quiet = now_s - self._busy_s >= QUIET_S
        if is_quiet is not self._is_quiet:
            self._is_quiet = is_quiet
            # aiokafka reads it for each fetch, and has no setting to change it.
            self._member._fetcher._fetch_max_wait_ms = QUIET_MS if is_quiet else FETCH_WAIT_MS

    @property
    def _member(self) -> DenseConsumer:
        assert self._consumer is not None, "call start first"
        return self._consumer

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._full, partition)

    def _is_ours(self, partition: int) -> bool:
        return self._place(partition) in self._member.assignment()

    def _switch(self, partition: int, *, on: bool) -> None:
        if self._is_ours(partition):
            (self._member.resume if on else self._member.pause)(self._place(partition))


async def require_joinable(settings: KafkaSettings, name: str) -> None:
    """Raise LogError if the user of this program may not join a consumer group, for which Faust would wait for ever."""
    admin = await connected_admin(settings)
    try:
        await admin.find_coordinator(settings.topic(name))
    except (KafkaError, OSError) as error:
        if not is_transient(error):
            raise LogError(f"this program cannot join {settings.topic(name)}: {explain(error)}") from error
    finally:
        await admin.close()


async def query_with_retry(query: Callable[[], Awaitable[Response]], problem: str) -> Response:
    """Return the result of a Kafka query, retrying after transient errors until the caller is cancelled.

    Raises LogError after a permanent error. `problem` begins its message, for example "the offsets cannot be read".
    """

    async def read() -> Response:
        try:
            return await query()
        except (KafkaError, OSError) as error:
            raise log_error(error, f"{problem}: {explain(error)}") from error

    return await until_available(read)


def _is_gap(message: ConsumerRecord) -> bool:
    return isinstance(message, AbsentRecord) and message.is_gap


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types for it
    def __init__(self, group: KafkaGroup, listener: RebalanceListener) -> None:
        self._group = group
        self._listener = listener

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        partitions = sorted(place.partition for place in assigned)
        for partition in partitions:
            self._group.pause(partition)
        self._listener.assigned(partitions)

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self._listener.revoked(sorted(place.partition for place in revoked))
