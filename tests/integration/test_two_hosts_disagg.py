"""Prefill and decode workers on two hosts: KV crosses the cable between them, which is cut under load.

The hosts are namespaces of this machine; Kafka, Redis, router, ingress and clients are in the network of the first.
The tests of this file go on with what the one before left running.
"""

import contextlib
import functools
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.progress import FirstTokenEmitted
from forebay.events.topics import PROGRESS
from tests.harness import fork_server
from tests.harness.cluster import Cluster
from tests.harness.hosts import Host, two_hosts
from tests.harness.local import Missing, local_kafka, local_redis
from tests.harness.mock_words import Words
from tests.integration.conftest import had_or_skipped
from tests.integration.listeners import Listeners, listeners
from tests.integration.test_disagg import LONG, SHORT, SIZES, STREAMS, ask, at_work, members, right, routings

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ("nixl", "tcp")


@dataclass(frozen=True, slots=True)
class Place:
    """Two hosts, and a log that both reach."""

    one: Host
    two: Host
    kafka: str
    redis_url: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """This process is in the network of the first host meanwhile."""
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.ExitStack() as stack:
        try:
            one, two = stack.enter_context(two_hosts())
        except Missing as missing:  # where parts are required, too: not every machine may make hosts
            pytest.skip(str(missing))
        stack.enter_context(one.network())
        kafka = stack.enter_context(had_or_skipped(local_kafka(folder / "kafka", host=one.address)))
        redis_url = stack.enter_context(had_or_skipped(local_redis(folder, host=one.address)))
        yield Place(one, two, kafka.address, redis_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def cluster(
    place: Place, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """The prefill worker is on the first host, a decode worker on the second; nobody is told an address."""
    kind = str(request.param)
    folder = tmp_path_factory.mktemp(kind)
    async with Cluster(
        place.kafka, place.redis_url, f"hosts-{kind}-{uuid.uuid4().hex[:8]}", folder, spawn=fork_server.spawn
    ) as running:
        running.router("r1")
        running.worker("p1", "--role", "prefill", "--kv-transport", kind, *SIZES, on=place.one)
        running.worker("d1", "--role", "decode", "--kv-transport", kind, *SIZES, on=place.two)
        running.ingress("i1")
        await running.until_serving(2)
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[Listeners]:
    async with listeners(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as speaking:
        yield speaking


async def test_hosts_disagg_kv_crosses_the_cable(cluster: Cluster, clients: Listeners, place: Place) -> None:
    before = place.one.sent_bytes()
    heard = ask(clients, STREAMS, SHORT)
    await clients.all()
    crossed = place.one.sent_bytes() - before
    await right(cluster, Words(), heard, SHORT)
    stages = [(one.stage, one.worker_id, one.attempt) for one in await routings(cluster, heard)]
    assert sorted(stages) == [("decode", "d1", 1)] * STREAMS + [("prefill", "p1", 1)] * STREAMS
    ids = {one.request_id for one in heard}
    said = [one for one in await cluster.events(PROGRESS) if isinstance(one, FirstTokenEmitted)]
    fetched = sum(one.transferred_bytes for one in said if one.request_id in ids)
    assert fetched >= STREAMS * 3 * 64 * 256, "prompts have more than three blocks"
    assert crossed > fetched


async def test_hosts_disagg_answers_go_on_when_the_cable_is_cut(
    cluster: Cluster, clients: Listeners, place: Place
) -> None:
    kind = "tcp" if "hosts-tcp" in cluster.namespace else "nixl"
    cluster.worker("d2", "--role", "decode", "--kv-transport", kind, *SIZES, on=place.one)
    await members(cluster, "p1", "d1", "d2")
    heard = ask(clients, STREAMS, LONG)
    working = functools.partial(at_work, cluster, heard, "d1")
    await cluster.processes.until("d1 is in the middle of an answer", working)
    place.two.cut()
    try:
        await members(cluster, "p1", "d2")
        heard += ask(clients, STREAMS, SHORT)
        await clients.all()
    finally:
        place.two.mend()
    await right(cluster, Words(), heard[:STREAMS], LONG)
    await right(cluster, Words(), heard[STREAMS:], SHORT)
    by_d1 = {one.request_id for one in await routings(cluster, heard) if one.worker_id == "d1"}
    assert {one.worker for one in heard if one.request_id in by_d1} == {"d2"}
    await members(cluster, "p1", "d1", "d2")
