"""Mock workers with KV tiers on Kafka: a shared directory and a bucket that fail under load. Every token is checked.

The tests of this file share a cluster and depend on their order.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.kv import StoreBlocksAdded
from forebay.events.topics import KV_EVENTS
from infra.kafka.kafka import HOST
from tests.harness.local import free_ports
from tests.harness.s3 import faulty_s3
from tests.harness.tier_system import TierSystem
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import stream_clients

ON_DIRECTORY, ON_BUCKET = ("w1", "w2"), ("w3", "w4")
CONVERSATIONS, TURNS = 16, 6
FAILS_S = 2.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(make_cluster: MakeCluster) -> AsyncIterator[TierSystem]:
    """Run two workers on a shared directory, and two on a bucket."""
    with faulty_s3("kv-blocks") as bucket:
        async with (
            make_cluster("tiers") as cluster,
            stream_clients([cluster.ingress("i1")], uuid.uuid4().hex[:8]) as clients,
        ):
            cluster.router("r1")
            running = TierSystem(cluster, clients, cluster.processes.folder, bucket)
            for name in (*ON_DIRECTORY, *ON_BUCKET):
                running.worker(name, bucket=name in ON_BUCKET)
            await cluster.until_serving(len(ON_DIRECTORY + ON_BUCKET))
            yield running


async def test_tiers_answers_are_exact_while_files_are_damaged_and_the_bucket_fails(
    system: TierSystem, report: Callable[[str], None]
) -> None:
    async with system.damaging():
        talking = asyncio.create_task(system.converse(range(CONVERSATIONS), TURNS))
        for fail in (system.bucket.deny, system.bucket.stop):
            await asyncio.wait([talking], timeout=FAILS_S)
            await asyncio.to_thread(fail)
            await asyncio.wait([talking], timeout=FAILS_S)
            await asyncio.to_thread(system.bucket.start)
        results = await talking
    assert system.wrong == []
    assert len(results) == CONVERSATIONS * TURNS == system.exact
    reuse = await system.reuse(results)
    report(f"{len(results)} requests; loaded {reuse.line()}; damaged {dict(sorted(system.damage.done.items()))}")
    assert reuse.tokens["host"] > 0
    assert reuse.tokens["disk"] + reuse.tokens["store"] > 0
    assert {kind.split()[0] for kind in system.damage.done} == {"truncated", "flipped", "deleted"}


async def test_tiers_both_stores_are_holders_of_their_own(system: TierSystem) -> None:
    """Blocks of a store were announced by several workers, under one name."""
    writers: dict[str, set[str]] = {}
    for event in await system.cluster.events(KV_EVENTS, StoreBlocksAdded):
        writers.setdefault(event.store, set()).add(event.worker_id)
    assert sorted(map(sorted, writers.values())) == [[*ON_DIRECTORY], [*ON_BUCKET]]


async def test_tiers_a_restarted_worker_loads_from_its_disk(system: TierSystem, report: Callable[[str], None]) -> None:
    await system.restart("w1")
    for name in ("w2", *ON_BUCKET):
        await system.cluster.stop(name)
    await system.cluster.until_members("w1")
    reuse = await system.reuse(await system.converse(range(8), 1))
    report(f"restarted: loaded {reuse.line()}")
    assert system.wrong == []
    assert reuse.tokens["disk"] > 0


async def test_tiers_stale_entries_are_misses_and_counted(system: TierSystem, tmp_path: Path) -> None:
    """A file that the index still names was removed: the worker computes the block, and tells everyone."""
    port = free_ports(1)
    system.worker("w5", "--metrics-port", str(port))
    await system.cluster.until_members("w1", "w5")
    await system.cluster.stop("w1")
    await system.cluster.until_members("w5")
    before = await system.stale()
    for file in system.shared.rglob("*.kv"):
        file.unlink()
    await system.converse(range(8), 1)
    assert system.wrong == []
    assert await system.stale() > before
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{HOST}:{port}/metrics")).text
    missing = sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "forebay_tier_misses_total" and sample.labels["reason"] == "missing"
    )
    assert missing > 0


@pytest.mark.parametrize(
    ("name", "previous", "others"), [("w6", "w5", ("w5",)), ("w7", "w6", ON_BUCKET)], ids=["directory", "bucket"]
)
async def test_tiers_a_new_worker_loads_what_others_computed(
    system: TierSystem, name: str, previous: str, others: tuple[str, ...], report: Callable[[str], None]
) -> None:
    is_bucket = others == ON_BUCKET
    system.worker(name, bucket=is_bucket)
    await system.cluster.until_members(previous, name)
    await system.cluster.stop(previous)
    await system.cluster.until_members(name)
    reuse = await system.reuse(await system.converse(system.served_by(*others), 1))
    report(f"new worker with the {'bucket' if is_bucket else 'directory'}: loaded {reuse.line()}")
    assert system.wrong == []
    assert reuse.own > 0


async def test_tiers_with_prefill_and_decode_workers(system: TierSystem, report: Callable[[str], None]) -> None:
    await system.cluster.stop("w7")  # a group has aggregated workers, or prefill and decode workers
    await system.cluster.until_members()
    for name, role in (("p1", "prefill"), ("d1", "decode")):
        system.worker(name, "--role", role)
    await system.cluster.until_members("p1", "d1")
    async with system.damaging():
        reuse = await system.reuse(await system.converse(range(8), 3))
    report(f"prefill and decode: loaded {reuse.line()}")
    assert system.wrong == []
    assert sum(reuse.tokens.values()) > 0


async def test_tiers_every_decision_is_derived_equal(system: TierSystem) -> None:
    assert (await system.cluster.require_verified())["verified"] > CONVERSATIONS * TURNS
    assert system.wrong == []
    assert system.cluster.processes.tracebacks() == []
