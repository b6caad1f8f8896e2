"""Decode TensorRT-LLM's KV events, which the adapter polls as dicts. Performs no I/O.

Theory of operation. Each rank numbers its events. They cannot be requested again, so a missing number means that an
event is lost. For a model with attention windows the engine reports the blocks of each window. Only the largest window,
which covers the whole prompt, determines whether a prefix can be reused. The engine reports the last block of a prompt
before it is full; such a block has no hash that could identify it later, so it is skipped. A block is stored in device
memory. An `updated` event moves it to another cache level, and a `removed` event does not name the level.
"""

from collections import Counter
from typing import Annotated, Any, Literal

import msgspec

from forebay.core.block_hashes import mm_hash
from forebay.events.kv import Tier
from forebay.workers.kv_events.engine_events import (
    Batch,
    EngineEvent,
    KvEventError,
    MovedBlock,
    RemovedBlocks,
    StoredBlocks,
    as_u64,
    packed_tokens,
)

LEVELS: tuple[Tier, ...] = ("device", "host", "disk")  # TensorRT-LLM's cache levels


class _Token(msgspec.Struct):
    token_id: int


class _MmKey(msgspec.Struct):
    hash: Annotated[str, msgspec.Meta(min_length=1)]
    type: Literal["mm_key"] = "mm_key"


class _Block(msgspec.Struct):
    block_hash: int
    tokens: list[_Token]
    mm_keys: list[_MmKey] | None = None
    cache_salt: str | None = None


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int]


class _Level(msgspec.Struct):
    new_value: Annotated[int, msgspec.Meta(ge=0, lt=len(LEVELS))]


class _Updated(msgspec.Struct):
    block_hash: int
    cache_level: _Level | None = None  # None if only the priority was updated


class _Event(msgspec.Struct):
    event_id: int
    data: dict[str, Any]
    attention_dp_rank: int | None = None
    window_size: int | None = None


class RankEvent(msgspec.Struct, frozen=True):
    """One event of a rank. `missed` says that earlier events of the rank are lost; it is empty if none are."""

    rank: int
    batch: Batch
    missed: str = ""


class TensorRtLlmReader:
    """Decodes the events of all ranks of one engine.

    Events are skipped and counted as `unknown_event`, `other_window` or `partial_blocks`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next_ids: dict[int, int] = {}
        self._window: int | None = None  # the largest window created before anything was stored
        self._settled = False
        self._partial: dict[int, set[int]] = {}

    def read(self, event: object) -> RankEvent:
        """Return one decoded event of TensorRT-LLM's `get_kv_cache_events`.

        Raises KvEventError if it is malformed. The next event of the rank then shows that one is missing.
        """
        try:
            one = msgspec.convert(event, _Event)
        except (msgspec.ValidationError, RecursionError) as error:
            raise KvEventError(f"cannot decode the KV event: {error}") from error
        rank = one.attention_dp_rank or 0
        due = self._next_ids.get(rank, one.event_id)
        missed = f"expected KV event {due}, got {one.event_id}" if one.event_id != due else ""
        if missed:
            self._partial.pop(rank, None)
        skipped: Counter[str] = Counter()
        events = self._events(one, rank, skipped)
        self._next_ids[rank] = one.event_id + 1
        return RankEvent(rank, Batch(tuple(events), skipped), missed)

    def _events(self, one: _Event, rank: int, skipped: Counter[str]) -> list[EngineEvent]:
        kind = one.data.get("type")
        if kind == "created":
            if not self._settled and one.window_size is not None:
                self._window = max(one.window_size, self._window or 0)
            return []
        self._settled = True
        if kind not in ("stored", "removed", "updated"):
            skipped["unknown_event"] += 1
            return []
        if None not in (one.window_size, self._window) and one.window_size != self._window:
            skipped["other_window"] += 1
            return []
        partial = self._partial.setdefault(rank, set())
        try:
            if kind == "stored":
                return self._stored(msgspec.convert(one.data, _Stored), partial, skipped)
            if kind == "updated":
                return _moved(msgspec.convert(one.data, _Updated), partial)
            return _removed(msgspec.convert(one.data, _Removed), partial)
        except (msgspec.ValidationError, RecursionError) as error:
            raise KvEventError(f"KV event {one.event_id}: {error}") from error

    def _stored(self, one: _Stored, partial: set[int], skipped: Counter[str]) -> list[EngineEvent]:
        full = [block for block in one.blocks if len(block.tokens) >= self._block_size]
        if full != one.blocks[: len(full)]:
            raise KvEventError(
                "only the last block of an event may be partly filled, but more blocks follow a partly filled one"
            )
        rest = {as_u64(block.block_hash) for block in one.blocks[len(full) :]}
        hashes = tuple(as_u64(block.block_hash) for block in full)
        token_ids = [token.token_id for block in full for token in block.tokens]
        packed = packed_tokens(token_ids, len(full), self._block_size)
        if rest:
            skipped["partial_blocks"] += len(rest)
        partial |= rest
        partial.difference_update(hashes)
        if not full:
            return []
        media = {at: [mm_hash(key.hash) for key in block.mm_keys] for at, block in enumerate(full) if block.mm_keys}
        return [
            StoredBlocks(
                hashes=hashes,
                parent=None if one.parent_hash is None else as_u64(one.parent_hash),
                token_ids=packed,
                block_size=self._block_size,
                lora_name=one.lora_name or "",
                cache_salt=one.cache_salt or full[0].cache_salt or "",
                mm_hashes=media,
            )
        ]


def _removed(one: _Removed, partial: set[int]) -> list[EngineEvent]:
    content = [as_u64(block) for block in one.block_hashes]
    hashes = tuple(block for block in content if block not in partial)
    partial.difference_update(content)
    return [RemovedBlocks(hashes=hashes, tier=None)] if hashes else []


def _moved(one: _Updated, partial: set[int]) -> list[EngineEvent]:
    block = as_u64(one.block_hash)
    if one.cache_level is None or block in partial:
        return []
    return [MovedBlock(block, LEVELS[one.cache_level.new_value])]
