"""Embeddings through the Kafka API on a real Kafka. The test plays router and worker."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forebay.events.codec import encode
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import Embedded, ResponseEnded, ResponseError, Usage
from forebay.events.topics import TOKENS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.transport.base import Draft
from forebay.transport.kafka.settings import KafkaSettings
from tests.integration.kafka_api import NAME, Client, OwnerAndWorkerStub, kafka_api_server, opened, prepare, until

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(DEFAULT_MODEL)


@pytest.fixture
async def settings(kafka: str, namespace: str) -> KafkaSettings:
    return await prepare(kafka, namespace)


@pytest.fixture
async def backstage(settings: KafkaSettings, model: Model) -> AsyncIterator[OwnerAndWorkerStub]:
    async with opened(settings) as log:
        yield OwnerAndWorkerStub(log, model)


@pytest.fixture
async def client(settings: KafkaSettings) -> AsyncIterator[Client]:
    async with Client(settings).running() as running:
        yield running


def body(*texts: str) -> dict[str, Any]:
    return {"model": NAME, "input": list(texts)}


async def submitted(backstage: OwnerAndWorkerStub, name: str, count: int = 1) -> RequestSubmitted:
    request: RequestSubmitted = (await backstage.submissions(name, count=count))[-1]
    assert request.task == "embed"
    return request


async def embed(backstage: OwnerAndWorkerStub, request: RequestSubmitted, number: float) -> None:
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "attempt": 1,
        "owner_epoch": 1,
        "group": NAME,
        "reply_key": request.reply_key,
    }
    usage = Usage(prompt_tokens=request.prompt_tokens, output_tokens=0)
    events = [
        Embedded(**fields, worker_id="w1", vector=array("f", [number]).tobytes()),
        ResponseEnded(**fields, finish_reason="stop", usage=usage),
    ]
    await backstage.log.append([Draft(TOKENS.name, request.reply_slot, encode(TOKENS, event)) for event in events])


async def test_a_record_with_several_inputs_gets_one_response(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model) as registry:
        await client.submit(body("a", "b", "c"), request_id="e", path=PATH)
        for at in (2, 0, 1):
            await embed(backstage, await submitted(backstage, f"e~kafka-{at}"), float(at))
        (record,) = await client.complete_response("e")
        await until(lambda: registry.get_sample_value("forebay_kafka_api_in_flight") == 0)
        assert registry.get_sample_value("forebay_kafka_api_requests_total", {"outcome": "answered"}) == 1
    assert (record.index, record.status) == (0, 200)
    assert [one["embedding"] for one in record.body["data"]] == [[0.0], [1.0], [2.0]]


async def test_one_failed_input_fails_the_request_and_cancels_the_others(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model) as registry:
        await client.submit(body("a", "b"), request_id="e", path=PATH)
        await submitted(backstage, "e~kafka-0")
        failing = await submitted(backstage, "e~kafka-1")
        error = ResponseError(status=503, code="busy", message="all are")
        ended = ResponseEnded(
            request_id="e~kafka-1",
            attempt=1,
            owner_epoch=1,
            finish_reason="error",
            error=error,
            group=NAME,
            reply_key=failing.reply_key,
        )
        await backstage.log.append([Draft(TOKENS.name, failing.reply_slot, encode(TOKENS, ended))])
        (record,) = await client.complete_response("e")
        async with asyncio.timeout(20):
            while not await backstage.cancelled("e~kafka-0"):
                pass
        assert registry.get_sample_value("forebay_kafka_api_in_flight") == 0
    assert (record.status, record.body["error"]["code"]) == (503, "busy")
    assert not await backstage.cancelled("e~kafka-1")


async def test_batches_above_the_capacity_are_all_served(
    settings: KafkaSettings,
    model: Model,
    backstage: OwnerAndWorkerStub,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An input with its vector frees capacity before its record is complete."""
    monkeypatch.setattr("forebay.ingress.kafka_api.shared.IN_FLIGHT_MAX", 2)
    async with kafka_api_server(settings, model):
        for partition, name in enumerate("xy"):
            await client.submit(body("a", "b", "c"), partition=partition, request_id=name, path=PATH)
        known: set[str] = set()
        async with asyncio.timeout(60):
            while len(known) < 6:
                for request in await backstage.events(RequestSubmitted):
                    if request.request_id not in known:
                        known.add(request.request_id)
                        await embed(backstage, request, float(request.request_id[-1]))
        for name in "xy":
            (record,) = await client.complete_response(name)
            assert [one["embedding"] for one in record.body["data"]] == [[0.0], [1.0], [2.0]]


async def test_a_takeover_uses_vectors_on_the_slot_and_submits_the_others(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model, "i1"):
        await client.submit(body("a", "b"), request_id="e", path=PATH)
        await embed(backstage, await submitted(backstage, "e~kafka-0"), 0.0)
        first = await submitted(backstage, "e~kafka-1")
    async with kafka_api_server(settings, model, "i2"):
        again = await submitted(backstage, "e~kafka-1", count=2)
        await embed(backstage, again, 1.0)
        (record,) = await client.complete_response("e")
    assert (again.nonce, again.token_ids) == (first.nonce, first.token_ids)
    assert [one["embedding"] for one in record.body["data"]] == [[0.0], [1.0]]
    assert len(await backstage.submissions("e~kafka-0")) == 1
