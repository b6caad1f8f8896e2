"""Cache changes of a rank, and recovery after lost events. Pure.

Theory of operation. Engines cannot list their blocks. Once events are lost, the rank is therefore reported as empty and
its engine should drop its prefix cache, so that engine and index agree again. Until the engine reports an empty cache,
stored blocks are reported as usual and removals of unknown blocks are ignored. The index may know fewer blocks than the
engine holds, never more.
"""

import msgspec

from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import Batch, ClearedBlocks, StoredBlocks
from forebay.workers.kv_events.resident import ResidentBlocks

CONTRADICTIONS_MAX = 3  # an engine that repeatedly reports invalid events should not lose its cache each time


class TrackerResult(msgspec.Struct, frozen=True):
    """Changes to publish, in order.

    `lost` is the reason why the engine should drop its prefix cache now, mostly empty.
    """

    changes: tuple[CacheChange, ...] = ()
    lost: str = ""


class KvTracker:
    """Blocks of one rank, and whether they are complete."""

    def __init__(self, resident: ResidentBlocks) -> None:
        self.resident = resident
        self._lost = False  # until the engine reports an empty cache
        self._contradictions = 0

    @property
    def lost(self) -> bool:
        """Whether the engine may hold unknown blocks."""
        return self._lost

    def batch(self, batch: Batch) -> TrackerResult:
        """Apply the next batch, in sequence order."""
        changes: list[CacheChange] = []
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
        """Handle a batch, in sequence order, that cannot be decoded."""
        return self._contradicted(f"cannot decode a batch of KV events: {reason}", [])

    def missed(self, reason: str) -> TrackerResult:
        """Handle a loss of batches that cannot be replayed."""
        self.resident.clear()
        already, self._lost = self._lost, True
        return TrackerResult((Cleared(),), "" if already else reason)

    def restarted(self) -> TrackerResult:
        """Handle a new publisher, that is, a restarted engine."""
        self.resident.clear()
        self._lost = False
        return TrackerResult((Cleared(),))

    def _contradicted(self, reason: str, changes: list[CacheChange]) -> TrackerResult:
        self._contradictions += 1
        outcome = self.missed(reason)
        dropped = outcome.lost if self._contradictions <= CONTRADICTIONS_MAX else ""
        return TrackerResult((*changes, *outcome.changes), dropped)
