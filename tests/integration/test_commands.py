"""Commands to workers of a system on Kafka, across the death of an owner, and the status of that system."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from forebay.events.topics import DECISIONS
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import cluster_fixture
from tests.integration.stream_clients import prompt

ROUTERS, WORKERS = ("r1", "r2"), ("w1", "w2")
LEASE_S = 3

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = cluster_fixture("commands", ROUTERS, WORKERS, ("i1", "i2"), worker=("--lease-ttl-s", str(LEASE_S)))


async def control(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, str]]:
    """Run `forebay control` at the first ingress. Return its exit code and the status by worker."""
    options = ("--url", cluster.urls["i1"], "--json", *cluster.admin_options)
    code, out = await cluster.command("control", "control", *arguments, *options, within_s=60)
    return code, {one["worker_id"]: one["status"] for one in json.loads(out)["outcomes"]}


async def complete(cluster: Cluster, client: httpx.AsyncClient, ingress: str, model: str = GROUP) -> httpx.Response:
    """Return the response, once the ingress knows the adapters of all models: until then the response is 503."""
    body = {"model": model, "prompt": prompt(1), "max_tokens": 1}
    answer: httpx.Response = await cluster.until(
        f"{ingress} knows the adapters",
        lambda: client.post(f"{cluster.urls[ingress]}/v1/completions", json=body),
        lambda answer: answer.status_code != 503 or "adapters_unknown" not in answer.text,
    )
    return answer


async def until_sent(cluster: Cluster, action: str) -> None:
    def is_sent(events: list[Any]) -> bool:
        return any(getattr(event, "action", "") == action for event in events)

    await cluster.until("the command is in the journal", lambda: cluster.events(DECISIONS), is_sent)


async def status(cluster: Cluster, *options: str) -> tuple[int, dict[str, Any]]:
    code, out = await cluster.command("status", "status", *options, "--json", within_s=60)
    return code, json.loads(out)


async def test_a_command_survives_the_death_of_its_owner(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """The worker is paused, the owner that sent the command dies, and the next owner receives the response."""
    cluster.processes.pause("w2")
    body, url = {"timeout_s": 100, "pool": "default"}, f"{cluster.urls['i2']}/pause"
    load = asyncio.create_task(client.post(url, json=body, headers=cluster.admin_headers))
    await until_sent(cluster, "pause")
    owner = await cluster.owner()
    cluster.kill(owner)
    cluster.processes.resume("w2")
    outcomes: list[dict[str, Any]] = (await load).json()["outcomes"]
    assert outcomes[0]["status"] == "done"
    # A worker paused for longer than its lease has left. Otherwise it has executed the command.
    assert outcomes[1]["status"] in ("done", "left")
    assert await cluster.owner() != owner
    await cluster.until_serving(len(WORKERS))
    assert await control(cluster, "power", "resume") == (0, dict.fromkeys(WORKERS, "done"))


async def test_the_status_of_a_system_on_kafka(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """Through an ingress and from Kafka itself, with and without an owner. The last test: it kills the owners."""
    for name in ROUTERS:
        if name not in cluster.processes:
            cluster.router(name)
    await cluster.until_serving(len(WORKERS))
    (await complete(cluster, client, "i1")).raise_for_status()
    sources = ("--url", cluster.urls["i1"]), cluster.where
    for options in sources:

        async def reported(options: tuple[str, ...] = options) -> tuple[str, int, dict[str, Any]]:
            return (await cluster.owner(), *await status(cluster, *options))

        # A router that has just started may be preferred, so the ownership may move once.
        def is_settled(one: tuple[str, int, dict[str, Any]]) -> bool:
            owner, standbys = one[2]["owner"]["owner_id"], one[2]["owner"]["standbys"]
            return one[0] == owner and {*standbys} == {*ROUTERS} - {owner}

        owner, code, found = await cluster.until("the status names the owner and the standby", reported, is_settled)
        assert (code, found["group"], found["source"], found["problems"]) == (0, GROUP, "log", [])
        assert (found["owner"]["owner_id"], found["owner"]["alive"]) == (owner, True)
        assert [worker["worker_id"] for worker in found["workers"]] == [*WORKERS]
        assert [pool["routed"] for pool in found["pools"]] == [await cluster.routed()]
        assert found["requests"]["in_flight"] == 0
    for name in ROUTERS:
        cluster.kill(name)
    is_down = lambda answer: answer.status_code == httpx.codes.SERVICE_UNAVAILABLE  # noqa: E731
    await cluster.until("the ingress has no owner", lambda: client.get("/ready"), is_down)
    for options in sources:
        code, found = await status(cluster, *options)
        assert (code, found["ready"], found["owner"]["alive"]) == (1, False, False)
        assert found["problems"] == ["no router owns the group now, so requests wait"]
        assert found["owner"]["owner_id"] == owner
