"""What engines say of their KV caches, one form for all of them. Pure.

Hashes are the engine's own, as u64: opaque, and never compared between workers or ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from forebay.core.block_hashes import NO_MM_HASHES
from forebay.events.base import U64_BYTES, U64_MASK, pack_u32
from forebay.events.kv import Tier

MEDIA: Mapping[str, Tier] = {
    "GPU": "device",
    "DEVICE": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "CPU_TIER1": "host",
    "CPU_TIER2": "disk",
    "DISK": "disk",
    "NVME": "disk",
    "STORAGE": "disk",
}
SHARED_MEDIA = frozenset({"EXTERNAL", "NETWORK", "REMOTE", "SHARED"})  # not the worker's own: no reason to choose it


class KvEventError(ValueError):
    """An engine said something that cannot be understood. The text names the place."""


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of full blocks entered a tier; it continues `parent`, or starts a sequence when that is None.

    `token_ids` is packed u32, `block_size` tokens a block. `lora_name` and `cache_salt` are of the whole sequence; a
    salt is only asked for where the sequence starts. `mm_hashes` holds `forebay.core.block_hashes.mm_hash` per block
    of this event.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: bytes
    block_size: int
    tier: Tier = "device"
    lora_name: str = ""
    cache_salt: str = ""
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks left a tier."""

    hashes: tuple[int, ...]
    tier: Tier = "device"


class ClearedBlocks(msgspec.Struct, frozen=True):
    """The cache is empty."""


EngineEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class Batch(msgspec.Struct, frozen=True):
    """Events that were said at once, in order; `skipped` counts by reason those that do not concern an index."""

    events: tuple[EngineEvent, ...]
    skipped: Counter[str] = msgspec.field(default_factory=Counter)


Decode = Callable[[bytes], Batch]
"""A payload of an engine's socket to what it says; raises KvEventError, and nothing else, for other bytes."""


def tier_of(medium: str | None, locality: str | None, skipped: Counter[str]) -> Tier | None:
    """Where a medium is; None, and counted, where that is no tier of the worker's own. No medium is the device."""
    if medium in SHARED_MEDIA or locality == "REMOTE":
        skipped["shared"] += 1
        return None
    tier = "device" if medium is None else MEDIA.get(medium)
    if tier is None:
        skipped["unknown_medium"] += 1
    return tier


def as_u64(engine_hash: int | bytes) -> int:
    """An engine's hash as u64: signed ones bit-cast, longer ones by their low 64 bits (as vLLM shortens them)."""
    if isinstance(engine_hash, int):
        return engine_hash & U64_MASK
    if not engine_hash:
        raise KvEventError("a block hash is empty")
    return int.from_bytes(engine_hash[-U64_BYTES:], "big")


def packed_tokens(token_ids: Sequence[int], blocks: int, block_size: int) -> bytes:
    """Packed u32 of the tokens of `blocks` full blocks; raises KvEventError for other lengths and ids."""
    if block_size < 1 or len(token_ids) != blocks * block_size:
        raise KvEventError(f"{len(token_ids)} tokens do not fill {blocks} blocks of {block_size}")
    try:
        return pack_u32(token_ids)
    except OverflowError as error:
        raise KvEventError(f"a token id is no u32: {error}") from error
