"""Faust app of a router, which assigns control partitions to routers and consumes the state topics.

All routers are members of one consumer group on the state topics. The assignment determines which router should own
the group of a partition, and the claim in the journal which one does. A rebalance does not interrupt an owner that
keeps its partition.
"""

from collections.abc import Callable
from typing import Any

from aiokafka import ConsumerRecord

from forebay.events.topics import CONTROL, FLEET, KV_EVENTS, METRICS
from forebay.live.faust_batches import POLL_INTERVAL_MS, BatchedApp
from forebay.live.router.faust_feed import Feed
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.tail import record_of

STATE_TOPICS = (KV_EVENTS, METRICS, FLEET, CONTROL)

OnAssigned = Callable[[set[int]], None]


class Assignments:
    """Passes assignments of control partitions to one listener. A late listener gets the newest earlier assignment."""

    def __init__(self) -> None:
        self._last: set[int] | None = None
        self._listener: OnAssigned | None = None

    def publish(self, partitions: set[int]) -> None:
        self._last = partitions
        if self._listener is not None:
            self._listener(partitions)

    def subscribe(self, listener: OnAssigned) -> None:
        self._listener = listener
        if self._last is not None:
            listener(self._last)


class RouterApp(BatchedApp):
    """Faust app that feeds `feed`, and calls `on_assigned` with the control partitions of this member."""

    def __init__(
        self, kafka: KafkaSettings, feed: Feed, on_assigned: OnAssigned, poll_interval_ms: int = POLL_INTERVAL_MS
    ) -> None:
        super().__init__(kafka, "router", STATE_TOPICS, self._push, poll_interval_ms)
        self._on_assigned = on_assigned
        self._feed = feed
        self.on_partitions_assigned.connect(self._assigned)
        self.on_partitions_revoked.connect(self._revoked)

    def _push(self, name: str, batch: list[ConsumerRecord]) -> None:
        for record in batch:
            if record.value is None:
                # The record has no value or cannot be read. The tail reads it from the log, which gives the reason.
                self._feed.announce(name, record.partition, record.offset)
            else:
                self._feed.push(record_of(name, record))

    async def _revoked(self, _app: Any, _revoked: set[Any], **_: Any) -> None:
        self._feed.hurry()

    async def _assigned(self, _app: Any, assigned: set[Any], **_: Any) -> None:
        # The state topics are assigned together, so one topic is enough.
        self._on_assigned({place.partition for place in assigned if place.topic == self.kafka.topic(FLEET.name)})
