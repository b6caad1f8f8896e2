"""Derive the cache changes of a rank from KV events, and recover after lost events. Performs no I/O.

Theory of operation. Engines cannot list their blocks. So if events are lost, the tracker reports the rank as empty, and
its caller makes the engine drop its prefix cache, so that engine and prefix index agree again. Until the engine reports
an empty cache, the tracker reports stored blocks as usual and ignores removals of unknown blocks. So the prefix index
may contain fewer blocks than the engine's cache, never more.
"""

import msgspec

from forebay.workers.engine import Cleared
from forebay.workers.kv_events.engine_events import Batch, ClearedBlocks, StoredBlocks
from forebay.workers.kv_events.resident import Change, ResidentBlocks

CONTRADICTIONS_MAX = 3  # an engine that repeatedly reports invalid events should not lose its cache each time


class TrackerResult(msgspec.Struct, frozen=True):
    """Result of processing a batch.

    Attributes:
        changes: changes of the cache and of the shared store to publish, in order.
        lost: why the engine should drop its prefix cache now, because events were lost; empty if it should not.
    """

    changes: tuple[Change, ...] = ()
    lost: str = ""


class KvTracker:
    """Tracks the blocks of one rank, and whether the engine may have blocks that were not reported."""

    def __init__(self, resident: ResidentBlocks) -> None:
        self.resident = resident
        self._lost = False  # until the engine reports an empty cache
        self._contradictions = 0

    @property
    def lost(self) -> bool:
        """Whether events were lost and the engine has not reported an empty cache since then."""
        return self._lost

    def batch(self, batch: Batch) -> TrackerResult:
        """Apply the next batch, in the order of the batch numbers."""
        changes: list[Change] = []
        orphaned = False
        for event in batch.events:
            orphans = self.resident.counts["orphans"]
            changes += self.resident.apply(event)
            match event:
                case StoredBlocks():
                    # In lower tiers a block may outlive its parent. On the device it cannot be computed without one.
                    orphaned |= event.tier == "device" and self.resident.counts["orphans"] > orphans
                case ClearedBlocks():
                    self._lost = orphaned = False
        if orphaned and not self._lost:
            return self._contradicted("blocks were stored after an unknown block", changes)
        return TrackerResult(tuple(changes))

    def undecodable(self, reason: str) -> TrackerResult:
        """Handle the next batch if it cannot be decoded, for this reason."""
        return self._contradicted(f"cannot decode a batch of KV events: {reason}", [])

    def missed(self, reason: str) -> TrackerResult:
        """Handle the loss of batches that cannot be replayed, for this reason."""
        self.resident.clear()
        already, self._lost = self._lost, True
        return TrackerResult((Cleared(),), "" if already else reason)

    def restarted(self) -> TrackerResult:
        """Handle a restart of the engine, whose cache is empty then."""
        self.resident.clear()
        self._lost = False
        return TrackerResult((Cleared(),))

    def _contradicted(self, reason: str, changes: list[Change]) -> TrackerResult:
        self._contradictions += 1
        outcome = self.missed(reason)
        dropped = outcome.lost if self._contradictions <= CONTRADICTIONS_MAX else ""
        return TrackerResult((*changes, *outcome.changes), dropped)
