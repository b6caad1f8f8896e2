"""Shutdown of worker processes: drained, immediate, or with their parent, without effect on clients."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerLost
from forebay.events.topics import FLEET
from forebay.transport.heartbeats import RouterHeartbeats
from tests.harness.cluster import GROUP, Cluster
from tests.harness.local import free_ports
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import StreamClients, StreamResult, problems, prompt

SLOW = ("--speedup", "0.1")  # about 57 ms per token, so a worker can be stopped during a response
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
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run a router and an ingress. Each test starts and stops its own workers."""
    async with make_cluster("workers") as cluster:
        await cluster.serve(workers=())
        yield cluster


async def until_started(cluster: Cluster, results: Sequence[StreamResult]) -> None:
    await cluster.until("every stream has begun", lambda: all(one.text for one in results))


async def members(cluster: Cluster, *names: str) -> None:
    """Wait until exactly these workers are members, and the owner has applied that."""
    await cluster.until_members(*names)
    await ready_workers(cluster, len(names))


async def ready_workers(cluster: Cluster, count: int) -> None:
    """Wait until this number of workers is ready in the owner's fleet: a fact on the log may not be applied yet."""
    heartbeats = RouterHeartbeats(cluster.log, GROUP)
    following = asyncio.create_task(heartbeats.follow(cluster.partition()))
    owner = lambda: heartbeats.owner  # noqa: E731
    try:
        await cluster.until(
            f"{count} workers are ready", owner, lambda owner: owner and owner.ready_aggregated == count
        )
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def fact_count(cluster: Cluster, kind: type[WorkerFact], worker_id: str) -> int:
    return sum(fact.worker_id == worker_id for fact in await cluster.events(FLEET, kind))


async def until_draining(cluster: Cluster, worker_id: str, before: int = 0) -> None:
    """Wait until the owner has recorded more than `before` times that a worker drains."""
    drains = lambda: fact_count(cluster, WorkerDraining, worker_id)  # noqa: E731
    await cluster.until(f"{worker_id} drains", drains, lambda count: count > before)


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
    await cluster.until("a is healthy", lambda: probe(port, "/ready"), lambda found: found == (200, "healthy"))
    old = [clients.submit(prompt(number), LONG) for number in range(STREAMS)]
    await until_started(cluster, old)
    cluster.processes["a"].signal(signal.SIGTERM)
    await until_draining(cluster, "a")
    await ready_workers(cluster, 1)
    assert await probe(port, "/ready") == (503, "stopping")
    assert await probe(port, "/live") == (200, "stopping")
    _, metrics = await probe(port, "/metrics")
    assert 'forebay_worker_state{state="stopping",worker_id="a"} 1.0' in metrics
    new = [clients.submit(one.prompt, SHORT) for one in old]
    await clients.all()
    assert await cluster.processes.ended("a", within_s=PATIENCE_S) == 0
    await members(cluster, "b")
    assert problems(old, LONG) + problems(new, SHORT) == []
    assert {(one.worker, one.attempts) for one in old} == {("a", 1), ("b", 1)}
    assert {one.worker for one in new} == {"b"}
    assert await fact_count(cluster, WorkerLost, "a") == 1
    await cluster.require_verified()
    await cluster.stop("b")
    await members(cluster)


@pytest.fixture
def lingering(tmp_path: Path) -> str:
    file = tmp_path / "lingering.py"
    file.write_text(LINGERING)
    return f"{file}:Lingering"


def serve(cluster: Cluster, *arguments: str) -> None:
    program, kind, *where = cluster.command_of("serve")
    cluster.processes.start("serve", [program, kind, *arguments, *where], ends=True)


def children(cluster: Cluster) -> list[int]:
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listed.splitlines() if cluster.namespace in line]
    return [int(line.split()[0]) for line in lines if re.search(r"forebay\.cli worker .*-id lin-\d", line)]


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
    await members(cluster, "a", "b")
    log = cluster.processes["a"].log
    broken.touch()
    assert await cluster.processes.ended("a", within_s=PATIENCE_S) == 1
    assert log.read_text().splitlines()[-1] == "forebay: test.fragile is broken: RuntimeError: the device fell off"
    await members(cluster, "b")
    await clients.all()
    assert problems([results], LONG) == []
    assert (results.worker, results.attempts) == ("b", 2)
    assert results.text.startswith("on and on")
    await cluster.stop("b")
    await members(cluster)


async def test_the_processes_of_a_service_stop_together(
    cluster: Cluster, clients: StreamClients, lingering: str
) -> None:
    serve(cluster, lingering, "--id", "lin", "--drain-s", "3600")
    await members(cluster, "lin-0", "lin-1")
    results = [clients.submit(prompt(200 + number), SHORT) for number in range(4)]
    await clients.all()
    assert problems(results, SHORT) == []
    assert {one.worker for one in results} == {"lin-0", "lin-1"}
    open_end = clients.submit(prompt(300), 100_000)
    await until_started(cluster, [open_end])
    cluster.processes["serve"].signal(signal.SIGINT)
    for name in ("lin-0", "lin-1"):
        await until_draining(cluster, name)
    cluster.processes["serve"].signal(signal.SIGINT)
    assert await cluster.processes.ended("serve", within_s=PATIENCE_S) == 0
    assert children(cluster) == []
    await members(cluster)
    await clients.drop()


async def test_the_processes_of_a_service_end_with_their_parent(cluster: Cluster, lingering: str) -> None:
    serve(cluster, lingering, "--id", "lin", "--workers", "1")
    await members(cluster, "lin-0")
    assert len(children(cluster)) == 1
    os.kill(cluster.processes["serve"].process.pid, signal.SIGKILL)
    assert await cluster.processes.ended("serve", within_s=PATIENCE_S) == -signal.SIGKILL
    await members(cluster)
    await cluster.until("its worker ends", lambda: not children(cluster))
