"""Rules for several pools on Kafka: from the file of the router, changed over HTTP and by `forebay control`.

The tests of this file share a cluster and depend on their order.
"""

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.control import PolicySet, PoolConfigured, WorkerCommanded
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerDraining
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.events.topics import CONTROL, DECISIONS, FLEET
from forebay.transport.kafka.topics import create_topics
from tests.harness import fork_server
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.integration.conftest import RUN
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
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run a router with a file of rules, a worker in each of two pools, and two ingresses."""
    folder = tmp_path_factory.mktemp("pools")
    (folder / "rules.toml").write_text(RULES)
    async with Cluster(kafka, redis_url, f"{RUN}-pools", folder, spawn=fork_server.spawn) as running:
        await create_topics(running.settings, PLAN, ["short", "long"])
        running.router("r1", "--pool-routing", str(folder / "rules.toml"))
        for name in ("short", "long"):
            running.worker(name, "--pool", name, "--speedup", "20")
        for name in ("i1", "i2"):
            running.ingress(name)
        await running.until_serving(2)
        yield running


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
    cluster.router("r2", "--pool-routing", os.fspath(cluster.processes.folder / "rules.toml"))
    await cluster.until_owned()
    before = await cluster.owner()
    assert before is not None
    await cluster.stop(before)
    assert await complete(cluster, SHORT) == "long"
    assert await control(cluster, "drain", "short", "--remove") == 0
    assert await complete(cluster, SHORT) == "short"
    assert await control(cluster, "policy", "short", "round-robin", "--operator", "alice") == 0
    assert {one["pool"]: one["policy"] for one in (await listed(cluster, "i1"))["pools"]} == {
        "long": "kv",
        "short": "round-robin",
    }
    events = [type(event) for event in await cluster.events(CONTROL) if not isinstance(event, PoolConfigured)]
    assert events == [PoolRoutingConfigured, PoolCanarySet, PoolCanarySet, PoolDrainSet, PoolDrainSet, PolicySet]
    report = await cluster.verify()
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])


async def test_a_policy_survives_a_takeover(cluster: Cluster) -> None:
    before = await cluster.owner()
    assert before is not None
    cluster.router("r3", "--pool-routing", os.fspath(cluster.processes.folder / "rules.toml"))
    await cluster.until_owned()
    await cluster.stop(before)
    assert await complete(cluster, SHORT) == "short"
    routed = [event for event in await cluster.events(DECISIONS) if isinstance(event, RequestRouted)]
    assert (routed[-1].pool, routed[-1].mode) == ("short", "round-robin")


async def test_a_drained_worker_leaves_and_its_process_ends(cluster: Cluster) -> None:
    assert await control(cluster, "drain", "--worker", "short", "--operator", "alice") == 0
    assert await cluster.processes.ended("short", within_s=TIMEOUT_S) == 0
    assert await complete(cluster, SHORT) == "long"
    drained = [event for event in await cluster.events(FLEET) if isinstance(event, WorkerDraining)]
    assert [event.worker_id for event in drained] == ["short"]
    (command,) = [event for event in await cluster.events(CONTROL) if isinstance(event, WorkerCommanded)]
    assert (command.worker_ids, command.operator) == (("short",), "alice")
    report = await cluster.verify()
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
