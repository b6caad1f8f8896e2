"""Real services have the properties forebay relies on, and the lease contract holds on a real Redis."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import for_code
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka import TopicPartition as Assignment
from redis.connection import parse_url

from forebay.transport.redis.leases import RedisLeases
from infra.kafka.kafka import Broker, BrokerError, answers, pid_of, start, stop
from tests.harness.local import Missing, free_ports
from tests.integration import parts

# The contract works with any Redis. Here its `client` uses the shared one.
from tests.transport.test_redis_leases import (  # noqa: F401
    test_a_group_can_be_announced_before_it_has_a_lease,
    test_a_lease_is_polled_as_it_was_acquired,
    test_a_redis_error_reply_raises_a_lease_error,
    test_a_released_lease_is_marked_until_it_is_forgotten,
    test_an_expired_lease_can_be_renewed_until_it_is_forgotten,
    test_an_expired_lease_stays_until_it_is_forgotten,
    test_another_incarnation_takes_over_and_the_first_fails_to_renew,
    test_deadlines_without_a_lease_are_swept,
    test_everything_in_redis_expires_well_after_its_deadline,
    test_leases_are_polled_in_worker_order_within_their_group,
    test_renewing_extends_the_lease_and_updates_its_ttl,
    test_scripts_are_loaded_again_after_a_server_loses_them,
    test_stores_namespaces_and_kinds_of_holders_are_separate,
    test_threads_can_renew_while_another_thread_polls,
)

PATIENCE_S = 30
DATABASE = 15  # an unused database on a Redis that may be shared


async def create(kafka: str, topic: str, **settings: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=settings)])
        for _, code, message in answer.topic_errors:
            assert code == 0, f"{for_code(code).__name__}: {message}"
    finally:
        await admin.close()


def produced(kafka: str, topic: str, values: list[bytes]) -> None:
    producer = Producer({"bootstrap.servers": kafka})
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(PATIENCE_S) == 0


def consumed(kafka: str, topic: str, count: int) -> list[bytes | None]:
    """Return the first records of a topic, read with a client library that forebay does not use."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "none"})
    consumer.assign([Assignment(topic, 0, 0)])
    try:
        messages = consumer.consume(count, PATIENCE_S)
        assert [message.error() for message in messages] == [None] * count
        return [message.value() for message in messages]
    finally:
        consumer.close()


def test_topics_are_not_created_automatically(kafka: str, namespace: str) -> None:
    topic = f"{namespace}.none"
    producer = Producer({"bootstrap.servers": kafka, "topic.metadata.propagation.max.ms": 0})
    reports: list[KafkaError | None] = []
    producer.produce(topic, b"lost", on_delivery=lambda error, _: reports.append(error))
    assert producer.flush(PATIENCE_S) == 0
    assert reports[0] is not None
    assert reports[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert topic not in producer.list_topics(timeout=PATIENCE_S).topics


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[Broker]:
    """Yield a broker, not yet started, that a test may stop."""
    broker = Broker(free_ports(3), tmp_path / "data", ends_with_starter=True)
    yield broker
    stop(broker.data)


@pytest.mark.usefixtures("local_kafka")  # skips if Kafka cannot be run
async def test_a_broker_keeps_its_records_across_a_restart(own_kafka: Broker) -> None:
    first = start(own_kafka)
    await create(own_kafka.address, "records")
    produced(own_kafka.address, "records", [b"kept"])
    with pytest.raises(BrokerError, match="already runs"):
        start(own_kafka)
    assert stop(own_kafka.data)
    assert first.wait() is not None
    assert (pid_of(own_kafka.data), answers(own_kafka.port), stop(own_kafka.data)) == (None, False, False)
    second = start(own_kafka)
    assert consumed(own_kafka.address, "records", 1) == [b"kept"]
    stop(own_kafka.data)
    second.wait()


@pytest.mark.usefixtures("local_kafka")
def test_the_error_of_a_failed_broker_has_its_log(own_kafka: Broker) -> None:
    records = own_kafka.data / "records"
    records.mkdir(parents=True)
    (records / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(BrokerError, match=r"the broker ended with code 1: (.|\n)*node"):
        start(own_kafka)
    assert pid_of(own_kafka.data) is None


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    # A database in the URL would override the argument.
    options = parse_url(redis_url)  # type: ignore[no-untyped-call]  # redis-py has not typed it
    with redis.Redis(**{**options, "db": DATABASE}) as client:
        assert client.dbsize() == 0, f"database {DATABASE} of {redis_url} is in use"
        yield client
        client.flushdb()


@pytest.fixture
def leases(client: redis.Redis) -> RedisLeases:
    return RedisLeases(client, "test")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Docker's client leaks a socket if no daemon runs
@pytest.mark.parametrize("container", [parts.redpanda, parts.redis_container])
def test_a_container_without_a_daemon_is_missing(
    container: Callable[[], AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(Missing, match="cannot be run"), container():
        pass
    gc.collect()
