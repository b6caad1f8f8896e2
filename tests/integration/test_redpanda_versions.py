"""The system works with the versions of requests that Redpanda offers, on Apache Kafka behind a proxy."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from confluent_kafka.admin import AdminClient

from forebay.transport.kafka.protocol import FETCH, PRODUCE
from infra.kafka.kafka import HOST
from tests.harness.cluster import Cluster
from tests.harness.limited_broker import LimitedBroker, limited_kafka
from tests.integration.conftest import MakeCluster, available_or_skipped
from tests.integration.stream_clients import StreamClients, problems, prompt

LONG, STREAMS = 100, 6
PATIENCE_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitedBroker]:
    with available_or_skipped(limited_kafka(tmp_path_factory.mktemp("limited"))) as proxy:
        yield proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster, limited: LimitedBroker) -> AsyncIterator[Cluster]:
    async with make_cluster("limited", kafka=limited.address) as running:
        await running.serve(("r1", "r2"), ("w1", "w2"), worker=("--speedup", "0.2"))
        yield running


async def test_streams_survive_a_takeover_with_the_versions_of_redpanda(
    cluster: Cluster, clients: StreamClients, limited: LimitedBroker
) -> None:
    owner = await cluster.owner()
    streams = [clients.submit(prompt(number), LONG) for number in range(STREAMS)]
    await cluster.until("every stream has begun", lambda: all(one.text for one in streams))
    cluster.kill(owner)
    streams.append(clients.submit(prompt(STREAMS), LONG))
    await cluster.taken_over(owner, within_s=PATIENCE_S)
    await clients.all()
    assert problems(streams, LONG) == []
    assert (await cluster.require_verified())["verified"] >= len(streams)
    assert (limited.versions(PRODUCE), limited.versions(FETCH)) == ({7}, {11})
    assert not limited.rejected


async def test_other_versions_are_not_offered_and_end_the_connection(limited: LimitedBroker) -> None:
    # librdkafka reads the offered versions in another format than aiokafka.
    metadata = await asyncio.to_thread(AdminClient({"bootstrap.servers": limited.address}).list_topics, timeout=30)
    assert [f"{one.host}:{one.port}" for one in metadata.brokers.values()] == [limited.address]
    reader, writer = await asyncio.open_connection(HOST, int(limited.address.partition(":")[2]))
    writer.write(struct.pack(">ihhih", 10, PRODUCE, 8, 1, -1))
    assert await reader.read() == b""
    writer.close()
    assert limited.rejected.pop((PRODUCE, 8)) == 1
