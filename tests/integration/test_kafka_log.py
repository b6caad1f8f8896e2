"""`KafkaLog` on a real broker: the contract of `Log`, tails that share a consumer, and errors."""

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from forebay.events.topics import CONTROL, DECISIONS, FLEET, GROUPS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.kafka import wire
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.tail import KafkaTail
from forebay.transport.kafka.topics import TopicPlan, count_topics, create_topics, partitions_of, plan_of
from forebay.transport.kafka.writer import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from infra.kafka.kafka import Broker
from tests.cli.up import forebay
from tests.harness.brokers import StoppableBroker
from tests.harness.local import free_ports
from tests.integration.parts import SASL

PLAN = TopicPlan(groups=2, slots=2, replies=2, kafka_api=2)
TOPIC = REQUESTS.name
PATIENCE_S = 60.0
HANG_MS, HANG_S = 1_000, 4.0  # request timeout, and the time without responses


@pytest.fixture
async def settings(kafka: str, namespace: str) -> KafkaSettings:
    settings = KafkaSettings(kafka, namespace)
    await create_topics(settings, PLAN, ["default"])
    return settings


@pytest.fixture
async def log(settings: KafkaSettings) -> AsyncIterator[KafkaLog]:
    opened = await KafkaLog.open(settings)
    yield opened
    await opened.close()


class Reader:
    """Tail with its wake event, read until records arrive."""

    def __init__(self, log: KafkaLog, topic: str, partition: int = 0, offset: int = 0) -> None:
        self.wake = asyncio.Event()
        self.tail: KafkaTail = log.tail(topic, partition, offset, self.wake)

    async def take(self, count: int) -> list[Record]:
        taken: list[Record] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(taken) < count:
                self.wake.clear()
                taken += self.tail.take(count - len(taken))
                if len(taken) < count:
                    await self.wake.wait()
        return taken


@asynccontextmanager
async def admin_of(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**settings.client_options())
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def grow(settings: KafkaSettings, topic: str, count: int) -> None:
    """Add partitions and wait until the broker reports them."""
    async with admin_of(settings) as admin:
        await admin.create_partitions({settings.topic(topic): NewPartitions(total_count=count)})
    async with asyncio.timeout(PATIENCE_S):
        while (await partitions_of(settings))[topic] != count:
            pass


def drafts(count: int, topic: str = TOPIC, partition: int = 0, first: int = 0) -> list[Draft]:
    return [Draft(topic, partition, str(number).encode()) for number in range(first, first + count)]


def numbers(records: list[Record]) -> list[int]:
    return [int(record.value) for record in records]


async def test_offsets_are_dense_per_partition_and_follow_the_order_of_calls(log: KafkaLog) -> None:
    assert await log.end(TOPIC, 0) == 0
    assert await log.append(drafts(3)) == [0, 1, 2]
    mixed = [Draft(TOPIC, 1, b"3"), Draft(TOPIC, 0, b"3"), Draft(FLEET.name, 0, b"0"), Draft(TOPIC, 1, b"4")]
    assert await log.append(mixed) == [0, 3, 0, 1]
    log.append_soon(drafts(1, first=4))
    calls = [asyncio.ensure_future(log.append(drafts(2, first=5 + 2 * number))) for number in range(50)]
    assert [await call for call in calls] == [[5 + 2 * number, 6 + 2 * number] for number in range(50)]
    assert numbers(await log.read(TOPIC, 0, 0, 1_000)) == list(range(105))
    places = ((TOPIC, 0), (TOPIC, 1), (FLEET.name, 0), (FLEET.name, 1))
    assert [await log.end(*place) for place in places] == [105, 2, 1, 0]
    assert await log.begin(TOPIC, 0) == 0
    assert await log.append([]) == []


async def test_a_record_round_trips(log: KafkaLog) -> None:
    given = [
        Draft(TOPIC, 1, b""),
        Draft(TOPIC, 1, bytes(range(256)), b"", None),
        Draft(TOPIC, 1, b"v", b"\x00key", {"a": "1", "b": "\u00e4\u2028"}),
        Draft(TOPIC, 1, bytes(3 * BATCH_BYTES_MAX), b"large"),
        Draft(TOPIC, 1, b"after"),
    ]
    assert await log.append(given) == [0, 1, 2, 3, 4]
    reader = Reader(log, TOPIC, 1)
    for found in (await reader.take(5), [one for at in range(5) for one in await log.read(TOPIC, 1, at, 1)]):
        assert [(one.value, one.key, one.headers) for one in found] == [
            (draft.value, draft.key, draft.headers) for draft in given
        ]
        assert [(one.topic, one.partition, one.offset) for one in found] == [(TOPIC, 1, at) for at in range(5)]


async def test_reads_are_bounded_and_start_at_any_offset(log: KafkaLog) -> None:
    await log.append(drafts(10))
    assert numbers(await log.read(TOPIC, 0, 3, 4)) == [3, 4, 5, 6]
    assert numbers(await log.read(TOPIC, 0, 7, 4)) == [7, 8, 9]
    assert numbers(await log.read(TOPIC, 0, 0, 2)) == [0, 1]
    for offset, limit in ((10, 4), (500, 4), (3, 0)):
        assert await log.read(TOPIC, 0, offset, limit) == []
    both = await asyncio.gather(log.read(TOPIC, 0, 5, 2), log.read(TOPIC, 1, 0, 2), log.read(TOPIC, 0, 1, 2))
    assert [numbers(records) for records in both] == [[5, 6], [], [1, 2]]


async def test_tails_of_one_process_are_independent(log: KafkaLog) -> None:
    await log.append(drafts(20))
    first = Reader(log, TOPIC)
    assert numbers(await first.take(20)) == list(range(20))
    # A second tail of the same partition starts earlier. The first tail gets no record twice.
    second, other = Reader(log, TOPIC, offset=5), Reader(log, FLEET.name)
    await log.append([*drafts(5, first=20), *drafts(1, FLEET.name)])
    assert numbers(await second.take(20)) == list(range(5, 25))
    assert numbers(await first.take(5)) == list(range(20, 25))
    assert numbers(await other.take(1)) == [0]
    second.tail.close()
    await log.append(drafts(3, first=25))
    assert numbers(await first.take(3)) == [25, 26, 27]


async def test_partitions_of_several_topics_are_polled_in_turn(log: KafkaLog) -> None:
    places = [(TOPIC, 0), (FLEET.name, 0), (TOPIC, 1), (FLEET.name, 1)]
    readers = {place: Reader(log, *place) for place in places}
    for number in range(3):
        for place in places:
            await log.append(drafts(1, *place, first=number))
            assert numbers(await readers[place].take(1)) == [number]


async def test_tails_are_opened_and_closed_while_the_first_one_connects(log: KafkaLog) -> None:
    await log.append(drafts(3))
    readers = []
    for _ in range(30):
        readers.append(Reader(log, TOPIC))
        Reader(log, FLEET.name).tail.close()
        await asyncio.sleep(0)  # each iteration advances the connection
    for reader in readers:
        assert numbers(await reader.take(3)) == [0, 1, 2]


async def test_a_log_closed_while_connecting_leaks_no_connection(settings: KafkaSettings) -> None:
    for turns in range(0, 60, 3):
        log = await KafkaLog.open(settings)
        Reader(log, TOPIC)
        end = asyncio.create_task(log.end(TOPIC, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        end.cancel()
        await asyncio.gather(end, return_exceptions=True)
        await log.close()
        with pytest.raises(LogError, match="closed"):
            await log.end(TOPIC, 0)
    gc.collect()  # an open connection warns here, and warnings are errors


async def test_readers_of_failed_tails_are_woken(log: KafkaLog) -> None:
    def broken(topic: str, seconds: float) -> None:
        raise ZeroDivisionError(f"no metric for {topic}")

    log.on_hop = broken
    reader = Reader(log, TOPIC)
    await log.append(drafts(1))
    with pytest.raises(LogError, match="Kafka cannot be read: no metric for requests"):
        await reader.take(1)


async def test_an_unread_tail_does_not_block_others(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.kafka.tail.BUFFER_RECORDS_MAX", 100)
    slow, quick = Reader(log, TOPIC), Reader(log, FLEET.name)
    for start in range(0, 500, 50):
        await log.append(drafts(50, first=start))
    await log.append(drafts(1, FLEET.name))
    await quick.take(1)
    assert numbers(await slow.take(500)) == list(range(500))


async def test_only_records_of_a_missing_partition_are_rejected(log: KafkaLog) -> None:
    log.append_soon([Draft(TOKENS.name, 99, b"nobody")])
    with pytest.raises(LogError, match="tokens has no partition 99"):
        await log.append([Draft(TOKENS.name, 99, b"nobody")])
    assert log.refused == 2
    assert log.failure is None
    assert await log.append(drafts(1)) == [0]


async def test_new_partitions_can_be_written_at_once(log: KafkaLog, settings: KafkaSettings) -> None:
    await log.append(drafts(1, TOKENS.name, 1))
    await grow(settings, TOKENS.name, 4)
    assert await log.append(drafts(1, TOKENS.name, 3)) == [0]
    assert numbers(await Reader(log, TOKENS.name, 3).take(1)) == [0]


async def test_batches_that_exceed_a_request_of_the_broker_are_written(log: KafkaLog, settings: KafkaSettings) -> None:
    """Brokers close a connection on which a request exceeds 100 MiB."""
    count = (100 << 20) // RECORD_BYTES_MAX + 1
    await grow(settings, TOKENS.name, count)
    # The leaders are known afterwards, so the large batches are ready together.
    assert await log.append([Draft(TOKENS.name, partition, b"") for partition in range(count)]) == [0] * count
    large = random.Random(0).randbytes(RECORD_BYTES_MAX)  # not compressible
    async with asyncio.timeout(PATIENCE_S):
        assert await log.append([Draft(TOKENS.name, partition, large) for partition in range(count)]) == [1] * count


@pytest.mark.parametrize("is_known", [False, True], ids=["first append to a topic", "topic and tail in use"])
async def test_tails_and_appends_survive_a_hung_broker(
    local_kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Requests without response are sent again on new connections, and every record is written once."""
    settings, hung = KafkaSettings(local_kafka.address, namespace), StoppableBroker(local_kafka)
    await create_topics(settings, PLAN, ["default"])
    monkeypatch.setattr("forebay.transport.kafka.settings.REQUEST_MS", HANG_MS)
    log = await KafkaLog.open(settings)
    reader = Reader(log, TOPIC) if is_known else None
    count = 10 if is_known else 0
    if reader is not None:
        await log.append(drafts(count))
        assert numbers(await reader.take(count)) == list(range(count))
    hung.pause()
    try:
        appended = asyncio.create_task(log.append(drafts(10, first=count)))
        await asyncio.wait([appended], timeout=HANG_S)
        assert not appended.done()
    finally:
        hung.resume()
    async with asyncio.timeout(PATIENCE_S):
        assert await appended == list(range(count, count + 10))
    if reader is not None:
        assert numbers(await reader.take(10)) == list(range(10, 20))
        assert await log.append(drafts(1, first=20)) == [20]
        assert numbers(await reader.take(1)) == [20]
    await log.close()


async def test_a_record_over_the_limit_is_rejected_before_it_is_sent(log: KafkaLog) -> None:
    with pytest.raises(ValueError, match=f"the limit is {RECORD_BYTES_MAX}"):
        await log.append([Draft(TOPIC, 0, b"small"), Draft(TOPIC, 0, bytes(RECORD_BYTES_MAX), b"k")])
    assert await log.end(TOPIC, 0) == 0
    assert await log.append([Draft(TOPIC, 0, bytes(RECORD_BYTES_MAX))]) == [0]


async def test_closing_a_log_flushes_it_and_rejects_later_appends(settings: KafkaSettings) -> None:
    log = await KafkaLog.open(settings)
    for number in range(100):
        log.append_soon(drafts(1, first=number))
    await log.close()
    await log.close()
    with pytest.raises(LogError, match="closed"):
        log.append_soon(drafts(1))
    again = await KafkaLog.open(settings)
    assert numbers(await again.read(TOPIC, 0, 0, 1_000)) == list(range(100))
    await again.close()


async def test_a_deleted_topic_ends_appends_and_tails(
    settings: KafkaSettings, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "REQUEST_MS", 1_000)
    await log.append(drafts(1))
    reader = Reader(log, TOPIC)
    assert numbers(await reader.take(1)) == [0]
    async with admin_of(settings) as admin:
        await admin.delete_topics([settings.topic(TOPIC)])
    with pytest.raises(LogError, match="was deleted"):
        async with asyncio.timeout(60):
            await reader.take(1)
    with pytest.raises(LogError, match=r"deleted|unknown"):
        async with asyncio.timeout(60):
            while True:  # the broker may not have forgotten the topic yet
                await log.append(drafts(1))


async def test_error_names_records_removed_by_retention(log: KafkaLog, settings: KafkaSettings) -> None:
    await log.append(drafts(10))
    async with admin_of(settings) as admin:
        await admin.delete_records({TopicPartition(settings.topic(TOPIC), 0): RecordsToDelete(before_offset=4)})
    assert await log.begin(TOPIC, 0) == 4
    assert numbers(await log.read(TOPIC, 0, 4, 100)) == [4, 5, 6, 7, 8, 9]
    with pytest.raises(LogError, match="no longer holds offset 2"):
        await log.read(TOPIC, 0, 2, 1)
    removed = Reader(log, TOPIC, offset=1)
    with pytest.raises(LogError, match="missing from the log"):
        await removed.take(1)


async def test_foreign_records_are_returned(log: KafkaLog, settings: KafkaSettings) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap)
    await producer.start()
    try:
        await producer.send_and_wait(settings.topic(TOPIC), None, b"tombstone", partition=0)
        await producer.send_and_wait(
            settings.topic(TOPIC), b"\xff", partition=0, headers=[("binary", b"\xfe"), ("twice", b"1"), ("twice", b"2")]
        )
    finally:
        await producer.stop()
    found = await log.read(TOPIC, 0, 0, 10)
    assert [record.value for record in found] == [b"", b"\xff"]
    assert found[1].headers == {"binary": "\\xfe", "twice": "2"}


async def test_topics_are_created_once_and_checked(kafka: str, namespace: str) -> None:
    settings = KafkaSettings(kafka, namespace)
    with pytest.raises(KafkaUnusable, match="run `forebay topics create`"):
        await count_topics(settings)
    created = await asyncio.gather(*(create_topics(settings, PLAN, ["default"]) for _ in range(3)))
    assert len({name for names in created for name in names}) == sum(len(names) for names in created)
    counts = await count_topics(settings)
    assert (counts.groups, counts.replies, counts.kafka_api, counts.pools) == (2, 2, 2, {"default": 2})
    assert await create_topics(settings, TopicPlan(slots=3), ["default", "other"]) == [settings.topic("work.other")]
    assert (await count_topics(settings)).pools == {"default": 2, "other": 3}


async def test_an_upgrade_adds_missing_topics_like_the_existing_ones(settings: KafkaSettings, kafka: str) -> None:
    missing = [settings.topic(SNAPSHOTS.name), settings.topic(TOKENS.name)]
    before = await partitions_of(settings)
    admin = AdminClient({"bootstrap.servers": kafka})  # the results fail if it is freed before
    deleted = admin.delete_topics(missing)
    await asyncio.to_thread(lambda: [one.result() for one in deleted.values()])
    async with asyncio.timeout(PATIENCE_S):
        while len(await partitions_of(settings)) > len(before) - len(missing):  # noqa: ASYNC110 - Kafka has no event
            await asyncio.sleep(0.05)
    with pytest.raises(KafkaUnusable, match="run `forebay topics create --upgrade`"):
        await count_topics(settings)
    assert (await plan_of(settings)).groups == PLAN.groups
    run = ("topics", "create", "--upgrade", "--kafka", kafka, "--namespace", settings.namespace)
    upgraded = await asyncio.to_thread(forebay, *run)
    assert upgraded.returncode == 0, upgraded.stderr
    assert sorted(upgraded.stdout.splitlines()) == sorted(f"created {name}" for name in missing)
    after = await partitions_of(settings)
    assert after == {**before, TOKENS.name: TopicPlan().replies}
    assert (await asyncio.to_thread(forebay, *run)).stdout == "this version needs no further topics\n"


@pytest.mark.parametrize("command", ["topics create --upgrade", "worker", "router", "ingress", "topics list --lag"])
async def test_an_empty_namespace_is_refused_at_once(command: str, kafka: str, namespace: str) -> None:
    port = ("--port", str(free_ports(1))) if command == "ingress" else ()
    ended = await asyncio.to_thread(forebay, *command.split(), *port, "--kafka", kafka, "--namespace", namespace)
    text = f"{kafka} has no topics of the namespace {namespace}; run `forebay topics create`, or check --namespace"
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, f"forebay: {text}")


async def test_topics_read_from_their_beginning_have_unlimited_retention(settings: KafkaSettings, kafka: str) -> None:
    admin, topics = AdminClient({"bootstrap.servers": kafka}), (CONTROL, GROUPS, DECISIONS)
    resources = [ConfigResource(ResourceType.TOPIC, settings.topic(topic.name)) for topic in topics]
    found = await asyncio.to_thread(lambda: [one.result() for one in admin.describe_configs(resources).values()])
    control_ms, groups_ms, decisions_ms = (int(config["retention.ms"].value) for config in found)
    assert (control_ms, groups_ms) == (-1, -1)
    assert decisions_ms > 0


@pytest.mark.parametrize(
    ("topic", "text"),
    [(FLEET.name, "the control topics must have equal partition counts.*fleet 5"), (GROUPS.name, "it must have 1")],
)
async def test_error_names_a_topic_with_a_wrong_partition_count(settings: KafkaSettings, topic: str, text: str) -> None:
    await grow(settings, topic, 5)
    with pytest.raises(KafkaUnusable, match=text):
        await count_topics(settings)


async def test_an_unreachable_broker_is_reported_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        for attempt in (KafkaLog.open(KafkaSettings(nobody)), count_topics(KafkaSettings(nobody))):
            with pytest.raises(KafkaUnusable, match=f"Kafka at {nobody} cannot be used.*check that it runs") as error:
                await attempt
            assert "\n" not in str(error.value)


async def test_credentials_are_used_and_wrong_ones_are_reported(local_kafka: Broker, namespace: str) -> None:
    user, password = SASL
    assert local_kafka.sasl_address is not None
    properties = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": user}
    settings = KafkaSettings(local_kafka.sasl_address, namespace, {**properties, "sasl.password": password})
    assert await create_topics(settings, PLAN, ["default"])
    log = await KafkaLog.open(settings)
    assert await log.append(drafts(2)) == [0, 1]
    assert numbers(await Reader(log, TOPIC).take(2)) == [0, 1]
    await log.close()
    wrong = KafkaSettings(local_kafka.sasl_address, namespace, {**properties, "sasl.password": "guess"})
    for attempt in (KafkaLog.open(wrong), create_topics(wrong, PLAN, [])):
        with pytest.raises(KafkaUnusable, match=r"check sasl\.username and sasl\.password"):
            await attempt


async def test_the_end_of_a_missing_topic_is_an_error(log: KafkaLog) -> None:
    with pytest.raises(LogError, match=r"work\.nobody"):
        await log.end("work.nobody", 0)
    assert await log.append(drafts(1)) == [0]
