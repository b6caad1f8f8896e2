"""Where the tiers of one rank keep their blocks: host memory and stores, how they fare, and what is counted."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.engine_model.steps import StoreChange
from forebay.events.kv import LowerTier
from forebay.workers.kv_tiers.block_stores import BAD_REASONS, BlockStore
from forebay.workers.kv_tiers.host_memory import HostMemory
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.tier_health import TierHealth

GONE_REASONS = frozenset({"missing", *BAD_REASONS})  # the tier does not have the block any more
SUSPENDED = "suspended"  # reason of blocks that were not moved because the tier is suspended


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Memory and stores of one rank.

    Attributes:
        block_bytes: bytes per block.
        host: host memory; None without a host tier.
        stores: stores of the disk tier and of the shared store, as far as the rank has them.
        quota_evicted: blocks that stores removed because their quota was exceeded, by tier.
        store_changes: changes of the shared store that the rank has observed and not reported yet, in order.
    """

    block_bytes: int
    host: HostMemory | None = None
    stores: dict[LowerTier, BlockStore] = field(default_factory=dict)
    reads: dict[LowerTier, TierHealth] = field(default_factory=dict)
    writes: dict[LowerTier, TierHealth] = field(default_factory=dict)
    counters: TierCounters = field(default_factory=TierCounters)
    quota_evicted: Counter[str] = field(default_factory=Counter)
    store_changes: list[StoreChange] = field(default_factory=list)

    def add_store(self, tier: LowerTier, store: BlockStore) -> None:
        self.stores[tier] = store
        self.reads[tier] = TierHealth(f"reads from the {tier} tier")
        self.writes[tier] = TierHealth(f"writes to the {tier} tier")

    def observe_read(self, tier: LowerTier, names: Sequence[BlockName], reasons: Sequence[str]) -> list[BlockName]:
        """Count the results of a read. Return the blocks that the tier does not have any more."""
        if tier in self.reads and SUSPENDED not in reasons:
            self.reads[tier].observe(reasons)
        gone = []
        for name, reason in zip(names, reasons, strict=True):
            if reason:
                self.counters.misses[tier, reason] += 1
                if reason in GONE_REASONS:
                    gone.append(name)
        if tier == "store":
            self.note_store(stale=gone)
        return gone

    def note_store(
        self, *, stored: Iterable[BlockName] = (), removed: Iterable[BlockName] = (), stale: Iterable[BlockName] = ()
    ) -> None:
        """Note changes of the shared store, of one kind."""
        change = StoreChange(stored=hashes(stored), removed=hashes(removed), stale=hashes(stale))
        if change.stored or change.removed or change.stale:
            self.store_changes.append(change)


def hashes(names: Iterable[BlockName]) -> Sequence[int]:
    return array("Q", [name.sequence_hash for name in names])
