"""Take-overs among real processes: what clients hear, and what the journal proves afterwards."""

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
from tests.integration.listeners import BLOCK, Heard, Listeners, listeners, post, problems, prompt

WORKERS = ("w1", "w2", "w3")
SLOW = ("--speedup", "0.1")  # a token takes about 57 ms: streams last longer than a take-over
LONG, SHORT = 160, 6  # tokens of answers
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
    """Two routers, of which one owns, three workers and two ingresses, all serving."""
    for name in ("r1", "r2"):
        if name not in running.processes:
            running.router(name)
            await running.processes.until(f"{name} runs", functools.partial(member, running, name))
    await running.until_serving(len(WORKERS))
    return running


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[Listeners]:
    async with listeners(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as speaking:
        yield speaking


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Shows a figure, also of a test that passes."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")

    return show


async def test_an_owner_is_killed_under_load(cluster: Cluster, clients: Listeners, tell: Callable[[str], None]) -> None:
    owner = await owner_of(cluster)
    streams = [clients.ask(prompt(number), LONG) for number in range(STREAMS)]
    await heard_by_all(cluster, streams)
    killed_us = cluster.kill(owner)
    late = [clients.ask(prompt(1_000 + number), SHORT) for number in range(STREAMS)]
    resumed_s = resumed_after(await cluster.taken_over(owner, within_s=PATIENCE_S), killed_us)
    tell(f"killed: routing resumed after {resumed_s:.2f} s")
    await clients.all()
    assert problems(streams, LONG) + problems(late, SHORT) == []
    again = await clients.answers([stream.prompt for stream in streams], LONG)
    assert [stream.text for stream in streams] == [stream.text for stream in again]
    await proven(cluster, clients)


async def test_an_owner_is_stopped_as_planned(
    cluster: Cluster, clients: Listeners, tell: Callable[[str], None]
) -> None:
    owner = await owner_of(cluster)
    async with clients.asking(ASK_EVERY_S, SHORT, first=2_000):
        await heard_by_all(cluster, clients.heard)
        await cluster.stop(owner)
        after = await cluster.taken_over(owner, within_s=PATIENCE_S)
    before = (await cluster.ownerships())[-2]
    assert (before.router, after.router != owner) == (owner, True)
    assert before.last_routed_us is not None
    tell(f"stopped as planned: no request was routed for {resumed_after(after, before.last_routed_us):.2f} s")
    assert problems(clients.heard, SHORT) == []
    await proven(cluster, clients)


async def test_an_owner_sleeps_and_finds_itself_replaced(
    cluster: Cluster, clients: Listeners, tell: Callable[[str], None]
) -> None:
    sleeper = await owner_of(cluster)
    async with clients.asking(ASK_EVERY_S, SHORT, first=3_000):
        await heard_by_all(cluster, clients.heard)
        cluster.pause(sleeper)
        after = await cluster.taken_over(sleeper, within_s=PATIENCE_S)
        cluster.resume(sleeper)
        await cluster.until_balanced()
    owners = await cluster.ownerships()
    asleep = next(one for one in reversed(owners) if one.epoch < after.epoch)
    tell(f"paused: {asleep.router} wrote {asleep.stale} stale records; owners then: {[one.router for one in owners]}")
    assert problems(clients.heard, SHORT) == []
    await proven(cluster, clients)
    # It is of use again: it owns when the other one goes, if it was not given the group back already.
    if await owner_of(cluster) == after.router:
        await cluster.stop(after.router)
    heard = clients.ask(prompt(3_999), SHORT)
    assert (await cluster.taken_over(after.router, within_s=PATIENCE_S)).router == sleeper
    await clients.all()
    assert problems([heard], SHORT) == []
    await proven(cluster, clients)


async def test_a_worker_is_killed_under_load(cluster: Cluster, clients: Listeners) -> None:
    cluster.worker("w4", *SLOW, "--lease-ttl-s", "3")
    await cluster.until_serving(len(WORKERS) + 1)
    victim = (await cluster.members())["w4"]
    streams = [clients.ask(prompt(4_000 + number), LONG) for number in range(STREAMS)]
    await heard_by_all(cluster, streams)
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
        # After the move another engine goes on, in words of its own; what was said until then stays.
        assert undisturbed.text.startswith(before[number])
        assert streams[number].text.startswith(before[number])

    cluster.worker("w5", *SLOW)
    await cluster.until_serving(len(WORKERS) + 1)
    successor = (await cluster.members())["w5"]
    assert successor.slot == victim.slot
    assert successor.worker_epoch > victim.worker_epoch
    await cluster.stop("w5")
    await cluster.until_serving(len(WORKERS))
    await proven(cluster, clients)


async def test_40_of_40_are_warm_after_a_take_over(cluster: Cluster, clients: Listeners) -> None:
    cold = await clients.answers([prompt(5_000 + number, blocks=6) for number in range(WARM)], 1)
    assert [one.cached_tokens for one in cold] == [0] * WARM
    assert {one.worker for one in cold} == set(WORKERS)
    owner = await owner_of(cluster)
    cluster.kill(owner)
    # One by one, each when the answer before it has ended for the owner: many at once would spread.
    warm = []
    for one in cold:
        warm += await clients.answers([one.prompt], 1)
        await cluster.processes.until("nothing is under way", functools.partial(idle, cluster))
    assert problems(warm, 1) == []
    assert await owner_of(cluster) != owner
    assert [(one.worker, one.cached_tokens) for one in warm] == [(one.worker, 6 * BLOCK) for one in cold]
    await proven(cluster, clients)


async def idle(cluster: Cluster) -> bool:
    """Whether the owner has no request at any worker, as a route that is only asked for tells."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = next(iter(cluster.urls.values()))
        told = (await post(client, f"{url}/v1/route", json={"model": GROUP, "prompt": "?"})).raise_for_status().json()
    return len(told["candidates"]) == len(WORKERS) and not any(one["active_requests"] for one in told["candidates"])


async def member(cluster: Cluster, router: str) -> bool:
    """Whether a router joined the group of routers."""
    return f"router {router} is a member of" in cluster.processes[router].output()


async def owner_of(cluster: Cluster) -> str:
    """The router that owns now."""
    owner = await cluster.owner()
    assert owner is not None
    return owner


async def heard_by_all(cluster: Cluster, heard: list[Heard]) -> None:
    """Wait until so many answers began as there are."""

    async def began() -> bool:
        return bool(heard) and all(one.text for one in heard[:STREAMS])

    await cluster.processes.until("every stream has begun", began)


def resumed_after(owner: Ownership, since_us: int) -> float:
    """Seconds until this owner routed its first request."""
    assert owner.first_routed_us is not None
    return (owner.first_routed_us - since_us) / 1e6


async def lost(cluster: Cluster, worker: FleetWorker) -> bool:
    """Whether the fleet says that this incarnation is lost."""
    facts = [event for event in await cluster.events(FLEET) if isinstance(event, WorkerLost)]
    return any(fact.worker_epoch == worker.worker_epoch for fact in facts)


async def proven(cluster: Cluster, clients: Listeners) -> None:
    """Each decision since the beginning derives equal, and each answer ended once."""
    assert {one.ends for one in clients.heard} == {1}
    report = await cluster.verify()
    assert report["divergence"] is None
    assert report["verified"] == report["decisions"] == await cluster.decided()
    assert report["claims"] == len(await cluster.ownerships())
