"""Worker commands on real services: adapters used by several ingresses, and deaths of workers and owners."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.topics import DECISIONS
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import RUN
from tests.integration.stream_clients import TIMEOUT_S, prompt

WORKERS = ("w1", "w2")
LEASE_S = 3

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run two routers, two workers and two ingresses."""
    folder = tmp_path_factory.mktemp("commands")
    async with Cluster(kafka, redis_url, f"{RUN}-commands", folder, spawn=fork_server.spawn) as running:
        running.router("r1")
        running.router("r2")
        for name in WORKERS:
            running.worker(name, "--lease-ttl-s", str(LEASE_S))
        running.ingress("i1")
        running.ingress("i2")
        await running.until_serving(len(WORKERS))
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=cluster.admin_headers) as opened:
        yield opened


async def control(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, str]]:
    """Run `forebay control` at the first ingress. Return its exit code and the status by worker."""
    options = ("--url", cluster.urls["i1"], "--json", *cluster.admin_options)
    code, out = await cluster.command("control", "control", *arguments, *options, within_s=60)
    return code, {one["worker_id"]: one["status"] for one in json.loads(out)["outcomes"]}


async def complete(cluster: Cluster, client: httpx.AsyncClient, ingress: str, model: str) -> httpx.Response:
    """Return the response, once the ingress knows the adapters of all models: until then the response is 503."""
    body = {"model": model, "prompt": prompt(1), "max_tokens": 1}

    async def answered() -> httpx.Response | None:
        answer = await client.post(f"{cluster.urls[ingress]}/v1/completions", json=body)
        return None if answer.status_code == 503 and "adapters_unknown" in answer.text else answer

    return await cluster.processes.until(f"{ingress} knows the adapters", answered)


async def sent(cluster: Cluster, action: str) -> bool:
    return any(getattr(event, "action", "") == action for event in await cluster.events(DECISIONS))


async def test_an_adapter_is_loaded_at_one_ingress_and_served_by_another(
    cluster: Cluster, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert (await complete(cluster, client, "i2", "sql")).status_code == 404
    where = ["--lora", f"sql={tmp_path}", "--worker", "w2"]
    assert await control(cluster, "adapters", "load", *where) == (0, {"w2": "done"})
    for ingress in ("i2", "i1"):
        answer = await complete(cluster, client, ingress, "sql")
        assert answer.status_code == 200, answer.text
        models = (await client.get(f"{cluster.urls[ingress]}/v1/models")).json()["data"]
        assert [card["id"] for card in models] == [GROUP, "sql"]
    assert await control(cluster, "adapters", "unload", "--lora", "sql") == (1, {"w1": "refused", "w2": "done"})
    assert (await complete(cluster, client, "i2", "sql")).status_code == 404


async def test_a_command_survives_the_death_of_its_owner(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """The worker is paused, the owner that sent the command dies, and the next owner receives the response."""
    cluster.pause("w2")
    load = asyncio.create_task(client.post(f"{cluster.urls['i2']}/pause", json={"timeout_s": 100, "pool": "default"}))
    await cluster.processes.until("the command is in the journal", lambda: sent(cluster, "pause"))
    owner = await cluster.owner()
    assert owner is not None
    cluster.kill(owner)
    cluster.resume("w2")
    answer = await load
    outcomes: list[dict[str, Any]] = answer.json()["outcomes"]
    assert outcomes[0]["status"] == "done"
    # A worker paused for longer than its lease has left. Otherwise it has executed the command.
    assert outcomes[1]["status"] in ("done", "left")
    assert await cluster.owner() != owner
    await cluster.until_serving(len(WORKERS))
    assert await control(cluster, "power", "resume") == (0, dict.fromkeys(WORKERS, "done"))


async def test_a_command_to_a_dying_worker_fails(cluster: Cluster, client: httpx.AsyncClient) -> None:
    cluster.pause("w1")
    load = asyncio.create_task(client.post(f"{cluster.urls['i1']}/sleep", json={"timeout_s": 100}))
    await cluster.processes.until("the command is in the journal", lambda: sent(cluster, "sleep"))
    cluster.kill("w1")
    answer = await load
    assert answer.status_code == 502
    found = [(one["worker_id"], one["status"]) for one in answer.json()["outcomes"]]
    assert found == [("w1", "left"), ("w2", "done")]
    assert await control(cluster, "power", "wake-up", "--worker", "w2") == (0, {"w2": "done"})
    report = await cluster.verify()
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
