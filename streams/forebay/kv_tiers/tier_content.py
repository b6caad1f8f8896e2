"""Content of one tier: which blocks can be read, are being written, or are in use by a transfer.

A removed block whose memory a transfer still uses is in `gone`: it cannot be found any more, but still takes room.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Generic, Literal

import msgspec

from forebay.events.kv import LowerTier
from forebay.kv_tiers.frequency import Key

SourceTier = Literal["device", "host", "disk", "store"]

SKIPS_MAX = 1024  # leased and pinned blocks that one search for room passes over; the next search continues behind them


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Size and write policy of a tier.

    Attributes:
        blocks: capacity in blocks. Of a shared store: number of blocks that one manager remembers at most.
        filter: whether only blocks that were offered often enough are offloaded into this tier.
    """

    blocks: int
    filter: bool = False

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError(f"the size of a tier must be at least 0 blocks, not {self.blocks}")


class TierContent(Generic[Key]):
    """Blocks of one tier of one rank.

    Attributes:
        blocks: readable blocks, least recently used first.
        writing: blocks that are being written; they take room.
        abandoned: blocks in `writing` that must not become readable.
        gone: removed blocks that a transfer still uses.
        leases: number of transfers that use each block.
        pinned: readable blocks that are not evicted, at most half of the capacity.
    """

    def __init__(self, name: LowerTier, limits: TierLimits) -> None:
        self.name = name
        self.limits = limits
        self.blocks: OrderedDict[Key, None] = OrderedDict()
        self.writing: set[Key] = set()
        self.abandoned: set[Key] = set()
        self.gone: set[Key] = set()
        self.leases: dict[Key, int] = {}
        self.pinned: set[Key] = set()
        self.paused = False

    @property
    def used(self) -> int:
        return len(self.blocks) + len(self.writing) + len(self.gone)

    @property
    def free(self) -> int:
        """Number of blocks for which there is room without eviction."""
        return self.limits.blocks - self.used

    def __contains__(self, key: Key) -> bool:
        return key in self.blocks

    def is_busy(self, key: Key) -> bool:
        """Return whether the block cannot be written now, because it is being written or its old copy is in use."""
        return key in self.writing or key in self.gone

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark readable blocks as just used; the first of them is evicted last, because the others depend on it."""
        move, blocks = self.blocks.move_to_end, self.blocks
        for key in reversed(keys):
            if key in blocks:
                move(key)

    def present(self, keys: Iterable[Key]) -> list[Key]:
        blocks = self.blocks
        return [key for key in keys if key in blocks]

    def lacking(self, keys: Iterable[Key]) -> list[Key]:
        blocks = self.blocks
        return [key for key in keys if key not in blocks]

    def writable(self, keys: Iterable[Key]) -> list[Key]:
        lacking = self.lacking(keys)
        if lacking and (self.writing or self.gone):
            return [key for key in lacking if not self.is_busy(key)]
        return lacking

    def insert(self, keys: Sequence[Key]) -> None:
        """Make blocks readable, for which there must be room."""
        for key in reversed(keys):
            self.blocks[key] = None
        assert self.used <= self.limits.blocks, f"{self.name} has more than {self.limits.blocks} blocks"

    def pin(self, keys: Iterable[Key]) -> None:
        """Pin the readable blocks of `keys`, as far as half of the capacity allows it."""
        for key in keys:
            if len(self.pinned) < self.limits.blocks // 2 and key in self:
                self.pinned.add(key)

    def lease(self, keys: Iterable[Key]) -> None:
        leases = self.leases
        for key in keys:
            leases[key] = leases.get(key, 0) + 1

    def release(self, keys: Iterable[Key]) -> None:
        leases = self.leases
        for key in keys:
            count = leases.pop(key)
            if count > 1:
                leases[key] = count - 1
            elif self.gone:
                self.gone.discard(key)

    def remove(self, keys: Iterable[Key]) -> list[Key]:
        """Remove blocks; return those that were readable. Blocks that are being written will not become readable."""
        removed = []
        for key in keys:
            if key in self.writing:
                self.abandoned.add(key)
            elif key in self:
                del self.blocks[key]
                self.pinned.discard(key)
                removed.append(key)
                if key in self.leases:
                    self.gone.add(key)
        return removed

    def clear(self) -> list[Key]:
        """Remove all blocks; return those that were readable, least recently used first."""
        return self.remove([*self.blocks, *self.writing])

    def evict(self, count: int, keep: Container[Key]) -> list[Key]:
        """Evict the least recently used blocks except `keep`: fewer than `count` if the remaining blocks are in use."""
        evicted: list[Key] = []
        queue = self.blocks
        skips = min(len(self.leases) + len(self.pinned), SKIPS_MAX)
        leases, pinned = self.leases, self.pinned
        while len(evicted) < count and queue:
            key, _ = queue.popitem(last=False)
            if key in leases or key in pinned:
                queue[key] = None
                if not skips:
                    break
                skips -= 1
            elif key in keep:
                queue[key] = None
                queue.move_to_end(key, last=False)
                break
            else:
                evicted.append(key)
        return evicted
