"""Topic `kv-events`: KV blocks that workers' caches gained and lost.

Canonical hashes are the sequence hashes of `forebay.core.block_hashes`. An engine's own hashes are opaque, and omitted
if they are the same. `seq` is consecutive per (worker, rank) and identifies redeliveries.
"""

from typing import Literal

from forebay.events.base import U64_BYTES, Count, Event, Name, require_packed

Tier = Literal["device", "host", "disk"]


class KvEvent(Event, frozen=True, kw_only=True):
    """Change of the cache of one (worker, rank)."""

    worker_id: Name
    worker_epoch: Count
    seq: Count
    rank: Count = 0


class BlocksStored(KvEvent, tag="kv.blocks_stored", frozen=True, kw_only=True):
    """Blocks entered one tier of a cache.

    Attributes:
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        seq: sequence number, consecutive per (worker, rank).
        rank: rank of the worker.
        sequence_hashes: hashes of the blocks, as packed u64.
        parent_hash: hash of the block before them; null if they start a sequence.
        engine_hashes: the engine's own hashes, as packed u64; empty if they are the same.
        tier: tier of the cache.
    """

    sequence_hashes: bytes
    parent_hash: int | None = None
    engine_hashes: bytes = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class BlocksRemoved(KvEvent, tag="kv.blocks_removed", frozen=True, kw_only=True):
    """Blocks left one tier of a cache."""

    sequence_hashes: bytes
    engine_hashes: bytes = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class CacheCleared(KvEvent, tag="kv.cache_cleared", frozen=True, kw_only=True):
    """The cache of this (worker, rank) is empty in every tier."""


AnyKvEvent = BlocksStored | BlocksRemoved | CacheCleared
