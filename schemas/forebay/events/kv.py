"""Topic `kv-events`: which KV blocks each worker's cache gained and lost.

Canonical hashes are `forebay.core.block_hashes` sequence hashes; an engine's own hashes are opaque, and
left out where they are the same. `seq` is dense per (worker, rank) and orders redeliveries.
"""

from typing import Literal

from forebay.events.base import U64_BYTES, Count, Event, Name, require_packed

Tier = Literal["device", "host", "disk"]


class KvEvent(Event, frozen=True, kw_only=True):
    """Where and when a cache changed."""

    worker_id: Name
    worker_epoch: Count
    seq: Count
    rank: Count = 0


class BlocksStored(KvEvent, tag="kv.blocks_stored", frozen=True, kw_only=True):
    """Blocks entered one tier. They continue `parent_hash`, or start a sequence when it is None."""

    sequence_hashes: bytes
    parent_hash: int | None = None
    engine_hashes: bytes = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class BlocksRemoved(KvEvent, tag="kv.blocks_removed", frozen=True, kw_only=True):
    """Blocks left one tier."""

    sequence_hashes: bytes
    engine_hashes: bytes = b""
    tier: Tier = "device"

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_packed("engine_hashes", self.engine_hashes, U64_BYTES)


class CacheCleared(KvEvent, tag="kv.cache_cleared", frozen=True, kw_only=True):
    """Every tier of this one (worker, rank) is empty."""


AnyKvEvent = BlocksStored | BlocksRemoved | CacheCleared
