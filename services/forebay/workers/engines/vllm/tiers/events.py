"""Encode changes of the tiers as KV events of vLLM. Imports vLLM.

These events name blocks by forebay's sequence hashes and contain no tokens. Their field `ownership` is `OWNER`. vLLM
publishes them on the same socket as its own events, so they are numbered and replayed, too.
"""

from collections.abc import Iterator, Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from forebay.engine_model.steps import StoreChange, Stored
from forebay.events.kv import Tier
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import OWNER, SHARED, SHARED_STALE

MEDIA: dict[Tier, str] = {"host": "CPU", "disk": "DISK"}


def cache_events(
    changes: Sequence[CacheChange], store_changes: Sequence[StoreChange], *, block_size: int
) -> Iterator[KVCacheEvent]:
    """Yield the events for changes of the rank's own tiers and of the shared store, in order."""
    for change in changes:
        assert not isinstance(change, Cleared)
        medium = MEDIA[change.tier]
        if isinstance(change, Stored):
            yield _stored(change.parent, change.hashes, medium, block_size, "LOCAL")
        else:
            yield _removed(change.hashes, medium, "LOCAL")
    for one in store_changes:
        for hashes, medium in ((one.removed, SHARED), (one.stale, SHARED_STALE)):
            if hashes:
                yield _removed(hashes, medium, "REMOTE")
        if one.stored:
            yield _stored(None, one.stored, SHARED, block_size, "REMOTE")


def _stored(parent: int | None, hashes: Sequence[int], medium: str, block_size: int, locality: str) -> KVCacheEvent:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        locality=locality,
        ownership=OWNER,
    )


def _removed(hashes: Sequence[int], medium: str, locality: str) -> KVCacheEvent:
    return BlockRemoved(block_hashes=list(hashes), medium=medium, locality=locality, ownership=OWNER)
