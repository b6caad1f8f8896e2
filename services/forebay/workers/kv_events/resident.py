"""The blocks that a rank holds, by the engine's names and by ours: engine events to cache changes. Pure.

Theory of operation. Our names follow from tokens, adapter, cache namespace and media alone, so a chain is named from
its events; where it goes on, the name of the block before it is needed, and the seed that its sequence began with. So
as many names are kept as blocks are resident, in any tier. An engine may hold a block twice, and may have two names
for what is one block to us: it is gone when its last copy is.
"""

from collections import Counter
from typing import get_args

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed
from forebay.engine_model.model import Removed, Stored
from forebay.events.kv import Tier
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import ClearedBlocks, EngineEvent, RemovedBlocks, StoredBlocks

TIERS: tuple[Tier, ...] = get_args(Tier)


class _Block:
    """One name of the engine: ours, the seed of its sequence, and how many copies are in each of `TIERS`."""

    __slots__ = ("canonical", "copies", "seed")

    def __init__(self, canonical: int, seed: int) -> None:
        self.canonical = canonical
        self.seed = seed
        self.copies = [0, 0, 0]


class ResidentBlocks:
    """One rank's blocks. `block_size` is the pool's, in tokens; blocks of other sizes have no name in it.

    `counts_copies`: whether the engine holds copies of a block and says each of them (vLLM), or has every block once
    a tier and may say so again (SGLang, TensorRT-LLM). `counts` are of blocks: `orphans` whose parent is not known,
    `unknown_removed`, `other_block_size`, and `renamed`: said again to be another block than before.
    """

    def __init__(self, block_size: int, *, counts_copies: bool) -> None:
        assert block_size > 0
        self.counts: Counter[str] = Counter()
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._blocks: dict[int, _Block] = {}
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}

    def held(self, tier: Tier = "device") -> tuple[int, ...]:
        """Our names of the blocks in a tier, as they came."""
        return tuple(self._held[tier])

    def __len__(self) -> int:
        """Names of the engine that are kept."""
        return len(self._blocks)

    def apply(self, event: EngineEvent) -> list[CacheChange]:
        """What an event means for an index; nothing where it only tells of a further copy."""
        match event:
            case StoredBlocks():
                return self._store(event)
            case RemovedBlocks():
                return self._remove(event)
            case ClearedBlocks():
                self.clear()
                return [Cleared()]

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        for held in self._held.values():
            held.clear()

    def _store(self, event: StoredBlocks) -> list[CacheChange]:
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
        changes: list[CacheChange] = []
        new: list[tuple[int, int]] = []  # names of blocks that follow each other: the engine's, ours
        new_parent = before
        for engine_hash, canonical in zip(event.hashes, chain, strict=True):
            if self._add(engine_hash, canonical, seed, event.tier):
                new.append((engine_hash, canonical))
            elif new:
                changes.append(_stored(new_parent, new, event.tier))
                new = []
            if not new:
                new_parent = canonical
        if new:
            changes.append(_stored(new_parent, new, event.tier))
        return changes

    def _add(self, engine_hash: int, canonical: int, seed: int, tier: Tier) -> bool:
        """A copy of a block came; whether the block is new in the tier."""
        block = self._blocks.get(engine_hash)
        if block is None:
            block = self._blocks[engine_hash] = _Block(canonical, seed)
        elif block.canonical != canonical:
            self.counts["renamed"] += 1
        at = TIERS.index(tier)
        if block.copies[at] and not self._counts_copies:
            return False
        block.copies[at] += 1
        held = self._held[tier]
        copies = held.get(block.canonical, 0)
        held[block.canonical] = copies + 1
        return not copies

    def _remove(self, event: RemovedBlocks) -> list[CacheChange]:
        at = TIERS.index(event.tier)
        held = self._held[event.tier]
        gone: list[tuple[int, int]] = []
        for engine_hash in event.hashes:
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
        return [Removed(tuple(ours for _, ours in gone), event.tier, tuple(theirs for theirs, _ in gone))]


def _stored(parent: int | None, blocks: list[tuple[int, int]], tier: Tier) -> Stored:
    return Stored(parent, tuple(ours for _, ours in blocks), tier, tuple(theirs for theirs, _ in blocks))
