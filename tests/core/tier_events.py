"""Events about caches, shared stores and measured costs, for the histories of `tests.core.worlds`."""

from typing import Any

from forebay.core.state.prefix_index import TIERS
from forebay.core.step import InputEvent
from forebay.events.base import pack_u64
from forebay.events.kv import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    StoreBlocksAdded,
    StoreBlocksRemoved,
)
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured

STORES = ("", "s", "t")


def tier_event(kind: str, position: tuple[str, int, int], blocks: list[int], first: int) -> tuple[str, InputEvent]:
    """Return an event of a worker in an epoch and with a number, with its topic."""
    worker, epoch, _ = position
    if kind == "costs":
        store = TierCost(tier="store", fixed_us=100.0 * first, block_us=20.0)
        tiers = (store, TierCost(tier="host", fixed_us=5.0, block_us=1.0))
        costs = TierCosts(prefill_block_us=40.0 * (first % 4), tiers=tiers[: first % 3])
        return "metrics", TierCostsMeasured(worker_id=worker, worker_epoch=epoch, costs=costs)
    fields: dict[str, Any] = {"store": STORES[1 + first % 2], "worker_id": worker}
    if kind == "in_store":
        return "kv-events", StoreBlocksAdded(**fields, sequence_hashes=pack_u64(blocks))
    if kind == "not_in_store":
        return "kv-events", StoreBlocksRemoved(**fields, sequence_hashes=pack_u64(blocks[first:]), stale=first > 4)
    return "kv-events", _cache_event(kind, position, blocks, first)


def _cache_event(kind: str, position: tuple[str, int, int], blocks: list[int], first: int) -> CacheEvent:
    """What a worker says of its cache, in an epoch and with a number."""
    worker, epoch, seq = position
    if kind == "cleared":
        return CacheCleared(worker_id=worker, worker_epoch=epoch, seq=seq)
    if kind == "removed":
        return BlocksRemoved(worker_id=worker, worker_epoch=epoch, seq=seq, sequence_hashes=pack_u64(blocks[:2]))
    parent = blocks[first] if first < len(blocks) else None
    return BlocksStored(
        worker_id=worker,
        worker_epoch=epoch,
        seq=seq,
        sequence_hashes=pack_u64(blocks[first:]),
        parent_hash=parent,
        tier=TIERS[first % 3],
    )
