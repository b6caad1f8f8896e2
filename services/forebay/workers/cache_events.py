"""What a worker says of its caches: KV events without a hole in their numbers, and all of it again when asked.

Theory of operation. Each rank's events are numbered from 1 as they are made, and made only to be appended at once,
in order; a worker whose append fails ends. So a number that is missing on the log is a record that did not reach it.
What was said is remembered here, not asked of the engine: its cache may already be ahead of what it has told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.core.engine_model import CacheChange, Removed, Stored
from forebay.events.base import Event, pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.topics import KV_EVENTS
from forebay.transport.base import Draft

EVENT_HASHES_MAX = 4_096  # the owner applies a record at once: a millisecond in which it decides nothing


@dataclass(slots=True)
class _Rank:
    """`parents` has every block that the rank is said to hold, with the block before it where that is known."""

    seq: int = 0
    parents: dict[int, int | None] = field(default_factory=dict)


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
                case Stored(parent=parent, hashes=hashes):
                    one.parents.update(zip(hashes, (parent, *hashes), strict=False))
                case Removed(hashes=hashes):
                    for block in hashes:
                        one.parents.pop(block, None)
            drafts += self._events(rank, one, change)
        return drafts

    def reannouncement(self, rank: int, above_seq: int) -> list[Draft]:
        """All that a rank holds as of its last event, from nothing on. To be appended in one piece.

        Numbers go on above `above_seq` too: somebody else may have used them.
        """
        if self._silent:
            return []
        one = self._ranks[rank]
        one.seq = max(one.seq, above_seq) + 1
        cleared = CacheCleared(worker_id=self._worker_id, worker_epoch=self._worker_epoch, seq=one.seq, rank=rank)
        drafts = [self._draft(cleared)]
        for chain in chains(one.parents):
            drafts += self._events(rank, one, chain)
        return drafts

    def _events(self, rank: int, one: _Rank, change: CacheChange) -> list[Draft]:
        drafts: list[Draft] = []
        for start in range(0, len(change.hashes), EVENT_HASHES_MAX):
            hashes = pack_u64(change.hashes[start : start + EVENT_HASHES_MAX])
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
                    )
                case Removed():
                    event = BlocksRemoved(
                        worker_id=self._worker_id,
                        worker_epoch=self._worker_epoch,
                        seq=one.seq,
                        rank=rank,
                        sequence_hashes=hashes,
                    )
            drafts.append(self._draft(event))
        return drafts

    def _draft(self, event: Event) -> Draft:
        return Draft(KV_EVENTS.name, self._partition, encode(KV_EVENTS, event))


def chains(parents: dict[int, int | None]) -> list[Stored]:
    """Blocks by parent as chains that hold each block once, every chain after the one that it continues.

    A parent that is not among the blocks, or not before them because they were said to go round in a circle, is
    left out.
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
            found.append(Stored(block if block in done and block not in path else None, tuple(reversed(path))))
    return found
