"""Real Kafka and Redis for the tests of this folder, and a separate namespace for each test.

If a service is unavailable, its tests are skipped with the reason, or fail if FOREBAY_REQUIRE_PARTS=1.
"""

import contextlib
import itertools
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from infra.kafka.kafka import Broker
from tests.harness.local import Missing, local_redis
from tests.harness.local import local_kafka as local_kafka_of
from tests.integration import idle_standby, parts
from tests.integration.idle_standby import IdleCluster

FOLDER = Path(__file__).parent
TIMEOUT_S = 180  # per test; the first test includes the start of the services
RUN = f"test-{uuid.uuid4().hex[:8]}"  # unique prefix of topics and keys on a shared broker
NUMBERS = itertools.count()
Part = TypeVar("Part")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker(idle_standby.MARK) is not None)  # stable sort


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
    elif parts.docker_answers():
        with available_or_skipped(parts.redpanda()) as address:
            yield address
    else:
        yield request.getfixturevalue("local_kafka").address


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    part: contextlib.AbstractContextManager[str]
    if given := os.environ.get("FOREBAY_REDIS"):
        part = parts.given_redis(given, RUN)
    elif parts.docker_answers():
        part = parts.redis_container()
    else:
        part = local_redis(tmp_path_factory.mktemp("redis"))
    with available_or_skipped(part) as url:
        yield url


@pytest.fixture(scope="session")
def idle_cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleCluster]:
    """Yield two routers that are idle from the start of the run."""
    folder = tmp_path_factory.mktemp("idle")
    cluster = idle_standby.start(kafka, redis_url, f"{RUN}-idle", folder)
    try:
        yield cluster
    finally:
        cluster.processes.end_all()


@pytest.fixture(scope="session", autouse=True)
def _idle_from_the_beginning(request: pytest.FixtureRequest) -> None:
    """Start the processes of the `idle_standby` tests at once, if any of these tests is selected."""
    if any(item.get_closest_marker(idle_standby.MARK) for item in request.session.items):
        request.getfixturevalue("idle_cluster")


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
