"""Leases on a Redis that is flushed and restarted, and leases of killed workers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis

from forebay.events.decisions import CacheResyncRequested, RequestAborted
from forebay.events.fleet import IngressLost, WorkerLost
from forebay.events.topics import DECISIONS, FLEET
from tests.harness.cluster import Cluster
from tests.harness.local import StoppableRedis, stoppable_redis
from tests.integration.conftest import MakeCluster, available_or_skipped
from tests.integration.stream_clients import StreamClients, problems, prompt, stream_clients

WORKERS = ("w1", "w2", "w3")
TOKENS = 60
ROUNDS, PER_ROUND = 5, 20
AWAY_S = 5.0  # longer than a lease of 3 s

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppableRedis]:
    """Yield a Redis used only by this module, because its tests flush and restart it."""
    with available_or_skipped(stoppable_redis(tmp_path_factory.mktemp("own-redis"))) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster, own_redis: StoppableRedis) -> AsyncIterator[Cluster]:
    async with make_cluster("leases", redis_url=own_redis.url) as running:
        await running.serve(workers=WORKERS)
        yield running


async def require_unharmed(cluster: Cluster) -> None:
    """Require that no worker was lost, and none had to re-announce its cache."""
    assert await cluster.events(FLEET, WorkerLost) == []
    assert await cluster.events(DECISIONS, CacheResyncRequested) == []


async def test_flushing_redis_under_load_loses_no_request(
    cluster: Cluster, clients: StreamClients, own_redis: StoppableRedis
) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        for number in range(ROUNDS):
            results = [clients.submit(prompt(number * 1_000 + one), TOKENS) for one in range(PER_ROUND)]
            for _ in range(2):
                client.flushall()
                await until_registered(client, cluster)
                await polled(client, cluster)
            await clients.all()
            assert problems(results, TOKENS) == []
    await require_unharmed(cluster)


async def test_requests_are_served_without_redis_and_workers_register_at_an_empty_one(
    cluster: Cluster, clients: StreamClients, own_redis: StoppableRedis
) -> None:
    own_redis.stop()
    async with asyncio.timeout(AWAY_S * 10):
        for number in range(int(AWAY_S)):
            results = await clients.answers([prompt(7_000 + number * PER_ROUND + one) for one in range(4)], TOKENS)
            assert problems(results, TOKENS) == []
            await asyncio.sleep(1.0)  # an outage is longer than a lease
    await asyncio.to_thread(own_redis.start)
    with redis.Redis.from_url(own_redis.url) as client:
        await until_registered(client, cluster)
    assert problems(await clients.answers([prompt(8_000)], TOKENS), TOKENS) == []
    await require_unharmed(cluster)


async def polled(client: redis.Redis, cluster: Cluster) -> None:
    """Wait until the owner has read the leases.

    An owner that reads no lease of a worker between several flushes rightly regards the worker as lost.
    """

    def reads() -> int:
        stats = client.info("commandstats")
        assert isinstance(stats, dict)
        return int(stats["cmdstat_zrange"]["calls"])

    # Every poll reads the leases of workers and of ingresses, each with one ZRANGE.
    wanted = reads() + 4
    await cluster.until("the owner reads the leases twice", reads, lambda found: found >= wanted)


async def until_registered(client: redis.Redis, cluster: Cluster) -> None:
    leases = lambda: list(client.scan_iter(match=f"{cluster.namespace}:lease:*"))  # noqa: E731
    await cluster.until("leases are taken again", leases, lambda found: len(found) == len(WORKERS))


async def test_a_killed_worker_is_lost_after_the_default_ttl_and_its_streams_continue(
    cluster: Cluster, clients: StreamClients
) -> None:
    cluster.worker("w4", "--speedup", "0.1")
    await cluster.until_serving(len(WORKERS) + 1)
    streams = [clients.submit(prompt(9_000 + number), TOKENS) for number in range(12)]
    await cluster.until("every stream has begun", lambda: all(one.text for one in streams))
    cluster.kill("w4")
    (fact,) = await cluster.until("w4 is lost", lambda: cluster.events(FLEET, WorkerLost))
    assert (fact.worker_id, fact.reason) == ("w4", "its lease of 3000 ms expired")
    await clients.all()
    assert problems(streams, TOKENS) == []


async def test_requests_of_a_killed_ingress_are_aborted_and_of_a_stopped_one_finished(cluster: Cluster) -> None:
    for name in ("i2", "i3"):
        cluster.ingress(name)
    await cluster.until_serving(len(WORKERS))
    prefix = uuid.uuid4().hex[:8]
    async with stream_clients([cluster.urls["i2"]], f"{prefix}-killed") as killed:
        async with stream_clients([cluster.urls["i3"]], f"{prefix}-stopped") as stopped:
            orphans = [killed.submit(prompt(20_000 + number), 5_000) for number in range(8)]
            others = [stopped.submit(prompt(30_000 + number), 200) for number in range(8)]
            await cluster.until("every stream has begun", lambda: all(one.text for one in orphans + others))
            cluster.kill("i2")
            await cluster.stop("i3", within_s=90.0)
            await stopped.all()
            assert problems(others, 200) == []

            def are_aborted(made: list[RequestAborted]) -> bool:
                found = {one.request_id for one in made if one.reason == "ingress_lost"}
                return found == {one.request_id for one in orphans}

            aborted = lambda: cluster.events(DECISIONS, RequestAborted)  # noqa: E731
            await cluster.until("the orphans are aborted", aborted, are_aborted)
        await killed.all()
    facts = {fact.ingress_id: fact.reason for fact in await cluster.events(FLEET, IngressLost)}
    assert facts == {"i2": "its lease of 3000 ms expired", "i3": "its lease was released"}
    await cluster.require_verified()
