"""Records for readers outside of forebay: full topic names, and the partition that every Kafka client would choose.

forebay's own topic for answers gets an idempotent producer; a failure there is a failure of the log. Topics of
others get a producer of their own, because one that refuses records would spoil the sequence of all of them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from forebay.transport.base import LogError
from forebay.transport.kafka.group import patiently
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.writer import BATCH_BYTES_MAX, HEADROOM_BYTES, RECORD_BYTES_MAX, explain

DELIVERY_MS = 30_000  # a broker may elect a leader or restart meanwhile
FOREIGN_MS = 10_000  # a topic that is gone holds up the answers behind it for this long
TOPICS_S = 2.0  # between two looks for a topic that was not there


class TopicUnusable(Exception):
    """A topic of somebody else's does not take what it was sent."""


class Reply(msgspec.Struct, frozen=True):
    """A record to send. `topic` is a full name, empty for forebay's own topic of answers."""

    topic: str
    key: bytes
    headers: Mapping[str, str]
    value: bytes


OnDone = Callable[[LogError | TopicUnusable | None], None]


class KafkaReplies:
    """Sends replies; those with the same key and topic keep their order. `own` is named without namespace."""

    def __init__(self, settings: KafkaSettings, own: str) -> None:
        self._settings = settings
        self._own = settings.topic(own)
        self._producer: AIOKafkaProducer | None = None
        self._foreign: AIOKafkaProducer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._topics: set[str] = set()
        self._looked_s = -TOPICS_S
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Connect. Raises KafkaUnusable."""
        options = self._settings.client_options()
        self._admin = AIOKafkaAdminClient(**options)
        common = {"acks": "all", "compression_type": "snappy", "max_batch_size": BATCH_BYTES_MAX}
        common |= {"max_request_size": RECORD_BYTES_MAX + HEADROOM_BYTES}
        self._producer = AIOKafkaProducer(
            **{**options, **common, "request_timeout_ms": DELIVERY_MS}, enable_idempotence=True
        )
        self._foreign = AIOKafkaProducer(**{**options, **common, "request_timeout_ms": FOREIGN_MS})
        try:
            await start_whole(self._producer.start, self._producer.stop)
            await start_whole(self._foreign.start, self._foreign.stop)
            await start_whole(self._admin.start, self._admin.close)
        except (KafkaError, OSError) as error:
            await self.stop()
            raise unreachable(self._settings, error) from error

    async def stop(self) -> None:
        """Send what is in line, and disconnect."""
        for client in (self._producer, self._foreign):
            if client is not None:
                await client.stop()
        if self._admin is not None:
            await self._admin.close()

    async def exists(self, topic: str) -> bool:
        """Whether there is a topic of this full name. Raises LogError. Asks without creating it."""
        assert self._admin is not None
        admin = self._admin
        async with self._looking:
            # A name that is not there is asked for again, but a client that repeats it does not flood the broker.
            if topic not in self._topics and time.monotonic() - self._looked_s >= TOPICS_S:
                self._topics = set(await patiently(admin.list_topics, "Kafka does not tell its topics"))
                self._looked_s = time.monotonic()
        return topic in self._topics

    async def send(self, reply: Reply, on_done: OnDone) -> None:
        """Put a reply in line, waiting while the line is full. `on_done` hears once the broker has it, or will not.

        It hears a LogError for forebay's own topic and TopicUnusable for others, perhaps before this returns.
        """
        assert self._producer is not None
        assert self._foreign is not None
        producer = self._foreign if reply.topic else self._producer
        headers = [(name, value.encode()) for name, value in reply.headers.items()]
        try:
            sent = await producer.send(reply.topic or self._own, reply.value, reply.key, headers=headers)
        except (KafkaError, OSError) as error:
            on_done(self._trouble(reply.topic, error))
            return

        def done(future: "asyncio.Future[object]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            on_done(None if error is None else self._trouble(reply.topic, error))

        sent.add_done_callback(done)

    def _trouble(self, topic: str, error: BaseException) -> LogError | TopicUnusable:
        told = explain(error) if isinstance(error, Exception) else repr(error)
        text = f"{topic or self._own} does not take answers: {told}"
        if topic:
            self._topics.discard(topic)
            return TopicUnusable(text)
        return LogError(text)
