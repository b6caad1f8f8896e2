"""Two indexers share the groups, and prove their state while owners and indexers die."""

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from forebay.events.decisions import SnapshotTaken
from forebay.events.topics import DECISIONS
from forebay.events.topics import SNAPSHOTS as SNAPSHOTS_TOPIC
from tests.harness.cluster import GROUP, Cluster
from tests.harness.indexers import INDEXERS, Indexers
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import BLOCK, prompt

SHORT = 6
REQUESTS = 6
SNAPSHOTS = ("--snapshot-every", "5")


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as opened:
        yield opened


async def serve_requests(cluster: Cluster, numbers: Iterator[int]) -> None:
    async with httpx.AsyncClient(timeout=60) as clients:
        for number in itertools.islice(numbers, REQUESTS):
            body = {"model": GROUP, "prompt": prompt(number % 3), "max_tokens": SHORT}
            response = await clients.post(f"{cluster.urls['i1']}/v1/completions", json=body)
            assert response.status_code == httpx.codes.OK, response.text


@pytest.mark.timeout(400)
async def test_two_indexers_prove_their_state_while_owners_and_indexers_die(
    make_cluster: MakeCluster, client: httpx.Client
) -> None:
    async with make_cluster("indexer") as cluster:
        await cluster.serve(("r1", "r2"), ("w1", "w2"), ("i1",), router=SNAPSHOTS)
        indexers = Indexers(cluster, client)
        for name in INDEXERS:
            indexers.start(name)
        holder = await indexers.holder()
        load = functools.partial(serve_requests, cluster, itertools.count())
        await load()
        await indexers.proven(holder)
        other = {"x0": "x1", "x1": "x0"}[holder]
        assert (indexers.get(other, f"/groups/{GROUP}/load") or httpx.Response(0)).status_code == 421
        owner = await cluster.owner()
        cluster.kill(owner)
        await load()
        await indexers.proven(holder)
        assert indexers.counts(holder)[0] >= 2
        cluster.kill(holder)  # the other one restores the newest snapshot
        await load()
        await cluster.until("the other indexer has the group", functools.partial(indexers.group, other), is_following)
        await indexers.proven(other)
        indexers.start_by_faust(holder)
        cluster.router(owner, *SNAPSHOTS)
        now = await indexers.holder()
        await load()
        await indexers.proven(now)
        for name in INDEXERS:
            assert indexers.counts(name)[1] == 0
            assert (indexers.get(name, "/ready") or httpx.Response(0)).status_code == 200
        assert max(rank["device"] for rank in indexers.overlaps(now, prompt(0))) == len(prompt(0)) // BLOCK
        await cluster.stop(other)
        await cluster.require_verified()


@pytest.mark.timeout(300)
async def test_an_indexer_that_starts_on_a_log_with_removed_records_names_them(
    make_cluster: MakeCluster, client: httpx.Client
) -> None:
    async with make_cluster("indexer-removed") as cluster:
        await cluster.serve(("r1",), ("w1",), ("i1",), router=SNAPSHOTS)
        await serve_requests(cluster, itertools.count())
        await cluster.until("there is a snapshot", functools.partial(cluster.events, DECISIONS, SnapshotTaken))
        cluster.kill("r1")
        indexers, partition = Indexers(cluster, client), cluster.partition()
        admin = AIOKafkaAdminClient(**cluster.settings.client_options())
        await admin.start()
        for topic in (SNAPSHOTS_TOPIC, DECISIONS):  # the chunks of the snapshot, then its record, too
            place = TopicPartition(cluster.settings.topic(topic.name), partition)
            end = await cluster.log.end(topic.name, partition)
            await admin.delete_records({place: RecordsToDelete(before_offset=end)})
            indexers.start("x0")
            lacks = f"{topic.name}/{partition} no longer holds offset 0: check the retention of the topic"
            await cluster.until(
                lacks, lambda: indexers.group("x0").get("problem"), functools.partial(operator.eq, lacks)
            )
            assert (indexers.get("x0", "/ready") or httpx.Response(0)).status_code == 503
            cluster.kill("x0")
        await admin.close()


def is_following(entry: dict[str, Any]) -> bool:
    return entry.get("state") == "following"
