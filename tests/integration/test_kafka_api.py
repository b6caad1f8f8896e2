"""The Kafka API on a real Kafka. The test plays router and worker, except in the last tests."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from forebay.cli.app import app
from forebay.events.request_ids import client_id_of
from forebay.events.topics import OPENAI_REQUESTS, REQUESTS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.replay.explain.explain import explain
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import partitions_of
from tests.harness.cluster import FOREBAY
from tests.integration.kafka_api import (
    KAFKA_API_PARTITIONS,
    NAME,
    PATIENCE_S,
    Client,
    OwnerAndWorkerStub,
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


def metric(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"forebay_kafka_api_{name}", labels) or 0.0


async def test_a_response_has_the_id_of_the_header(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model) as registry:
        await client.submit(CHAT, request_id="r-1")
        (request,) = await backstage.submissions("r-1")
        await backstage.answer(request, "one two", " three")
        (record,) = await client.complete_response("r-1")
        await until(lambda: metric(registry, "in_flight") == 0)
        assert metric(registry, "requests_total", outcome="answered") == 1
    assert (record.status, record.index) == (200, 0)
    assert record.body["choices"][0]["message"]["content"] == "one two three"
    assert record.body["id"] == request.request_id == "r-1~kafka"
    assert record.body["forebay"]["worker"] == "w1"


async def test_a_stream_has_a_record_per_chunk_and_marks_the_last(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model):
        await client.submit(STREAM, request_id="s-1")
        (request,) = await backstage.submissions("s-1")
        await backstage.answer(request, "one", " two")
        records = await client.complete_response("s-1")
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert [record.last for record in records] == [False, False, False, True]
    assert [record.body["choices"][0]["delta"].get("content") for record in records[:3]] == ["one", " two", None]
    assert records[3].body["usage"]["total_tokens"] > 0


async def test_a_record_without_headers_gets_an_id_of_partition_and_offset(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model):
        await client.submit({"model": NAME, "prompt": "a b", "max_tokens": 2}, partition=1, path="/v1/completions")
        (request,) = await backstage.submissions("kafka-api-1-0")
        await backstage.answer(request, " c d")
        (record,) = await client.complete_response("kafka-api-1-0")
    assert record.body["object"] == "text_completion"
    assert record.body["choices"][0]["text"] == " c d"


async def test_a_malformed_record_gets_an_error_and_the_next_is_served(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model) as registry:
        await client.submit(b"{no json", request_id="bad")
        await client.submit(CHAT, request_id="what is this?")
        await client.submit(CHAT, request_id="good")
        (request,) = await backstage.submissions("good")
        await backstage.answer(request, "fine")
        (good,) = await client.complete_response("good")
        (bad,) = await client.complete_response("bad")
        (unnamed,) = await client.complete_response("kafka-api-0-1")
        assert metric(registry, "malformed_total", reason="invalid_json") == 1
    assert good.status == 200
    assert (bad.status, bad.body["error"]["code"]) == (400, "invalid_json")
    assert (unnamed.status, unnamed.body["error"]["param"]) == (400, "request-id")


async def test_responses_go_to_the_reply_topic_if_it_exists(
    kafka: str, settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, namespace: str
) -> None:
    mine = f"{namespace}.replies.mine"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    await admin.create_topics([NewTopic(mine, 1, 1)])
    await admin.close()
    async with Client(settings).running(mine) as client, kafka_api_server(settings, model):
        await client.submit(CHAT, request_id="a", reply_topic=mine)
        await client.submit(CHAT, request_id="b", reply_topic=f"{namespace}.replies.nobodys")
        await client.submit(CHAT, request_id="c", reply_topic=settings.topic(REQUESTS.name))
        (request,) = await backstage.submissions("a")
        await backstage.answer(request, "yes")
        (answer,) = await client.complete_response("a")
        (missing,) = await client.complete_response("b")
        (refused,) = await client.complete_response("c")
        assert await backstage.log.end(REQUESTS.name, 0) == 1
    assert answer.status == 200
    assert missing.body["error"]["code"] == "unknown_reply_topic"
    assert refused.body["error"]["code"] == "invalid_reply_topic"


async def test_no_response_is_sent_to_another_namespace(
    kafka: str, settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    other = await prepare(kafka, f"{settings.namespace}-other")
    names = sorted(await partitions_of(other))
    assert {"decisions", "control", "openai-requests", "work.default"} <= set(names)
    async with kafka_api_server(settings, model) as registry:
        for name in names:
            await client.submit(CHAT, request_id=name, reply_topic=other.topic(name))
        answers = [record for name in names for record in await client.complete_response(name)]
        assert metric(registry, "malformed_total", reason="invalid_reply_topic") == len(names)
    assert {(one.status, one.body["error"]["code"]) for one in answers} == {(400, "invalid_reply_topic")}
    async with opened(other) as log:
        assert [await log.end(name, 0) for name in names] == [0] * len(names)
    assert await backstage.events() == []


async def test_without_an_owner_a_request_times_out(
    settings: KafkaSettings,
    model: Model,
    backstage: OwnerAndWorkerStub,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.ingress.kafka_api.partition.GRACE_S", 0.1)
    async with kafka_api_server(settings, model, timeout_s=0.2):
        await client.submit(CHAT, request_id="late")
        (record,) = await client.complete_response("late")
        assert (record.status, record.body["error"]["code"]) == (504, "deadline_exceeded")
        async with asyncio.timeout(20):
            while not await backstage.cancelled("late"):
                pass


async def test_a_stop_string_ends_the_response_and_cancels_the_request(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model):
        await client.submit({**CHAT, "stop": "three"}, request_id="stop")
        (request,) = await backstage.submissions("stop")
        await backstage.emit(request, "one two three four")
        (record,) = await client.complete_response("stop")
        async with asyncio.timeout(20):
            while not await backstage.cancelled("stop"):
                pass
    assert record.body["choices"][0]["message"]["content"] == "one two "
    assert record.body["choices"][0]["finish_reason"] == "stop"


async def test_a_takeover_sends_the_same_records_again(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model, "i1"):
        await client.submit(STREAM, request_id="slow")
        await client.submit(CHAT, request_id="done")
        (request,) = await backstage.submissions("slow")
        position = await backstage.emit(request, "one")
        await backstage.answer((await backstage.submissions("done"))[0], "quick")
        await client.complete_response("done")
        await until(lambda: client.of("slow"))
    async with kafka_api_server(settings, model, "i2") as registry:
        _, again = await backstage.submissions("slow", count=2)
        position = await backstage.emit(request, " two", first=position)
        await backstage.end(request, position)
        records = await client.complete_response("slow")
        await client.complete_response("done", times=2)
        assert metric(registry, "repeated_total") == 1
    first, *rest = records
    assert (again.nonce, again.token_ids, again.reply_slot) == (request.nonce, request.token_ids, request.reply_slot)
    assert rest[0] == first
    assert [record.index for record in rest] == [0, 1, 2, 3]
    assert len({record.raw for record in client.of("done")}) == 1
    assert len(await backstage.submissions("done")) == 1


async def test_completed_requests_are_not_read_again(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model, "i1"):
        await client.submit(CHAT, request_id="one")
        await backstage.answer((await backstage.submissions("one"))[0], "yes")
        await client.complete_response("one")
    async with kafka_api_server(settings, model, "i2"):
        await client.submit(CHAT, request_id="two")
        await backstage.answer((await backstage.submissions("two"))[0], "yes")
        await client.complete_response("two")
    assert len(client.of("one")) == 1
    assert len(await backstage.submissions("one")) == 1


async def test_ingresses_share_the_partitions(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    async with kafka_api_server(settings, model, "i1") as first, kafka_api_server(settings, model, "i2") as second:
        await until(lambda: metric(first, "partitions") == metric(second, "partitions") == 1)
        for partition in range(KAFKA_API_PARTITIONS):
            await client.submit(CHAT, partition=partition, request_id=f"p{partition}")
        for partition in range(KAFKA_API_PARTITIONS):
            (request,) = await backstage.submissions(f"p{partition}")
            await backstage.answer(request, "yes")
            await client.complete_response(f"p{partition}")


async def test_every_request_gets_a_response_while_ingresses_join_and_leave(
    settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    names = [f"n{number}" for number in range(400)]
    serving = asyncio.create_task(backstage.serve())

    async def submit() -> None:
        for number, name in enumerate(names):
            await client.submit(
                STREAM if number % 2 else CHAT, partition=number % KAFKA_API_PARTITIONS, request_id=name
            )

    async def some(count: int) -> None:
        await until(lambda: len({one.request_id for one in client.records}) >= count)

    load = asyncio.create_task(submit())
    async with AsyncExitStack() as last:
        async with kafka_api_server(settings, model, "i1"):
            await some(50)
            async with kafka_api_server(settings, model, "i2") as second:
                await until(lambda: metric(second, "partitions") == 1)
                await some(100)
            await some(150)
        await last.enter_async_context(kafka_api_server(settings, model, "i3"))
        await load
        for name in names:
            await client.complete_response(name)
    serving.cancel()
    for number, name in enumerate(names):
        by_index: dict[int, set[bytes]] = {}
        for one in client.of(name):
            by_index.setdefault(one.index, set()).add(one.raw)
            assert one.status == 200
        assert sorted(by_index) == list(range(4 if number % 2 else 1))
        assert all(len(raws) == 1 for raws in by_index.values())


async def test_a_killed_ingress_is_replaced(
    kafka: str, settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    arguments = (sys.executable, "-m", "tests.integration.kafka_api", kafka, settings.namespace, "victim")
    victim = await asyncio.create_subprocess_exec(*arguments)
    try:
        for partition in range(KAFKA_API_PARTITIONS):
            await client.submit(STREAM, partition=partition, request_id=f"k{partition}")
        requests = [(await backstage.submissions(f"k{partition}"))[0] for partition in range(KAFKA_API_PARTITIONS)]
        positions = [await backstage.emit(request, "before") for request in requests]
        await until(lambda: len(client.records) == KAFKA_API_PARTITIONS)
        victim.kill()
        async with kafka_api_server(settings, model, "heir"):
            for request, position in zip(requests, positions, strict=True):
                await backstage.end(request, await backstage.emit(request, " after", first=position))
                records = await client.complete_response(client_id_of(request.request_id))
                assert records[0] == records[1]
                assert [record.index for record in records] == [0, 0, 1, 2, 3]
                assert len(await backstage.submissions(request.request_id)) <= 2
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()


async def test_records_of_aborted_transactions_are_not_served(
    kafka: str, settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, client: Client
) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=settings.namespace)
    await producer.start()
    topic = settings.topic(OPENAI_REQUESTS.name)
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"{not served}", partition=0)
    await producer.abort_transaction()
    await producer.stop()
    async with kafka_api_server(settings, model, "i1"):
        await client.submit(CHAT, request_id="after")
        await backstage.answer((await backstage.submissions("after"))[0], "yes")
        await client.complete_response("after")
    async with kafka_api_server(settings, model, "i2"):
        await client.submit(CHAT, request_id="again")
        await backstage.answer((await backstage.submissions("again"))[0], "yes")
        await client.complete_response("again")
    assert {record.request_id for record in client.records} == {"after", "again"}


async def test_the_whole_system_serves_the_kafka_api(settings: KafkaSettings, model: Model, client: Client) -> None:
    async with opened(settings) as log:
        system = System(log)  # type: ignore[arg-type]  # what is used of it takes any log
        async with system.started(2), system.owned() as owner, kafka_api_server(settings, model, model_name=MODEL):
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
            found = await explain(log, 0, "three")
            choices = {one["request_id"] for one in whole.body["forebay"]["choices"]}
            assert {found.request_id, *(found.others or ())} == choices


async def test_produce_prints_a_response_per_line(
    kafka: str, settings: KafkaSettings, model: Model, backstage: OwnerAndWorkerStub, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    bodies = [{**CHAT, "request_id": "whole"}, {**STREAM, "request_id": "stream"}]
    lines.write_bytes(b"\n\n".join(msgspec.json.encode(body) for body in bodies))
    arguments = [
        "produce",
        str(lines),
        "--wait",
        "--kafka",
        kafka,
        "--namespace",
        settings.namespace,
        "--timeout-s",
        "40",
    ]
    async with kafka_api_server(settings, model):
        running = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, arguments))
        for name in ("whole", "stream"):
            await backstage.answer((await backstage.submissions(name))[0], "yes", " no")
        result = await running
        assert result.exit_code == 0, result.stderr
        answers = {one["request_id"]: one for one in map(msgspec.json.decode, result.stdout.splitlines())}
        assert answers["whole"]["body"]["choices"][0]["message"]["content"] == "yes no"
        assert len(answers["stream"]["chunks"]) == 4
        lines.write_bytes(b"{no json")
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert msgspec.json.decode(result.stdout)["status"] == 400
    assert "1 of them with an error, 0 missing" in result.stderr


@pytest.mark.parametrize("from_pipe", [False, True])
async def test_an_interrupted_produce_reports_what_it_sent(
    kafka: str, settings: KafkaSettings, from_pipe: bool, tmp_path: Path
) -> None:
    """Nobody responds, and a pipe is still open: Ctrl-C ends the command, which then counts the missing responses."""
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b"".join(msgspec.json.encode(CHAT) + b"\n" for _ in range(3)))
    arguments = ["-" if from_pipe else str(lines), "--wait", "--kafka", kafka, "--namespace", settings.namespace]
    process = await asyncio.create_subprocess_exec(
        FOREBAY, "produce", *arguments, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    if from_pipe:
        process.stdin.write(lines.read_bytes())
    log = await KafkaLog.open(settings)
    try:
        await until_sent(log, 3)
    finally:
        await log.close()
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        error = await process.stderr.read() if process.stderr is not None else b""
        code = await process.wait()
    assert (code, error.decode()) == (130, "forebay: 3 requests sent, 0 answered, 0 of them with an error, 3 missing\n")


async def until_sent(log: KafkaLog, count: int) -> None:
    """Wait until the request topic of the Kafka API has this many records."""
    async with asyncio.timeout(PATIENCE_S):
        while sum([await log.end(OPENAI_REQUESTS.name, one) for one in range(KAFKA_API_PARTITIONS)]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
