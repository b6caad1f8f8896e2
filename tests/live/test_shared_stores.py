"""Shared stores at a live owner: hints to workers, a store that survives everybody, snapshots, and metrics."""

import pytest
from prometheus_client import CollectorRegistry

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import U64_BYTES, pack_u32
from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.kv import StoreBlocksAdded, StoreBlocksRemoved, StoreEvent
from forebay.events.topics import KV_EVENTS, work_topic
from forebay.events.work import WorkItem
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.system import BLOCK, MODEL, System, submitted, until

pytestmark = pytest.mark.asyncio

WORK = work_topic("default")
PROMPT = list(range(5 * BLOCK))
BLOCKS = sequence_hashes(pack_u32(PROMPT), BLOCK)


def write(system: System, *events: StoreEvent) -> None:
    system.log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, event)) for event in events])


def items(system: System) -> list[WorkItem]:
    return system.events(WORK, WorkItem)


def added(count: int, store: str = "s") -> StoreBlocksAdded:
    return StoreBlocksAdded(store=store, worker_id="w0", sequence_hashes=BLOCKS[: count * U64_BYTES])


async def known(owner: Owner, sizes: dict[str, int]) -> None:
    await until(lambda: owner.world.index.stores.sizes() == sizes)


async def test_the_work_item_says_for_how_long_the_prompt_is_pinned(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0")
    async with system.owned(fleet=1):
        system.send(submitted("r", PROMPT, kv_pin_s=300))
        system.send(submitted("s", PROMPT))
        await until(lambda: len(items(system)) == 2)
    assert [item.kv_pin_s for item in items(system)] == [300, 0]


async def test_the_work_item_says_how_many_blocks_the_store_should_have(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0", kv_store="s")
    async with system.owned(dies=True, fleet=1) as owner:
        write(system, added(3))
        await known(owner, {"s": 3})
        system.send(submitted("r", PROMPT))
        await until(lambda: items(system))
    async with system.owned():
        await until(lambda: len(items(system)) == 2)
    # The hint is lost with the owner that made the decision: the worker only looks less far.
    assert [item.store_blocks for item in items(system)] == [3, 0]
    (routed,) = system.decisions(RequestRouted)
    assert (routed.terms.store_overlap, routed.terms.overlap_credit) == (3, 1.5)


async def test_without_a_store_there_is_no_hint(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0")
    async with system.owned(fleet=1):
        system.send(submitted("r", PROMPT))
        await until(lambda: items(system))
    assert items(system)[0].store_blocks == 0


@pytest.mark.parametrize("dies", [False, True])
async def test_a_store_survives_its_workers_and_owners(log: SqliteLog, *, dies: bool) -> None:
    system = System(log)
    system.join("w0", kv_store="s")
    async with system.owned(dies=dies, fleet=1) as owner:
        write(system, added(4))
        await known(owner, {"s": 4})
        system.leases.release(MODEL, "w0", "w0-1")
        await until(lambda: not len(owner.world.fleet))
        write(system, StoreBlocksRemoved(store="s", worker_id="w0", sequence_hashes=BLOCKS[3 * U64_BYTES :]))
        await known(owner, {"s": 3})
    async with system.owned() as owner:
        await known(owner, {"s": 3})
        system.join("w1", kv_store="s")
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("r", PROMPT))
        await until(lambda: items(system))
    assert [(item.worker_id, item.store_blocks) for item in items(system)] == [("w1", 3)]


async def test_the_owner_counts_stale_blocks_and_unused_stores(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0", kv_store="s")
    registry = CollectorRegistry()
    async with system.owned() as owner:
        registry.register(OwnerMetrics(owner, MODEL))
        await until(lambda: len(owner.world.fleet) == 1)
        stale = StoreBlocksRemoved(store="s", worker_id="w0", sequence_hashes=BLOCKS[: 2 * U64_BYTES], stale=True)
        write(system, added(4), stale, added(1, "unknown"))
        await known(owner, {"s": 2, "unknown": 1})

        def sample(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"model": MODEL, **labels})

        assert sample("forebay_index_store_blocks", store="s") == 2
        assert sample("forebay_index_store_blocks", store="unknown") == 1
        assert sample("forebay_index_stale_store_blocks_total") == 2
        assert sample("forebay_index_store_events_total", reason="unused") == 1
        assert sample("dynamo_component_kv_cache_events_applied", event_type="store_added", status="ok") == 2
        assert sample("dynamo_component_kv_cache_events_applied", event_type="store_removed", status="ok") == 1
