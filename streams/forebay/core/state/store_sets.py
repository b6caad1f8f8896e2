"""Blocks of the shared stores of a group. They belong to no worker, so they stay when all workers have left.

Several workers report changes of the same store, in any order. Adding a block that is already there, or removing one
that is not there, has no effect. A store without blocks is not kept, so equal contents have equal digests. If a new
store or more blocks exceed a limit, a store that no worker uses is dropped as a whole, or else the blocks are ignored.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from forebay.core.state.block_sets import BlockSets
from forebay.core.state.holder_bits import HolderBits
from forebay.core.state_machine import digest_of
from forebay.events.base import array_u64
from forebay.events.kv import StoreBlocksAdded, StoreEvent
from forebay.events.snapshots import StoreBlocks

STORES_MAX = 64  # stores of a group in use at the same time; each lookup visits all of them
STORE_BLOCKS_MAX = 1 << 23  # blocks of all stores: about 800 MB of memory


class StoreSets:
    """The blocks that each shared store has, by the name of the store.

    Attributes:
        names: bit in `sets` of each store that has blocks, by name.
        counts: for diagnostics, not part of the state: `unused`, events of a store that no worker uses; `full`, events
            ignored for lack of room; `dropped`, stores dropped to make room.
        stale_blocks: number of blocks that workers expected in a store and did not find. For diagnostics too.
    """

    def __init__(self, stores_max: int = STORES_MAX, blocks_max: int = STORE_BLOCKS_MAX) -> None:
        self.names: dict[str, int] = {}
        self.sets = BlockSets()
        self.counts: Counter[str] = Counter()
        self.stale_blocks = 0
        self._stores_max = stores_max
        self._blocks_max = blocks_max
        self._bits = HolderBits([self.sets])

    @property
    def live(self) -> int:
        return self._bits.live

    def sizes(self) -> dict[str, int]:
        return {name: self.sets.counts[self.names[name]] for name in sorted(self.names)}

    def dropped_for(self, event: StoreEvent, used: Collection[str]) -> list[str] | None:
        """Return the stores, none of them in `used`, to drop for the blocks of an event; None if there is no room."""
        stores, blocks = len(self.names) + (event.store not in self.names), sum(self.sets.counts.values())
        dropped: list[str] = []
        if not event.sequence_hashes or not isinstance(event, StoreBlocksAdded) or self._fits(stores, blocks):
            return dropped
        for name, size in self.sizes().items():
            if name not in used and name != event.store:
                dropped.append(name)
                stores, blocks = stores - 1, blocks - size
                if self._fits(stores, blocks):
                    return dropped
        return None

    def fold(self, event: StoreEvent) -> int:
        """Apply an event, regardless of limits. Return the store's bit if it is no longer in use, otherwise 0."""
        blocks = array_u64(event.sequence_hashes)
        if isinstance(event, StoreBlocksAdded):
            self.add(event.store, blocks)
        elif bit := self.names.get(event.store, 0):
            self.sets.remove(bit, blocks)
            if not self.sets.counts[bit]:
                return self.drop(event.store)
        if self._bits.sweeping:
            self._bits.sweep()
        return 0

    def add(self, store: str, blocks: Sequence[int]) -> None:
        if blocks:
            bit = self.names.get(store)
            if bit is None:
                bit = self.names[store] = self._bits.take((store, 0))
            self.sets.add(bit, blocks)

    def drop(self, store: str) -> int:
        """Remove a store with all its blocks. Return its bit, which is no longer in use; 0 for an unknown store."""
        bit = self.names.pop(store, 0)
        if bit:
            self._bits.retire(bit)
        return bit

    def _fits(self, stores: int, blocks: int) -> bool:
        return stores <= self._stores_max and blocks < self._blocks_max

    def runs(self, store: str, query: Sequence[int]) -> "StoreRuns":
        """Return the runs of blocks of a prompt in a store that has blocks."""
        return StoreRuns(self.sets, self.names[store], query)

    def part(self, bit: int, hashes: bytearray) -> StoreBlocks:
        return StoreBlocks(store=self._bits.key_of(bit)[0], sequence_hashes=bytes(hashes))

    def digest(self) -> int:
        """Return a 64-bit digest over the names, block counts and block sums of all stores; 0 without stores."""
        return digest_of_stores(
            {name: (self.sets.counts[bit], self.sets.sums[bit]) for name, bit in self.names.items()}
        )


class StoreRuns:
    """Consecutive blocks of a prompt in one store, looked up when they are read. The last run is remembered."""

    __slots__ = ("_begin", "_bit", "_end", "_query", "_sets")

    def __init__(self, sets: BlockSets, bit: int, query: Sequence[int]) -> None:
        self._sets = sets
        self._bit = bit
        self._query = query
        self._begin, self._end = 1, 0

    def after(self, start: int) -> int:
        """Return how many blocks of the prompt from position `start` on the store has without a gap."""
        if not self._begin <= start <= self._end:
            self._begin, self._end = start, self._sets.match_depths(self._query, self._bit, start)[-1][0]
        return self._end - start


def digest_of_stores(stores: dict[str, tuple[int, int]]) -> int:
    """Return the digest of stores from the number of blocks and the sum of the blocks of each store."""
    return digest_of("stores", sorted(stores.items())) if stores else 0
