"""Leases on a Redis that is flushed and restarted, and leases of killed workers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import redis

from forebay.events.decisions import CacheResyncRequested, RequestAborted
from forebay.events.fleet import IngressLost, WorkerLost
from forebay.events.topics import DECISIONS, FLEET
from tests.harness.cluster import Cluster
from tests.harness.failover import Counts, System
from tests.harness.local import StoppableRedis, stoppable_redis
from tests.integration.conftest import MakeCluster, available_or_skipped
from tests.integration.stream_clients import problems, prompt, stream_clients

WORKERS = ("w1", "w2", "w3")
TOKENS = 60
FLUSHES = 8
STOPPED_S = 5.0  # longer than a lease of 3 s
ASK_EVERY_S = 0.05

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


async def test_flushes_and_an_outage_of_redis_harm_no_request_and_no_worker(
    cluster: Cluster, own_redis: StoppableRedis, report: Callable[[str], None]
) -> None:
    system, counts, members = System(cluster), Counts(), len(await cluster.members())

    async def until_held() -> None:
        with redis.Redis.from_url(own_redis.url) as client:
            leases = lambda: list(client.scan_iter(match=f"{cluster.namespace}:lease:*"))  # noqa: E731
            await cluster.until("leases are held again", leases, lambda found: len(found) == members)

    async def harmed() -> list[WorkerLost | CacheResyncRequested]:
        return [*await cluster.events(FLEET, WorkerLost), *await cluster.events(DECISIONS, CacheResyncRequested)]

    before = await harmed()
    async with system.load(ASK_EVERY_S, counts) as clients:
        for _ in range(FLUSHES):
            first = len(clients.results)
            with redis.Redis.from_url(own_redis.url) as client:
                client.flushall()
            await until_held()
            await system.until_served(clients, 20, first)
        own_redis.stop()
        first = len(clients.results)
        await asyncio.sleep(STOPPED_S)
        await system.until_served(clients, 20, first)
        await asyncio.to_thread(own_redis.start)
        await until_held()
        await system.until_served(clients, 20, len(clients.results))
    report(f"Redis flushed {FLUSHES} times, stopped for {STOPPED_S:g} s and started empty: {counts.sent} requests")
    assert counts.problems == []
    assert await harmed() == before


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
