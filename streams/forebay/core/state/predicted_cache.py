"""What was routed is taken for cached, until a due time: for workers that tell nothing, or have not told yet.

Theory of operation. What one prompt adds is a batch: blocks of one holder with one due time, in the order of the
prompt. Every (holder, block) is in one batch, the one with the latest due time. A later prompt with the same first
blocks takes them over, so what an earlier batch loses are its first blocks. Batches wait in a heap by due time.
"""

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby

from xxhash import xxh3_64_intdigest

from forebay.core.state.block_sets import BlockSets, packed
from forebay.core.state.holder_bits import HolderBits, HolderKey
from forebay.events.base import U64_MASK, array_u64, pack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, RoutedBlocks

EMPTY_BATCHES_MAX = 4_096  # they wait in the heap for their time; beyond this, and as many as the others, they go


class _Holder:
    """`bit` is 0 when the holder is gone."""

    __slots__ = ("batches", "bit", "key", "live", "sum")

    def __init__(self, key: HolderKey, bit: int) -> None:
        self.key = key
        self.bit = bit
        self.batches: dict[int, _Batch] = {}  # by block
        self.live = 0  # batches with blocks
        self.sum = 0


class _Batch:
    __slots__ = ("blocks", "due_us", "factor", "holder")

    def __init__(self, holder: _Holder, due_us: int) -> None:
        worker_id, rank = holder.key
        self.holder = holder
        self.due_us = due_us
        self.blocks = array("Q")
        self.factor = xxh3_64_intdigest(f"{worker_id}\0{rank}\0{due_us}".encode()) | 1


class RoutedIndex:
    """Blocks taken for cached at each holder. Its length counts (holder, block) pairs."""

    def __init__(self) -> None:
        self._sets = BlockSets()
        self._bits = HolderBits([self._sets])
        self._holders: dict[HolderKey, _Holder] = {}
        self._heap: list[tuple[int, int, _Batch]] = []
        self._number = 0  # of batches ever: who came first is due first at one time
        self._live = 0  # batches with blocks
        self._pairs = 0
        self._sum = 0

    def __len__(self) -> int:
        return self._pairs

    def add_holder(self, worker_id: str, rank: int) -> None:
        """Admit a rank to which nothing was routed, in place of any before."""
        self.drop_holder(worker_id, rank)
        key = worker_id, rank
        self._holders[key] = _Holder(key, self._bits.take(key))

    def drop_holder(self, worker_id: str, rank: int) -> None:
        """A rank is gone, and what was routed there with it. Unknown ranks are none to drop."""
        holder = self._holders.pop((worker_id, rank), None)
        if holder is None:
            return
        self._bits.retire(holder.bit)
        self._pairs -= len(holder.batches)
        self._live -= holder.live
        self._sum -= holder.sum
        holder.bit = 0
        holder.batches = {}
        self._tidy()

    def add(self, worker_id: str, rank: int, blocks: Sequence[int], due_us: int, blocks_max: int) -> None:
        """A prompt was routed to a rank: its blocks count as cached there until `due_us`, or longer if they did so.

        Beyond `blocks_max` (holder, block) pairs those due soonest go, of one prompt the last blocks first: as many as
        are too many and no more, for nobody should wait while room is made in advance. Raises KeyError for an unknown
        rank.
        """
        self._add(self._holders[worker_id, rank], blocks, due_us)
        while self._pairs > blocks_max:
            batch = self._heap[0][2]
            if batch.holder.bit and batch.blocks:
                self._remove(batch, max(0, len(batch.blocks) - (self._pairs - blocks_max)))
            if not (batch.holder.bit and batch.blocks):
                heappop(self._heap)

    def expire(self, now_us: int) -> None:
        """What is due by now is not taken for cached any more. Costs next to nothing when that is nothing."""
        heap = self._heap
        while heap and heap[0][0] <= now_us:
            batch = heappop(heap)[2]
            if batch.holder.bit and batch.blocks:
                self._remove(batch, 0)
        if self._bits.sweeping:
            self._bits.sweep()

    def depths(self, query: Sequence[int]) -> dict[HolderKey, int]:
        """How many of a prompt's first blocks count as cached at each holder; holders with none are left out.

        Arrays ("Q") are the fastest queries.
        """
        found: dict[HolderKey, int] = {}
        for depth, mask in self._sets.drops(query, self._bits.live):
            if depth:
                found.update(dict.fromkeys(self._bits.keys_of(mask), depth))
        return found

    def blocks_held(self, worker_id: str, rank: int) -> int:
        """How many blocks count as cached at a rank. Raises KeyError for an unknown one."""
        return len(self._holders[worker_id, rank].batches)

    def digest(self) -> int:
        """64 bits over every (holder, block) and its due time."""
        return (self._sum + self._pairs) & U64_MASK

    def snapshot(self, predicted: bool) -> Iterator[RoutedBlocks]:
        """All blocks, those due soonest first. Nothing may change meanwhile."""
        for due_us, _, batch in sorted(self._heap):
            if batch.holder.bit:
                worker_id, rank = batch.holder.key
                # The last blocks go first when some must go, so they come first.
                for start in reversed(range(0, len(batch.blocks), CHUNK_HASHES_MAX)):
                    yield RoutedBlocks(
                        worker_id=worker_id,
                        rank=rank,
                        due_us=due_us,
                        predicted=predicted,
                        sequence_hashes=pack_u64(batch.blocks[start : start + CHUNK_HASHES_MAX]),
                    )

    def restore(self, chunk: RoutedBlocks) -> None:
        """Take in one chunk of a snapshot, in the order of `snapshot`. Raises KeyError for an unknown rank."""
        self._add(self._holders[chunk.worker_id, chunk.rank], array_u64(chunk.sequence_hashes), chunk.due_us)

    def _add(self, holder: _Holder, blocks: Sequence[int], due_us: int) -> None:
        asked = packed(blocks)
        batch = _Batch(holder, due_us)
        batches = holder.batches
        placed = dict.fromkeys(asked, batch)
        longer = array("Q")
        for old, group in groupby(placed, batches.get):
            if old is None:
                continue
            members = array("Q", group)
            if old.due_us < due_us:
                self._leave(old, members)
            else:
                longer += members
        for block in longer:
            del placed[block]
        if placed:
            known = len(batches)
            batches.update(placed)
            self._pairs += len(batches) - known
            batch.blocks = array("Q", placed)
            self._count(batch, sum(placed))
            self._live += 1
            holder.live += 1
            heappush(self._heap, (due_us, self._number, batch))
            self._number += 1
            self._sets.add(holder.bit, asked)
        if self._bits.sweeping:
            self._bits.sweep()
        self._tidy()

    def _leave(self, batch: _Batch, members: "array[int]") -> None:
        """Blocks that are the batch's go into another one."""
        count = len(members)
        if batch.blocks[:count] == members:
            del batch.blocks[:count]
        else:
            leaving = set(members)
            batch.blocks = array("Q", (block for block in batch.blocks if block not in leaving))
        self._count(batch, -sum(members))

    def _remove(self, batch: _Batch, start: int) -> None:
        """Blocks of a batch, from `start` on, do not count as cached any more."""
        gone = batch.blocks[start:]
        del batch.blocks[start:]
        batches = batch.holder.batches
        for block in gone:
            del batches[block]
        self._sets.remove(batch.holder.bit, gone)
        self._pairs -= len(gone)
        self._count(batch, -sum(gone))

    def _count(self, batch: _Batch, blocks_sum: int) -> None:
        """Blocks with this sum came into a batch or, if it is negative, left it."""
        term = batch.factor * blocks_sum & U64_MASK
        self._sum = (self._sum + term) & U64_MASK
        batch.holder.sum = (batch.holder.sum + term) & U64_MASK
        if not batch.blocks:
            batch.holder.live -= 1
            self._live -= 1

    def _tidy(self) -> None:
        if len(self._heap) > 2 * self._live + EMPTY_BATCHES_MAX:
            self._heap = [entry for entry in self._heap if entry[2].holder.bit and entry[2].blocks]
            heapify(self._heap)
