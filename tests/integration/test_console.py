"""A console beside a system on Kafka: the live fleet, a takeover, and an action of an operator."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio

from forebay.events.control import WorkerCommanded
from forebay.events.topics import CONTROL
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.harness.local import free_ports
from tests.integration.conftest import RUN
from tests.integration.stream_clients import TIMEOUT_S, prompt

TOKEN = "token-of-tests"
ROUTERS = ("r1", "r2")
WORKERS = ("w1", "w2", "w3")
Found = TypeVar("Found")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run two routers, three workers and an ingress."""
    folder = tmp_path_factory.mktemp("console")
    async with Cluster(kafka, redis_url, f"{RUN}-console", folder, spawn=fork_server.spawn) as running:
        for name in ROUTERS:
            running.router(name)
        for name in WORKERS:
            running.worker(name)
        running.ingress("i1")
        await running.until_serving(len(WORKERS))
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def console(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """Run a console of the system, and yield a client of it."""
    folder: Path = cluster.processes.folder
    port, token_file = free_ports(1), folder / "console-token"
    token_file.write_text(TOKEN)
    source = ("--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace, "--cache-dir", str(folder))
    served = ("--port", str(port), "--token-file", str(token_file), "--ingress", cluster.urls["i1"])
    cluster.begin("console", "console", *source, *served)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=TIMEOUT_S) as client:

        async def follows() -> bool:
            try:
                found = (await client.get("/v1/console")).raise_for_status().json()
            except httpx.TransportError:
                return False
            return bool(found["state"]["is_complete"])

        await cluster.processes.until("the console follows the log", follows)
        yield client


async def complete(cluster: Cluster, *numbers: int) -> None:
    """Send requests, and wait for their responses."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        bodies = [{"model": GROUP, "prompt": prompt(one), "max_tokens": 4} for one in numbers]
        url = f"{cluster.urls['i1']}/v1/completions"
        for response in await asyncio.gather(*(client.post(url, json=body) for body in bodies)):
            response.raise_for_status()


async def shown(
    cluster: Cluster, console: httpx.AsyncClient, path: str, reached: Callable[[Any], Awaitable[Found | None] | Found]
) -> Any:
    """Wait until the console's response fulfils a condition, and return it."""

    async def is_reached() -> Any:
        response = await console.get(path)
        found = response.json() if response.is_success else None
        return found if found is not None and reached(found) else None

    return await cluster.processes.until(f"the console shows it at {path}", is_reached)


async def test_the_fleet_and_the_requests_are_live(cluster: Cluster, console: httpx.AsyncClient) -> None:
    owner = await cluster.owner()
    (standby,) = {*ROUTERS} - {owner}
    fleet = await shown(cluster, console, "/v1/console/fleet", lambda found: found["status"]["owner"]["standbys"])
    assert fleet["problems"] == []
    assert [one["worker_id"] for one in fleet["status"]["workers"]] == [*WORKERS]
    assert (fleet["status"]["owner"]["owner_id"], fleet["status"]["owner"]["alive"]) == (owner, True)
    assert fleet["status"]["owner"]["standbys"] == [standby]
    await complete(cluster, *range(6))

    def are_finished(found: Any) -> bool:  # the owner writes no record about their ends while it is idle
        return [one["state"] for one in found["requests"]] == ["finished"] * 6

    page = await shown(cluster, console, "/v1/console/requests", are_finished)
    row = page["requests"][0]
    explained = (await console.get(f"/v1/requests/{row['request_id']}/explain")).raise_for_status().json()
    assert (
        explained["routings"][0]["candidates"][explained["routings"][0]["winner"]]["seen"]["worker_id"]
        == (row["worker_id"])
    )


async def test_an_operator_drains_a_worker(cluster: Cluster, console: httpx.AsyncClient) -> None:
    headers = {"x-forebay-admin-token": cluster.admin_token}
    cluster.processes["w3"].ends = True
    body = {"operator": "alice", "worker_ids": ["w3"]}
    refused = await console.post("/v1/console/actions/drain-worker", json=body)
    assert refused.status_code in {401, 403}
    response = await console.post("/v1/console/actions/drain-worker", json=body, headers=headers)
    assert response.status_code == httpx.codes.OK, response.text
    drained = await cluster.events(CONTROL)
    assert [one.operator for one in drained if isinstance(one, WorkerCommanded)] == ["alice"]

    def has_left(found: Any) -> bool:
        return [one["worker_id"] for one in found["status"]["workers"]] == ["w1", "w2"]

    await shown(cluster, console, "/v1/console/fleet", has_left)
    await shown(
        cluster,
        console,
        "/v1/console/markers",
        lambda found: any(one["kind"] == "command" and "alice" in one["text"] for one in found["markers"]),
    )


async def test_a_takeover_is_a_marker_and_a_missing_standby_a_problem(
    cluster: Cluster, console: httpx.AsyncClient
) -> None:
    owner = await cluster.owner()
    assert owner is not None
    cluster.kill(owner)
    await complete(cluster, 7)
    newest = await cluster.taken_over(owner, within_s=60)
    alone = f"no standby for group {GROUP}: if its router fails, requests wait until one is started"
    fleet = await shown(cluster, console, "/v1/console/fleet", lambda found: alone in found["problems"])
    assert fleet["status"]["owner"]["owner_id"] == newest.router
    markers = await shown(
        cluster,
        console,
        "/v1/console/markers",
        lambda found: sum(one["kind"] == "takeover" for one in found["markers"]) > 1,
    )
    takeover = [one for one in markers["markers"] if one["kind"] == "takeover"][-1]
    assert newest.router in takeover["text"]
    later = await console.get("/v1/console/fleet", params={"at_us": takeover["at_us"]})
    assert later.json()["status"]["owner"]["owner_id"] == newest.router
