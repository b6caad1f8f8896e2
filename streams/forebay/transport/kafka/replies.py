"""Send responses of the Kafka API to topics outside of forebay's log.

Topics are full names, and the record key determines the partition as in every Kafka client. forebay's own response
topic has an idempotent producer, whose failure is a failure of the log. All other reply topics share a second producer,
because one topic that rejects records would break the idempotent sequence of all topics.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from forebay import runtime
from forebay.transport.base import LogError
from forebay.transport.kafka.errors import explain, log_error
from forebay.transport.kafka.group import query_with_retry
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import start_whole, stop_within
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.writer import BATCH_BYTES_MAX, HEADROOM_BYTES, RECORD_BYTES_MAX

DELIVERY_MS = 30_000  # a broker may elect a leader or restart meanwhile
FOREIGN_MS = 10_000  # a deleted topic delays the responses behind it for at most this long
STOP_S = 5.0  # without an acknowledgement, the next ingress sends a response again
TOPICS_S = 2.0  # between two queries for a topic that did not exist


class TopicUnusable(Exception):
    """A reply topic other than forebay's own does not accept a response."""


class Reply(msgspec.Struct, frozen=True):
    """Record to send. An empty topic is forebay's own response topic; others have their full name."""

    topic: str
    key: bytes
    headers: Mapping[str, str]
    value: bytes


OnDone = Callable[[LogError | TopicUnusable | None], None]


class KafkaReplies:
    """Sender of replies. Replies with the same topic and key keep their order.

    `own` is the name of forebay's own response topic, without namespace.
    """

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
        """Connect. Raises KafkaUnusable if the broker is unreachable or rejects the connection."""
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
        """Send pending replies for up to `STOP_S`, and disconnect."""
        clients = [one.stop() for one in (self._producer, self._foreign) if one is not None]
        clients += [self._admin.close()] if self._admin is not None else []
        if clients:
            await stop_within(STOP_S, *clients)

    async def exists(self, topic: str) -> bool:
        """Return whether a topic of this full name exists, without creating it. Raises LogError."""
        assert self._admin is not None
        admin = self._admin
        async with self._looking:
            # Query an unknown name again, but not more often than every TOPICS_S for a client that repeats it.
            if topic not in self._topics and runtime.monotonic_s() - self._looked_s >= TOPICS_S:
                self._topics = set(await query_with_retry(admin.list_topics, "the topics of Kafka cannot be listed"))
                self._looked_s = runtime.monotonic_s()
        return topic in self._topics

    async def send(self, reply: Reply, on_done: OnDone) -> None:
        """Queue a reply, waiting while the queue is full.

        `on_done` is called with None once the broker has acknowledged the reply. It is called with LogError (forebay's
        own topic) or TopicUnusable (other topics) if that failed, possibly before this method returns.
        """
        assert self._producer is not None
        assert self._foreign is not None
        producer = self._foreign if reply.topic else self._producer
        headers = [(name, value.encode()) for name, value in reply.headers.items()]
        try:
            sent = await producer.send(reply.topic or self._own, reply.value, reply.key, headers=headers)
        except (KafkaError, OSError) as error:
            on_done(self._error_of(reply.topic, error))
            return

        def done(future: "asyncio.Future[object]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            on_done(None if error is None else self._error_of(reply.topic, error))

        sent.add_done_callback(done)

    def _error_of(self, topic: str, error: BaseException) -> LogError | TopicUnusable:
        reason = explain(error) if isinstance(error, Exception) else repr(error)
        text = f"{topic or self._own} does not accept responses: {reason}"
        if topic:
            self._topics.discard(topic)
            return TopicUnusable(text)
        return log_error(error, text)
