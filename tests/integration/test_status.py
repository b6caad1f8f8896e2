"""`forebay status` of a system on Kafka: through an ingress and from Kafka itself, with and without an owner."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import RUN
from tests.integration.stream_clients import TIMEOUT_S, prompt

ROUTERS = ("r1", "r2")
WORKERS = ["w1", "w2"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run two routers, two workers and an ingress."""
    folder = tmp_path_factory.mktemp("status")
    async with Cluster(kafka, redis_url, f"{RUN}-status", folder, spawn=fork_server.spawn) as running:
        for name in ROUTERS:
            running.router(name)
        for name in WORKERS:
            running.worker(name)
        running.ingress("i1")
        await running.until_serving(len(WORKERS))
        yield running


async def status(cluster: Cluster, *options: str) -> tuple[int, dict[str, Any]]:
    code, out = await cluster.command("status", "status", *options, "--json", within_s=60)
    return code, json.loads(out)


async def test_the_status_of_a_system_on_kafka(cluster: Cluster) -> None:
    through_ingress = ("--url", cluster.urls["i1"])
    from_kafka = ("--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace)
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        body = {"model": GROUP, "prompt": prompt(1), "max_tokens": 1}
        (await client.post(f"{cluster.urls['i1']}/v1/completions", json=body)).raise_for_status()
    owner = await cluster.owner()
    (standby,) = {*ROUTERS} - {owner}
    for options in (through_ingress, from_kafka):
        code, found = await status(cluster, *options)
        assert (code, found["group"], found["source"], found["problems"]) == (0, GROUP, "log", [])
        assert (found["owner"]["owner_id"], found["owner"]["alive"]) == (owner, True)
        assert found["owner"]["standbys"] == [standby]
        assert [worker["worker_id"] for worker in found["workers"]] == WORKERS
        assert [pool["routed"] for pool in found["pools"]] == [1]
        assert found["requests"]["in_flight"] == 0
    for name in ROUTERS:
        cluster.kill(name)

    async def silent() -> bool:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return (await client.get(f"{cluster.urls['i1']}/ready")).status_code == httpx.codes.SERVICE_UNAVAILABLE

    await cluster.processes.until("the ingress has no owner", silent)
    for options in (through_ingress, from_kafka):
        code, found = await status(cluster, *options)
        assert (code, found["ready"], found["owner"]["alive"]) == (1, False, False)
        assert found["problems"] == ["no router owns the group now, so requests wait"]
        assert found["owner"]["owner_id"] == owner
