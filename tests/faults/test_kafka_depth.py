"""The simulated Kafka behaves like the real one where forebay depends on it, and simulations on it repeat."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from aiokafka.errors import CommitFailedError, OutOfOrderSequenceNumber, TopicAuthorizationFailedError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from forebay.events.topics import REQUESTS, TOKENS
from forebay.transport.base import Draft, LogError
from forebay.transport.kafka import log
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.producer import Producer
from forebay.transport.kafka.settings import RETRY_BACKOFF_MS, KafkaSettings
from forebay.transport.kafka.wire import Channel, Wire
from tests.faults.broker import Broker, Faults
from tests.faults.kafka import server
from tests.faults.kafka.client import HOST, Host
from tests.faults.kafka.consumer import FakeConsumer
from tests.faults.kafka.patches import fake_clients
from tests.faults.kafka.server import NAMESPACE, FakeKafka
from tests.faults.kafka.wire import FakeWire
from tests.faults.loop import VirtualLoop
from tests.faults.plan import draw_plan
from tests.faults.process import Process
from tests.faults.simulation import simulate

SETTINGS = KafkaSettings("simulated:9092", NAMESPACE)
PLACE = TopicPartition(SETTINGS.topic(REQUESTS.name), 0)
SEED = 26  # answers requests to the Kafka API in spite of rebalances, leader changes and lost acknowledgements


class Scene:
    """One process on a simulated cluster."""

    def __init__(self, host: Host, fired: Counter[str]) -> None:
        self.host = host
        self.fired = fired

    @property
    def values(self) -> list[bytes]:
        return [record.value for record in self.host.kafka.broker.records((REQUESTS.name, 0))]

    async def producer(self) -> Producer:
        wire = FakeWire(SETTINGS)
        await wire.start()
        producer = Producer(cast("Wire", wire), Channel.APPENDS)
        await producer.start()
        return producer


def send(producer: Producer, value: bytes) -> "asyncio.Task[int]":
    return asyncio.ensure_future(producer.append(PLACE, [(Draft(REQUESTS.name, 0, value), 1)], len(value)))


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a test as the main coroutine of a simulated process."""
    loop = VirtualLoop("1")
    fired: Counter[str] = Counter()
    process = Process(loop, "p", 1, "1")
    host = Host(process, Faults(lambda kind: fired.update([kind])), FakeKafka(Broker(loop, "1"), "1"))
    ended = loop.create_future()
    process.on_end = lambda _: ended.set_result(None)

    async def main(_: Process) -> None:
        process.bind(HOST, host)
        await test(Scene(host, fired))

    async def whole() -> None:
        process.start(main)
        await ended

    with fake_clients():
        loop.run(whole())
    loop.discard()
    if process.error is not None:
        raise process.error


def test_a_batch_whose_acknowledgement_is_lost_is_written_once() -> None:
    async def test(scene: Scene) -> None:
        producer = await scene.producer()
        scene.host.faults.pending["append_without_ack"] = 1
        await send(producer, b"a")
        assert scene.values == [b"a"]
        assert scene.fired["retry_with_effect"] == 1

    run(test)


def test_batches_after_a_rejected_one_are_out_of_order() -> None:
    async def test(scene: Scene) -> None:
        producer = await scene.producer()
        scene.host.faults.pending["append_rejected"] = 1
        first, second = send(producer, b"a"), send(producer, b"b")
        with pytest.raises(Exception, match="Error"):
            await first
        with pytest.raises(OutOfOrderSequenceNumber):
            await second
        assert not scene.values

    run(test)


def test_an_append_to_an_old_leader_is_retried_at_the_new_one() -> None:
    async def test(scene: Scene) -> None:
        producer, kafka = await scene.producer(), scene.host.kafka
        old = kafka.leader(PLACE, kafka.epoch)
        while kafka.leader(PLACE, kafka.epoch) == old:
            kafka.change_leaders()
        began_s = kafka.broker.loop.time()
        await send(producer, b"a")
        assert kafka.broker.loop.time() - began_s >= RETRY_BACKOFF_MS / 1000
        assert scene.values == [b"a"]

    run(test)


def test_a_log_reads_its_records_after_outages_and_elections() -> None:
    async def test(scene: Scene) -> None:
        kafka, broker = scene.host.kafka, scene.host.kafka.broker
        opened, wake = await KafkaLog.open(SETTINGS), asyncio.Event()
        tail = opened.tail(REQUESTS.name, 0, 0, wake)
        for number in range(5):
            broker.down = number % 2 == 1
            kafka.change_leaders()
            opened.append_soon([Draft(REQUESTS.name, 0, bytes([number]))])
            broker.loop.call_main_later(1.0, setattr, broker, "down", False)
            await opened.append([Draft(REQUESTS.name, 0, bytes([number + 100]))])
        found: list[int] = []
        while len(found) < 10:
            await wake.wait()
            wake.clear()
            found += [record.value[0] for record in tail.take(100)]
        assert found == [0, 100, 1, 101, 2, 102, 3, 103, 4, 104]
        await opened.close()

    run(test)


def test_failed_appends_end_in_the_order_of_the_calls() -> None:
    async def test(scene: Scene) -> None:
        opened = await KafkaLog.open(SETTINGS)
        scene.host.faults.cut = True
        order: list[int] = []

        async def append(number: int) -> None:
            with pytest.raises(LogError):
                await opened.append([Draft(REQUESTS.name, 0, b"a")])
            order.append(number)

        scene.host.faults.pending["append_rejected"] = 1
        scene.host.kafka.broker.loop.call_main_later(1.0, setattr, scene.host.faults, "cut", False)
        await asyncio.gather(*(append(number) for number in range(40)))
        assert order == list(range(40))

    run(test)


def test_a_partition_that_does_not_exist_does_not_block_records_that_follow_others() -> None:
    async def test(scene: Scene) -> None:
        opened = await KafkaLog.open(SETTINGS)
        for number, partition in enumerate((server.REPLY_SLOTS, 0)):
            follower = Draft(REQUESTS.name, 0, bytes([number]))
            opened.append_soon([Draft(TOKENS.name, partition, b"a")], [follower])
        await opened.close()
        assert scene.values == [b"\0", b"\1"]
        assert opened.refused == 1

    run(test)


def test_a_read_that_is_not_permitted_fails() -> None:
    async def test(scene: Scene) -> None:
        consumer = FakeConsumer(**SETTINGS.client_options(), auto_offset_reset="none")
        await consumer.start()
        scene.host.faults.pending["read_failed"] = 1
        with pytest.raises(TopicAuthorizationFailedError):
            await consumer.end_offsets([PLACE])

    run(test)


def test_a_member_of_an_earlier_generation_cannot_commit() -> None:
    async def test(scene: Scene) -> None:
        group = scene.host.kafka.group("g")
        place = TopicPartition(SETTINGS.topic("openai-requests"), 0)
        joined = await group.join("", scene.host.process, 10.0)
        group.commit(joined.member_id, joined.generation, {place: OffsetAndMetadata(1, "")})
        consumer = FakeConsumer(**SETTINGS.client_options(), group_id="g")
        await consumer.start()
        consumer.assign([place])
        with pytest.raises(CommitFailedError):
            await consumer.commit({place: 5})
        assert group.offsets[place].offset == 1

    run(test)


def test_the_names_of_the_clients_are_restored() -> None:
    original = vars(log)["Wire"]
    with fake_clients():
        assert vars(log)["Wire"] is FakeWire
    assert vars(log)["Wire"] is original


def test_the_kafka_api_responds_in_spite_of_faults() -> None:
    result = simulate(draw_plan(SEED, depth="kafka"))
    assert not result.violation
    assert result.outcomes["answered 200"]
    assert sum(len(result.partitions.get(("openai-responses", number), ())) for number in range(server.API_PARTITIONS))
