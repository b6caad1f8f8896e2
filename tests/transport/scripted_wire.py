"""Connections to brokers whose requests the test answers."""

import asyncio
from typing import Generic, TypeVar

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError

PATIENCE_S = 20.0
A, B, C = (TopicPartition("n.requests", number) for number in range(3))
Sent = TypeVar("Sent")


class ScriptedWire(Generic[Sent]):
    """A partition has leader 0 unless `leaders` names another."""

    def __init__(self) -> None:
        self.leaders: dict[TopicPartition, int | None] = {}
        self.deleted: set[str] = set()
        self.sent: asyncio.Queue[Sent] = asyncio.Queue()

    def leader(self, place: TopicPartition) -> int | None:
        return self.leaders.get(place, 0)

    def gone(self, topic: str) -> KafkaError | None:
        return UnknownTopicOrPartitionError("deleted") if topic in self.deleted else None

    async def next_request(self) -> Sent:
        async with asyncio.timeout(PATIENCE_S):
            return await self.sent.get()

    async def settled(self) -> bool:
        """Run all tasks that can run. Return whether no request was sent."""
        for _ in range(20):
            await asyncio.sleep(0)
        return self.sent.empty()
