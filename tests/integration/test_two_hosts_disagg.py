"""Prefill and decode workers on two hosts: KV is transferred between them, and the link is cut under load.

The hosts are network namespaces. Kafka, Redis, router, ingress and clients are in the network of the first host.
The tests of this file share a cluster and depend on their order.
"""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.progress import FirstTokenEmitted
from forebay.events.topics import PROGRESS
from tests.harness.cluster import Cluster
from tests.harness.hosts import Host, two_hosts
from tests.harness.local import Missing, local_kafka, local_redis
from tests.harness.mock_words import Words
from tests.integration.conftest import available_or_skipped
from tests.integration.stream_clients import StreamClients
from tests.integration.test_disagg import (
    LONG,
    SHORT,
    SIZES,
    STREAMS,
    check_responses,
    routings,
    submit,
    until_streaming,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Place:
    """Two hosts and a log reachable from both."""

    one: Host
    two: Host
    kafka: str
    redis_url: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Create the hosts and move this process into the network of the first one."""
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.ExitStack() as stack:
        try:
            one, two = stack.enter_context(two_hosts())
        except Missing as missing:  # even if services are required: not every machine can create network namespaces
            pytest.skip(str(missing))
        stack.enter_context(one.network())
        kafka = stack.enter_context(available_or_skipped(local_kafka(folder / "kafka", host=one.address)))
        redis_url = stack.enter_context(available_or_skipped(local_redis(folder, host=one.address)))
        yield Place(one, two, kafka.address, redis_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(place: Place, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run the prefill worker on the first host and a decode worker on the second, without configured addresses."""
    folder = tmp_path_factory.mktemp("nixl")
    # Not by the fork server, which is in the network of this machine.
    async with Cluster(place.kafka, place.redis_url, f"hosts-{uuid.uuid4().hex[:8]}", folder) as running:
        running.worker("p1", "--role", "prefill", *SIZES, on=place.one)
        running.worker("d1", "--role", "decode", *SIZES, on=place.two)
        await running.serve(workers=())
        await running.until_serving(2)
        yield running


async def test_hosts_disagg_kv_is_transferred_between_hosts(
    cluster: Cluster, clients: StreamClients, place: Place
) -> None:
    before = place.one.sent_bytes()
    results = submit(clients, STREAMS, SHORT)
    await clients.all()
    crossed = place.one.sent_bytes() - before
    check_responses(Words(), results, SHORT)
    stages = [(one.stage, one.worker_id, one.attempt) for one in await routings(cluster, results)]
    assert sorted(stages) == [("decode", "d1", 1)] * STREAMS + [("prefill", "p1", 1)] * STREAMS
    ids = {one.request_id for one in results}
    first_tokens = await cluster.events(PROGRESS, FirstTokenEmitted)
    fetched = sum(one.transferred_bytes for one in first_tokens if one.request_id in ids)
    assert fetched >= STREAMS * 3 * 64 * 256, "prompts have more than three blocks"
    assert crossed > fetched


async def test_hosts_disagg_responses_continue_when_the_link_is_cut(
    cluster: Cluster, clients: StreamClients, place: Place
) -> None:
    cluster.worker("d2", "--role", "decode", *SIZES, on=place.one)
    await cluster.until_members("p1", "d1", "d2")
    results = submit(clients, STREAMS, LONG)
    await until_streaming(cluster, results, "d1")
    place.two.cut()
    try:
        await cluster.until_members("p1", "d2")
        results += submit(clients, STREAMS, SHORT)
        await clients.all()
    finally:
        place.two.mend()
    check_responses(Words(), results[:STREAMS], LONG)
    check_responses(Words(), results[STREAMS:], SHORT)
    by_d1 = {one.request_id for one in await routings(cluster, results) if one.worker_id == "d1"}
    assert {one.worker for one in results if one.request_id in by_d1} == {"d2"}
    await cluster.until_members("p1", "d1", "d2")
