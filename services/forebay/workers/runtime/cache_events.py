"""Create the KV events of a worker, numbered without gaps, and complete re-announcements of its cache.

Theory of operation. The events of each rank are numbered from 1. The worker appends them in order, as soon as they are
created, and exits if an append fails. So a missing number on the log means that a record was lost. Re-announcements
contain the blocks that were announced so far, and not the engine's cache: that may be ahead of the reported events.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import Event, pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, Tier
from forebay.events.topics import KV_EVENTS
from forebay.transport.base import Draft
from forebay.workers.engine import CacheChange, Cleared

EVENT_HASHES_MAX = 4_096  # the owner applies one record without interruption: a millisecond without decisions


TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(slots=True)
class _Tier:
    """Announced blocks of one tier of one rank.

    Attributes:
        parents: sequence hash of each block -> that of the preceding block; None if this block is unknown.
        engine_hashes: sequence hash -> the engine's own block hash, for blocks that have one.
    """

    parents: dict[int, int | None] = field(default_factory=dict)
    engine_hashes: dict[int, int] = field(default_factory=dict)

    def add(self, change: Stored) -> None:
        self.parents.update(zip(change.hashes, (change.parent, *change.hashes), strict=False))
        self.engine_hashes.update(zip(change.hashes, change.engine_hashes, strict=False))

    def remove(self, change: Removed) -> None:
        for block in change.hashes:
            self.parents.pop(block, None)
            self.engine_hashes.pop(block, None)

    def named(self, chain: Stored, tier: Tier) -> Stored:
        """Return a chain of this tier, with the engine's hashes if all of them are known."""
        names = tuple(self.engine_hashes[block] for block in chain.hashes if block in self.engine_hashes)
        return Stored(chain.parent, chain.hashes, tier, names if len(names) == len(chain.hashes) else ())


@dataclass(slots=True)
class _Rank:
    seq: int = 0
    tiers: dict[Tier, _Tier] = field(default_factory=lambda: {tier: _Tier() for tier in TIERS})


class CacheEvents:
    """Creates the KV events of one worker for one worker epoch, and remembers the announced blocks of each rank.

    If `spec.kv_events` is false, it creates no events.
    """

    def __init__(self, spec: WorkerSpec, worker_epoch: int, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._silent = not spec.kv_events
        self._ranks = {rank: _Rank() for rank in spec.ranks}

    def announcement(self, rank: int, hashes: Sequence[int]) -> list[Draft]:
        """Return the events that announce the cache of a rank when the epoch begins.

        Args:
            hashes: sequence hashes of the cached blocks.
        """
        return self.changes(rank, [Stored(None, tuple(hashes))])

    def changes(self, rank: int, changes: Iterable[CacheChange]) -> list[Draft]:
        """Return the events for changes of the cache of a rank, in order."""
        if self._silent:
            return []
        one = self._ranks[rank]
        drafts: list[Draft] = []
        for change in changes:
            match change:
                case Stored(tier=tier):
                    one.tiers[tier].add(change)
                case Removed(tier=tier):
                    one.tiers[tier].remove(change)
                case Cleared():
                    one.tiers = _Rank().tiers
                    drafts.append(self._cleared(rank, one))
                    continue
            drafts += self._events(rank, one, change)
        return drafts

    def reannouncement(self, rank: int, above_seq: int) -> list[Draft]:
        """Return events that clear a rank in the prefix index and then store all blocks that it has announced.

        The caller must append the events as one batch.

        Args:
            above_seq: number that the events must exceed, because another process may have used numbers up to it.
        """
        if self._silent:
            return []
        one = self._ranks[rank]
        one.seq = max(one.seq, above_seq)
        drafts = [self._cleared(rank, one)]
        announced: set[int] = set()
        for tier, held in one.tiers.items():
            for chain in chains(held.parents, announced):
                drafts += self._events(rank, one, held.named(chain, tier))
            announced.update(held.parents)
        return drafts

    def _cleared(self, rank: int, one: _Rank) -> Draft:
        one.seq += 1
        event = CacheCleared(worker_id=self._worker_id, worker_epoch=self._worker_epoch, seq=one.seq, rank=rank)
        return self._draft(event)

    def _events(self, rank: int, one: _Rank, change: Stored | Removed) -> list[Draft]:
        drafts: list[Draft] = []
        for start in range(0, len(change.hashes), EVENT_HASHES_MAX):
            end = start + EVENT_HASHES_MAX
            hashes = pack_u64(change.hashes[start:end])
            engine_hashes = pack_u64(change.engine_hashes[start:end])
            one.seq += 1
            event: Event
            match change:
                case Stored():
                    event = BlocksStored(
                        worker_id=self._worker_id,
                        worker_epoch=self._worker_epoch,
                        seq=one.seq,
                        rank=rank,
                        sequence_hashes=hashes,
                        parent_hash=change.hashes[start - 1] if start else change.parent,
                        engine_hashes=engine_hashes,
                        tier=change.tier,
                    )
                case Removed():
                    event = BlocksRemoved(
                        worker_id=self._worker_id,
                        worker_epoch=self._worker_epoch,
                        seq=one.seq,
                        rank=rank,
                        sequence_hashes=hashes,
                        engine_hashes=engine_hashes,
                        tier=change.tier,
                    )
            drafts.append(self._draft(event))
        return drafts

    def _draft(self, event: Event) -> Draft:
        return Draft(KV_EVENTS.name, self._partition, encode(KV_EVENTS, event))


def chains(parents: dict[int, int | None], before: Container[int] = ()) -> list[Stored]:
    """Split blocks into chains, in which each block follows its parent. Each block is in exactly one chain.

    A chain that continues another chain comes after it in the result. If the parent of its first block is neither in
    an earlier chain nor in `before`, for example because an engine reported a cycle, the parent of the chain is None.

    Args:
        parents: sequence hash of the parent, which is the preceding block of the prompt, by sequence hash of the block.
        before: sequence hashes of blocks that are already announced.
    """
    found: list[Stored] = []
    done: set[int] = set()
    # Children are mostly newer than their parents, so starting with the newest block gives long chains.
    for youngest in reversed(parents):
        path: dict[int, None] = {}
        block: int | None = youngest
        while block is not None and block in parents and block not in done and block not in path:
            path[block] = None
            block = parents[block]
        if path:
            done.update(path)
            known = block in before or (block in done and block not in path)
            found.append(Stored(block if known else None, tuple(reversed(path))))
    return found
