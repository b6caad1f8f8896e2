"""`forebay restore` and `forebay dead-letters` on real Kafka."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from forebay.events.codec import encode
from forebay.events.control import PolicySet
from forebay.events.decisions import RequestRouted
from forebay.events.pools import PoolDrainSet
from forebay.events.topics import CONTROL, DEAD_LETTERS, DECISIONS
from forebay.replay.restore import settings_of, settled_world
from forebay.transport.base import Draft, Record
from forebay.transport.dead_letters import dead_letter
from forebay.transport.kafka.log import KafkaLog
from tests.harness import fork_server
from tests.harness.cluster import GROUP, PLAN, POOL, Cluster
from tests.integration.conftest import RUN

PATIENCE_S = 60.0
LETTERS = f"{RUN}-letters"
LOST, NEW = f"{RUN}-lost", f"{RUN}-new"
TOPICS = {"groups": PLAN.groups, "slots": PLAN.slots, "replies": PLAN.replies}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def serving(cluster: Cluster) -> None:
    """Start a router, a worker and an ingress, and wait until they serve."""
    cluster.router("r1")
    cluster.worker("w1", "--speedup", "50")
    cluster.ingress("i1")
    await cluster.until_serving(1)


async def complete(cluster: Cluster) -> str:
    """Complete a prompt, and return the router mode of the newest decision."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"model": GROUP, "prompt": "hello", "max_tokens": 2}
        answer = await client.post(f"{cluster.urls['i1']}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    decisions = await cluster.events(DECISIONS)
    return [one for one in decisions if isinstance(one, RequestRouted)][-1].mode


async def command(cluster: Cluster, *arguments: object, code: int = 0) -> str:
    """Run a command, check its exit code, and return its stdout, or its stderr if it failed."""
    found, output = await cluster.command("command", *map(str, arguments), within_s=PATIENCE_S)
    errors = (cluster.processes.folder / "command.log").read_text()
    assert found == code, errors + output
    return errors if code else output


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(kafka, redis_url, LETTERS, tmp_path, spawn=fork_server.spawn) as running:
        await serving(running)
        yield running


async def test_a_retried_letter_takes_effect(cluster: Cluster) -> None:
    where = ("--kafka", cluster.settings.bootstrap, "--namespace", LETTERS)
    log = await KafkaLog.open(cluster.settings)
    try:
        assert await complete(cluster) == "kv"
        await log.append([Draft(CONTROL.name, 0, b'{"type": "control.of_a_newer_version"}')])

        async def buried() -> bool:
            return await log.end(DEAD_LETTERS.name, 0) == 1

        await cluster.processes.until("the owner writes a dead letter", buried, within_s=PATIENCE_S)
        policy = encode(CONTROL, PolicySet(model=GROUP, pool=POOL, mode="round-robin"))
        await log.append([dead_letter(Record(CONTROL.name, 0, 9, 0, policy), 0, "unknown tag")])
        lines = (await command(cluster, "dead-letters", "list", *where, "--json")).splitlines()
        assert [json.loads(line)["offset"] for line in lines] == [1, 0]
        assert json.loads(lines[1])["source_offset"] == await log.end(CONTROL.name, 0) - 1
        refused = await command(cluster, "dead-letters", "retry", *where, "0/0", code=1)
        assert "does not decode in this version either" in refused
        assert "appended as control/0/" in await command(cluster, "dead-letters", "retry", *where, "0/1")
        assert "it was retried before" in await command(cluster, "dead-letters", "retry", *where, "0/1", code=1)
        assert "counted from 0; got 7" in await command(
            cluster, "dead-letters", "list", *where, "--letter", "7/0", code=2
        )
    finally:
        await log.close()
    for _ in range(2):  # the owner has applied the setting before the second request at the latest
        mode = await complete(cluster)
    assert mode == "round-robin"


async def test_a_new_namespace_serves_with_the_settings_of_a_recording(
    kafka: str, redis_url: str, tmp_path: Path
) -> None:
    recording = tmp_path / "lost.rec"
    for name in (LOST, NEW):
        (tmp_path / name).mkdir()
    changes = (
        PolicySet(model=GROUP, pool=POOL, mode="round-robin", operator="ann"),
        PoolDrainSet(model=GROUP, pool="old", drained=True),
    )
    async with Cluster(kafka, redis_url, LOST, tmp_path / LOST, spawn=fork_server.spawn) as lost:
        await serving(lost)
        log = await KafkaLog.open(lost.settings)
        await log.append([Draft(CONTROL.name, 0, encode(CONTROL, change)) for change in changes])
        for _ in range(2):
            mode = await complete(lost)
        assert mode == "round-robin"
        wanted, _ = await settled_world(log, 0)
        await log.close()
        where = ("--kafka", kafka, "--namespace", LOST)
        await command(lost, "record", *where, recording)
        refused = await command(lost, "restore", recording, *where, code=2)
        assert f"the namespace {LOST} on {kafka} is in use: control/0 ends at offset" in refused

    async with Cluster(kafka, redis_url, NEW, tmp_path / NEW, spawn=fork_server.spawn) as new:
        options = [text for name, count in TOPICS.items() for text in ("--partitions", f"{name}={count}")]
        output = await command(new, "restore", recording, "--kafka", kafka, "--namespace", NEW, *options, "--json")
        (group,) = json.loads(output)["groups"]
        assert (group["name"], group["partition"], group["pools"]) == (GROUP, 0, [POOL])
        assert {name: count for name, count in group["restored"].items() if count} == {
            "pools": 1,
            "policies": 1,
            "drains": 1,
        }
        await serving(new)
        assert await complete(new) == "round-robin"
        log = await KafkaLog.open(new.settings)
        found, read = await settled_world(log, 0)
        await log.close()
        assert settings_of(found) == settings_of(wanted)
        assert read.settings == 3, "the router did not configure the pool again"
        report = await new.verify()
        assert (report["divergence"], report["verified"]) == (None, report["decisions"])
