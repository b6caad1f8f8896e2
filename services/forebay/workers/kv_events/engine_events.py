"""Common form of the KV events of all engines. Performs no I/O.

Block hashes in these events are the engine's own hashes as u64. They have no meaning outside of one rank, so hashes of
different workers or ranks are never compared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from forebay.core.block_hashes import NO_MM_HASHES
from forebay.engine_model.steps import StoreChange
from forebay.events.base import U64_BYTES, U64_MASK, pack_u32
from forebay.events.kv import Tier
from forebay.kv_tiers.tier_content import SourceTier

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
SHARED_MEDIA = frozenset({"EXTERNAL", "NETWORK", "REMOTE", "SHARED"})  # storage shared by workers


OWNER = "forebay"  # `ownership` in events of forebay's own connector
SHARED, SHARED_STALE = "SHARED", "SHARED_STALE"  # media of its shared store; stale blocks were not found there


class KvEventError(ValueError):
    """A KV event of an engine is invalid. The message names its position in the batch."""


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Event: consecutive full blocks of a prompt have entered a tier.

    Attributes:
        hashes: the engine's hashes of the blocks, in order.
        parent: the engine's hash of the block before the first of them; None if they begin the prompt.
        token_ids: token ids of the blocks, packed as little-endian u32.
        block_size: tokens per block.
        tier: tier that the blocks have entered; `store` for storage that workers share.
        lora_name: LoRA adapter of the prompt; empty for the base model.
        cache_salt: salt of the prompt's hashes. It is used only if `parent` is None.
        mm_hashes: by block index in this event, the `forebay.core.block_hashes.mm_hash` values of the images, videos
            and sounds in the block. Blocks without any are omitted.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: bytes
    block_size: int
    tier: SourceTier = "device"
    lora_name: str = ""
    cache_salt: str = ""
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Event: blocks have left a tier."""

    hashes: tuple[int, ...]
    tier: SourceTier = "device"


class ClearedBlocks(msgspec.Struct, frozen=True):
    """Event: the cache of the rank is empty, in every tier that belongs to the rank."""


class OwnStored(msgspec.Struct, frozen=True, kw_only=True):
    """Event: forebay's connector in the engine has stored blocks in a tier, and names them by sequence hash.

    Attributes:
        parent: sequence hash of the block before the first of them; None if it is unknown.
        hashes: sequence hashes of consecutive blocks.
    """

    parent: int | None
    hashes: tuple[int, ...]
    tier: Tier


class OwnRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Event: forebay's connector in the engine has removed blocks from a tier."""

    hashes: tuple[int, ...]
    tier: Tier


EngineEvent = StoredBlocks | RemovedBlocks | ClearedBlocks | OwnStored | OwnRemoved | StoreChange


class Batch(msgspec.Struct, frozen=True):
    """Events that an engine published together.

    Attributes:
        events: the events, in order.
        skipped: number of events that were left out because a prefix index does not need them, by reason.
    """

    events: tuple[EngineEvent, ...]
    skipped: Counter[str] = msgspec.field(default_factory=Counter)


Decode = Callable[[bytes], Batch]
"""Decoder of the payloads of an engine's socket. Raises only KvEventError, for any bytes."""


def tier_of(
    medium: str | None, locality: str | None, skipped: Counter[str], *, has_store: bool = False
) -> SourceTier | None:
    """Return the tier for the storage medium of an event; None if the event must be skipped.

    Events of unknown media are skipped.

    Args:
        medium: the engine's name of the medium; None for device memory.
        locality: `REMOTE` for storage that workers share.
        skipped: counter to which a skipped event is added.
        has_store: whether the storage that workers share has a name for the router. Otherwise its events are skipped.
    """
    if medium in SHARED_MEDIA or locality == "REMOTE":
        if has_store:
            return "store"
        skipped["shared"] += 1
        return None
    tier = "device" if medium is None else MEDIA.get(medium)
    if tier is None:
        skipped["unknown_medium"] += 1
    return tier


def as_u64(engine_hash: int | bytes) -> int:
    """Return an engine's block hash as u64. Raises KvEventError for an empty hash.

    The bits of a signed hash are kept. Of a longer hash only the low 64 bits are kept, as in vLLM.
    """
    if isinstance(engine_hash, int):
        return engine_hash & U64_MASK
    if not engine_hash:
        raise KvEventError("a block hash is empty")
    return int.from_bytes(engine_hash[-U64_BYTES:], "big")


def packed_tokens(token_ids: Sequence[int], blocks: int, block_size: int) -> bytes:
    """Return the token ids of full blocks, packed as little-endian u32.

    Args:
        block_size: tokens per block.

    Raises:
        KvEventError: the number of tokens is wrong, or a token id is not a u32.
    """
    if block_size < 1 or len(token_ids) != blocks * block_size:
        raise KvEventError(f"{len(token_ids)} tokens do not fill {blocks} blocks of {block_size}")
    try:
        return pack_u32(token_ids)
    except OverflowError as error:
        raise KvEventError(f"a token id is not a u32: {error}") from error
