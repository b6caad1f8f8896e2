"""Assumed cache contents: the blocks of a routed prompt count as cached at its rank until their due time.

The assumption is used for workers without KV events, and for the time until KV events arrive. A prompt is added when it
is routed, and again when the rank reports that it has computed it. If the rank rejects or drops it instead, the blocks
that no computed prompt has are withdrawn.

The blocks that one prompt adds are a batch: blocks of one rank with one due time, in prompt order. Every (rank, block)
pair is in one batch: the batch with the latest due time, but a block of a computed prompt stays in the batch of a
computed prompt. A later prompt with the same first blocks moves them to its own batch, so a batch loses blocks from its
start. Batches are ordered by due time in a heap.
"""

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby

from xxhash import xxh3_64_intdigest

from forebay.core.state.block_sets import BlockSets, as_block_array
from forebay.core.state.holder_bits import HolderBits, HolderKey
from forebay.events.base import U64_MASK, array_u64, pack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, RoutedBlocks

EMPTY_BATCHES_MAX = 4_096  # compact the heap when it has this many more empty batches than others


class _Holder:
    """Worker rank with its assumed blocks. `bit` is 0 once the rank was removed."""

    __slots__ = ("batches", "bit", "key", "live", "sum")

    def __init__(self, key: HolderKey, bit: int) -> None:
        self.key = key
        self.bit = bit
        self.batches: dict[int, _Batch] = {}  # by block
        self.live = 0  # batches that have blocks
        self.sum = 0


class _Batch:
    __slots__ = ("blocks", "computed", "due_us", "factor", "holder")

    def __init__(self, holder: _Holder, due_us: int, computed: bool) -> None:
        worker_id, rank = holder.key
        self.holder = holder
        self.due_us = due_us
        self.computed = computed
        self.blocks = array("Q")
        kind = "\0computed" if computed else ""
        self.factor = xxh3_64_intdigest(f"{worker_id}\0{rank}\0{due_us}{kind}".encode()) | 1


class RoutedIndex:
    """Blocks that each worker rank is assumed to have cached. `len` returns the number of (rank, block) pairs."""

    def __init__(self) -> None:
        self._sets = BlockSets()
        self._bits = HolderBits([self._sets])
        self._holders: dict[HolderKey, _Holder] = {}
        self._heap: list[tuple[int, int, _Batch]] = []
        self._number = 0  # number of batches so far; orders batches with equal due times
        self._live = 0  # batches that have blocks
        self._pairs = 0
        self._sum = 0

    def __len__(self) -> int:
        return self._pairs

    def add_holder(self, worker_id: str, rank: int) -> None:
        """Add a rank without assumed blocks. It replaces an earlier rank of the same worker id and number."""
        self.drop_holder(worker_id, rank)
        key = worker_id, rank
        self._holders[key] = _Holder(key, self._bits.take(key))

    def drop_holder(self, worker_id: str, rank: int) -> None:
        """Remove a rank and the blocks that it is assumed to have cached. Unknown ranks are ignored."""
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

    def add(
        self,
        worker_id: str,
        rank: int,
        blocks: Sequence[int],
        due_us: int,
        blocks_max: int,
        *,
        computed: bool = False,
    ) -> None:
        """Assume that a rank has cached the blocks of a routed prompt until `due_us`.

        Later due times of blocks stay as they are, and those of computed prompts unless this prompt is computed, too.

        If there are more than `blocks_max` (rank, block) pairs, exactly the excess is removed: first blocks with the
        earliest due time, and the last blocks of a prompt before its first. Nothing is removed in advance, because that
        would delay a request.

        If `computed`, the rank has reported that it computed the prompt. Raises KeyError if the rank is unknown.
        """
        self._add(self._holders[worker_id, rank], blocks, due_us, computed)
        while self._pairs > blocks_max:
            batch = self._heap[0][2]
            if batch.holder.bit and batch.blocks:
                self._remove(batch, max(0, len(batch.blocks) - (self._pairs - blocks_max)))
            if not (batch.holder.bit and batch.blocks):
                heappop(self._heap)

    def withdraw(self, worker_id: str, rank: int, blocks: Sequence[int]) -> None:
        """Remove the blocks of a prompt that a rank did not compute, except blocks of prompts that it has computed.

        Blocks of a prompt that it still computes are removed, too. They are added again once it has computed them.
        Raises KeyError if the rank is unknown.
        """
        holder = self._holders[worker_id, rank]
        for batch, group in groupby(dict.fromkeys(as_block_array(blocks)), holder.batches.get):
            if batch is None or batch.computed:
                continue
            members = array("Q", group)
            self._leave(batch, members)
            for block in members:
                del holder.batches[block]
            self._sets.remove(holder.bit, members)
            self._pairs -= len(members)
        self._tidy()

    def expire(self, now_us: int) -> None:
        """Remove blocks whose due time is at or before `now_us`. This is cheap if there are none."""
        heap = self._heap
        while heap and heap[0][0] <= now_us:
            batch = heappop(heap)[2]
            if batch.holder.bit and batch.blocks:
                self._remove(batch, 0)
        if self._bits.sweeping:
            self._bits.sweep()

    def depths(self, query: Sequence[int]) -> dict[HolderKey, int]:
        """Return how many leading blocks of a prompt each rank is assumed to have cached, without zeros."""
        found: dict[HolderKey, int] = {}
        for depth, mask in self._sets.match_depths(query, self._bits.live):
            if depth:
                found.update(dict.fromkeys(self._bits.keys_of(mask), depth))
        return found

    def blocks_held(self, worker_id: str, rank: int) -> int:
        """Return how many blocks a rank is assumed to have cached. Raises KeyError for an unknown rank."""
        return len(self._holders[worker_id, rank].batches)

    def digest(self) -> int:
        return (self._sum + self._pairs) & U64_MASK

    def snapshot(self, predicted: bool) -> Iterator[RoutedBlocks]:
        """Yield all blocks, the first to expire first. The caller must not change the index while it iterates."""
        for due_us, _, batch in sorted(self._heap):
            if batch.holder.bit:
                worker_id, rank = batch.holder.key
                # Yield the last blocks of a prompt first, because they are evicted first.
                for start in reversed(range(0, len(batch.blocks), CHUNK_HASHES_MAX)):
                    yield RoutedBlocks(
                        worker_id=worker_id,
                        rank=rank,
                        due_us=due_us,
                        predicted=predicted,
                        sequence_hashes=pack_u64(batch.blocks[start : start + CHUNK_HASHES_MAX]),
                        computed=batch.computed,
                    )

    def restore(self, chunk: RoutedBlocks) -> None:
        """Apply one part of a snapshot, in the order of `snapshot`. Raises KeyError if the rank is unknown."""
        blocks = array_u64(chunk.sequence_hashes)
        self._add(self._holders[chunk.worker_id, chunk.rank], blocks, chunk.due_us, chunk.computed)

    def _add(self, holder: _Holder, blocks: Sequence[int], due_us: int, computed: bool) -> None:
        query = as_block_array(blocks)
        batch = _Batch(holder, due_us, computed)
        batches = holder.batches
        taken = array("Q")
        for old, group in groupby(dict.fromkeys(query), batches.get):
            members = array("Q", group)
            if old is not None:
                if (old.computed == computed and old.due_us >= due_us) or old.computed > computed:
                    continue
                self._leave(old, members)
            taken += members
        placed = dict.fromkeys(taken, batch)
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
            self._sets.add(holder.bit, query)
        if self._bits.sweeping:
            self._bits.sweep()
        self._tidy()

    def _leave(self, batch: _Batch, members: "array[int]") -> None:
        count = len(members)
        if batch.blocks[:count] == members:
            del batch.blocks[:count]
        else:
            leaving = set(members)
            batch.blocks = array("Q", (block for block in batch.blocks if block not in leaving))
        self._count(batch, -sum(members))

    def _remove(self, batch: _Batch, start: int) -> None:
        gone = batch.blocks[start:]
        del batch.blocks[start:]
        batches = batch.holder.batches
        for block in gone:
            del batches[block]
        self._sets.remove(batch.holder.bit, gone)
        self._pairs -= len(gone)
        self._count(batch, -sum(gone))

    def _count(self, batch: _Batch, blocks_sum: int) -> None:
        """Update the sums of a batch for blocks with the sum `blocks_sum`, negative if they were removed."""
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
