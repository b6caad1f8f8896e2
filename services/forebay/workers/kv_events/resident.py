"""Map the KV events of an engine, which contain the engine's own hashes, to cache changes with sequence hashes.

Theory of operation. The canonical hash of a block is forebay's sequence hash. It depends only on tokens, adapter,
cache namespace and media, so it can be computed from an engine's event. For a block that continues a prompt, the
canonical hash of the preceding block and the seed of the prompt are needed. So one entry is kept per block that the
rank has in any tier. An engine may have two copies of a block, and may have two hashes for one canonical hash. A block
is reported as removed with its last copy.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby, takewhile
from typing import get_args

import msgspec

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed
from forebay.engine_model.steps import Removed, StoreChange, Stored
from forebay.events.kv import Tier
from forebay.kv_tiers.tier_content import SourceTier
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import (
    Batch,
    ClearedBlocks,
    EngineEvent,
    MovedBlock,
    OwnRemoved,
    OwnStored,
    RemovedBlocks,
    StoredBlocks,
)

Change = CacheChange | StoreChange
LOWER: tuple[Tier, ...] = ("host", "disk")
TIERS: tuple[SourceTier, ...] = get_args(SourceTier)


class _Block:
    """Entry of one engine hash: canonical hash, seed of the sequence, and number of copies in each of `TIERS`."""

    __slots__ = ("canonical", "copies", "seed")

    def __init__(self, canonical: int, seed: int) -> None:
        self.canonical = canonical
        self.seed = seed
        self.copies = [0] * len(TIERS)


class ResidentBlocks:
    """The blocks that one rank has in its cache, by the engine's hash and by sequence hash (canonical hash).

    Blocks in storage that the rank shares with others are reported as changes of the shared store. Blocks of another
    size than `block_size` have no canonical hash and are ignored.

    Args:
        counts_copies: true if the engine reports each copy of a block (vLLM). False if it has each block at most once
            per tier, and may report it repeatedly (SGLang, TensorRT-LLM).

    Attributes:
        counts: number of anomalous blocks by kind: `orphans` were stored after an unknown block, `unknown_removed` were
            removed or moved without being known, `other_block_size` have another size, and `renamed` were stored again
            with another canonical hash.
    """

    def __init__(self, block_size: int, *, counts_copies: bool) -> None:
        assert block_size > 0
        self.counts: Counter[str] = Counter()
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._blocks: dict[int, _Block] = {}
        self._held: dict[SourceTier, dict[int, int]] = {tier: {} for tier in TIERS}
        self._shared: dict[int, int] = {}

    def held(self, tier: Tier = "device") -> tuple[int, ...]:
        """Return the sequence hashes of the blocks in a tier, in the order in which they were stored."""
        return tuple(self._held[tier])

    def lower(self) -> list[Stored]:
        """Return changes that report the blocks in the tiers other than device memory."""
        return [Stored(None, held, tier) for tier in LOWER if (held := self.held(tier))]

    def shared(self) -> tuple[int, ...]:
        """Return the sequence hashes of the blocks that the shared store has, as far as they were reported."""
        return tuple(self._shared | self._held["store"])

    def leading(self, sequence_hashes: Iterable[int]) -> int:
        """Return how many of these blocks, from the first on, are in device memory without a gap."""
        held = self._held["device"]
        return sum(1 for _ in takewhile(held.__contains__, sequence_hashes))

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: EngineEvent) -> list[Change]:
        """Apply an event, and return the changes of the cache. Storing an additional copy of a block is no change."""
        match event:
            case StoredBlocks():
                return self._store(event)
            case RemovedBlocks():
                return self._remove(event.hashes, event.tier) if event.tier else self._leave(event.hashes)
            case MovedBlock():
                return self._move(event)
            case ClearedBlocks():
                self.clear()
                return [Cleared()]
            case OwnStored():
                return self._store_own(event)
            case OwnRemoved():
                held = self._held[event.tier]
                gone = tuple(block for block in event.hashes if held.pop(block, 0))
                return [Removed(gone, event.tier)] if gone else []
            case StoreChange():
                for block in (*event.removed, *event.stale):
                    self._shared.pop(block, None)
                self._shared.update(dict.fromkeys(event.stored, 1))
                return [event]

    def clear(self) -> None:
        """Forget all blocks of the rank. The blocks of a shared store remain."""
        at = TIERS.index("store")
        self._blocks = {name: block for name, block in self._blocks.items() if block.copies[at]}
        for block in self._blocks.values():
            block.copies = [0] * at + block.copies[at:]
        for tier in TIERS[:at]:
            self._held[tier].clear()

    def _store(self, event: StoredBlocks) -> list[Change]:
        if event.block_size != self._block_size:
            self.counts["other_block_size"] += len(event.hashes)
            return []
        before = None
        if event.parent is None:
            seed = hash_seed(event.lora_name, event.cache_salt)
        else:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self.counts["orphans"] += len(event.hashes)
                return []
            before, seed = parent.canonical, parent.seed
        chain = extend_chain(before, block_hashes(event.token_ids, self._block_size, seed, event.mm_hashes))
        changes: list[Change] = []
        new: list[tuple[int, int]] = []  # (engine hash, canonical hash) of consecutive blocks
        new_parent = before
        for engine_hash, computed in zip(event.hashes, chain, strict=True):
            is_new = self._add(engine_hash, computed, seed, event.tier)
            canonical = self._blocks[engine_hash].canonical
            if is_new:
                new.append((engine_hash, canonical))
            elif new:
                changes.append(_stored(new_parent, new, event.tier))
                new = []
            if not new:
                new_parent = canonical
        if new:
            changes.append(_stored(new_parent, new, event.tier))
        return changes

    def _store_own(self, event: OwnStored) -> list[Change]:
        held = self._held[event.tier]
        changes: list[Change] = []
        before = event.parent
        for is_known, group in groupby(event.hashes, held.__contains__):
            blocks = tuple(group)
            if not is_known:
                changes.append(Stored(before, blocks, event.tier))
            before = blocks[-1]
        held.update(dict.fromkeys(event.hashes, 1))
        return changes

    def _add(self, engine_hash: int, canonical: int, seed: int, tier: SourceTier) -> bool:
        """Add a copy of a block and return whether the block is new in the tier."""
        block = self._blocks.get(engine_hash)
        if block is None:
            block = self._blocks[engine_hash] = _Block(canonical, seed)
        elif block.canonical != canonical and tier == "device":  # vLLM's events of offloaded blocks have no salt
            self.counts["renamed"] += 1
        at = TIERS.index(tier)
        if block.copies[at] and not self._counts_copies:
            return False
        block.copies[at] += 1
        held = self._held[tier]
        copies = held.get(block.canonical, 0)
        held[block.canonical] = copies + 1
        return not copies

    def _move(self, event: MovedBlock) -> list[Change]:
        block = self._blocks.get(event.hash)
        changes: list[Change] = []
        if block is not None and self._add(event.hash, block.canonical, block.seed, event.tier):
            changes.append(_stored(None, [(event.hash, block.canonical)], event.tier))
        return changes + self._leave((event.hash,), but=event.tier)

    def _leave(self, hashes: tuple[int, ...], but: Tier | None = None) -> list[Change]:
        """Remove blocks from all tiers, except the tier `but`."""
        known = [(name, self._blocks[name].copies) for name in hashes if name in self._blocks]
        self.counts["unknown_removed"] += len(hashes) - len(known)
        changes: list[Change] = []
        for at, tier in enumerate(TIERS):
            if tier != but and (there := tuple(name for name, copies in known if copies[at])):
                changes += self._remove(there, tier)
        return changes

    def _remove(self, hashes: tuple[int, ...], tier: SourceTier) -> list[Change]:
        at = TIERS.index(tier)
        held = self._held[tier]
        gone: list[tuple[int, int]] = []
        for engine_hash in hashes:
            block = self._blocks.get(engine_hash)
            if block is None or not block.copies[at]:
                self.counts["unknown_removed"] += 1
                continue
            block.copies[at] -= 1
            if not any(block.copies):
                del self._blocks[engine_hash]
            held[block.canonical] -= 1
            if not held[block.canonical]:
                del held[block.canonical]
                gone.append((engine_hash, block.canonical))
        if not gone:
            return []
        removed = tuple(ours for _, ours in gone)
        if tier == "store":
            return [StoreChange(removed=removed)]
        return [Removed(removed, tier, tuple(theirs for theirs, _ in gone))]


def _stored(parent: int | None, blocks: list[tuple[int, int]], tier: SourceTier) -> Change:
    if tier == "store":
        return StoreChange(stored=tuple(ours for _, ours in blocks))
    return Stored(parent, tuple(ours for _, ours in blocks), tier, tuple(theirs for theirs, _ in blocks))


CONTRADICTIONS_MAX = 3  # an engine that repeatedly reports invalid events should not lose its cache each time


class TrackerResult(msgspec.Struct, frozen=True):
    """Changes to publish, in order.

    If events were lost, `lost` tells why, and the engine should drop its prefix cache.
    """

    changes: tuple[Change, ...] = ()
    lost: str = ""


class KvTracker:
    """Tracks the blocks of one rank, and recovers after lost events.

    Engines cannot list their blocks. So if events are lost, the tracker reports the rank as empty, and its caller makes
    the engine drop its prefix cache, so that engine and prefix index agree again. Until the engine reports an empty
    cache, the tracker reports stored blocks as usual and ignores removals of unknown blocks. So the prefix index may
    contain fewer blocks than the engine's cache, never more.
    """

    def __init__(self, resident: ResidentBlocks) -> None:
        self.resident = resident
        self.lost = False  # whether events were lost and the engine has not reported an empty cache since then
        self._contradictions = 0

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
                    self.lost = orphaned = False
        if orphaned and not self.lost:
            return self._contradicted("blocks were stored after an unknown block", changes)
        return TrackerResult(tuple(changes))

    def undecodable(self, reason: str) -> TrackerResult:
        return self._contradicted(f"cannot decode a batch of KV events: {reason}", [])

    def missed(self, reason: str) -> TrackerResult:
        self.resident.clear()
        already, self.lost = self.lost, True
        return TrackerResult((Cleared(),), "" if already else reason)

    def restarted(self) -> TrackerResult:
        """Handle a restart of the engine, whose cache is empty then."""
        self.resident.clear()
        self.lost = False
        return TrackerResult((Cleared(),))

    def _contradicted(self, reason: str, changes: list[Change]) -> TrackerResult:
        self._contradictions += 1
        outcome = self.missed(reason)
        dropped = outcome.lost if self._contradictions <= CONTRADICTIONS_MAX else ""
        return TrackerResult((*changes, *outcome.changes), dropped)
