"""Errors that must not stop a partition of the Kafka API, without a broker."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.request_ids import aliases_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api import partition as partition_module
from forebay.ingress.kafka_api.partition import PartitionServer
from forebay.ingress.kafka_api.shared import KafkaApiMetrics, SharedState
from forebay.ingress.parsers.deltas import OutputDelta
from forebay.ingress.served import OneModel
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
            SharedState(cast(Any, shared), OneModel(scene.ingress), cast(Any, self), cast(Any, self), metrics, 16), 3
        )
        self.records = 0

    async def start_request(self, body: Any, **headers: str) -> None:
        """Add a record. Underscores in header names stand for dashes."""
        value = msgspec.json.encode(body)
        fields = {name.replace("_", "-"): text for name, text in headers.items()}
        self.server.push([Record("openai-requests", 3, self.records, 1_700_000_000_000_000, value, None, fields)])
        self.records += 1

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["asyncio.Task[None]"]:
        serving = asyncio.create_task(self.server.run())
        yield serving
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def committed(self, partition: int) -> None: ...

    async def bounds(self, partition: int) -> tuple[int, int]:
        """Return the bounds of an empty partition."""
        return 0, 0

    async def commit(self, offsets: Any) -> bool:
        return True

    def seek(self, partition: int, offset: int) -> None: ...

    def resume(self, partition: int) -> None: ...

    async def send(self, reply: Any, on_done: Any) -> None:
        """Accept a response record."""
        self.responses.append(reply)
        on_done(None)


async def test_a_record_that_raises_gets_a_500_and_the_next_is_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
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
        assert scene.requests(RequestSubmitted)[0].request_id == "kafka-api-3-1~kafka"
        assert scene.requests(RequestSubmitted)[0].patient, "the topic holds it anyway"


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
    async with fake.serving() as serving:
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


async def test_the_request_id_of_the_client_stands_for_all_choices(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
        await fake.start_request({**CHAT, "n": 3}, request_id="order-7")
        choices = [(await scene.next_request()).request_id for _ in range(3)]
        assert all("order-7" in aliases_of(choice) for choice in choices)
        for body in (CHAT, {**CHAT, "n": 3}):
            await fake.start_request(body, request_id="order-7")
        await until(lambda: len(fake.responses) == 2 or serving.done())
        assert [one.headers["status"] for one in fake.responses] == ["409", "409"]
        assert "the request id order-7 is" in msgspec.json.decode(fake.responses[0].value)["error"]["message"]
        scene.refuse(choices[1], 429, "queue_full")
        await until(lambda: len(scene.requests(RequestCancelled)) == 2 or serving.done())
        assert {one.request_id for one in scene.requests(RequestCancelled)} == {choices[0], choices[2]}
        await until(lambda: len(fake.responses) == 3 or serving.done())
        assert fake.responses[2].headers["status"] == "429"
        assert {(one.key, one.headers["request-id"]) for one in fake.responses} == {(b"order-7", "order-7")}
        await fake.start_request(CHAT, request_id="order-7")
        await until(lambda: len(scene.requests(RequestSubmitted)) == 4 or serving.done())
        assert scene.requests(RequestSubmitted)[3].request_id not in choices
