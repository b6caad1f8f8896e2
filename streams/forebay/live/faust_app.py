"""The Faust app of a router: who owns which partition, and the state topics; nothing per request.

Theory of operation. All routers are members of one consumer group on the state topics, which have equal partition
counts, so Faust gives a partition of all of them to one member. That assignment says who should own the groups
of the partition; who does own them is said by the claim in the journal. An assignment that changes for others leaves
an owner at work: only what it lost it gives up.
"""

import ssl
from collections.abc import Callable
from typing import Any

import faust
from aiokafka import AIOKafkaConsumer
from faust.auth import SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport

from forebay.events.topics import CONTROL, FLEET, KV_EVENTS, METRICS
from forebay.live.faust_feed import Feed
from forebay.transport.base import Record
from forebay.transport.kafka_settings import KafkaSettings

STATE_TOPICS = (KV_EVENTS, METRICS, FLEET, CONTROL)
FETCH_WAIT_MS = 20  # Faust's own 1,500 ms would hold a busy partition up behind quiet ones
SESSION_MS = 6_000  # a router that died is replaced after this
HEARTBEAT_MS = 500  # how soon members hear of a rebalance
REBALANCE_MS = 10_000
POLL_INTERVAL_MS = 300_000

OnAssigned = Callable[[set[int]], None]


class Assignments:
    """Hands assignments on, also those that came before anybody listened."""

    def __init__(self) -> None:
        self._last: set[int] | None = None
        self._hear: OnAssigned | None = None

    def tell(self, partitions: set[int]) -> None:
        """There is a new assignment."""
        self._last = partitions
        if self._hear is not None:
            self._hear(partitions)

    def hear(self, listener: OnAssigned) -> None:
        """Listen from now on, the newest assignment included."""
        self._hear = listener
        if self._last is not None:
            listener(self._last)


class _ConsumerThread(AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust ships no types
    """Faust's consumer with the waits and the security properties that forebay needs."""

    def _create_worker_consumer(self, transport: Any) -> AIOKafkaConsumer:
        self._assignor = self.app.assignor
        return AIOKafkaConsumer(
            **self.app.kafka.client_options(),
            group_id=self.app.conf.id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_poll_records=self.app.conf.broker_max_poll_records,
            max_poll_interval_ms=POLL_INTERVAL_MS,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )


class _Consumer(Consumer):  # type: ignore[misc]
    consumer_thread_class = _ConsumerThread

    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(Transport):  # type: ignore[misc]
    Consumer = _Consumer


class RouterApp(faust.App):  # type: ignore[misc]
    """A Faust app that feeds `feed` and tells `on_assigned` the control partitions of this member."""

    def __init__(self, kafka: KafkaSettings, feed: Feed, on_assigned: OnAssigned) -> None:
        self.kafka = kafka
        super().__init__(
            kafka.topic("router"),
            broker=[f"kafka://{server.strip()}" for server in kafka.bootstrap.split(",")],
            broker_credentials=_credentials(kafka),
            broker_session_timeout=SESSION_MS / 1000,
            broker_heartbeat_interval=HEARTBEAT_MS / 1000,
            broker_rebalance_timeout=REBALANCE_MS / 1000,
            store="memory://",
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            autodiscover=False,
        )
        self._tell = on_assigned
        self.on_partitions_assigned.connect(self._assigned)
        for topic in STATE_TOPICS:
            self._consume(topic.name, feed)

    def _new_transport(self) -> Any:
        return _Transport(self.conf.broker_consumer, self)

    def _consume(self, name: str, feed: Feed) -> None:
        topic = self.topic(self.kafka.topic(name), key_serializer="raw", value_serializer="raw")

        async def consume(stream: Any) -> None:
            async for event in stream.events():
                message = event.message
                at_us = round(message.timestamp * 1e6)
                feed.give(Record(name, message.partition, message.offset, at_us, message.value, message.key))

        self.agent(topic, name=f"forebay.{name}")(consume)

    async def _assigned(self, _app: Any, assigned: set[Any], **_: Any) -> None:
        # One topic speaks for all: they are assigned together.
        self._tell({place.partition for place in assigned if place.topic == self.kafka.topic(FLEET.name)})


def _credentials(kafka: KafkaSettings) -> Any:
    options = kafka.client_options()
    context: ssl.SSLContext | None = options.get("ssl_context")
    if "sasl_mechanism" in options:
        return SASLCredentials(
            username=options.get("sasl_plain_username"),
            password=options.get("sasl_plain_password"),
            mechanism=options["sasl_mechanism"],
            ssl_context=context,
        )
    return SSLCredentials(context) if context is not None else None
