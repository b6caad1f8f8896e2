"""Errors that must not stop a partition of the Kafka API, without a broker."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.requests import RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api import partition as partition_module
from forebay.ingress.kafka_api.metrics import KafkaApiMetrics
from forebay.ingress.kafka_api.partition import PartitionServer, SharedState
from forebay.ingress.parsers.deltas import OutputDelta
from forebay.transport.base import Record
from tests.ingress.conftest import NAME, SLOT, Scene
from tests.system import until

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}


class FakeKafka:
    """Broker and consumer group of one partition, with its records and responses."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partition_module, "slot_of", lambda partition, slots: SLOT)
        log = cast(Any, scene.log)
        shared = SimpleNamespace(
            begin=log.begin,
            end=log.end,
            tail=log.tail,
            append_soon=log.append_soon,
            settings=SimpleNamespace(namespace="shop"),
        )
        metrics = KafkaApiMetrics(CollectorRegistry())
        self.responses: list[Any] = []
        self.server = PartitionServer(
            SharedState(cast(Any, shared), scene.ingress, cast(Any, self), cast(Any, self), metrics, 16), 3
        )
        self.records = 0

    async def start_request(self, body: Any) -> None:
        """Add a record."""
        value = msgspec.json.encode(body)
        self.server.push([Record("openai-requests", 3, self.records, 1_700_000_000_000_000, value, None, None)])
        self.records += 1

    async def committed(self, partition: int) -> None:
        """Return that nothing was committed."""

    async def bounds(self, partition: int) -> tuple[int, int]:
        """Return the bounds of an empty partition."""
        return 0, 0

    async def commit(self, offsets: Any) -> bool:
        """Accept a commit."""
        return True

    def seek(self, partition: int, offset: int) -> None:
        """Ignore the call."""

    def resume(self, partition: int) -> None:
        """Ignore the call."""

    async def send(self, reply: Any, on_done: Any) -> None:
        """Accept a response record."""
        self.responses.append(reply)
        on_done(None)


async def test_a_record_that_raises_gets_a_500_and_the_next_is_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeKafka(scene, monkeypatch)
    serving = asyncio.create_task(fake.server.run())
    try:
        with monkeypatch.context() as broken:
            broken.setattr(scene.model, "render", lambda *_: 1 // 0)
            await fake.start_request(CHAT)
            await until(lambda: fake.responses or serving.done())
        (response,) = fake.responses
        assert (response.headers["status"], response.headers["last"]) == ("500", "1")
        assert msgspec.json.decode(response.value)["error"]["code"] == "internal_error"
        assert "record 0 of partition 3" in caplog.text
        await fake.start_request(CHAT)
        await until(lambda: scene.requests(RequestSubmitted) or serving.done())
        assert scene.requests(RequestSubmitted)[0].request_id == "kafka-api-3-1"
        assert scene.requests(RequestSubmitted)[0].patient, "the topic holds it anyway"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_an_error_of_a_parser_ends_the_response(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.access")

    class Broken:
        def push(self, text: str, token_ids: list[int]) -> OutputDelta:
            raise ApiError(502, "parser_failed", "it broke")

        finish = push

    monkeypatch.setattr(scene.ingress.parsers, "parser", lambda how, request_id: Broken())
    fake = FakeKafka(scene, monkeypatch)
    serving = asyncio.create_task(fake.server.run())
    try:
        await fake.start_request({**CHAT, "stream": True})
        submitted = await scene.next_request()
        scene.emit_text(submitted.request_id, "one")
        await until(lambda: fake.responses or serving.done())
        (response,) = fake.responses
        assert (response.headers["status"], response.headers["last"]) == ("502", "1")
        assert (await scene.cancelled()).reason == "parser_failed"
        await fake.start_request({**CHAT, "model": "unknown"})
        await until(lambda: len(fake.responses) == 2 or serving.done())
        failed, rejected = (one.__dict__["fields"] for one in caplog.records if one.name == "forebay.access")
        assert (failed["offset"], failed["status"], failed["error"]) == (0, 502, "parser_failed")
        assert (failed["request_id"], failed["worker"]) == (submitted.request_id, "w1")
        assert (rejected["offset"], rejected["status"], rejected["error"]) == (1, 404, "model_not_found")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
