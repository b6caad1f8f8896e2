"""What a rank's events come to, and what to do when some were missed. Pure.

Theory of operation. Engines keep no list of their blocks that could be asked for. So once events are lost for good the
rank is said to be empty, and its engine should drop its prefix cache: then engine and index agree again. Until it says
that it did, what it stores is told as usual and what it removes unknown to us is left alone: an index may know less
than is there, never more.
"""

import msgspec

from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import Batch, ClearedBlocks, StoredBlocks
from forebay.workers.kv_events.resident import ResidentBlocks

CONTRADICTIONS_MAX = 3  # an engine that goes on to say what cannot be should not lose its cache each time


class Outcome(msgspec.Struct, frozen=True):
    """Changes to publish, in order. `lost` says why the engine should drop its prefix cache now; mostly it is empty."""

    changes: tuple[CacheChange, ...] = ()
    lost: str = ""


class KvTracker:
    """One rank's blocks, and whether they are all that there are."""

    def __init__(self, resident: ResidentBlocks) -> None:
        self.resident = resident
        self._lost = False  # until the engine says that its cache is empty
        self._contradictions = 0

    @property
    def lost(self) -> bool:
        """Whether the engine may hold blocks that nobody knows of."""
        return self._lost

    def batch(self, batch: Batch) -> Outcome:
        """A batch in its turn."""
        changes: list[CacheChange] = []
        orphaned = False
        for event in batch.events:
            orphans = self.resident.counts["orphans"]
            changes += self.resident.apply(event)
            match event:
                case StoredBlocks():
                    # In a lower tier a block may outlive the one before it; on the device nothing can be computed so.
                    orphaned |= event.tier == "device" and self.resident.counts["orphans"] > orphans
                case ClearedBlocks():
                    self._lost = orphaned = False
        if orphaned and not self._lost:
            return self._contradicted("blocks were stored after a block that nobody told of", changes)
        return Outcome(tuple(changes))

    def undecodable(self, reason: str) -> Outcome:
        """A batch came in its turn and says something that nobody understands."""
        return self._contradicted(f"a batch of KV events cannot be understood: {reason}", [])

    def missed(self, reason: str) -> Outcome:
        """Batches are missing and nobody has them any more."""
        self.resident.clear()
        already, self._lost = self._lost, True
        return Outcome((Cleared(),), "" if already else reason)

    def restarted(self) -> Outcome:
        """Another engine speaks now, from its beginning."""
        self.resident.clear()
        self._lost = False
        return Outcome((Cleared(),))

    def _contradicted(self, reason: str, changes: list[CacheChange]) -> Outcome:
        self._contradictions += 1
        outcome = self.missed(reason)
        dropped = outcome.lost if self._contradictions <= CONTRADICTIONS_MAX else ""
        return Outcome((*changes, *outcome.changes), dropped)
