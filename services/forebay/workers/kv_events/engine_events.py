"""Common form of the KV events of all engines. Pure.

Block hashes are the engine's own, as u64. They are opaque and never compared between workers or ranks.
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
SHARED_MEDIA = frozenset(
    {"EXTERNAL", "NETWORK", "REMOTE", "SHARED"}
)  # storage shared by workers: no reason to select one of them


class KvEventError(ValueError):
    """Invalid KV event of an engine. The message names the position."""


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of full blocks entered a tier.

    Attributes:
        parent: block before the chain, None at the start of a sequence.
        token_ids: packed u32, `block_size` tokens per block.
        lora_name: adapter of the whole sequence.
        cache_salt: salt of the whole sequence, used only at its start.
        mm_hashes: `forebay.core.block_hashes.mm_hash` of each block of this event.
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
    """Events published together, in order. `skipped` counts events that are irrelevant to an index, by reason."""

    events: tuple[EngineEvent, ...]
    skipped: Counter[str] = msgspec.field(default_factory=Counter)


Decode = Callable[[bytes], Batch]
"""Decoder of the payloads of an engine's socket. Raises only KvEventError, for any bytes."""


def tier_of(medium: str | None, locality: str | None, skipped: Counter[str]) -> Tier | None:
    """Return the tier of a medium, the device if it is None. Count other media in `skipped` and return None."""
    if medium in SHARED_MEDIA or locality == "REMOTE":
        skipped["shared"] += 1
        return None
    tier = "device" if medium is None else MEDIA.get(medium)
    if tier is None:
        skipped["unknown_medium"] += 1
    return tier


def as_u64(engine_hash: int | bytes) -> int:
    """Return an engine's hash as u64.

    Signed hashes are bit-cast, longer ones truncated to the low 64 bits, as in vLLM.
    """
    if isinstance(engine_hash, int):
        return engine_hash & U64_MASK
    if not engine_hash:
        raise KvEventError("a block hash is empty")
    return int.from_bytes(engine_hash[-U64_BYTES:], "big")


def packed_tokens(token_ids: Sequence[int], blocks: int, block_size: int) -> bytes:
    """Return the tokens of `blocks` full blocks as packed u32.

    Raises KvEventError for other lengths and invalid ids.
    """
    if block_size < 1 or len(token_ids) != blocks * block_size:
        raise KvEventError(f"{len(token_ids)} tokens do not fill {blocks} blocks of {block_size}")
    try:
        return pack_u32(token_ids)
    except OverflowError as error:
        raise KvEventError(f"a token id is not a u32: {error}") from error
