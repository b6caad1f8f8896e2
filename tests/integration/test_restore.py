"""`forebay restore` and `forebay dead-letters` on real Kafka."""

import json
from pathlib import Path

import httpx
import pytest

from forebay.events.codec import encode
from forebay.events.control import PolicySet
from forebay.events.decisions import RequestRouted
from forebay.events.pools import PoolDrainSet
from forebay.events.topics import CONTROL, DEAD_LETTERS, DECISIONS
from forebay.replay.group_settings import settings_of
from forebay.transport.base import Draft, Record
from forebay.transport.dead_letters import dead_letter
from forebay.transport.kafka.log import KafkaLog
from tests.harness.cluster import GROUP, PLAN, POOL, Cluster
from tests.integration.conftest import MakeCluster

PATIENCE_S = 60.0
FAST = ("--speedup", "50")
TOPICS = {"groups": PLAN.groups, "slots": PLAN.slots, "replies": PLAN.replies}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def complete(cluster: Cluster) -> str:
    """Complete a prompt, and return the router mode of the newest decision."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"model": GROUP, "prompt": "hello", "max_tokens": 2}
        answer = await client.post(f"{cluster.urls['i1']}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str((await cluster.events(DECISIONS, RequestRouted))[-1].mode)


async def command(cluster: Cluster, *arguments: object, code: int = 0) -> str:
    """Run a command, check its exit code, and return its stdout, or its stderr if it failed."""
    found, output = await cluster.command("command", *map(str, arguments), within_s=PATIENCE_S)
    errors = (cluster.processes.folder / "command.log").read_text()
    assert found == code, errors + output
    return errors if code else output


async def test_a_retried_letter_takes_effect(make_cluster: MakeCluster) -> None:
    async with make_cluster("letters") as cluster:
        await cluster.serve(worker=FAST)
        letters = ("dead-letters", "list", *cluster.where)
        retry = ("dead-letters", "retry", *cluster.where)
        log = await KafkaLog.open(cluster.settings)
        assert await complete(cluster) == "kv"
        await log.append([Draft(CONTROL.name, 0, b'{"type": "control.of_a_newer_version"}')])
        await cluster.until("a dead letter", lambda: log.end(DEAD_LETTERS.name, 0), lambda end: end == 1)
        policy = encode(CONTROL, PolicySet(model=GROUP, pool=POOL, mode="round-robin"))
        await log.append([dead_letter(Record(CONTROL.name, 0, 9, 0, policy), 0, "unknown tag")])
        lines = (await command(cluster, *letters, "--json")).splitlines()
        assert [json.loads(line)["offset"] for line in lines] == [1, 0]
        assert json.loads(lines[1])["source_offset"] == await log.end(CONTROL.name, 0) - 1
        await log.close()
        assert "does not decode in this version either" in await command(cluster, *retry, "0/0", code=1)
        assert "appended as control/0/" in await command(cluster, *retry, "0/1")
        assert "it was retried before" in await command(cluster, *retry, "0/1", code=1)
        assert "counted from 0; got 7" in await command(cluster, *letters, "--letter", "7/0", code=2)
        for _ in range(2):  # the owner has applied the setting before the second request at the latest
            mode = await complete(cluster)
        assert mode == "round-robin"


async def test_a_new_namespace_serves_with_the_settings_of_a_recording(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    recording = tmp_path / "lost.rec"
    changes = (
        PolicySet(model=GROUP, pool=POOL, mode="round-robin", operator="ann"),
        PoolDrainSet(model=GROUP, pool="old", drained=True),
    )
    async with make_cluster("lost") as lost:
        await lost.serve(worker=FAST)
        log = await KafkaLog.open(lost.settings)
        await log.append([Draft(CONTROL.name, 0, encode(CONTROL, change)) for change in changes])
        for _ in range(2):
            mode = await complete(lost)
        assert mode == "round-robin"
        wanted, _ = await settings_of(log, 0)
        await log.close()
        await command(lost, "record", *lost.where, recording)
        refused = await command(lost, "restore", recording, *lost.where, code=2)
        assert f"the namespace {lost.namespace} on {lost.settings.bootstrap} is in use: control/0 ends at" in refused

    async with make_cluster("new") as new:
        options = [text for name, count in TOPICS.items() for text in ("--partitions", f"{name}={count}")]
        output = await command(new, "restore", recording, *new.where, *options, "--json")
        (group,) = json.loads(output)["groups"]
        assert (group["name"], group["partition"], group["pools"]) == (GROUP, 0, [POOL])
        restored = {name: count for name, count in group["restored"].items() if count}
        assert restored == {"pools": 1, "policies": 1, "drains": 1}
        await new.serve(worker=FAST)
        assert await complete(new) == "round-robin"
        log = await KafkaLog.open(new.settings)
        found, read = await settings_of(log, 0)
        await log.close()
        assert found.snapshot() == wanted.snapshot()
        assert read.settings == 3, "the router did not configure the pool again"
        await new.require_verified()
