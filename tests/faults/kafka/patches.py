"""Replace the clients of aiokafka in the Kafka transport for the time of a simulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from forebay.transport.kafka import group, log, position, reader, replies, writer
from tests.faults.kafka.client import HOST, FakeAdmin
from tests.faults.kafka.consumer import FakeConsumer
from tests.faults.kafka.producer import FakeProducer
from tests.faults.kafka.wire import FakeWire


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
    (position, "AIOKafkaConsumer", FakeConsumer),
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
