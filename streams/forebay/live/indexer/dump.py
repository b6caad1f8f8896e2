"""Write a prefix index as KV events, from which it can be restored."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import U64_BYTES
from forebay.events.kv import BlocksStored, StoreBlocksAdded, Tier
from forebay.events.snapshots import IndexBlocks, StoreBlocks

EVENT_HASHES_MAX = 8_192  # about 90 kB per line
DUMPED = "index"  # stands for the workers that reported the blocks of shared stores, which the index does not keep
TIERS: tuple[Tier, ...] = get_args(Tier)


def stored_events(index: PrefixIndex, worker: str = "") -> Iterator[BlocksStored | StoreBlocksAdded]:
    """Yield the blocks of a prefix index as events, sorted by worker, rank and tier, in the order of the index.

    The blocks of shared stores follow those of workers, unless `worker` selects one worker.
    """
    found = [*index.snapshot()]
    parts = [part for part in found if isinstance(part, IndexBlocks) and worker in ("", part.worker_id)]
    parts.sort(key=lambda part: (part.worker_id, part.rank, TIERS.index(part.tier)))
    seqs: Counter[tuple[str, int]] = Counter()
    size = EVENT_HASHES_MAX * U64_BYTES
    for part in parts:
        for start in range(0, len(part.sequence_hashes), size):
            seqs[part.worker_id, part.rank] += 1
            yield BlocksStored(
                worker_id=part.worker_id,
                worker_epoch=part.worker_epoch,
                rank=part.rank,
                seq=seqs[part.worker_id, part.rank],
                sequence_hashes=part.sequence_hashes[start : start + size],
                tier=part.tier,
            )
    stores = [part for part in found if isinstance(part, StoreBlocks) and not worker]
    for blocks in sorted(stores, key=lambda part: part.store):
        for start in range(0, len(blocks.sequence_hashes), size):
            hashes = blocks.sequence_hashes[start : start + size]
            yield StoreBlocksAdded(store=blocks.store, worker_id=DUMPED, sequence_hashes=hashes)
