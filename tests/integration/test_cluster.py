"""Takeovers between real processes: complete responses for clients and a verified journal."""

import functools
import uuid
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import pytest_asyncio

from forebay.core.state.fleet import FleetWorker
from forebay.events.fleet import WorkerLost
from forebay.events.topics import FLEET
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster, Ownership
from tests.integration.conftest import RUN
from tests.integration.stream_clients import BLOCK, StreamClients, StreamResult, post, problems, prompt, stream_clients

WORKERS = ("w1", "w2", "w3")
SLOW = ("--speedup", "0.1")  # about 57 ms per token, so streams last longer than a takeover
LONG, SHORT = 160, 6  # output tokens
STREAMS = 12
ASK_EVERY_S = 0.1
PATIENCE_S = 60.0
WARM = 40  # prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with Cluster(kafka, redis_url, f"{RUN}-cluster", folder, spawn=fork_server.spawn) as cluster:
        for name in WORKERS:
            cluster.worker(name, *SLOW)
        for name in ("i1", "i2"):
            cluster.ingress(name)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: Cluster) -> Cluster:
    """Wait until the two routers, three workers and two ingresses serve, with one owner."""
    for name in ("r1", "r2"):
        if name not in running.processes:
            running.router(name)
            await running.processes.until(f"{name} runs", functools.partial(member, running, name))
    await running.until_serving(len(WORKERS))
    return running


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[StreamClients]:
    async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as speaking:
        yield speaking


async def test_clients_survive_the_kill_of_the_owner(
    cluster: Cluster, clients: StreamClients, report: Callable[[str], None]
) -> None:
    owner = await owner_of(cluster)
    streams = [clients.submit(prompt(number), LONG) for number in range(STREAMS)]
    await until_started(cluster, streams)
    killed_us = cluster.kill(owner)
    late = [clients.submit(prompt(1_000 + number), SHORT) for number in range(STREAMS)]
    resumed_s = resumed_after(await cluster.taken_over(owner, within_s=PATIENCE_S), killed_us)
    report(f"killed: routing resumed after {resumed_s:.2f} s")
    await clients.all()
    assert problems(streams, LONG) + problems(late, SHORT) == []
    again = await clients.answers([stream.prompt for stream in streams], LONG)
    assert [stream.text for stream in streams] == [stream.text for stream in again]
    await check_journal(cluster, clients)


async def test_the_first_request_to_a_new_ingress_is_served(cluster: Cluster) -> None:
    url = cluster.ingress("i3")
    body = {"model": GROUP, "prompt": prompt(7), "max_tokens": SHORT}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def first() -> httpx.Response | None:
            try:
                return await client.post(f"{url}/v1/completions", json=body)
            except httpx.ConnectError:  # the process does not listen yet
                return None

        response = await cluster.processes.until("the ingress listens", first)
    assert response.status_code == httpx.codes.OK
    await cluster.stop("i3")


async def test_clients_survive_a_planned_stop_of_the_owner(
    cluster: Cluster, clients: StreamClients, report: Callable[[str], None]
) -> None:
    owner = await owner_of(cluster)
    async with clients.load(ASK_EVERY_S, SHORT, first=2_000):
        await until_started(cluster, clients.results)
        await cluster.stop(owner)
        after = await cluster.taken_over(owner, within_s=PATIENCE_S)
    before = (await cluster.ownerships())[-2]
    assert (before.router, after.router != owner) == (owner, True)
    assert before.last_routed_us is not None
    report(f"stopped as planned: no request was routed for {resumed_after(after, before.last_routed_us):.2f} s")
    assert problems(clients.results, SHORT) == []
    await check_journal(cluster, clients)


async def test_a_paused_owner_is_fenced_when_it_resumes(
    cluster: Cluster, clients: StreamClients, report: Callable[[str], None]
) -> None:
    sleeper = await owner_of(cluster)
    async with clients.load(ASK_EVERY_S, SHORT, first=3_000):
        await until_started(cluster, clients.results)
        cluster.pause(sleeper)
        after = await cluster.taken_over(sleeper, within_s=PATIENCE_S)
        cluster.resume(sleeper)
        await cluster.until_owned()
    owners = await cluster.ownerships()
    paused = next(one for one in reversed(owners) if one.epoch < after.epoch)
    report(f"paused: {paused.router} wrote {paused.stale} stale records; owners: {[one.router for one in owners]}")
    assert problems(clients.results, SHORT) == []
    await check_journal(cluster, clients)
    # The resumed router takes over again when the other one stops, unless it already owns the group.
    if await owner_of(cluster) == after.router:
        await cluster.stop(after.router)
    result = clients.submit(prompt(3_999), SHORT)
    assert (await cluster.taken_over(after.router, within_s=PATIENCE_S)).router == sleeper
    await clients.all()
    assert problems([result], SHORT) == []
    await check_journal(cluster, clients)


async def test_clients_survive_the_kill_of_a_worker(cluster: Cluster, clients: StreamClients) -> None:
    cluster.worker("w4", *SLOW, "--lease-ttl-s", "3")
    await cluster.until_serving(len(WORKERS) + 1)
    victim = (await cluster.members())["w4"]
    streams = [clients.submit(prompt(4_000 + number), LONG) for number in range(STREAMS)]
    await until_started(cluster, streams)
    before = [stream.text for stream in streams]
    cluster.kill("w4")
    await cluster.processes.until("w4 is lost", lambda: lost(cluster, victim))
    await clients.all()
    assert problems(streams, LONG) == []
    moved = [number for number, stream in enumerate(streams) if stream.attempts > 1]
    assert moved, "the killed worker had none of the streams"
    assert "w4" not in {stream.worker for stream in streams}
    again = await clients.answers([streams[number].prompt for number in moved], LONG)
    for number, undisturbed in zip(moved, again, strict=True):
        # After the retry another engine continues with other tokens. Tokens emitted before are kept.
        assert undisturbed.text.startswith(before[number])
        assert streams[number].text.startswith(before[number])

    cluster.worker("w5", *SLOW)
    await cluster.until_serving(len(WORKERS) + 1)
    successor = (await cluster.members())["w5"]
    assert successor.slot == victim.slot
    assert successor.worker_epoch > victim.worker_epoch
    await cluster.stop("w5")
    await cluster.until_serving(len(WORKERS))
    await check_journal(cluster, clients)


async def test_all_prefixes_are_found_after_a_takeover(cluster: Cluster, clients: StreamClients) -> None:
    cold = await clients.answers([prompt(5_000 + number, blocks=6) for number in range(WARM)], 1)
    assert [one.cached_tokens for one in cold] == [0] * WARM
    assert {one.worker for one in cold} == set(WORKERS)
    owner = await owner_of(cluster)
    cluster.kill(owner)
    # One by one, after the owner has applied the end of the previous response, so that load does not spread them.
    warm = []
    for one in cold:
        warm += await clients.answers([one.prompt], 1)
        await cluster.processes.until("no request is in flight", functools.partial(idle, cluster))
    assert problems(warm, 1) == []
    assert await owner_of(cluster) != owner
    assert [(one.worker, one.cached_tokens) for one in warm] == [(one.worker, 6 * BLOCK) for one in cold]
    await check_journal(cluster, clients)


async def idle(cluster: Cluster) -> bool:
    """Return whether the owner has no active request at any worker, by a route query."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = next(iter(cluster.urls.values()))
        response = (
            (await post(client, f"{url}/v1/route", json={"model": GROUP, "prompt": "?"})).raise_for_status().json()
        )
    return len(response["candidates"]) == len(WORKERS) and not any(
        one["active_requests"] for one in response["candidates"]
    )


async def member(cluster: Cluster, router: str) -> bool:
    """Return whether a router has joined the consumer group."""
    return f"router {router} is a member of" in cluster.processes[router].output()


async def owner_of(cluster: Cluster) -> str:
    owner = await cluster.owner()
    assert owner is not None
    return owner


async def until_started(cluster: Cluster, results: list[StreamResult]) -> None:
    """Wait until the first `STREAMS` responses have started."""

    async def began() -> bool:
        return bool(results) and all(one.text for one in results[:STREAMS])

    await cluster.processes.until("every stream has begun", began)


def resumed_after(owner: Ownership, since_us: int) -> float:
    """Return the seconds until this owner routed its first request."""
    assert owner.first_routed_us is not None
    return (owner.first_routed_us - since_us) / 1e6


async def lost(cluster: Cluster, worker: FleetWorker) -> bool:
    facts = [event for event in await cluster.events(FLEET) if isinstance(event, WorkerLost)]
    return any(fact.worker_epoch == worker.worker_epoch for fact in facts)


async def check_journal(cluster: Cluster, clients: StreamClients) -> None:
    """Check that every decision is verified and every response ended once."""
    assert {one.ends for one in clients.results} == {1}
    report = await cluster.verify()
    assert report["divergence"] is None
    assert report["verified"] == report["decisions"] == await cluster.decided()
    assert report["claims"] == len(await cluster.ownerships())
