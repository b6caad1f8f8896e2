"""Decode the KV events of vLLM and SGLang, as their PUB sockets send them. Performs no I/O.

For hybrid models vLLM reports the blocks of several groups of layers. Only groups that attend to the whole prompt
determine whether a prefix can be reused; events of other groups are skipped, as in Dynamo. The event for removed blocks
contains the number of the group, but not its kind. So the decoder remembers the kind from stored blocks. Before it
knows the kind of a group, it uses only events of group 0.

SGLang's format differs from vLLM's: hashes are signed, storage media have other names, and each event has a field for
the salt. SGLang reports partially filled pages as smaller blocks. With EAGLE speculation the tokens of a page are pairs
of a token and its successor; the first token of each pair belongs to the block.
"""

from collections import Counter
from typing import Any

import msgspec

from forebay.core.block_hashes import DIGEST_CHARS, HEX_DIGITS, mm_hash
from forebay.engine_model.steps import StoreChange
from forebay.events.base import U64_BYTES
from forebay.workers.kv_events.engine_events import (
    OWNER,
    SHARED,
    SHARED_STALE,
    Batch,
    BatchDecoder,
    ClearedBlocks,
    EngineEvent,
    KvEventError,
    OwnRemoved,
    OwnStored,
    RemovedBlocks,
    StoredBlocks,
    as_u64,
    packed_tokens,
    tier_of,
)

MAIN_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
GROUPS_MAX = 1_024  # groups of layers; models have a few


# Fields are in the order of the engines' arrays.


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _SglangStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _SglangRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class VllmDecoder:
    """Decodes the events of one rank, and remembers the kinds of its layer groups.

    Events are skipped and counted as `unknown_event`, `unknown_medium`, `shared` (storage that workers share, unless
    `has_store`), `other_group` (group of layers), `no_tokens` (offloaded blocks without token ids) or `unnamed_lora`.
    """

    def __init__(self, *, has_store: bool = False) -> None:
        self._has_store = has_store
        self._main_groups: dict[int, bool] = {}

    def __call__(self, payload: bytes) -> Batch:
        """Return the decoded events of one message. Raises KvEventError if the message is malformed."""
        reported, skipped = _VLLM.decode(payload)
        events: list[EngineEvent] = []
        for one in reported:
            event: EngineEvent | None
            match one:
                case _Stored() | _Removed() if one.ownership == OWNER:
                    event = _own(one, skipped)
                case _Stored():
                    event = self._stored(one, skipped)
                case _Removed():
                    event = self._removed(one, skipped)
                case _:
                    event = ClearedBlocks()
            if event is not None:
                events.append(event)
        return Batch(tuple(events), skipped)

    def _stored(self, one: _Stored, skipped: Counter[str]) -> StoredBlocks | None:
        if not self._counts(one.group_idx, one.kv_cache_spec_kind):
            skipped["other_group"] += 1
            return None
        if (tier := tier_of(one.medium, one.locality, skipped, has_store=self._has_store)) is None:
            return None
        if not one.token_ids:
            skipped["no_tokens"] += 1
            return None
        if one.lora_id and not one.lora_name:
            skipped["unnamed_lora"] += 1
            return None
        salt, mm_hashes = _extra(one, starts=one.parent_block_hash is None)
        return StoredBlocks(
            hashes=tuple(map(as_u64, one.block_hashes)),
            parent=_parent(one),
            token_ids=packed_tokens(one.token_ids, len(one.block_hashes), one.block_size),
            block_size=one.block_size,
            tier=tier,
            lora_name=one.lora_name or "",
            cache_salt=salt,
            mm_hashes=mm_hashes,
        )

    def _removed(self, one: _Removed, skipped: Counter[str]) -> RemovedBlocks | None:
        if not self._counts(one.group_idx, None):
            skipped["other_group"] += 1
            return None
        tier = tier_of(one.medium, one.locality, skipped, has_store=self._has_store)
        return None if tier is None else RemovedBlocks(hashes=tuple(map(as_u64, one.block_hashes)), tier=tier)

    def _counts(self, group: int | None, kind: str | None) -> bool:
        if group is None:
            return kind is None or kind in MAIN_ATTENTION
        if kind is not None:
            if group not in self._main_groups and len(self._main_groups) >= GROUPS_MAX:
                raise KvEventError(
                    f"the engine has more than {GROUPS_MAX} groups of layers, the maximum that forebay reads"
                )
            self._main_groups[group] = kind in MAIN_ATTENTION
        return self._main_groups.get(group, group == 0)


def _own(one: _Stored | _Removed, skipped: Counter[str]) -> EngineEvent | None:
    """Return an event of forebay's own connector, which names blocks by sequence hash."""
    hashes = tuple(map(as_u64, one.block_hashes))
    if one.medium in (SHARED, SHARED_STALE):
        if isinstance(one, _Stored):
            return StoreChange(stored=hashes)
        return StoreChange(removed=hashes) if one.medium == SHARED else StoreChange(stale=hashes)
    tier = tier_of(one.medium, None, skipped)
    if tier is None or tier == "store":
        return None
    if isinstance(one, _Removed):
        return OwnRemoved(hashes=hashes, tier=tier)
    return OwnStored(parent=_parent(one), hashes=hashes, tier=tier)


def _parent(one: _Stored | _SglangStored) -> int | None:
    return None if one.parent_block_hash is None else as_u64(one.parent_block_hash)


def _extra(one: _Stored, *, starts: bool) -> tuple[str, dict[int, list[int]]]:
    """Return the cache salt of a sequence that starts here, and the media hashes of each block.

    The keys of a block are the adapter's name, pairs of a medium's name and offset, the salt (in the first block of a
    sequence), and digests of prompt embeddings. Older releases have bare names of media instead of pairs. With
    EAGLE and similar speculation, the hashes of vLLM 0.33 also cover the next tokens (`lookahead_token_ids`), and the
    keys contain the media of these tokens, whose offset is behind the block.
    """
    salt = ""
    objects: dict[int, list[int]] = {}
    if one.extra_keys is None:
        return salt, objects
    if len(one.extra_keys) != len(one.block_hashes):
        raise KvEventError(
            f"extra_keys has {len(one.extra_keys)} entries, expected one per block: {len(one.block_hashes)}"
        )
    bare_media = one.__struct_config__.array_like
    for block, keys in enumerate(one.extra_keys):
        lora_due = bool(one.lora_name)
        for key in keys or ():
            match key:
                case str() if lora_due and key == one.lora_name:
                    lora_due = False
                    continue
                case str() if starts and block == 0 and not salt and not (bare_media and _is_digest(key)):
                    salt = key
                    continue
                case [str(), int(offset)] if offset >= one.block_size:
                    continue
                case str(name) | [str(name), *_] if name:
                    content = mm_hash(name)
                case bytes():
                    content = int.from_bytes(key[:U64_BYTES], "big")
                case _:
                    # An unknown key still distinguishes the block from blocks that have tokens only.
                    content = mm_hash(repr(key))
            objects.setdefault(block, []).append(content)
    return salt, objects


def _is_digest(key: str) -> bool:
    return len(key) == DIGEST_CHARS and HEX_DIGITS.issuperset(key)


def decode_sglang(payload: bytes, *, has_store: bool = False) -> Batch:
    """Return the decoded events of one message of SGLang. Raises KvEventError if it is malformed.

    Events are skipped and counted as `unknown_event`, `unknown_medium`, or `shared` for storage that workers share,
    unless `has_store`.
    """
    reported, skipped = _SGLANG.decode(payload)
    events: list[EngineEvent] = []
    for one in reported:
        if isinstance(one, _Cleared):
            events.append(ClearedBlocks())
        elif (tier := tier_of(one.medium, None, skipped, has_store=has_store)) is not None:
            hashes = tuple(map(as_u64, one.block_hashes))
            if isinstance(one, _SglangRemoved):
                events.append(RemovedBlocks(hashes=hashes, tier=tier))
                continue
            token_ids = [token if isinstance(token, int) else token[0] for token in one.token_ids]
            stored = StoredBlocks(
                hashes=hashes,
                parent=_parent(one),
                token_ids=packed_tokens(token_ids, len(hashes), one.block_size),
                block_size=one.block_size,
                tier=tier,
                lora_name=one.lora_name or "",
                cache_salt=one.cache_salt or "",
            )
            events.append(stored)
    return Batch(tuple(events), skipped)


_VLLM = BatchDecoder[_Stored | _Removed | _Cleared]((_Stored, _Removed, _Cleared))
_SGLANG = BatchDecoder[_SglangStored | _SglangRemoved | _Cleared]((_SglangStored, _SglangRemoved, _Cleared))
