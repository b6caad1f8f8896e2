"""What a worker says of its caches: KV events without a hole in their numbers, and all of it again when asked.

Theory of operation. Each rank's events are numbered from 1 as they are made, and made only to be appended at once,
in order; a worker whose append fails ends. So a number that is missing on the log is a record that did not reach it.
What was said is remembered here, not asked of the engine: its cache may already be ahead of what it has told.
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

EVENT_HASHES_MAX = 4_096  # the owner applies a record at once: a millisecond in which it decides nothing


TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(slots=True)
class _Tier:
    """`parents` has every block that is said to be there, with the block before it where that is known.

    `engine_hashes` has the engine's names of those that it named.
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
        """A chain of this tier, with the engine's names if it has them all."""
        names = tuple(self.engine_hashes[block] for block in chain.hashes if block in self.engine_hashes)
        return Stored(chain.parent, chain.hashes, tier, names if len(names) == len(chain.hashes) else ())


@dataclass(slots=True)
class _Rank:
    seq: int = 0
    tiers: dict[Tier, _Tier] = field(default_factory=lambda: {tier: _Tier() for tier in TIERS})


class CacheEvents:
    """The KV events of one epoch of one worker; a spec without `kv_events` has none."""

    def __init__(self, spec: WorkerSpec, worker_epoch: int, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._silent = not spec.kv_events
        self._ranks = {rank: _Rank() for rank in spec.ranks}

    def announcement(self, rank: int, hashes: Sequence[int]) -> list[Draft]:
        """What a rank's cache holds as its epoch begins."""
        return self.changes(rank, [Stored(None, tuple(hashes))])

    def changes(self, rank: int, changes: Iterable[CacheChange]) -> list[Draft]:
        """The events of changes, in their order."""
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
        """All that a rank holds as of its last event, from nothing on. To be appended in one piece.

        Numbers go on above `above_seq` too: somebody else may have used them.
        """
        if self._silent:
            return []
        one = self._ranks[rank]
        one.seq = max(one.seq, above_seq)
        drafts = [self._cleared(rank, one)]
        said: set[int] = set()
        for tier, held in one.tiers.items():
            for chain in chains(held.parents, said):
                drafts += self._events(rank, one, held.named(chain, tier))
            said.update(held.parents)
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
    """Blocks by parent as chains that hold each block once, every chain after the one that it continues.

    A parent that is neither among the blocks nor in `before`, or not before them because they were said to go round in
    a circle, is left out.
    """
    found: list[Stored] = []
    done: set[int] = set()
    # Children are mostly younger than their parents: from the youngest on, chains get long.
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
