"""Commit the position of a reader without consumer group, so that monitoring tools show its lag.

forebay never reads the committed offset back. A failed commit is logged once and retried.
"""

import asyncio
import logging
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from forebay import runtime
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.start import stop_within
from forebay.transport.kafka.topics import unreachable

logger = logging.getLogger(__name__)

COMMIT_EVERY_S = 5.0  # the default commit interval of Kafka's own clients
COMMIT_S = 1.0  # timeout of a commit; short, because the reader waits for it


class KafkaPosition:
    """Commits the offset of a reader in one partition, under the name of a consumer group."""

    def __init__(self, consumer: AIOKafkaConsumer, place: TopicPartition, group: str) -> None:
        self._consumer = consumer
        self._place = place
        self._group = group
        self._offset: int | None = None
        self._due_s = 0.0
        self._failing = False

    @classmethod
    async def open(cls, settings: KafkaSettings, topic: str, partition: int, name: str) -> Self:
        """Connect, to commit as consumer group `name`. Names are without namespace. Raises KafkaUnusable."""
        group = settings.topic(name)
        consumer = AIOKafkaConsumer(**settings.client_options(), group_id=group, enable_auto_commit=False)
        place = TopicPartition(settings.topic(topic), partition)
        try:
            await consumer.start()
        except (KafkaError, OSError) as error:
            await consumer.stop()
            raise unreachable(settings, error) from error
        consumer.assign([place])  # without joining the group, so this causes no rebalance
        consumer.pause(place)
        return cls(consumer, place, group)

    async def update(self, offset: int) -> None:
        """Set the next offset to read, and commit it if the last commit is older than `COMMIT_EVERY_S`."""
        self._offset = offset
        if runtime.monotonic_s() >= self._due_s:
            self._due_s = runtime.monotonic_s() + COMMIT_EVERY_S
            await self._commit()

    async def close(self) -> None:
        """Commit the last offset, if any, and disconnect."""
        await self._commit()
        await stop_within(COMMIT_S, self._consumer.stop())

    async def _commit(self) -> None:
        if self._offset is None:
            return
        try:
            async with asyncio.timeout(COMMIT_S):
                await self._consumer.commit({self._place: self._offset})
            self._failing = False
        except (KafkaError, OSError) as error:
            if not self._failing:
                logger.warning(
                    "the group %s cannot commit, so its lag is not up to date: %s", self._group, explain(error)
                )
            self._failing = True
