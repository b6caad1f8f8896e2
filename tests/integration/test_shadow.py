"""Shadows of a cluster under load evaluate each decision once and write only to their topic."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient

from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import RequestRouted
from forebay.events.shadow import DecisionShadowed, ShadowStarted
from forebay.events.topics import DECISIONS, HEARTBEATS, SHADOW
from forebay.journal.records import Validity, journal
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics, partitions_of
from tests.harness.cluster import GROUP, Cluster
from tests.integration import kafka_api
from tests.integration.conftest import cluster_fixture
from tests.integration.stream_clients import StreamClients, problems, prompt

TOKENS = 24
PATIENCE_S = 60.0
ASK_EVERY_S = 0.02
SHADOWS = {"same": ("--set", "temperature=0"), "round": ("--policy", "round-robin")}

# These grow while the cluster is idle. The owner journals the last events up to a second after they arrived.
BESIDE = {SHADOW.name, HEARTBEATS.name, DECISIONS.name}

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = cluster_fixture("shadow", ("r1", "r2"), ("w1", "w2", "w3"), router=("--snapshot-every", "50"))


@pytest_asyncio.fixture(loop_scope="module")
async def log(cluster: Cluster) -> AsyncIterator[KafkaLog]:
    """Open the cluster's log from outside of the cluster."""
    async with kafka_api.opened(cluster.settings) as opened:
        yield opened


def start(cluster: Cluster, name: str, *options: str) -> None:
    shared = (*cluster.where, "--group", GROUP, "--id", name)
    cluster.begin(name, "shadow", *shared, *SHADOWS.get(name, ()), *options)


async def stop(cluster: Cluster, name: str) -> str:
    """Stop a shadow and return its last output line."""
    cluster.processes[name].signal(signal.SIGTERM)
    code, output = await cluster.finish(name, within_s=PATIENCE_S)
    assert code == 0
    return output.splitlines()[-1]


async def shadow_events(log: KafkaLog, name: str, kind: type = DecisionShadowed) -> list[Any]:
    found: list[Any] = []
    position, end = 0, await log.end(SHADOW.name, 0)
    while position < end:
        for record in await log.read(SHADOW.name, 0, position, 500):
            position = record.offset + 1
            with contextlib.suppress(DecodeError):
                found.append(decode(SHADOW, record.value))
    return [event for event in found if event.shadow == name and isinstance(event, kind)]


async def routed(log: KafkaLog) -> list[tuple[int, str, int]]:
    """Return the valid routing decisions of the journal with their offsets."""
    end = await log.end("decisions", 0)
    records = journal(log, 0, 0, end, Validity())
    return [(at, one.request_id, one.attempt) async for at, one in records if isinstance(one, RequestRouted)]


async def until_started(cluster: Cluster, log: KafkaLog, name: str, times: int) -> None:
    starts = lambda: shadow_events(log, name, ShadowStarted)  # noqa: E731
    await cluster.until(f"{name} looks on", starts, lambda found: len(found) == times)


async def until_evaluated_all(cluster: Cluster, log: KafkaLog, name: str) -> None:
    async def evaluated_all() -> bool:
        evaluated = await shadow_events(log, name)
        return bool(evaluated) and evaluated[-1].decision_offset == (await routed(log))[-1][0]

    await cluster.until(f"{name} has seen all", evaluated_all)


async def ends(log: KafkaLog) -> dict[str, int]:
    """Return the end offset of every partition except those of `BESIDE`."""
    partitions = await partitions_of(log.settings)
    places = [(topic, number) for topic in partitions if topic not in BESIDE for number in range(partitions[topic])]
    return {f"{topic}/{number}": await log.end(topic, number) for topic, number in places}


async def test_shadows_of_a_cluster_under_load(cluster: Cluster, log: KafkaLog, clients: StreamClients) -> None:
    """The owner and one of the shadows are killed meanwhile."""
    for name in SHADOWS:
        start(cluster, name)
        await until_started(cluster, log, name, 1)
    begin = {name: (await shadow_events(log, name, ShadowStarted))[0].from_offset for name in SHADOWS}
    async with clients.load(ASK_EVERY_S, TOKENS, first=0):
        await cluster.until("decisions are evaluated", lambda: shadow_events(log, "same"))
        cluster.processes.kill("same")
        start(cluster, "same")
        owner = await cluster.owner()
        cluster.kill(owner)
        await cluster.taken_over(owner, within_s=PATIENCE_S)
        await until_started(cluster, log, "same", 2)
    assert problems(clients.results, TOKENS) == []
    for name in SHADOWS:
        await until_evaluated_all(cluster, log, name)
    decided = await routed(log)
    for name in SHADOWS:
        evaluated = [(one.decision_offset, one.request_id, one.attempt) for one in await shadow_events(log, name)]
        assert evaluated == [one for one in decided if one[0] >= begin[name]]
    assert all(one.agrees and one.regret_blocks == 0.0 for one in await shadow_events(log, "same"))
    others = await shadow_events(log, "round")
    assert 0.0 < sum(one.agrees for one in others) / len(others) < 1.0
    assert "100.0% agree, regret mean 0.00 p99 0.00 blocks" in await stop(cluster, "same")
    assert "% agree, regret mean -" in await stop(cluster, "round")


async def test_a_shadow_writes_to_its_topic_alone(cluster: Cluster, log: KafkaLog, clients: StreamClients) -> None:
    """Only a shadow runs, and it reads the whole log."""
    results = await clients.answers([prompt(number) for number in range(8)], 1)
    assert problems(results, 1) == []
    before: dict[str, int] = {}

    async def quiet() -> bool:
        last = dict(before)
        before.update(await ends(log))
        return before == last

    await cluster.until("the system is idle", quiet)
    start(cluster, "late", "--policy", "random", "--from-start")
    await until_evaluated_all(cluster, log, "late")
    assert len(await shadow_events(log, "late")) == len(await routed(log))
    await stop(cluster, "late")
    assert await ends(log) == before
    listing = ("topics", "list", "--lag", "--json", *cluster.where)
    code, output = await cluster.command("lag", *listing, within_s=PATIENCE_S)
    found = json.loads(output)
    assert code == 0
    assert all(one["lag"] == one["end"] - one["at"] for one in found["readers"])
    assert any(line.startswith(f"{GROUP}, partition 0: owner ") for line in found["groups"])


async def test_a_cluster_without_the_shadow_topic_is_reported(kafka: str, cluster: Cluster) -> None:
    settings = KafkaSettings(kafka, f"{cluster.namespace}-old")
    await create_topics(settings, TopicPlan(groups=1, slots=1, replies=1, kafka_api=1), ["default"])
    admin = AIOKafkaAdminClient(**settings.client_options())
    await admin.start()
    try:
        await admin.delete_topics([settings.topic(SHADOW.name)])
    finally:
        await admin.close()
    await cluster.until("it is deleted", lambda: partitions_of(settings), lambda found: SHADOW.name not in found)
    where = ("--kafka", kafka, "--namespace", settings.namespace)
    code, _ = await cluster.command("old", "shadow", *where, "--policy", "random", within_s=PATIENCE_S)
    assert code == 2
    output = (cluster.processes.folder / "old.log").read_text()
    assert f"has no topic {settings.topic(SHADOW.name)}; run `forebay topics create --upgrade`" in output
