"""Ingresses that serve the Kafka API on a real Kafka, and a Kafka client.

Run as a program, it serves one ingress until it is killed: `kafka_api.py BOOTSTRAP NAMESPACE NAME`.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from prometheus_client import CollectorRegistry

from forebay.events.base import pack_u32
from forebay.events.codec import decode, encode
from forebay.events.request_ids import aliases_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.tokens import ResponseEnded, TokenChunk, TokenEvent, TokensEmitted, Usage
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES, REQUESTS, TOKENS
from forebay.ingress.front import Front
from forebay.ingress.kafka_api.api import KafkaApi
from forebay.ingress.kafka_api.shared import KafkaApiMetrics
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.settings import IngressSettings
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics
from tests.harness.only_model import OnlyModel

NAME = "test-model"
KAFKA_API_PARTITIONS = 2
REPLY_SLOTS = 3
PATIENCE_S = 40.0
PLAN = TopicPlan(groups=1, slots=4, replies=REPLY_SLOTS, kafka_api=KAFKA_API_PARTITIONS)


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A record of `openai-responses` or of another reply topic."""

    request_id: str
    index: int
    status: int
    last: bool
    body: Any
    raw: bytes


class Client:
    """A Kafka client that produces bodies and collects responses."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.records: list[ResponseRecord] = []
        self._settings = settings
        self._producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap)

    @asynccontextmanager
    async def running(self, *topics: str) -> AsyncIterator["Client"]:
        """Collect from `openai-responses`, and from the first partition of topics with these full names."""
        await self._producer.start()
        await self._consumer.start()
        own = self._settings.topic(OPENAI_RESPONSES.name)
        places = [TopicPartition(own, partition) for partition in range(KAFKA_API_PARTITIONS)]
        places += [TopicPartition(topic, 0) for topic in topics]
        self._consumer.assign(places)
        await self._consumer.seek_to_beginning(*places)
        collecting = asyncio.create_task(self._collect())
        try:
            yield self
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            await self._consumer.stop()
            await self._producer.stop()

    async def submit(self, body: Any, *, partition: int = 0, **headers: str) -> None:
        """Produce a request. Underscores in header names stand for dashes."""
        value = body if isinstance(body, bytes) else msgspec.json.encode(body)
        record_headers = [(name.replace("_", "-"), text.encode()) for name, text in headers.items()]
        topic = self._settings.topic(OPENAI_REQUESTS.name)
        await self._producer.send_and_wait(topic, value, partition=partition, headers=record_headers)

    def of(self, request_id: str) -> list[ResponseRecord]:
        """Return the records of a request in the order of arrival."""
        return [record for record in self.records if record.request_id == request_id]

    async def complete_response(self, request_id: str, *, times: int = 1) -> list[ResponseRecord]:
        """Wait until the last record of a response arrived this often, and return all its records."""
        await until(lambda: sum(record.last for record in self.of(request_id)) >= times)
        return self.of(request_id)

    async def _collect(self) -> None:
        async for message in self._consumer:
            headers = {name: value.decode() for name, value in message.headers}
            assert message.key == headers["request-id"].encode()
            answered = ResponseRecord(
                headers["request-id"],
                int(headers["index"]),
                int(headers["status"]),
                headers["last"] == "1",
                msgspec.json.decode(message.value),
                message.value,
            )
            self.records.append(answered)


class OwnerAndWorkerStub:
    """Router and worker, played by the test."""

    def __init__(self, log: KafkaLog, model: Model) -> None:
        self.log = log
        self.model = model

    async def events(self, kind: type | None = None) -> list[Any]:
        """Return the events that ingresses appended to `requests`."""
        found = [decode(REQUESTS, record.value) for record in await self.log.read(REQUESTS.name, 0, 0, 10_000)]
        return [event for event in found if kind is None or isinstance(event, kind)]

    async def submissions(self, request_id: str, *, count: int = 1) -> list[RequestSubmitted]:
        """Wait for this many submissions of a request or of all its choices, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [one for one in await self.events(RequestSubmitted) if request_id in aliases_of(one.request_id)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{request_id} is not submitted"

    async def cancelled(self, request_id: str) -> bool:
        return any(request_id in aliases_of(event.request_id) for event in await self.events(RequestCancelled))

    async def emit(self, request: RequestSubmitted, text: str, *, first: int = 0) -> int:
        """Emit a text in one chunk and return the index after it."""
        token_ids = self.model.encode(text)
        chunk = TokenChunk(
            request_id=request.request_id,
            attempt=1,
            first_index=first,
            token_ids=pack_u32(token_ids),
            reply_key=request.reply_key,
        )
        await self.send(request, TokensEmitted(worker_id="w1", worker_epoch=1, owner_epoch=1, chunks=(chunk,)))
        return first + len(token_ids)

    async def end(self, request: RequestSubmitted, output_tokens: int) -> None:
        usage = Usage(prompt_tokens=request.prompt_tokens, output_tokens=output_tokens)
        ended = ResponseEnded(
            request_id=request.request_id,
            attempt=1,
            owner_epoch=1,
            finish_reason="length",
            usage=usage,
            reply_key=request.reply_key,
        )
        await self.send(request, ended)

    async def answer(self, request: RequestSubmitted, *texts: str) -> None:
        """Emit texts, one chunk each, and end the response."""
        position = 0
        for text in texts:
            position = await self.emit(request, text, first=position)
        await self.end(request, position)

    async def serve(self) -> None:
        """Respond to every request once, in two chunks, until cancelled; ignore duplicates as the owner does."""
        wake = asyncio.Event()
        tail = self.log.tail(REQUESTS.name, 0, 0, wake)
        known: set[str] = set()
        while True:
            wake.clear()
            for record in tail.take(50):
                request = decode(REQUESTS, record.value)
                if isinstance(request, RequestSubmitted) and request.request_id not in known:
                    known.add(request.request_id)
                    await self.answer(request, f"one {request.request_id}", " two")
            if not tail:
                await wake.wait()

    async def send(self, request: RequestSubmitted, event: TokenEvent) -> None:
        event = msgspec.structs.replace(event, group=request.model)
        await self.log.append([Draft(TOKENS.name, request.reply_slot, encode(TOKENS, event))])


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - records set no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened(settings: KafkaSettings) -> AsyncIterator[KafkaLog]:
    log = await KafkaLog.open(settings)
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def kafka_api_server(
    settings: KafkaSettings, model: Model, name: str = "i1", *, model_name: str = NAME, timeout_s: float = 60.0
) -> AsyncIterator[CollectorRegistry]:
    registry = CollectorRegistry()
    async with opened(settings) as log:
        ingress_settings = IngressSettings(
            model_name=model_name, block_size=4, ingress_id=name, timeout_s=timeout_s, body_bytes_max=100_000
        )
        reply_from = await log.end(TOKENS.name, 0)
        front = Front(log, ingress_settings, IngressMetrics(registry, model_name), reply_from, model)
        await front.keys.start()
        models = OnlyModel(front, model).models
        tasks = [
            asyncio.create_task(front.run()),
            asyncio.create_task(KafkaApi(log, models, KafkaApiMetrics(registry), REPLY_SLOTS).run()),
        ]
        try:
            yield registry
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if end is not None and not isinstance(end, asyncio.CancelledError):
                    raise end


async def prepare(bootstrap: str, namespace: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap, namespace)
    await create_topics(settings, PLAN, ["default"])
    return settings


async def _forever(bootstrap: str, namespace: str, name: str) -> None:
    async with kafka_api_server(KafkaSettings(bootstrap, namespace), Model(DEFAULT_MODEL), name):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_forever(*sys.argv[1:4]))
