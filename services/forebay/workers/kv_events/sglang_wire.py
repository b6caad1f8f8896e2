"""Decode SGLang's KV events, as its PUB socket sends them. Performs no I/O.

The format is that of vLLM, with these differences: hashes are signed, storage media have other names, and each event
has a field for the salt. SGLang reports partially filled pages as smaller blocks. With EAGLE speculation the tokens of
a page are pairs of a token and its successor; the first token of each pair belongs to the block.
"""

import msgspec

from forebay.kv_tiers.tier_content import SourceTier
from forebay.workers.kv_events.engine_events import (
    Batch,
    BatchDecoder,
    ClearedBlocks,
    EngineEvent,
    RemovedBlocks,
    StoredBlocks,
    as_u64,
    packed_tokens,
    tier_of,
)


class _Event(msgspec.Struct):
    """Fields in the order of SGLang's structs."""


class _Stored(_Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _Removed(_Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(_Event, tag="AllBlocksCleared"):
    pass


def decode_sglang(payload: bytes, *, has_store: bool = False) -> Batch:
    """Return the decoded events of one message. Raises KvEventError if it is malformed.

    Events are skipped and counted as `unknown_event`, `unknown_medium`, or `shared` for storage that workers share,
    unless `has_store`.
    """
    reported, skipped = _BATCHES.decode(payload)
    events: list[EngineEvent] = []
    for one in reported:
        match one:
            case _Stored():
                tier = tier_of(one.medium, None, skipped, has_store=has_store)
                if tier is not None:
                    events.append(_stored(one, tier))
            case _Removed():
                tier = tier_of(one.medium, None, skipped, has_store=has_store)
                if tier is not None:
                    events.append(RemovedBlocks(hashes=tuple(map(as_u64, one.block_hashes)), tier=tier))
            case _:
                events.append(ClearedBlocks())
    return Batch(tuple(events), skipped)


def _stored(one: _Stored, tier: SourceTier) -> StoredBlocks:
    return StoredBlocks(
        hashes=tuple(map(as_u64, one.block_hashes)),
        parent=None if one.parent_block_hash is None else as_u64(one.parent_block_hash),
        token_ids=packed_tokens(
            [token if isinstance(token, int) else token[0] for token in one.token_ids],
            len(one.block_hashes),
            one.block_size,
        ),
        block_size=one.block_size,
        tier=tier,
        lora_name=one.lora_name or "",
        cache_salt=one.cache_salt or "",
    )


_BATCHES = BatchDecoder[_Event]((_Stored, _Removed, _Cleared))
