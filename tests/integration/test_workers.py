"""Shutdown of worker processes: drained, immediate, or with their parent, without effect on clients."""

import asyncio
import functools
import os
import re
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerLost
from forebay.events.topics import FLEET
from forebay.transport.heartbeats import RouterHeartbeats
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.harness.local import free_ports
from tests.integration.conftest import RUN
from tests.integration.stream_clients import StreamClients, StreamResult, problems, prompt, stream_clients

SLOW = ("--speedup", "0.1")  # about 57 ms per token, so a worker can be stopped during a response
ENDLESS = ("--speedup", "0.001")
LONG, SHORT = 120, 4  # output tokens
STREAMS = 6
PATIENCE_S = 60.0
LINGERING = """
import asyncio
from forebay.workers.service import Request, endpoint, service

@service(namespace="test", workers=2, resources={"cpu": 1})
class Lingering:
    @endpoint()
    async def generate(self, request: Request):
        while True:
            yield "on and "
            await asyncio.sleep(0.2)
"""
FRAGILE = """
from pathlib import Path

@service(namespace="test")
class Fragile(Lingering):
    async def check(self):
        if Path("BROKEN").exists():
            raise RuntimeError("the device fell off")
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run a router and an ingress. Each test starts and stops its own workers."""
    async with Cluster(
        kafka, redis_url, f"{RUN}-workers", tmp_path_factory.mktemp("workers"), spawn=fork_server.spawn
    ) as cluster:
        cluster.router("r1")
        cluster.ingress("i1")
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[StreamClients]:
    async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as until_started:
        yield until_started


async def until_started(cluster: Cluster, results: Sequence[StreamResult]) -> None:
    async def begun() -> bool:
        return all(one.text for one in results)

    await cluster.processes.until("every stream has begun", begun)


async def members(cluster: Cluster, names: set[str]) -> None:
    """Wait until exactly these workers are members, and the owner has applied that."""

    async def are() -> bool:
        return set(await cluster.members()) == names

    await cluster.processes.until(f"{names} are members", are)
    await ready_workers(cluster, len(names))


async def ready_workers(cluster: Cluster, count: int) -> None:
    """Wait until this number of workers is ready in the owner's fleet: a fact on the log may not be applied yet."""
    partition = cluster.partition()
    assert partition is not None
    heartbeats = RouterHeartbeats(cluster.log, GROUP)
    following = asyncio.create_task(heartbeats.follow(partition))

    async def applied() -> bool:
        owner = heartbeats.owner
        return owner is not None and owner.ready_aggregated == count

    try:
        await cluster.processes.until(f"{count} workers are ready", applied)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def fact_count(cluster: Cluster, kind: type[WorkerFact], worker_id: str) -> int:
    facts = [event for event in await cluster.events(FLEET) if isinstance(event, kind)]
    return sum(fact.worker_id == worker_id for fact in facts)


async def probe(port: int, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        return answer.status_code, answer.text.strip()


async def test_a_terminated_worker_finishes_its_requests_and_gets_no_more(
    cluster: Cluster, clients: StreamClients
) -> None:
    port = free_ports(1)
    cluster.worker("a", *SLOW, "--metrics-port", str(port))
    cluster.worker("b", *SLOW)
    await cluster.until_serving(2)

    async def ready() -> bool:
        return await probe(port, "/ready") == (200, "healthy")

    await cluster.processes.until("a is healthy", ready)
    old = [clients.submit(prompt(number), LONG) for number in range(STREAMS)]
    await until_started(cluster, old)
    cluster.processes["a"].signal(signal.SIGTERM)
    await cluster.processes.until("a drains", functools.partial(fact_count, cluster, WorkerDraining, "a"))
    await ready_workers(cluster, 1)
    assert await probe(port, "/ready") == (503, "stopping")
    assert await probe(port, "/live") == (200, "stopping")
    _, metrics = await probe(port, "/metrics")
    assert 'forebay_worker_state{state="stopping",worker_id="a"} 1.0' in metrics
    new = [clients.submit(one.prompt, SHORT) for one in old]
    await clients.all()
    assert await cluster.processes.ended("a", within_s=PATIENCE_S) == 0
    await members(cluster, {"b"})
    assert problems(old, LONG) + problems(new, SHORT) == []
    assert {(one.worker, one.attempts) for one in old} == {("a", 1), ("b", 1)}
    assert {one.worker for one in new} == {"b"}
    assert await fact_count(cluster, WorkerLost, "a") == 1
    report = await cluster.verify()
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
    await cluster.stop("b")
    await members(cluster, set())


@pytest.mark.parametrize("how", ["in time", "second signal"])
async def test_requests_unfinished_by_a_worker_continue_on_another(
    cluster: Cluster, clients: StreamClients, how: str
) -> None:
    drain_s = "0.5" if how == "in time" else "3600"
    cluster.worker("a", *ENDLESS, "--drain-s", drain_s)
    await cluster.until_serving(1)
    results = [clients.submit(prompt(100 + number), SHORT) for number in range(2)]
    # The first token would take minutes, so only the end of the worker redispatches these requests.
    await cluster.processes.until("the requests are routed", lambda: routed(cluster, results))
    cluster.worker("b")
    await members(cluster, {"a", "b"})
    drained = await fact_count(cluster, WorkerDraining, "a")  # by earlier tests
    cluster.processes["a"].signal(signal.SIGTERM)
    if how == "second signal":

        async def draining() -> bool:
            return await fact_count(cluster, WorkerDraining, "a") > drained

        await cluster.processes.until("a drains", draining)
        cluster.processes["a"].signal(signal.SIGTERM)
    assert await cluster.processes.ended("a", within_s=PATIENCE_S) == 0
    await clients.all()
    assert problems(results, SHORT) == []
    assert {(one.worker, one.attempts) for one in results} == {("b", 2)}
    await cluster.stop("b")
    await members(cluster, set())


async def routed(cluster: Cluster, results: Sequence[StreamResult]) -> bool:
    """Return whether all of these requests are active at a worker."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = next(iter(cluster.urls.values()))
        response = (
            (await client.post(f"{url}/v1/route", json={"model": GROUP, "prompt": "?"})).raise_for_status().json()
        )
    return sum(int(one["active_requests"]) for one in response["candidates"]) == len(results)


@pytest.fixture
def lingering(tmp_path: Path) -> str:
    file = tmp_path / "lingering.py"
    file.write_text(LINGERING)
    return f"{file}:Lingering"


def serve(cluster: Cluster, kafka: str, redis_url: str, *arguments: str) -> None:
    shared = ["--kafka", kafka, "--redis", redis_url, "--namespace", cluster.namespace]
    cluster.processes.start("serve", [FOREBAY, "serve", *arguments, *shared], ends=True)


def children() -> list[int]:
    """Return the process ids of the service's workers."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [
        int(line.split()[0]) for line in listed.splitlines() if re.search(r"forebay\.cli worker .*-id lin-\d", line)
    ]


async def test_a_worker_with_a_failed_engine_exits_with_the_reason_and_its_requests_continue(
    cluster: Cluster, clients: StreamClients, tmp_path: Path
) -> None:
    file, broken = tmp_path / "fragile.py", tmp_path / "broken"
    file.write_text(LINGERING + FRAGILE.replace("BROKEN", str(broken)))
    cluster.worker("a", "--engine", f"{file}:Fragile")
    await cluster.until_serving(1)
    results = clients.submit(prompt(400), LONG)
    await until_started(cluster, [results])
    cluster.worker("b")
    await members(cluster, {"a", "b"})
    log = cluster.processes["a"].log
    broken.touch()
    assert await cluster.processes.ended("a", within_s=PATIENCE_S) == 1
    assert log.read_text().splitlines()[-1] == "forebay: test.fragile is broken: RuntimeError: the device fell off"
    await members(cluster, {"b"})
    await clients.all()
    assert problems([results], LONG) == []
    assert (results.worker, results.attempts) == ("b", 2)
    assert results.text.startswith("on and on")
    await cluster.stop("b")
    await members(cluster, set())


async def test_the_processes_of_a_service_stop_together(
    cluster: Cluster, kafka: str, redis_url: str, clients: StreamClients, lingering: str
) -> None:
    serve(cluster, kafka, redis_url, lingering, "--id", "lin", "--drain-s", "3600")
    await members(cluster, {"lin-0", "lin-1"})
    results = [clients.submit(prompt(200 + number), SHORT) for number in range(4)]
    await clients.all()
    assert problems(results, SHORT) == []
    assert {one.worker for one in results} == {"lin-0", "lin-1"}
    open_end = clients.submit(prompt(300), 100_000)
    await until_started(cluster, [open_end])
    cluster.processes["serve"].signal(signal.SIGINT)
    await cluster.processes.until("lin-0 drains", functools.partial(fact_count, cluster, WorkerDraining, "lin-0"))
    await cluster.processes.until("lin-1 drains", functools.partial(fact_count, cluster, WorkerDraining, "lin-1"))
    cluster.processes["serve"].signal(signal.SIGINT)
    assert await cluster.processes.ended("serve", within_s=PATIENCE_S) == 0
    assert children() == []
    await members(cluster, set())
    await clients.drop()


async def test_the_processes_of_a_service_end_with_their_parent(
    cluster: Cluster, kafka: str, redis_url: str, lingering: str
) -> None:
    serve(cluster, kafka, redis_url, lingering, "--id", "lin", "--workers", "1")
    await members(cluster, {"lin-0"})
    assert len(children()) == 1
    os.kill(cluster.processes["serve"].process.pid, signal.SIGKILL)
    assert await cluster.processes.ended("serve", within_s=PATIENCE_S) == -signal.SIGKILL
    await members(cluster, set())

    async def has_ended() -> bool:
        return children() == []

    await cluster.processes.until("its worker ends", has_ended)
