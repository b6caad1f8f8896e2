"""Simulated Kafka cluster: leaders, metadata, idempotent producers and consumer groups on the partitions of a `Broker`.

Metadata are an epoch number. The leader of a partition is a hash of its name and the epoch, so a new epoch moves about
half of the partitions. A client that knows an older epoch sends to the wrong node, which answers with an error.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from aiokafka.errors import (
    BrokerResponseError,
    ClusterAuthorizationFailedError,
    KafkaStorageError,
    NotLeaderForPartitionError,
    OutOfOrderSequenceNumber,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import ConsumerRecord, TopicPartition

from forebay.events.topics import (
    ANSWERS,
    FIXED_TOPICS,
    KEYS,
    MODELS,
    OPENAI_REQUESTS,
    OPENAI_RESPONSES,
    TOKENS,
    work_topic,
)
from forebay.transport.base import Draft, Record
from tests.faults.broker import Broker, Faults, Place
from tests.faults.kafka.coordinator import GroupCoordinator

NAMESPACE = "forebay"
NODES = 2
RETAINED_BATCHES = 5  # per producer and partition, as in Kafka
ELECTION_S = 0.4  # until the new leaders of moved partitions serve requests
SLOTS = 16
REPLY_SLOTS = 10_000  # more than the reply slots of foreign requests
API_PARTITIONS = 3
CREATE_TIME = 0
REJECTIONS: tuple[type[BrokerResponseError], ...] = (
    ClusterAuthorizationFailedError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)


class Appender(Protocol):
    def is_appending(self, topic: str) -> bool:
        """Return whether the process runs and has batches for a topic, by its full name, without acknowledgement."""


class _Sequence:
    """State of one idempotent producer in one partition: the next sequence number, and the newest batches."""

    def __init__(self) -> None:
        self.next = 0
        self.batches: deque[tuple[int, int]] = deque(maxlen=RETAINED_BATCHES)


@dataclass(slots=True, eq=False)
class Fetch:
    """Fetch request of one consumer to one node.

    Attributes:
        serve: answers the request, or holds it.
        is_held: whether the node holds the request until a record is appended.
        is_hurried: whether the node holds the request only for its maximum wait.
        is_over: whether the request was answered or cancelled.
    """

    node: int
    offsets: dict[TopicPartition, int]
    serve: "Callable[[Fetch], None]"
    is_held: bool = False
    is_hurried: bool = False
    is_over: bool = False


class FakeKafka:
    """Nodes of a simulated Kafka cluster.

    Attributes:
        epoch: number of the current leader election.
        is_stale: whether metadata responses lack the newest election.
    """

    alive = True

    def __init__(self, broker: Broker, seed: str) -> None:
        self.broker = broker
        self.epoch = 0
        self.is_stale = False
        self.groups: dict[str, GroupCoordinator] = {}
        self.producers: list[Appender] = []
        self._seed = seed
        self._elected_s = 0.0
        self._producer_ids = itertools.count(1)
        self._sequences: dict[tuple[int, Place], _Sequence] = {}
        self._messages: dict[Place, list[ConsumerRecord]] = {}
        self._held: dict[Place, dict[Fetch, None]] = {}
        broker.watch(self)
        self._leaders: dict[tuple[TopicPartition, int], int] = {}
        counts = {topic.name: 1 for topic in FIXED_TOPICS}
        counts |= {work_topic("default").name: SLOTS, TOKENS.name: REPLY_SLOTS}
        counts |= {MODELS.name: 2, ANSWERS.name: 2, KEYS.name: 1}
        counts |= {OPENAI_REQUESTS.name: API_PARTITIONS, OPENAI_RESPONSES.name: API_PARTITIONS}
        self._counts = {f"{NAMESPACE}.{name}": count for name, count in counts.items()}

    @property
    def visible_epoch(self) -> int:
        """Election that a metadata response contains."""
        return max(0, self.epoch - 1) if self.is_stale else self.epoch

    def topics(self) -> list[str]:
        return list(self._counts)

    def count(self, topic: str) -> int | None:
        """Return the number of partitions of a topic by its full name; None if it does not exist."""
        return self._counts.get(topic)

    def leader(self, place: TopicPartition, epoch: int) -> int:
        """Return the node that leads a partition since an election."""
        key = place, epoch
        node = self._leaders.get(key)
        if node is None:
            node = self._leaders[key] = crc32(f"{place.topic}/{place.partition}/{epoch}".encode()) % NODES
        return node

    def change_leaders(self) -> None:
        """Elect new leaders. Moved partitions are unavailable until the election is over."""
        self.epoch += 1
        self._elected_s = self.broker.loop.time() + ELECTION_S * self.broker.chance()
        for place in list(self._held):
            self.announce(place)  # moved partitions are answered with an error

    def require_leader(self, node: int, place: TopicPartition) -> None:
        """Raise an error if a node does not lead a partition, or does not lead it yet."""
        leader = self.leader(place, self.epoch)
        is_new = self.epoch and leader != self.leader(place, self.epoch - 1)
        if node != leader or (is_new and self.broker.loop.time() < self._elected_s):
            raise NotLeaderForPartitionError

    def hold(self, fetch: Fetch) -> None:
        """Hold a fetch until there is a record, or an error, in one of its partitions."""
        fetch.is_held = True
        for place in fetch.offsets:
            self._held.setdefault(place_of(place), {})[fetch] = None

    def release(self, fetch: Fetch) -> bool:
        """End the hold of a fetch, and return whether it was held."""
        was_held, fetch.is_held = fetch.is_held, False
        if was_held:
            for place in fetch.offsets:
                self._held[place_of(place)].pop(fetch, None)
        return was_held

    def announce(self, place: Place) -> None:
        """Answer the held fetches of a partition."""
        for fetch in list(self._held.get(place, ())):
            self.release(fetch)
            self.broker.loop.call_main_later(0.0, fetch.serve, fetch)

    def is_appending(self, topic: str) -> bool:
        """Return whether a process that runs has batches for a topic that are not acknowledged."""
        return any(one.is_appending(f"{NAMESPACE}.{topic}") for one in self.producers)

    def new_producer_id(self) -> int:
        return next(self._producer_ids)

    def group(self, name: str) -> GroupCoordinator:
        found = self.groups.get(name)
        if found is None:
            places = [TopicPartition(f"{NAMESPACE}.{OPENAI_REQUESTS.name}", number) for number in range(API_PARTITIONS)]
            found = self.groups[name] = GroupCoordinator(self.broker, self._seed, name, places)
        return found

    def append(
        self,
        node: int,
        place: TopicPartition,
        faults: Faults,
        writer: str,
        drafts: list[tuple[Draft, int]],
        sequence: tuple[int, int] | None,
    ) -> int:
        """Append a batch, or find out that it was appended before, and return the offset of its first record.

        Args:
            sequence: producer id, and sequence number of the first record; None without idempotence.

        Raises:
            BrokerResponseError: The node rejects the batch.
        """
        self.require_leader(node, place)
        if place.partition >= (self.count(place.topic) or 0):
            raise UnknownTopicOrPartitionError
        match self.broker.refusal(faults):
            case "disk_full":
                raise KafkaStorageError
            case "append_rejected":
                raise REJECTIONS[int(self.broker.chance() * len(REJECTIONS))]
            case _:
                pass
        target = place_of(place)
        if sequence is None:
            offsets = [self.broker.append(draft, at_us, writer) for draft, at_us in drafts]
            return offsets[0]
        producer_id, first = sequence
        state = self._sequences.setdefault((producer_id, target), _Sequence())
        for number, offset in state.batches:
            if number == first:
                faults.fired("retry_with_effect")
                return offset
        if first != state.next:
            raise OutOfOrderSequenceNumber
        offset = len(self.broker.records(target))
        state.next += len(drafts)
        state.batches.append((first, offset))
        for draft, at_us in drafts:
            self.broker.append(draft, at_us, writer)
        return offset

    def messages(self, place: TopicPartition) -> list[ConsumerRecord]:
        """Return the records of a partition as aiokafka returns them."""
        target = place_of(place)
        records = self.broker.records(target)
        messages = self._messages.setdefault(target, [])
        if len(messages) < len(records):
            messages.extend(_message(place, record) for record in records[len(messages) :])
        return messages


def place_of(place: TopicPartition) -> Place:
    """Return a partition by the name of its topic without namespace."""
    return place.topic[len(NAMESPACE) + 1 :], place.partition


def _message(place: TopicPartition, record: Record) -> ConsumerRecord:
    headers = tuple((name, value.encode()) for name, value in (record.headers or {}).items())
    sizes = len(record.key or b""), len(record.value)
    return ConsumerRecord(
        *place, record.offset, record.at_us // 1000, CREATE_TIME, record.key, record.value, None, *sizes, headers
    )
