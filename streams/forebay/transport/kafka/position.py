"""How far a reader without a consumer group is, committed all the same: for tools that watch the lag of groups.

A hint only: nobody reads it back. What cannot be committed is said once, and tried again.
"""

import asyncio
import logging
import time
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import unreachable
from forebay.transport.kafka.writer import explain

logger = logging.getLogger(__name__)

COMMIT_EVERY_S = 5.0  # Kafka's own clients commit so often
COMMIT_S = 1.0  # the reader waits for it, and it is not worth more


class KafkaPosition:
    """The committed offset of the group `name` in one partition of `topic`, both named without namespace."""

    def __init__(self, consumer: AIOKafkaConsumer, place: TopicPartition, group: str) -> None:
        self._consumer = consumer
        self._place = place
        self._group = group
        self._offset: int | None = None
        self._due_s = 0.0
        self._failing = False

    @classmethod
    async def open(cls, settings: KafkaSettings, topic: str, partition: int, name: str) -> Self:
        """Connect. Raises KafkaUnusable when there is no broker or it does not let us in."""
        group = settings.topic(name)
        consumer = AIOKafkaConsumer(**settings.client_options(), group_id=group, enable_auto_commit=False)
        place = TopicPartition(settings.topic(topic), partition)
        try:
            await consumer.start()
        except (KafkaError, OSError) as error:
            await consumer.stop()
            raise unreachable(settings, error) from error
        consumer.assign([place])  # without a group's members: nobody is asked, and nothing moves
        consumer.pause(place)
        return cls(consumer, place, group)

    async def reached(self, offset: int) -> None:
        """The next offset to read; committed at most every `COMMIT_EVERY_S`."""
        self._offset = offset
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + COMMIT_EVERY_S
            await self._commit()

    async def close(self) -> None:
        """Commit the last offset, if there is one, and disconnect."""
        await self._commit()
        await self._consumer.stop()

    async def _commit(self) -> None:
        if self._offset is None:
            return
        try:
            async with asyncio.timeout(COMMIT_S):
                await self._consumer.commit({self._place: self._offset})
            self._failing = False
        except (KafkaError, OSError) as error:
            if not self._failing:
                logger.warning("the group %s cannot commit, its lag is not shown: %s", self._group, explain(error))
            self._failing = True
