"""Three brokers with replication 3, of which the one that leads all partitions ends under load."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from forebay.events.topics import REQUESTS
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import MIN_INSYNC, TopicPlan
from tests.harness import fork_server
from tests.harness.brokers import StoppableBroker, all_in_sync, create_topics_on, replicas_of
from tests.harness.cluster import PLAN, POOL, Cluster
from tests.harness.failover import System
from tests.harness.local import CLUSTER_BROKERS, CLUSTER_SESSION_S, local_kafka_cluster
from tests.harness.mock_words import Words
from tests.integration.conftest import RUN, available_or_skipped
from tests.integration.stream_clients import StreamClients, problems, stream_clients

WORKERS = ("w1", "w2")
TOKENS = 6
ASK_EVERY_S = 0.1
PATIENCE_S = 180.0
WITHOUT_LEADER_S = 3.0  # several rounds of searching for the leader
LEADER, FOLLOWER, CONTROLLER = 2, 3, 1  # numbers of the brokers
REPLICATED_PLAN = msgspec.structs.replace(PLAN, replication=CLUSTER_BROKERS)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("quiet_clients"),
]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StoppableBroker]]:
    folder: Path = tmp_path_factory.mktemp("three-brokers")
    with available_or_skipped(local_kafka_cluster(folder)) as started:
        stoppable = [StoppableBroker(one) for one in started]
        yield stoppable
        for one in stoppable:
            one.end()


@pytest.fixture(scope="module")
def bootstrap(brokers: list[StoppableBroker]) -> str:
    return ",".join(one.broker.address for one in brokers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(bootstrap: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder, namespace = tmp_path_factory.mktemp("three"), f"{RUN}-three"
    settings = KafkaSettings(bootstrap, namespace)
    await create_topics_on(settings, REPLICATED_PLAN, [POOL], [LEADER, FOLLOWER, CONTROLLER])
    async with Cluster(bootstrap, redis_url, namespace, folder, REPLICATED_PLAN, spawn=fork_server.spawn) as running:
        for name in ("r1", "r2"):
            running.router(name)
        for name in WORKERS:
            running.worker(name)
        running.ingress("i1")
        await running.until_serving(len(WORKERS))
        yield running


@pytest.mark.parametrize("way", ["stopped", "killed", "both-killed"])
async def test_nothing_is_lost_if_the_leaders_of_all_partitions_end(
    cluster: Cluster, brokers: list[StoppableBroker], report: Callable[[str], None], way: str
) -> None:
    """End the broker that leads all partitions, or two brokers, and restart them."""
    await in_sync(cluster)
    (leader,) = await leaders_of(cluster.settings)
    assert leader != CONTROLLER
    ending = [brokers[LEADER - 1], brokers[FOLLOWER - 1]] if way == "both-killed" else [brokers[leader - 1]]
    pids = {one.name: one.process.pid for one in cluster.processes.running()}
    async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
        async with clients.load(ASK_EVERY_S, TOKENS, first=10_000 * len(way)):
            await cluster.processes.until("responses arrive", lambda: ended(clients, 10))
            ended_s, first = time.monotonic(), len(clients.results)
            for one in ending:
                await (asyncio.to_thread(one.stop) if way == "stopped" else asyncio.to_thread(one.kill))
            if CLUSTER_BROKERS - len(ending) < MIN_INSYNC:
                await cluster.processes.until("the ingress rejects requests", lambda: rejected(clients))
                for one in ending:
                    await one.restart()
            await cluster.processes.until(
                "a request of after the end is served", lambda: ended(clients, 1, first), within_s=PATIENCE_S
            )
            resumed_s = time.monotonic() - ended_s
            await cluster.processes.until("requests are served", lambda: ended(clients, 30, first), within_s=PATIENCE_S)
        report(
            f"{CLUSTER_BROKERS} brokers, replication {CLUSTER_BROKERS}, min.insync.replicas {MIN_INSYNC}, "
            f"broker session timeout {CLUSTER_SESSION_S} s; {way}: no response for {resumed_s:.1f} s"
        )
        assert problems(clients.results, TOKENS) == []
        words = Words()
        assert [one.request_id for one in clients.results if one.text != words.text(one.prompt, TOKENS)] == []
    assert await System(cluster).settled() == []
    assert {one.name: one.process.pid for one in cluster.processes.running()} == pids
    verified = await cluster.verify()
    assert verified["divergence"] is None
    assert verified["verified"] == verified["decisions"] == await cluster.decided()
    for one in brokers:
        if not one.runs:
            await one.restart()


async def test_an_append_waits_for_a_partition_without_a_leader(
    bootstrap: str, brokers: list[StoppableBroker], namespace: str
) -> None:
    """Requests are sent again until the broker accepts or rejects the record."""
    settings = KafkaSettings(bootstrap, namespace)
    await create_topics_on(settings, TopicPlan(groups=1, slots=1, replies=1, kafka_api=1), [], [LEADER])
    log = await KafkaLog.open(settings)
    try:
        assert await log.append([Draft(REQUESTS.name, 0, b"before")]) == [0]
        brokers[LEADER - 1].kill()
        await until_leaders(settings, {-1})
        appended = asyncio.create_task(log.append([Draft(REQUESTS.name, 0, b"during")]))
        assert not (await asyncio.wait([appended], timeout=WITHOUT_LEADER_S))[0]
        await brokers[LEADER - 1].restart()
        async with asyncio.timeout(PATIENCE_S):
            assert await appended == [1]
    finally:
        await log.close()


async def ended(clients: StreamClients, count: int, first: int = 0) -> bool:
    """Return whether `count` responses from number `first` on have ended."""
    return sum(one.ends for one in clients.results[first:]) >= count


async def rejected(clients: StreamClients) -> bool:
    return clients.rejected > 0


async def in_sync(cluster: Cluster) -> None:
    """Wait until each partition has all replicas."""
    await cluster.processes.until(
        "all replicas are in sync", lambda: all_in_sync(cluster.settings, CLUSTER_BROKERS), within_s=PATIENCE_S
    )


async def leaders_of(settings: KafkaSettings) -> set[int]:
    """Return the brokers that lead partitions."""
    return {leader for leader, _ in (await replicas_of(settings)).values()}


async def until_leaders(settings: KafkaSettings, wanted: set[int]) -> None:
    """Wait until exactly these brokers lead partitions."""
    async with asyncio.timeout(PATIENCE_S):
        while await leaders_of(settings) != wanted:  # noqa: ASYNC110 - Kafka has no event for this
            await asyncio.sleep(ASK_EVERY_S)
