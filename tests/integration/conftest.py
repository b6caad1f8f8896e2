"""Real Kafka and Redis for the tests of this folder, and a separate namespace for each test.

If a service is unavailable, its tests are skipped with the reason, or fail if FOREBAY_REQUIRE_PARTS=1.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio

from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics
from infra.kafka.kafka import HOST, Broker
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY, PLAN, POOL, Cluster
from tests.harness.local import Missing, free_ports, local_redis
from tests.harness.local import local_kafka as local_kafka_of
from tests.harness.processes import Processes
from tests.integration import parts
from tests.integration.stream_clients import TIMEOUT_S as CLIENT_TIMEOUT_S
from tests.integration.stream_clients import StreamClients, stream_clients

FOLDER = Path(__file__).parent
TIMEOUT_S = 180  # per test; the first test includes the start of the services
RUN = f"test-{uuid.uuid4().hex[:8]}"  # unique prefix of topics and keys on a shared broker
NUMBERS = itertools.count()
IDLE_STANDBY = "idle_standby"  # marks the tests of idle routers, which run last
Part = TypeVar("Part")
MakeCluster = Callable[..., Cluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker(IDLE_STANDBY) is not None)  # stable sort


@contextlib.contextmanager
def available_or_skipped(part: contextlib.AbstractContextManager[Part]) -> Iterator[Part]:
    """Use a service. If it is unavailable, skip, or fail if services are required."""
    with contextlib.ExitStack() as stack:
        try:
            had = stack.enter_context(part)
        except Missing as missing:
            if os.environ.get("FOREBAY_REQUIRE_PARTS") == "1":
                pytest.fail(f"a required part is missing: {missing}", pytrace=False)
            pytest.skip(str(missing))
        yield had


@pytest.fixture(scope="session")
def local_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Yield an Apache Kafka started by this run. Its `sasl_address` requires the credentials of `sasl`."""
    with available_or_skipped(local_kafka_of(tmp_path_factory.mktemp("kafka"), parts.SASL)) as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the bootstrap address of a Kafka shared by all tests."""
    if given := os.environ.get("FOREBAY_KAFKA"):
        with parts.given_kafka(given, RUN) as address:
            yield address
    elif parts.containers_are_wanted():
        with available_or_skipped(parts.redpanda()) as address:
            yield address
    else:
        yield request.getfixturevalue("local_kafka").address


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    part: contextlib.AbstractContextManager[str]
    if given := os.environ.get("FOREBAY_REDIS"):
        part = parts.given_redis(given, RUN)
    elif parts.containers_are_wanted():
        part = parts.redis_container()
    else:
        part = local_redis(tmp_path_factory.mktemp("redis"))
    with available_or_skipped(part) as url:
        yield url


@dataclass(slots=True)
class IdleCluster:
    """Processes with their Kafka and namespace, and the monotonic start time of the routers."""

    processes: Processes
    where: Sequence[str]
    url: str
    began_s: float


@pytest.fixture(scope="session")
def idle_cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleCluster]:
    """Yield two routers, a worker and an ingress that are idle from the start of the run."""
    settings, processes = KafkaSettings(kafka, f"{RUN}-idle"), Processes(tmp_path_factory.mktemp("idle"))
    asyncio.run(create_topics(settings, PLAN, [POOL]))
    where, port = ("--kafka", kafka, "--namespace", settings.namespace), str(free_ports(1))
    kinds = {"r1": ("router",), "r2": ("router",), "w1": ("worker",)}
    for name, (kind, *options) in {**kinds, "i1": ("ingress", "--port", port)}.items():
        processes.start(name, [FOREBAY, kind, *where, "--redis", redis_url, "--id", name, *options])
    try:
        yield IdleCluster(processes, where, f"http://{HOST}:{port}", time.monotonic())
    finally:
        processes.end_all()


@pytest.fixture(scope="session", autouse=True)
def _idle_from_the_beginning(request: pytest.FixtureRequest) -> None:
    """Start the processes of the `idle_standby` tests at once, if any of these tests is selected."""
    if any(item.get_closest_marker(IDLE_STANDBY) for item in request.session.items):
        request.getfixturevalue("idle_cluster")


@pytest.fixture(scope="module")
def make_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeCluster:
    """Return a function that creates a cluster with a name of its own, by default on the shared Kafka and Redis."""

    def make(name: str, plan: TopicPlan = PLAN, *, kafka: str = "", redis_url: str = "") -> Cluster:
        kafka = kafka or request.getfixturevalue("kafka")
        redis_url = redis_url or request.getfixturevalue("redis_url")
        folder = tmp_path_factory.mktemp(name)
        return Cluster(kafka, redis_url, f"{RUN}-{name}", folder, plan, spawn=fork_server.spawn)

    return make


def cluster_fixture(name: str, *services: Sequence[str], **options: Sequence[str]) -> Any:
    """Return the fixture `cluster` of a module, with services and options as `Cluster.serve` takes them."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
        async with make_cluster(name) as running:
            await running.serve(*services, **options)
            yield running

    return cluster


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[StreamClients]:
    """Yield streaming clients of all ingresses of the module's cluster."""
    async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the ingress `i1` of the module's cluster."""
    async with httpx.AsyncClient(base_url=cluster.urls["i1"], timeout=CLIENT_TIMEOUT_S) as running:
        yield running


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """Return the prefix of the test's topics and keys, so that tests can share a broker."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    return f"{RUN}-{next(NUMBERS)}-{name}"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that prints a measurement even if the test passes."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")

    return show


@pytest.fixture(scope="module")
def quiet_clients() -> Iterator[None]:
    """Silence the Kafka clients of the test process, which log every reconnection attempt."""
    logger = logging.getLogger("aiokafka")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
