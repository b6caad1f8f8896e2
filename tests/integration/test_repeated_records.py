"""Repeated records and records of another namespace lose no request and leave no group without an owner.

Each attack appends copies of records to one topic while clients send requests, and then kills the owner. The
environment variable FOREBAY_REPEATS sets the number of attacks per topic. By default, one attack writes to all topics.
"""

import os
import random
import uuid
from collections.abc import Callable, Sequence

import pytest
import pytest_asyncio

from forebay.events.topics import FIXED_TOPICS, Topic, work_topic
from forebay.transport.base import Draft, Record
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.topics import partitions_of
from tests.harness.cluster import GROUP, POOL, Cluster
from tests.integration.conftest import MakeCluster, cluster_fixture
from tests.integration.stream_clients import problems, stream_clients

REPEATS = int(os.environ.get("FOREBAY_REPEATS", "0"))
SEED = int(os.environ.get("FOREBAY_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
TOPICS = (*FIXED_TOPICS, work_topic(POOL))
SPEED = ("--speedup", "0.5")
COPIES = 8  # per partition, source and attack
READ_MAX = 200  # newest records from which copies are drawn
TOKENS, EVERY_S = 6, 0.1
PATIENCE_S = 60.0

SNAPSHOTS = ("--snapshot-every", "50")

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = cluster_fixture("repeats", ("r1", "r2"), ("w1", "w2"), ("i1", "i2"), router=SNAPSHOTS, worker=SPEED)
Stored = dict[tuple[str, int], list[Record]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def foreign(make_cluster: MakeCluster) -> Stored:
    """Return the records of another namespace, whose group has the same name."""
    async with make_cluster("foreign") as other:
        await other.serve(router=("--snapshot-every", "20"), worker=SPEED)
        async with stream_clients(list(other.urls.values()), "foreign") as clients:
            await clients.answers([[number] * 70 for number in range(30)], TOKENS)
        await other.stop("r1")
        return await newest(other.log, other, TOPICS)


async def newest(log: KafkaLog, cluster: Cluster, topics: Sequence[Topic]) -> Stored:
    found: Stored = {}
    for topic in topics:
        for partition in range((await partitions_of(cluster.settings)).get(topic.name, 0)):
            begin, end = await log.begin(topic.name, partition), await log.end(topic.name, partition)
            start = max(begin, end - READ_MAX)
            found[topic.name, partition] = await log.read(topic.name, partition, start, READ_MAX) if start < end else []
    return found


async def attack(cluster: Cluster, topics: Sequence[Topic], foreign: Stored, chance: random.Random) -> int:
    """Append copies of records to the topics, and return their number."""
    drafts: list[Draft] = []
    for (name, partition), own in (await newest(cluster.log, cluster, topics)).items():
        for source in (own, foreign.get((name, partition), [])):
            few = [*source[-1:], *(chance.sample(source, min(COPIES, len(source))))]
            drafts += [Draft(name, partition, one.value, one.key, one.headers) for one in few if one.value]
    await cluster.log.append(drafts)
    return len(drafts)


async def survive(
    cluster: Cluster, topics: Sequence[Topic], foreign: Stored, chance: random.Random, first: int
) -> tuple[int, float]:
    """Attack under load, kill the owner, and return the number of requests and the seconds until routing resumed."""
    async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
        async with clients.load(EVERY_S, TOKENS, first=first):
            await cluster.until("a response ends", lambda: any(one.ends for one in clients.results))
            await attack(cluster, topics, foreign, chance)
            owner = await cluster.owner()
            killed_us = cluster.kill(owner)
            after = await cluster.taken_over(owner, within_s=PATIENCE_S)
            cluster.router(owner, *SNAPSHOTS)
        assert problems(clients.results, TOKENS) == []
        cluster.processes.check()
        await cluster.until_owned()
        assert after.first_routed_us is not None
        return len(clients.results), (after.first_routed_us - killed_us) / 1e6


@pytest.mark.timeout(7_200 if REPEATS else 600)
@pytest.mark.parametrize(
    "topics",
    [[topic] for topic in TOPICS] if REPEATS else [list(TOPICS)],
    ids=lambda some: "+".join(one.name for one in some),
)
async def test_repeated_and_foreign_records(
    topics: Sequence[Topic], cluster: Cluster, foreign: Stored, report: Callable[[str], None]
) -> None:
    report(f"FOREBAY_FUZZ_SEED={SEED}")
    chance = random.Random(SEED)
    for number in range(max(1, REPEATS)):
        requests, resumed_s = await survive(cluster, topics, foreign, chance, chance.randrange(1 << 30))
        report(f"attack {number}: {requests} requests complete, routing resumed after {resumed_s:.2f} s")
    allowed = ("--allow", "foreign-records", "--allow", "foreign-progress")
    verified = await cluster.require_verified(GROUP, *allowed)
    report(f"verified {verified['verified']} of {verified['decisions']} decisions")
