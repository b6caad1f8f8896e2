"""Invalid records on every topic of a running cluster stop no service, and each is accounted for.

Hypothesis generates the records from FOREBAY_FUZZ_SEED, by default a new seed per run. A failure prints the seed.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from operator import le

import httpx
import msgspec
import pytest
import pytest_asyncio
from aiokafka.errors import KafkaError
from confluent_kafka import Producer
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.base import Event
from forebay.events.codec import DecodeError, encode
from forebay.events.topics import (
    CONTROL,
    DEAD_LETTERS,
    FIXED_TOPICS,
    FLEET,
    INPUTS,
    OPENAI_REQUESTS,
    OPENAI_RESPONSES,
    REQUESTS,
    Topic,
    work_topic,
)
from forebay.transport.base import Record, event_of
from forebay.transport.kafka.batches import DECOMPRESSED_BYTES_MAX
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.topics import TopicPlan
from tests.cli.in_process import forebay
from tests.harness.cluster import GROUP, INGRESSES_MAX, POOL, Cluster
from tests.harness.local import free_ports
from tests.harness.samples import samples
from tests.integration.conftest import MakeCluster
from tests.raw_batches import CODECS, LOG_APPEND_TIME, ZSTD, RawBatch, RawProducer, RawRecord

SEED = int(os.environ.get("FOREBAY_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
DRAWN = 8  # batches per partition, of up to four records
PATIENCE_S = 60.0
TIMEOUT_S = 600  # 100 s on an idle machine
REQUEST_COUNT = 10
PAGE = 1_000
PLAN = TopicPlan(groups=1, slots=2, replies=2, kafka_api=2)
WORK = work_topic(POOL)
PARTITIONS = dict.fromkeys(FIXED_TOPICS, 1) | {
    WORK: PLAN.slots,
    OPENAI_REQUESTS: PLAN.kafka_api,
    OPENAI_RESPONSES: PLAN.kafka_api,
}
PARTITIONS |= {topic: PLAN.replies for topic in FIXED_TOPICS if topic.name == "tokens"}
DEAD_LETTERED = (*INPUTS, WORK)  # readers of these topics write invalid records to `dead-letters`
HEAVY = (OPENAI_REQUESTS, REQUESTS, FLEET, CONTROL)  # one topic per kind of reader, because these records take seconds
COUNTED = {
    "decisions": "forebay_owner_foreign_records_total",
    "groups": "forebay_placements_ignored_total",
    "tokens": "forebay_ingress_undecodable_total",
}
ROUTERS = ("r1", "r2")
METRICS: dict[str, str] = {}  # addresses of the routers' metrics, set when they run
BODY = {"model": GROUP, "prompt": "what is on the log?", "max_tokens": 3}
Produced = dict[tuple[str, int], list[int]]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def cut_short(topic: Topic) -> list[bytes]:
    """Return events of the topic without their last byte."""
    return [encode(topic, event)[:-1] for _, of, event, _ in samples() if of == topic and isinstance(event, Event)]


def generated(topic: Topic, number: int) -> list[RawBatch]:
    found: list[RawBatch] = []
    garbage = st.none() | st.binary(max_size=50) | st.sampled_from([b"{}", b"null", b"[" * 10_000, b"\x91" * 10_000])
    if events := cut_short(topic):
        garbage |= st.sampled_from(events)
    few = st.none() | st.binary(max_size=20)
    headers = st.lists(st.tuples(st.sampled_from([b"path", b"x", b"\xff\xfe", b""]) | st.binary(max_size=5), few))
    records = st.lists(st.builds(RawRecord, value=garbage, key=few, headers=headers), min_size=1, max_size=4)
    times = st.sampled_from([-1, 0, 1, 2**40]) | st.integers(-(2**50), 2**41)
    batches = st.builds(RawBatch, records=records, timestamp_ms=times, codec=st.sampled_from(CODECS))

    @seed(SEED + number)
    @settings(max_examples=DRAWN, database=None, phases=[Phase.generate], deadline=None)
    @given(batch=batches)
    def collect(batch: RawBatch) -> None:
        found.append(batch)

    collect()
    return found


def fixed() -> list[RawBatch]:
    late_ms = int(time.time() * 1000) + 10**11
    same = [(b"y", b"one"), (b"y", b"two"), (b"x", b"\xff"), (b"x", None)]
    return [
        RawBatch([RawRecord(None)]),
        RawBatch([RawRecord(b"{}", headers=[(b"reply-topic", None)])]),
        RawBatch([RawRecord(b"{}", headers=[(b"\xff", b"1")])]),
        RawBatch([RawRecord(b"{}", key=b"", headers=same)], timestamp_ms=-1),
        RawBatch([RawRecord(b"{}")], timestamp_ms=late_ms),
        RawBatch([RawRecord(b"{}")], attributes=LOG_APPEND_TIME),
    ]


def large() -> list[tuple[str, bytes]]:
    """Return small batches that decompress to more than the limit of a record and of a batch."""
    sizes = {"large": 20 << 20, "bomb": DECOMPRESSED_BYTES_MAX}
    return [(name, RawBatch([RawRecord(bytes(size))], codec=ZSTD).encoded()) for name, size in sizes.items()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    async with make_cluster("odd", PLAN) as cluster:
        # After the ports reserved for ingresses.
        first = free_ports(INGRESSES_MAX + len(ROUTERS)) + INGRESSES_MAX
        for port, name in enumerate(ROUTERS, first):
            cluster.router(name, "--metrics-port", str(port))
            METRICS[name] = f"http://127.0.0.1:{port}"
        await cluster.serve((), ("w1", "w2"))
        yield cluster


@pytest.mark.timeout(TIMEOUT_S)
async def test_odd_records_stop_no_service(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n  FOREBAY_FUZZ_SEED={SEED}")
    log = await KafkaLog.open(cluster.settings)
    try:
        await check_service(cluster, log, "before")
        produced = await produce_all(cluster)
        await asyncio.to_thread(transactions, cluster)
        await check_service(cluster, log, "after")
        await check_accounting(cluster, log, produced)
        await cluster.stop(await cluster.owner())
        cluster.kill("i1")
        cluster.router("r3")
        cluster.ingress("i2")
        await cluster.until_serving(2)
        await check_service(cluster, log, "fresh")
    finally:
        await log.close()
    report = await cluster.require_verified()
    # Retention may have removed inputs with ancient timestamps. Verification then begins at the snapshot of the first
    # owner, and has only the decisions of the second one: a request of each API per number.
    assert report["decisions"] >= 2 * REQUEST_COUNT
    await asyncio.to_thread(check_tails, cluster, produced)
    cluster.processes.check()


async def produce_all(cluster: Cluster) -> Produced:
    """Write odd records to every partition and return their offsets."""
    produced: Produced = {}
    accepted: Counter[str] = Counter()
    heavy = large()
    async with RawProducer(cluster.settings.bootstrap) as producer:

        async def send(topic: Topic, partition: int, name: str, batch: bytes, count: int) -> None:
            try:
                offset = await producer.send(cluster.settings.topic(topic.name), partition, batch)
            except KafkaError as error:  # a record rejected by the broker is harmless
                accepted[f"{name}: {type(error).__name__}"] += 1
                return
            accepted[name] += count
            produced.setdefault((topic.name, partition), []).extend(range(offset, offset + count))

        for number, (topic, partitions) in enumerate(PARTITIONS.items()):
            for partition in range(partitions):
                for batch in (*fixed(), *generated(topic, 100 * number + partition)):
                    await send(topic, partition, "small", batch.encoded(), len(batch.records))
            for name, batch_bytes in heavy if topic in HEAVY else ():
                await send(topic, 0, name, batch_bytes, 1)
    assert accepted["small"] > len(produced) * DRAWN, accepted
    assert accepted["bomb"] > 0, accepted
    return produced


def transactions(cluster: Cluster) -> None:
    """Write to every topic in a committed and in an aborted transaction."""
    producer = Producer(
        {"bootstrap.servers": cluster.settings.bootstrap, "transactional.id": f"{cluster.namespace}-odd"}
    )
    producer.init_transactions(PATIENCE_S)
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for topic in PARTITIONS:
            key = b"x" if topic.is_compacted else None  # brokers reject records without a key for compacted topics
            producer.produce(cluster.settings.topic(topic.name), b"{}", key, partition=0, headers=[("x", None)])
        producer.flush(PATIENCE_S)
        end(PATIENCE_S)


async def check_service(cluster: Cluster, log: KafkaLog, name: str) -> None:
    """Check that requests over HTTP and the Kafka API complete."""
    cluster.processes.check()
    ids = [f"{name}-{number}" for number in range(REQUEST_COUNT)]
    headers = [[(b"request-id", one.encode()), (b"path", b"/v1/completions")] for one in ids]
    async with RawProducer(cluster.settings.bootstrap) as producer:
        for number, request_headers in enumerate(headers):
            record = RawRecord(msgspec.json.encode(BODY), headers=request_headers)
            # Without a timestamp, retention considers the records old and may delete them unread.
            batch = RawBatch([record], timestamp_ms=time.time_ns() // 1_000_000)
            await producer.send(cluster.settings.topic(OPENAI_REQUESTS.name), number % PLAN.kafka_api, batch.encoded())
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        urls = [url for url in cluster.urls.values() for _ in range(REQUEST_COUNT)]
        responses = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=BODY) for url in urls))
    assert [response.status_code for response in responses] == [200] * len(urls)

    def are_complete(found: dict[str, str]) -> bool:
        return [found.get(one) for one in ids] == ["200"] * len(ids)

    await cluster.until("the responses are complete", lambda: statuses(log), are_complete)


async def statuses(log: KafkaLog) -> dict[str, str]:
    """Return the status of every completed request of the Kafka API, by request id."""
    found: dict[str, str] = {}
    for partition in range(PLAN.kafka_api):
        for record in await everything(log, OPENAI_RESPONSES.name, partition):
            headers = record.headers or {}
            if headers.get("last") == "1":
                found[headers["request-id"]] = headers["status"]
    return found


async def check_accounting(cluster: Cluster, log: KafkaLog, produced: Produced) -> None:
    """Check that each record is a dead letter, has an error response, or is counted."""
    wanted = {
        (topic.name, partition, record.offset)
        for topic in DEAD_LETTERED
        for partition in range(PARTITIONS[topic])
        for record in await everything(log, topic.name, partition)
        if not is_event(topic, record)
    }
    for topic in DEAD_LETTERED:
        for partition in range(PARTITIONS[topic]):
            # Retention may already have removed records with ancient timestamps.
            begin = await log.begin(topic.name, partition)
            kept = [offset for offset in produced[topic.name, partition] if offset >= begin]
            assert wanted >= {(topic.name, partition, offset) for offset in kept}
    await cluster.until("all records are dead letters", lambda: letters(log), lambda found: found >= wanted)
    request_ids = {
        f"kafka-api-{at}-{offset}" for at in range(PLAN.kafka_api) for offset in produced[OPENAI_REQUESTS.name, at]
    }
    rejected = await cluster.until("responses", lambda: statuses(log), lambda found: found.keys() >= request_ids)
    assert {rejected[one][0] for one in request_ids} == {"4"}
    for name, metric in COUNTED.items():
        # An ingress reads one reply slot beside those of its Kafka API.
        least = min(len(offsets) for (topic_name, _), offsets in produced.items() if topic_name == name)
        await cluster.until(f"{metric} reaches {least}", partial(counted, cluster, metric), partial(le, least))


def is_event(topic: Topic, record: Record) -> bool:
    try:
        event_of(topic, record)
    except DecodeError:
        return False
    return True


async def letters(log: KafkaLog) -> set[tuple[str, int, int]]:
    """Return topic, partition and offset of each record in `dead-letters`."""
    found = set()
    for record in await everything(log, DEAD_LETTERS.name, 0):
        headers = record.headers or {}
        if "source-topic" in headers:
            assert headers["reason"]
            found.add((headers["source-topic"], int(headers["source-partition"]), int(headers["source-offset"])))
    return found


async def counted(cluster: Cluster, metric: str) -> float:
    """Return the sum of a metric over processes and labels."""
    total = 0.0
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for url in (*cluster.urls.values(), *METRICS.values()):
            text = (await client.get(f"{url}/metrics")).text
            for family in text_string_to_metric_families(text):
                total += sum(sample.value for sample in family.samples if sample.name == metric)
    return total


def check_tails(cluster: Cluster, produced: Produced) -> None:
    """Check that `forebay topics tail` shows every record of every partition."""
    for topic, partitions in PARTITIONS.items():
        for partition in range(partitions):
            run = forebay("topics", "tail", topic.name, *cluster.where, "-p", str(partition), "--offset", "0")
            lines = [msgspec.json.decode(line) for line in run.stdout.split("\n") if line]
            assert run.returncode == 0
            offsets = [line["offset"] for line in lines]
            assert offsets[-1] >= produced[topic.name, partition][-1]
            if topic.is_compacted:
                assert offsets == sorted(set(offsets))  # compaction removes records between others
                continue
            # Retention deletes segments by record timestamps, and some generated timestamps are old.
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))


async def everything(log: KafkaLog, topic: str, partition: int) -> list[Record]:
    found: list[Record] = []
    at, end = await log.begin(topic, partition), await log.end(topic, partition)
    while at < end:
        found += await log.read(topic, partition, at, PAGE)
        at = found[-1].offset + 1
    return found
