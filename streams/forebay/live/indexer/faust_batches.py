"""Faust app that consumes topics of groups, with one message per fetch and partition.

Theory of operation. The topics have equal partition counts, so Faust assigns a partition of all of them to the same
member of the consumer group.

Faust takes about 100 µs per message. The consumer therefore passes the records of one fetch and partition to Faust's
stream as one message, with the list of records as its value and the offset of the last one. Faust commits this offset.

aiokafka makes a member leave the group `POLL_INTERVAL_MS` after its last poll, and Faust polls only while it has
partitions. `_Consumer` therefore polls for an idle member, from the event loop of the process.
"""

import asyncio
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import faust
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError
from faust.auth import SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types.tuples import TP, ConsumerMessage

from forebay.events.topics import Topic
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.kafka.consumer import DenseConsumer
from forebay.transport.kafka.errors import is_transient
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.topics import partitions_of

logger = logging.getLogger(__name__)

FETCH_WAIT_MS = 500  # a quiet member sends two fetches per second
# Between two batches of records, because Faust's cost is per batch more than per record. Neither the index nor the load
# needs fresher state. aiokafka delays a busy partition behind quiet ones only if records wait for 100 ms.
GATHER_S = 0.05
GROUP = "indexer"  # name of the consumer group, without the namespace
SESSION_MS = 6_000  # a dead member is replaced after this time
HEARTBEAT_MS = 500  # members learn of a rebalance within this time
REBALANCE_MS = 10_000
POLL_INTERVAL_MS = 300_000  # a member that does not poll for this long is stuck, and leaves the group
MEMBERSHIP_CHECK_S = 1.0  # between two checks whether this process is a member
ALONE_S = 60.0  # joining takes as long as the slowest member, at most `REBALANCE_MS`, and may have to be repeated

OnBatch = Callable[[str, list[ConsumerRecord]], None]


class _ConsumerThread(AIOKafkaConsumerThread):  # type: ignore[misc]  # Faust ships no types
    """Faust's consumer thread with forebay's timeouts and security properties."""

    def _create_worker_consumer(self, transport: Any) -> DenseConsumer:
        self._assignor = self.app.assignor
        return DenseConsumer(
            **self.app.kafka.client_options(),
            group_id=self.app.conf.id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_poll_records=self.app.conf.broker_max_poll_records,
            max_poll_interval_ms=self.app.poll_interval_ms,
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )

    async def poll_idle(self) -> None:
        """Poll for a member without partitions. Raises KafkaError if aiokafka left the group."""
        consumer = self._ensure_consumer()
        # `getmany` would do the same, but it waits for a running rebalance, and the rebalance needs this thread.
        with consumer._subscription.fetch_context():
            consumer._coordinator.check_errors()

    def is_member(self) -> bool:
        consumer = self._consumer
        return consumer is not None and consumer._coordinator.generation > 0


class _Consumer(Consumer):  # type: ignore[misc]
    consumer_thread_class = _ConsumerThread
    _was_busy = False

    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def _wait_next_records(self, timeout: float) -> Any:  # noqa: ASYNC109 - Faust's
        if self.flow_active and not self._get_active_partitions():
            await self._thread.call_thread(self._thread.poll_idle)
        if self._was_busy:
            await asyncio.sleep(GATHER_S)
        records, active = await super()._wait_next_records(timeout)
        self._was_busy = bool(records)
        return records, active

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:  # noqa: ASYNC109 - Faust's
        """Yield one message per partition and batch of records, as Faust's `getmany` yields one per record."""
        records, active = await self._wait_next_records(timeout)
        if records is None or self.should_stop:
            return
        if not self.flow_active:
            await self._return_to_committed()
            return
        generation = self.app.consumer_generation_id
        for place, batch in records.items():
            if not self.flow_active or self.app.consumer_generation_id != generation:
                return  # the partitions were revoked meanwhile
            partition = TP(*place)
            if batch and (active is None or partition in active or partition in self._buffered_partitions):
                self.app.monitor.track_tp_end_offset(partition, self.highwater(partition))
                message = self._to_message(partition, batch[-1])
                message.value = batch
                yield partition, message

    async def _return_to_committed(self) -> None:
        """Seek, because records that arrive during a rebalance are not delivered."""
        try:
            await self.perform_seek()
        except Exception as error:  # noqa: BLE001 - as Faust does; the next rebalance seeks again
            logger.warning("cannot return to the committed offsets: %s", error)


class _BatchSchema(faust.Schema):  # type: ignore[misc]
    """Schema of messages whose value is a list of records, which Faust does not decode."""

    def loads_key(self, app: Any, message: Any, **_: Any) -> None:
        """Return no key, because each record of a batch has its own."""

    def loads_value(self, app: Any, message: Any, **_: Any) -> list[ConsumerRecord]:
        records: list[ConsumerRecord] = message.value
        return records


class _Transport(Transport):  # type: ignore[misc]
    Consumer = _Consumer


class BatchedApp(faust.App):  # type: ignore[misc]
    """Faust app that calls `on_batch` with the name of a topic and consecutive records of one of its partitions.

    Faust tells the other members the address `url` of this one.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topics: Iterable[Topic],
        on_batch: OnBatch,
        url: str,
        poll_interval_ms: int,
    ) -> None:
        self.kafka = kafka
        self.poll_interval_ms = poll_interval_ms
        super().__init__(
            kafka.topic(GROUP),
            broker=[f"kafka://{server.strip()}" for server in kafka.bootstrap.split(",")],
            broker_credentials=_credentials(kafka),
            broker_session_timeout=SESSION_MS / 1000,
            broker_heartbeat_interval=HEARTBEAT_MS / 1000,
            broker_rebalance_timeout=REBALANCE_MS / 1000,
            store="memory://",
            # Faust creates this folder for tables, although there are none. The default is the working directory.
            datadir=Path(tempfile.gettempdir()) / f"forebay-faust-{os.getuid()}",
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            autodiscover=False,
            canonical_url=url,
        )
        for topic in topics:
            self._consume(topic.name, on_batch)

    @property
    def is_member(self) -> bool:
        """Whether the broker counts this process as a member of the consumer group."""
        consumer = self.consumer if self.started else None
        return consumer is not None and not self.should_stop and consumer._thread.is_member()

    async def until_broken(self) -> None:
        """Wait until this app can no longer be a member of the group, then raise LogUnavailable or LogError.

        aiokafka rejoins by itself after a lost session. `ALONE_S` bounds the time this may take while the broker
        responds. A new app can join again, except after an error that it would meet, too.
        """
        alone_s = 0.0
        while not self.should_stop:
            await asyncio.sleep(MEMBERSHIP_CHECK_S)
            alone_s = 0.0 if self.is_member else alone_s + MEMBERSHIP_CHECK_S
            if alone_s >= ALONE_S and await self._is_broker_reachable():
                raise LogUnavailable(
                    f"this indexer has not been a member of the consumer group {self.conf.id} for {ALONE_S:g} s"
                )
        reason = self.crash_reason or "it stopped"
        is_denied = isinstance(reason, KafkaError) and not is_transient(reason)
        kind = LogError if is_denied else LogUnavailable
        raise kind(f"this indexer left the consumer group {self.conf.id} ({reason})")

    async def _is_broker_reachable(self) -> bool:
        try:
            await partitions_of(self.kafka)
        except KafkaUnusable:
            return False
        return True

    def _new_transport(self) -> Any:
        return _Transport(self.conf.broker_consumer, self)

    def _consume(self, name: str, on_batch: OnBatch) -> None:
        topic = self.topic(self.kafka.topic(name), schema=_BatchSchema())

        async def consume(stream: Any) -> None:
            async for batch in stream:
                on_batch(name, batch)

        self.agent(topic, name=f"forebay.{name}")(consume)


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
