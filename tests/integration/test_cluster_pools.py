"""Rules for several pools on Kafka: from the file of the router, changed over HTTP and by `forebay control`.

The tests of this file share a cluster and depend on their order.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.control import PolicySet, PoolConfigured, WorkerCommanded
from forebay.events.fleet import WorkerDraining
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.events.topics import CONTROL, FLEET
from forebay.transport.kafka.topics import create_topics
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import TIMEOUT_S

RULES = f"""
[[models]]
name = "{GROUP}"

[[models.grids]]
isl_max = 400
target_max_ms = 1000
pools = [{{ pool = "short", priority = 0 }}, {{ pool = "long", priority = 1 }}]
cells = [["short"], ["long"]]
"""
SHORT, LONG = "once upon a time", "word " * 300

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run a router with a file of rules, a worker in each of two pools, and two ingresses."""
    async with make_cluster("pools") as running:
        rules_of(running).write_text(RULES)
        await create_topics(running.settings, PLAN, ["short", "long"])
        for name in ("short", "long"):
            running.worker(name, "--pool", name, "--speedup", "20")
        await running.serve(("r1",), (), ("i1", "i2"), router=("--pool-routing", str(rules_of(running))))
        await running.until_serving(2)
        yield running


def rules_of(cluster: Cluster) -> Path:
    return cluster.processes.folder / "rules.toml"


async def take_over(cluster: Cluster, router: str) -> None:
    """Start a router with the same file, and let it take over from the owner, which is stopped."""
    before = await cluster.owner()
    cluster.router(router, "--pool-routing", str(rules_of(cluster)))
    await cluster.until_owned()
    await cluster.stop(before)


async def complete(cluster: Cluster, prompt: str) -> str:
    """Return the worker, named after its pool, that served a completion."""
    body = {"model": GROUP, "prompt": prompt, "max_tokens": 2}
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        response = await client.post(f"{cluster.urls['i1']}/v1/completions", json=body)
    worker: str = response.raise_for_status().json()["forebay"]["worker"]
    return worker


async def listed(cluster: Cluster, ingress: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=cluster.admin_headers) as client:
        rules: dict[str, Any] = (await client.get(f"{cluster.urls[ingress]}/v1/pools")).raise_for_status().json()
    return rules


async def control(cluster: Cluster, *arguments: str) -> int:
    """Run `forebay control` against the second ingress and return its exit code."""
    options = ("--url", cluster.urls["i2"], *cluster.admin_options[-2:])
    code, _ = await cluster.command("control", "control", *arguments, *options, within_s=TIMEOUT_S)
    return code


async def test_requests_follow_the_rules_of_the_file(cluster: Cluster) -> None:
    assert (await complete(cluster, SHORT), await complete(cluster, LONG)) == ("short", "long")
    rules = await listed(cluster, "i2")
    assert [grid["cells"] for grid in rules["grids"]] == [[["short"], ["long"]]]
    assert [one["pool"] for one in rules["pools"]] == ["long", "short"]


async def test_changes_through_one_ingress_apply_to_requests_of_another(cluster: Cluster) -> None:
    assert await control(cluster, "pools", "--pool", "long", "--base", "short", "--share", "1") == 0
    assert await complete(cluster, SHORT) == "long"
    assert await control(cluster, "pools", "--pool", "long", "--remove") == 0
    assert await control(cluster, "drain", "short") == 0
    assert await complete(cluster, SHORT) == "long"
    assert [one["drained"] for one in (await listed(cluster, "i1"))["pools"]] == [False, True]


async def test_rules_survive_a_takeover_and_the_file_is_written_once(cluster: Cluster) -> None:
    await take_over(cluster, "r2")
    assert await complete(cluster, SHORT) == "long"
    assert await control(cluster, "drain", "short", "--remove") == 0
    assert await complete(cluster, SHORT) == "short"
    assert await control(cluster, "policy", "short", "round-robin", "--operator", "alice") == 0
    policies = {one["pool"]: one["policy"] for one in (await listed(cluster, "i1"))["pools"]}
    assert policies == {"long": "kv", "short": "round-robin"}
    events = [type(event) for event in await cluster.events(CONTROL) if not isinstance(event, PoolConfigured)]
    assert events == [PoolRoutingConfigured, PoolCanarySet, PoolCanarySet, PoolDrainSet, PoolDrainSet, PolicySet]
    await cluster.require_verified()


async def test_a_drained_worker_leaves_and_its_process_ends(cluster: Cluster) -> None:
    cluster.processes["short"].ends = True
    assert await control(cluster, "drain", "--worker", "short", "--operator", "alice") == 0
    assert await cluster.processes.ended("short", within_s=TIMEOUT_S) == 0
    assert await complete(cluster, SHORT) == "long"
    assert [event.worker_id for event in await cluster.events(FLEET, WorkerDraining)] == ["short"]
    (command,) = await cluster.events(CONTROL, WorkerCommanded)
    assert (command.worker_ids, command.operator) == (("short",), "alice")
    await cluster.require_verified()
