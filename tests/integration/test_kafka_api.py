"""The Kafka API on a real Kafka. The test plays router and worker, except of the whole system."""

import asyncio
import signal
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from forebay.cli.app import app
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import Embedded, ResponseEnded, Usage
from forebay.events.topics import OPENAI_REQUESTS, REQUESTS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.replay.explain.explain import explain
from forebay.replay.states import States
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import partitions_of
from tests.harness.cluster import FOREBAY
from tests.integration.kafka_api import (
    KAFKA_API_PARTITIONS,
    NAME,
    PATIENCE_S,
    Client,
    OwnerAndWorkerStub,
    ResponseRecord,
    kafka_api_server,
    opened,
    prepare,
    until,
)
from tests.system import MODEL, System

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(DEFAULT_MODEL)


@dataclass(frozen=True)
class Scene:
    """A namespace on Kafka, a client of the Kafka API, and the router and the worker, which the test plays."""

    settings: KafkaSettings
    model: Model
    stub: OwnerAndWorkerStub
    client: Client

    def serve(self, name: str = "i1", **options: Any) -> AbstractAsyncContextManager[CollectorRegistry]:
        """Run an ingress, and yield its metrics."""
        return kafka_api_server(self.settings, self.model, name, **options)

    async def answer(self, request_id: str, *texts: str) -> RequestSubmitted:
        """Answer the first submission of a request, and return it."""
        request = (await self.stub.submissions(request_id))[0]
        await self.stub.answer(request, *texts)
        return request

    async def until_cancelled(self, request_id: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.stub.cancelled(request_id):
                pass


@pytest.fixture
async def scene(kafka: str, namespace: str, model: Model) -> AsyncIterator[Scene]:
    settings = await prepare(kafka, namespace)
    async with opened(settings) as log, Client(settings).running() as client:
        yield Scene(settings, model, OwnerAndWorkerStub(log, model), client)


def metric(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"forebay_kafka_api_{name}", labels) or 0.0


async def test_a_response_has_the_id_of_the_header(scene: Scene) -> None:
    async with scene.serve() as registry:
        await scene.client.submit(CHAT, request_id="r-1")
        request = await scene.answer("r-1", "one two", " three")
        (record,) = await scene.client.complete_response("r-1")
        await until(lambda: metric(registry, "in_flight") == 0)
        assert metric(registry, "requests_total", outcome="answered") == 1
    assert (record.status, record.index) == (200, 0)
    assert record.body["choices"][0]["message"]["content"] == "one two three"
    assert record.body["id"] == request.request_id == "r-1~kafka"
    assert record.body["forebay"]["worker"] == "w1"


async def test_responses_go_to_the_reply_topic_if_it_exists(scene: Scene) -> None:
    settings = scene.settings
    mine = f"{settings.namespace}.replies.mine"
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(mine, 1, 1)])
    await admin.close()
    async with Client(settings).running(mine) as client, scene.serve():
        await client.submit(CHAT, request_id="a", reply_topic=mine)
        await client.submit(CHAT, request_id="b", reply_topic=f"{settings.namespace}.replies.nobodys")
        await client.submit(CHAT, request_id="c", reply_topic=settings.topic(REQUESTS.name))
        await scene.answer("a", "yes")
        answer, missing, refused = [(await client.complete_response(one))[0] for one in "abc"]
        assert await scene.stub.log.end(REQUESTS.name, 0) == 1
    assert answer.status == 200
    assert missing.body["error"]["code"] == "unknown_reply_topic"
    assert refused.body["error"]["code"] == "invalid_reply_topic"


async def test_no_response_is_sent_to_another_namespace(scene: Scene) -> None:
    other = await prepare(scene.settings.bootstrap, f"{scene.settings.namespace}-other")
    names = sorted(await partitions_of(other))
    assert {"decisions", "control", "openai-requests", "work.default"} <= set(names)
    async with scene.serve() as registry:
        for name in names:
            await scene.client.submit(CHAT, request_id=name, reply_topic=other.topic(name))
        answers = [record for name in names for record in await scene.client.complete_response(name)]
        assert metric(registry, "malformed_total", reason="invalid_reply_topic") == len(names)
    assert {(one.status, one.body["error"]["code"]) for one in answers} == {(400, "invalid_reply_topic")}
    async with opened(other) as log:
        assert [await log.end(name, 0) for name in names] == [0] * len(names)
    assert await scene.stub.events() == []


async def test_without_an_owner_a_request_times_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.kafka_api.partition.GRACE_S", 0.1)
    async with scene.serve(timeout_s=0.2):
        await scene.client.submit(CHAT, request_id="late")
        (record,) = await scene.client.complete_response("late")
        assert (record.status, record.body["error"]["code"]) == (504, "deadline_exceeded")
        await scene.until_cancelled("late")


async def test_a_stop_string_ends_the_response_and_cancels_the_request(scene: Scene) -> None:
    async with scene.serve():
        await scene.client.submit({**CHAT, "stop": "three"}, request_id="stop")
        (request,) = await scene.stub.submissions("stop")
        await scene.stub.emit(request, "one two three four")
        (record,) = await scene.client.complete_response("stop")
        await scene.until_cancelled("stop")
    assert record.body["choices"][0]["message"]["content"] == "one two "
    assert record.body["choices"][0]["finish_reason"] == "stop"


async def test_a_takeover_sends_the_same_records_again(scene: Scene) -> None:
    client, stub = scene.client, scene.stub
    async with scene.serve("i1"):
        await client.submit(STREAM, request_id="slow")
        await client.submit(CHAT, request_id="done")
        (request,) = await stub.submissions("slow")
        position = await stub.emit(request, "one")
        await scene.answer("done", "quick")
        await client.complete_response("done")
        await until(lambda: client.of("slow"))
    async with scene.serve("i2") as registry:
        _, again = await stub.submissions("slow", count=2)
        position = await stub.emit(request, " two", first=position)
        await stub.end(request, position)
        records = await client.complete_response("slow")
        await client.complete_response("done", times=2)
        assert metric(registry, "repeated_total") == 1
    first, *rest = records
    assert (again.nonce, again.token_ids, again.reply_slot) == (request.nonce, request.token_ids, request.reply_slot)
    assert rest[0] == first
    assert [record.index for record in rest] == [0, 1, 2, 3]
    assert len({record.raw for record in client.of("done")}) == 1
    assert len(await stub.submissions("done")) == 1


async def test_completed_requests_are_not_read_again(scene: Scene) -> None:
    for ingress, request_id in (("i1", "one"), ("i2", "two")):
        async with scene.serve(ingress):
            await scene.client.submit(CHAT, request_id=request_id)
            await scene.answer(request_id, "yes")
            await scene.client.complete_response(request_id)
    assert len(scene.client.of("one")) == 1
    assert len(await scene.stub.submissions("one")) == 1


async def test_every_request_gets_a_response_while_ingresses_join_and_leave(scene: Scene) -> None:
    client, names = scene.client, [f"n{number}" for number in range(400)]
    serving = asyncio.create_task(scene.stub.serve())

    async def submit() -> None:
        for number, name in enumerate(names):
            body = STREAM if number % 2 else CHAT
            await client.submit(body, partition=number % KAFKA_API_PARTITIONS, request_id=name)

    async def some(count: int) -> None:
        await until(lambda: len({one.request_id for one in client.records}) >= count)

    load = asyncio.create_task(submit())
    async with AsyncExitStack() as last:
        async with scene.serve("i1"):
            await some(50)
            async with scene.serve("i2") as second:
                await until(lambda: metric(second, "partitions") == 1)
                await some(100)
            await some(150)
        await last.enter_async_context(scene.serve("i3"))
        await load
        for name in names:
            await client.complete_response(name)
    serving.cancel()
    for number, name in enumerate(names):
        by_index: dict[int, set[bytes]] = {}
        for one in client.of(name):
            by_index.setdefault(one.index, set()).add(one.raw)
            assert one.status == 200
        assert sorted(by_index) == list(range(len(by_index))), "no record is missing"
        assert (len(by_index) > 1) == (number % 2 == 1), "every second request has a stream"
        assert all(len(raws) == 1 for raws in by_index.values())


async def test_a_killed_ingress_is_replaced(scene: Scene) -> None:
    client, stub, settings = scene.client, scene.stub, scene.settings
    arguments = ("-m", "tests.integration.kafka_api", settings.bootstrap, settings.namespace, "victim")
    victim = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        for partition in range(KAFKA_API_PARTITIONS):
            await client.submit(STREAM, partition=partition, request_id=f"k{partition}")
        requests = [(await stub.submissions(f"k{partition}"))[0] for partition in range(KAFKA_API_PARTITIONS)]
        positions = [await stub.emit(request, " before") for request in requests]
        await until(lambda: len(client.records) == KAFKA_API_PARTITIONS)
        victim.kill()
        async with scene.serve("heir"):
            for request, position in zip(requests, positions, strict=True):
                await stub.end(request, await stub.emit(request, " after", first=position))
                records = await client.complete_response(client_id_of(request.request_id))
                assert records[0] == records[1]
                assert [record.index for record in records] == [0, 0, 1, 2, 3]
                assert len(await stub.submissions(request.request_id)) <= 2
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()


async def test_records_of_aborted_transactions_are_not_served(scene: Scene) -> None:
    settings = scene.settings
    producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap, transactional_id=settings.namespace)
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(settings.topic(OPENAI_REQUESTS.name), b"{not served}", partition=0)
    await producer.abort_transaction()
    await producer.stop()
    for ingress, request_id in (("i1", "after"), ("i2", "again")):
        async with scene.serve(ingress):
            await scene.client.submit(CHAT, request_id=request_id)
            await scene.answer(request_id, "yes")
            await scene.client.complete_response(request_id)
    assert {record.request_id for record in scene.client.records} == {"after", "again"}


async def test_the_whole_system_serves_the_kafka_api(scene: Scene) -> None:
    client, log = scene.client, scene.stub.log
    system = System(log)  # type: ignore[arg-type]  # what is used of it takes any log
    async with system.started(2), system.owned() as owner, scene.serve(model_name=MODEL):
        await until(lambda: len(owner.world.fleet.workers()) == 2)
        names = [f"q{number}" for number in range(40)]
        for number, name in enumerate(names):
            body = {**CHAT, "model": MODEL, "ignore_eos": True, "stream": bool(number % 2)}
            await client.submit(body, partition=number % KAFKA_API_PARTITIONS, request_id=name)
        for number, name in enumerate(names):
            records = await client.complete_response(name)
            assert {record.status for record in records} == {200}
            assert [record.index for record in records] == list(range(len(records)))
            if not number % 2:
                assert records[0].body["usage"]["completion_tokens"] == CHAT["max_tokens"]
        await client.submit({**CHAT, "model": MODEL, "n": 3}, request_id="three")
        (whole,) = await client.complete_response("three")
        found = await explain(States(log, 0), "three")
        choices = {one["request_id"] for one in whole.body["forebay"]["choices"]}
        assert {found.request_id, *(found.others or ())} == choices


async def test_produce_prints_a_response_per_line(scene: Scene, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    bodies = [{**CHAT, "request_id": "whole"}, {**STREAM, "request_id": "stream"}]
    lines.write_bytes(b"\n\n".join(msgspec.json.encode(body) for body in bodies))
    where = ("--kafka", scene.settings.bootstrap, "--namespace", scene.settings.namespace)
    run = await asyncio.to_thread(CliRunner().invoke, app, ["keys", "create", "--tenant=acme", "--signing", *where])
    (tmp_path / "key").write_text(run.stdout)
    arguments = ["produce", str(lines), "--wait", *where, "--timeout-s", "40", "--signing-key", str(tmp_path / "key")]
    async with scene.serve():
        running = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, arguments))
        for name in ("whole", "stream"):
            assert (await scene.answer(name, "yes", " no")).tenant == "acme"
        result = await running
        assert result.exit_code == 0, result.stderr
        answers = {one["request_id"]: one for one in map(msgspec.json.decode, result.stdout.splitlines())}
        assert answers["whole"]["body"]["choices"][0]["message"]["content"] == "yes no"
        choices = [one for chunk in answers["stream"]["chunks"] for one in chunk["choices"]]
        assert "".join(one["delta"].get("content", "") for one in choices) == "yes no"
        assert choices[-1]["finish_reason"] == "length"
        lines.write_bytes(b"{no json")
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert msgspec.json.decode(result.stdout)["status"] == 400
    assert "1 of them with an error, 0 missing" in result.stderr


@pytest.mark.parametrize("from_pipe", [False, True])
async def test_an_interrupted_produce_reports_what_it_sent(scene: Scene, from_pipe: bool, tmp_path: Path) -> None:
    """Nobody responds, and a pipe is still open: Ctrl-C ends the command, which then counts the missing responses."""
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b"".join(msgspec.json.encode(CHAT) + b"\n" for _ in range(3)))
    where = ("--kafka", scene.settings.bootstrap, "--namespace", scene.settings.namespace)
    arguments = [FOREBAY, "produce", "-" if from_pipe else str(lines), "--wait", *where]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stderr=pipe)
    assert process.stdin is not None
    if from_pipe:
        process.stdin.write(lines.read_bytes())
    log, partitions = scene.stub.log, range(KAFKA_API_PARTITIONS)
    async with asyncio.timeout(PATIENCE_S):
        while sum([await log.end(OPENAI_REQUESTS.name, partition) for partition in partitions]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        error = await process.stderr.read() if process.stderr is not None else b""
        code = await process.wait()
    assert (code, error.decode()) == (130, "forebay: 3 requests sent, 0 answered, 0 of them with an error, 3 missing\n")


async def submit_inputs(scene: Scene, request_id: str, *texts: str, partition: int = 0) -> None:
    body = {"model": NAME, "input": list(texts)}
    await scene.client.submit(body, partition=partition, request_id=request_id, path="/v1/embeddings")


async def submitted_input(scene: Scene, name: str, count: int = 1) -> RequestSubmitted:
    request = (await scene.stub.submissions(name, count=count))[-1]
    assert request.task == "embed"
    return request


def of(request: RequestSubmitted) -> dict[str, Any]:
    """Return the fields that all events of a response have."""
    shared = {"request_id": request.request_id, "reply_key": request.reply_key}
    return {**shared, "attempt": 1, "owner_epoch": 1, "group": NAME}


async def embed(scene: Scene, request: RequestSubmitted, number: float) -> None:
    usage = Usage(prompt_tokens=request.prompt_tokens, output_tokens=0)
    vector = array("f", [number]).tobytes()
    await scene.stub.send(request, Embedded(**of(request), worker_id="w1", vector=vector))
    await scene.stub.send(request, ResponseEnded(**of(request), finish_reason="stop", usage=usage))


def vectors(record: ResponseRecord) -> list[list[float]]:
    return [one["embedding"] for one in record.body["data"]]


async def test_batches_above_the_capacity_are_all_served(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input with its vector frees capacity before its record is complete."""
    monkeypatch.setattr("forebay.ingress.kafka_api.shared.IN_FLIGHT_MAX", 2)
    async with scene.serve():
        for partition, name in enumerate("xy"):
            await submit_inputs(scene, name, "a", "b", "c", partition=partition)
        known: set[str] = set()
        async with asyncio.timeout(60):
            while len(known) < 6:
                for request in await scene.stub.events(RequestSubmitted):
                    if request.request_id not in known:
                        known.add(request.request_id)
                        await embed(scene, request, float(request.request_id[-1]))
        for name in "xy":
            (record,) = await scene.client.complete_response(name)
            assert vectors(record) == [[0.0], [1.0], [2.0]]


async def test_a_takeover_uses_vectors_on_the_slot_and_submits_the_others(scene: Scene) -> None:
    async with scene.serve("i1"):
        await submit_inputs(scene, "e", "a", "b")
        await embed(scene, await submitted_input(scene, "e~kafka-0"), 0.0)
        first = await submitted_input(scene, "e~kafka-1")
    async with scene.serve("i2"):
        again = await submitted_input(scene, "e~kafka-1", count=2)
        await embed(scene, again, 1.0)
        (record,) = await scene.client.complete_response("e")
    assert (again.nonce, again.token_ids) == (first.nonce, first.token_ids)
    assert vectors(record) == [[0.0], [1.0]]
    assert len(await scene.stub.submissions("e~kafka-0")) == 1
