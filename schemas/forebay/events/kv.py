"""Topic `kv-events`: KV blocks that workers' caches and shared stores gained and lost.

`sequence_hashes` are the hashes of `forebay.core.block_hashes`. `engine_hashes` are the engine's own hashes of the same
blocks, which forebay does not interpret; they are left out if they are equal. The numbers `seq` of one (worker, rank)
are consecutive. A number that was applied before marks a redelivered event.

A shared store is a directory or bucket that belongs to no worker. Its events have no sequence numbers. Several workers
report changes of one store, in any order, and applying an event twice has the same effect as applying it once.
"""

from typing import Annotated, Literal

from forebay.events.base import U64_BYTES, Count, Event, require_packed
from forebay.events.privacy import HASH, HASHES, SystemName

Tier = Literal["device", "host", "disk"]
LowerTier = Literal["host", "disk", "store"]  # tiers from which blocks are loaded into device memory


class KvEvent(Event, frozen=True, kw_only=True):
    """Base class of changes to the cache of one (worker, rank)."""

    worker_id: SystemName
    worker_epoch: Count
    seq: Count
    rank: Count = 0


class BlocksStored(KvEvent, tag="kv.blocks_stored", frozen=True, kw_only=True):
    """One tier of a cache has stored blocks.

    Attributes:
        seq: sequence number, consecutive per (worker, rank).
        sequence_hashes: hashes of the blocks in prompt order, as packed u64.
        parent_hash: sequence hash of the block before the first of these blocks; null if they start a prompt.
    """

    sequence_hashes: Annotated[bytes, HASHES]
    parent_hash: Annotated[int | None, HASH] = None
    engine_hashes: Annotated[bytes, HASHES] = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class BlocksRemoved(KvEvent, tag="kv.blocks_removed", frozen=True, kw_only=True):
    """One tier of a cache has removed blocks."""

    sequence_hashes: Annotated[bytes, HASHES]
    engine_hashes: Annotated[bytes, HASHES] = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class CacheCleared(KvEvent, tag="kv.cache_cleared", frozen=True, kw_only=True):
    """The cache of this (worker, rank) has become empty in every tier."""


class StoreKvEvent(Event, frozen=True, kw_only=True):
    """Base class of changes to the content of a shared store. They outlive the worker that reports them."""

    store: SystemName
    worker_id: SystemName
    sequence_hashes: Annotated[bytes, HASHES]
    at_us: int = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class StoreBlocksAdded(StoreKvEvent, tag="kv.store_blocks_added", frozen=True, kw_only=True):
    """A shared store has blocks: a worker wrote them, or found them there.

    Attributes:
        worker_id: worker that reports the blocks.
        sequence_hashes: hashes of the blocks, as packed u64, in any order.
    """


class StoreBlocksRemoved(StoreKvEvent, tag="kv.store_blocks_removed", frozen=True, kw_only=True):
    """A shared store no longer has blocks: a worker removed them, or did not find them there.

    Attributes:
        worker_id: worker that reports the blocks.
        sequence_hashes: hashes of the blocks, as packed u64, in any order.
        stale: whether the worker expected the blocks and did not find them, or found them unusable.
    """

    stale: bool = False


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
StoreEvent = StoreBlocksAdded | StoreBlocksRemoved
AnyKvEvent = CacheEvent | StoreEvent
