"""Replace the clients of aiokafka in the Kafka transport for the time of a simulation.

The stand-in for `AIOKafkaProducer` sends every record as a batch of its own through forebay's producer. Both producers
are idempotent, and retry until the broker accepts or rejects a batch.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

from aiokafka.partitioner import DefaultPartitioner
from aiokafka.structs import TopicPartition

from forebay import runtime
from forebay.transport.base import Draft
from forebay.transport.kafka import group, log, reader, replies, writer
from forebay.transport.kafka.producer import Producer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.wire import Channel, Wire
from tests.faults.kafka.client import HOST, FakeAdmin
from tests.faults.kafka.consumer import FakeConsumer
from tests.faults.kafka.server import NAMESPACE
from tests.faults.kafka.wire import FakeWire


class FakeProducer:
    def __init__(self, *, bootstrap_servers: str, **_: Any) -> None:
        self._wire = FakeWire(KafkaSettings(bootstrap_servers, NAMESPACE))
        self._producer = Producer(cast("Wire", self._wire), Channel.APPENDS)
        self._partitioner = DefaultPartitioner()
        self._sent: dict[asyncio.Task[int], None] = {}

    async def start(self) -> None:
        self._wire.count_call()
        await self._wire.start()
        await self._producer.start()

    async def stop(self) -> None:
        """Wait until every record is acknowledged or rejected, and disconnect."""
        if self._sent:
            await asyncio.wait(self._sent)
        await self._producer.stop()
        await self._wire.close()

    async def send(self, topic: str, value: bytes, key: bytes, *, headers: Sequence[tuple[str, bytes]] = ()) -> Any:
        """Queue a record, and return a future for its offset. Raises KafkaError if the topic is unknown."""
        self._wire.count_call()
        numbers = list(range(await self._wire.counted(topic)))
        place = TopicPartition(topic, self._partitioner(key, numbers, numbers))
        draft = Draft(topic, place.partition, value, key, {name: text.decode() for name, text in headers})
        at_ms = runtime.wall_ns() // 1_000_000
        task = self._wire.start_task(self._producer.append(place, [(draft, at_ms)], len(value)))
        self._sent[task] = None
        task.add_done_callback(lambda done: self._sent.pop(done, None))
        return task


class _BufferLimit(int):
    """Maximum bytes of unacknowledged records, which count as exceeded when the fault `log_full` is injected."""

    def __lt__(self, buffered: int) -> bool:
        return HOST.get().faults.take("log_full") or super().__lt__(buffered)


REPLACED: tuple[tuple[ModuleType, str, object], ...] = (
    (writer, "BUFFER_BYTES_MAX", _BufferLimit(writer.BUFFER_BYTES_MAX)),
    (log, "Wire", FakeWire),
    (replies, "AIOKafkaProducer", FakeProducer),
    (replies, "AIOKafkaAdminClient", FakeAdmin),
    (group, "AIOKafkaAdminClient", FakeAdmin),
    (group, "DenseConsumer", FakeConsumer),
    (reader, "DenseConsumer", FakeConsumer),
)


@contextmanager
def fake_clients() -> Iterator[None]:
    """Let the Kafka transport use the simulated clients. They find their process with the variable `HOST`."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in REPLACED]
    try:
        for module, name, fake in REPLACED:
            setattr(module, name, fake)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
