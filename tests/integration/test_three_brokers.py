"""Three brokers with replication 3, of which the one that leads all partitions ends under load."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import pytest_asyncio

from forebay.events.topics import REQUESTS
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import MIN_INSYNC, SLOTS_ADDED, TopicPlan
from tests.harness.brokers import StoppableBroker, all_in_sync, create_topics_on, replicas_of
from tests.harness.cluster import PLAN, POOL
from tests.harness.failover import PATIENCE_S, Counts, System
from tests.harness.local import CLUSTER_BROKERS, CLUSTER_SESSION_S, local_kafka_cluster
from tests.integration.conftest import MakeCluster, available_or_skipped
from tests.integration.stream_clients import problems, prompt, stream_clients

ASK_EVERY_S = 0.1
WITHOUT_LEADER_S = 3.0  # several rounds of searching for the leader
COUNT, TOKENS = 40, 4  # of the workers that need further slots
LEADER, FOLLOWER, CONTROLLER = 2, 3, 1  # numbers of the brokers
REPLICATED_PLAN = msgspec.structs.replace(PLAN, replication=CLUSTER_BROKERS)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("quiet_clients"),
]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StoppableBroker]]:
    with available_or_skipped(local_kafka_cluster(tmp_path_factory.mktemp("three-brokers"))) as started:
        stoppable = [StoppableBroker(one) for one in started]
        yield stoppable
        for one in stoppable:
            one.end()


@pytest.fixture(scope="module")
def bootstrap(brokers: list[StoppableBroker]) -> str:
    return ",".join(one.broker.address for one in brokers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(make_cluster: MakeCluster, bootstrap: str) -> AsyncIterator[System]:
    cluster = make_cluster("three", REPLICATED_PLAN, kafka=bootstrap)
    await create_topics_on(cluster.settings, REPLICATED_PLAN, [POOL], [LEADER, FOLLOWER, CONTROLLER])
    async with cluster:
        await cluster.serve(("r1", "r2"), ("w1", "w2"))
        yield System(cluster)


async def test_slots_and_pools_that_workers_need_are_replicated(make_cluster: MakeCluster, bootstrap: str) -> None:
    plan = msgspec.structs.replace(REPLICATED_PLAN, slots=1)
    async with make_cluster("added", plan, kafka=bootstrap) as cluster:
        await cluster.serve(workers=("w1", "w2", "w3"))
        cluster.worker("w4", "--pool", "other")
        await cluster.until_members(count=4)
        async with stream_clients(list(cluster.urls.values()), "added") as clients:
            for number in range(COUNT):
                clients.submit(prompt(number), TOKENS)
            await clients.all()
            assert problems(clients.results, TOKENS) == []
            assert {one.worker for one in clients.results} >= {"w1", "w2", "w3"}
        replicas = (await replicas_of(cluster.settings)).items()
        copies = Counter((topic, len(in_sync)) for (topic, _), (_, in_sync) in replicas if topic.startswith("work."))
        assert copies == {("work.default", CLUSTER_BROKERS): SLOTS_ADDED, ("work.other", CLUSTER_BROKERS): SLOTS_ADDED}


@pytest.mark.parametrize("way", ["stopped", "killed", "both-killed"])
async def test_nothing_is_lost_if_the_leaders_of_all_partitions_end(
    system: System, brokers: list[StoppableBroker], report: Callable[[str], None], way: str
) -> None:
    """End the broker that leads all partitions, or two brokers, and restart them."""
    cluster, pids, counts = system.cluster, system.pids(), Counts()
    await cluster.until(
        "all replicas are in sync", lambda: all_in_sync(cluster.settings, CLUSTER_BROKERS), within_s=PATIENCE_S
    )
    (leader,) = await leaders_of(cluster.settings)
    assert leader != CONTROLLER
    ending = [brokers[LEADER - 1], brokers[FOLLOWER - 1]] if way == "both-killed" else [brokers[leader - 1]]
    async with system.load(ASK_EVERY_S, counts) as clients:
        await system.until_served(clients, 10)
        ended_s, first = time.monotonic(), len(clients.results)
        for one in ending:
            await asyncio.to_thread(one.stop if way == "stopped" else one.kill)
        if CLUSTER_BROKERS - len(ending) < MIN_INSYNC:
            await cluster.until("the ingress rejects requests", lambda: clients.rejected)
            for one in ending:
                await one.restart()
        await system.until_served(clients, 1, first)
        resumed_s = time.monotonic() - ended_s
        await system.until_served(clients, 30, first)
    report(
        f"{CLUSTER_BROKERS} brokers, replication {CLUSTER_BROKERS}, min.insync.replicas {MIN_INSYNC}, "
        f"broker session timeout {CLUSTER_SESSION_S} s; {way}: no response for {resumed_s:.1f} s"
    )
    assert counts.problems == []
    assert await system.settled() == []
    assert system.pids() == pids
    assert (await cluster.require_verified())["verified"] == await cluster.decided()
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


async def leaders_of(settings: KafkaSettings) -> set[int]:
    return {leader for leader, _ in (await replicas_of(settings)).values()}


async def until_leaders(settings: KafkaSettings, wanted: set[int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await leaders_of(settings) != wanted:  # noqa: ASYNC110 - Kafka has no event for this
            await asyncio.sleep(ASK_EVERY_S)
