"""A broker with one partition of `openai-requests` for the Kafka API of an ingress, and its records."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.ingress.kafka_api import partition as partition_module
from forebay.ingress.kafka_api.partition import PartitionServer
from forebay.ingress.kafka_api.shared import KafkaApiMetrics, SharedState
from forebay.transport.base import Record
from forebay.transport.kafka.group import Committed
from tests.ingress.conftest import HELLO, NAME, SLOT, Scene

BODY: dict[str, Any] = {"model": NAME, "messages": HELLO}
NAMESPACE = "shop"
AT_MS = 1_700_000_000_000  # time at which the broker appended all records


def record(body: Any = BODY, place: tuple[int, int] = (3, 41), **headers: str) -> Record:
    """Return a record; underscores in names of headers stand for dashes."""
    value = body if isinstance(body, bytes) else msgspec.json.encode(body)
    fields = {name.replace("_", "-"): text for name, text in headers.items()}
    return Record("openai-requests", *place, AT_MS * 1000, value, None, fields or None, is_stamped=True)


class FakeKafka:
    """Broker and consumer group of one partition, with its records and responses.

    Args:
        taken_over: records that another ingress may have submitted.
    """

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, taken_over: Sequence[Record] = ()) -> None:
        monkeypatch.setattr(partition_module, "slot_of", lambda partition, slots: SLOT)
        log = cast(Any, scene.log)
        shared = SimpleNamespace(
            begin=log.begin,
            end=log.end,
            tail=log.tail,
            append_soon=log.append_soon,
            settings=SimpleNamespace(namespace=NAMESPACE),
        )
        metrics = KafkaApiMetrics(CollectorRegistry())
        self.responses: list[Any] = []
        self.server = PartitionServer(
            SharedState(cast(Any, shared), scene.models, cast(Any, self), cast(Any, self), metrics, 16), 3
        )
        self.metrics = metrics
        self.taken_over = taken_over
        self.records = list(taken_over)
        self.server.push(self.records[:])

    async def start_request(self, body: Any, **headers: str) -> None:
        self.append(record(body, (3, len(self.records)), **headers))

    def append(self, one: Record) -> None:
        self.records.append(one)
        self.server.push([one])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["asyncio.Task[None]"]:
        serving = asyncio.create_task(self.server.run())
        yield serving
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def committed(self, partition: int) -> Committed | None:
        return Committed(0, f"{SLOT}:0:{len(self.taken_over)}") if self.taken_over else None

    async def bounds(self, partition: int) -> tuple[int, int]:
        return 0, len(self.taken_over)

    async def commit(self, offsets: Any) -> bool:
        return True

    def seek(self, partition: int, offset: int) -> None: ...

    def resume(self, partition: int) -> None: ...

    async def send(self, reply: Any, on_done: Any) -> None:
        """Accept a response record."""
        self.responses.append(reply)
        on_done(None)
