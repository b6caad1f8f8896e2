"""Takeovers between real processes: complete responses for clients and a verified journal."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerLost
from forebay.events.topics import FLEET
from tests.harness.cluster import GROUP, Cluster, Ownership
from tests.integration.conftest import MakeCluster, cluster_fixture
from tests.integration.stream_clients import BLOCK, StreamClients, StreamResult, post, problems, prompt

WORKERS = ("w1", "w2", "w3")
SLOW = ("--speedup", "0.1")  # about 57 ms per token, so streams last longer than a takeover
LONG, SHORT = 160, 6  # output tokens
STREAMS = 12
ASK_EVERY_S = 0.1
PATIENCE_S = 60.0
WARM = 40  # prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")
running = cluster_fixture("cluster", ("r1", "r2"), WORKERS, ("i1", "i2"), worker=SLOW)


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: Cluster) -> Cluster:
    """Wait until the two routers, three workers and two ingresses serve, with one owner."""
    for name in ("r1", "r2"):
        if name not in running.processes:
            running.router(name)
            await running.until_joined(name)
    await running.until_serving(len(WORKERS))
    return running


async def test_clients_survive_the_kill_of_the_owner(
    cluster: Cluster, clients: StreamClients, report: Callable[[str], None]
) -> None:
    owner = await cluster.owner()
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

        response = await cluster.until("the ingress listens", first, lambda found: found is not None)
    assert response.status_code == httpx.codes.OK
    await cluster.stop("i3")


async def test_clients_survive_a_planned_stop_of_the_owner(
    cluster: Cluster, clients: StreamClients, report: Callable[[str], None]
) -> None:
    owner = await cluster.owner()
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
    sleeper = await cluster.owner()
    async with clients.load(ASK_EVERY_S, SHORT, first=3_000):
        await until_started(cluster, clients.results)
        cluster.processes.pause(sleeper)
        after = await cluster.taken_over(sleeper, within_s=PATIENCE_S)
        cluster.processes.resume(sleeper)
        await cluster.until_owned()
    owners = await cluster.ownerships()
    paused = next(one for one in reversed(owners) if one.epoch < after.epoch)
    report(f"paused: {paused.router} wrote {paused.stale} stale records; owners: {[one.router for one in owners]}")
    assert problems(clients.results, SHORT) == []
    await check_journal(cluster, clients)
    # The resumed router takes over again when the other one stops, unless it already owns the group.
    if await cluster.owner() == after.router:
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

    def is_lost(facts: list[WorkerLost]) -> bool:
        return any(fact.worker_epoch == victim.worker_epoch for fact in facts)

    await cluster.until("w4 is lost", lambda: cluster.events(FLEET, WorkerLost), is_lost)
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
    owner = await cluster.owner()
    cluster.kill(owner)
    # One by one, after the owner has applied the end of the previous response, so that load does not spread them.
    warm = []
    for one in cold:
        warm += await clients.answers([one.prompt], 1)
        await cluster.until("no request is in flight", lambda: active_requests(cluster), lambda all_: all_ == [0] * 3)
    assert problems(warm, 1) == []
    assert await cluster.owner() != owner
    assert [(one.worker, one.cached_tokens) for one in warm] == [(one.worker, 6 * BLOCK) for one in cold]
    await check_journal(cluster, clients)


async def test_a_healthy_start_and_stop_log_no_error_and_each_event_once(make_cluster: MakeCluster) -> None:
    async with make_cluster("logs") as cluster:
        await cluster.serve()
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": GROUP, "prompt": "a secret prompt", "max_tokens": 3}
            (await client.post(f"{cluster.urls['i1']}/v1/completions", json=body)).raise_for_status()
        outputs = {name: cluster.processes[name] for name in ("i1", "w1", "r1")}
        for name in outputs:
            await cluster.stop(name)
        logs = {name: process.output() for name, process in outputs.items()}
    lines = [line for text in logs.values() for line in text.splitlines()]
    assert [line for line in lines if " ERROR " in line or " WARNING " in line] == []
    assert "a secret prompt" not in "".join(logs.values())
    assert logs["i1"].count("forebay.access: POST /v1/completions 200 request_id=") == 1
    shared = ("worker w1 joined the pool default", "worker w1 is draining")
    assert [logs["w1"].count(event) for event in (*shared, "worker w1 left")] == [1] * 3
    assert [logs["r1"].count(event) for event in shared] == [1] * 2
    assert "Starting..." not in logs["r1"]


async def active_requests(cluster: Cluster) -> list[int]:
    """Return the number of active requests of each worker, as the owner of the group knows them."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = next(iter(cluster.urls.values()))
        response = await post(client, f"{url}/v1/route", json={"model": GROUP, "prompt": "?"})
    candidates: list[dict[str, Any]] = response.raise_for_status().json()["candidates"]
    return [one["active_requests"] for one in candidates]


async def until_started(cluster: Cluster, results: list[StreamResult]) -> None:
    """Wait until the first `STREAMS` responses have started."""
    await cluster.until("every stream has begun", lambda: results and all(one.text for one in results[:STREAMS]))


def resumed_after(owner: Ownership, since_us: int) -> float:
    """Return the seconds until this owner routed its first request."""
    assert owner.first_routed_us is not None
    return (owner.first_routed_us - since_us) / 1e6


async def check_journal(cluster: Cluster, clients: StreamClients) -> None:
    """Check that every decision is verified and every response ended once."""
    assert {one.ends for one in clients.results} == {1}
    report = await cluster.require_verified()
    assert report["verified"] == await cluster.decided()
    assert report["claims"] == len(await cluster.ownerships())
