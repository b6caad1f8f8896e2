"""Copy a prefix index into a snapshot while the index keeps changing. No call takes long, and the result is exact.

A scan visits all blocks, a bounded number per call. Every KV event that is applied meanwhile is recorded. A restore
applies the blocks that the scan visited and then the recorded events, in order. The result is the index at the end of
the scan: a block without an event is as the scan visited it, and for every other block its last event decides.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from forebay.core.state.block_sets import RUN_BLOCKS_MAX, BlockSets, Cursor, split_bits
from forebay.events.base import U64_BYTES, pack_u64
from forebay.events.kv import CacheCleared, CacheEvent, Tier
from forebay.events.snapshots import IndexBlocks, IndexChanges

SCAN_CHUNK_HASHES = 16_384  # 128 KiB: a chunk is copied, encoded and written in one call
PIECE_BYTES = SCAN_CHUNK_HASHES * U64_BYTES  # maximum of hashes per event in `IndexChanges`; larger events are split
EVENT_BYTES = 256  # upper bound of an event's size beside its hashes and its worker id
REMEMBERED_MASKS_MAX = 1_024  # masks whose bits are cached: more than there are ranks; a few megabytes at most
NAME_BYTES = 4  # maximum bytes per character in UTF-8


class HolderEpoch(NamedTuple):
    """Worker rank in one epoch of its worker."""

    worker_id: str
    worker_epoch: int
    rank: int


class _Chunk(NamedTuple):
    holder: HolderEpoch
    tier: Tier
    hashes: bytearray


class IndexScan:
    """Scan over all blocks of a prefix index, in steps."""

    def __init__(
        self, tiers: Mapping[Tier, BlockSets], live: Callable[[], int], holder_of: Callable[[int], HolderEpoch]
    ) -> None:
        self._tiers = tuple(tiers)
        self._live = live
        self._holder_of = holder_of
        self._ahead = deque((tier, sets, sets.cursor()) for tier, sets in tiers.items())
        self._open: dict[tuple[Tier, int], bytearray] = {}  # by the number of a bit
        self._full: deque[_Chunk] = deque()
        self._numbers: dict[int, list[int]] = {}

    @property
    def done(self) -> bool:
        """Whether the scan has visited all blocks and returned all of them."""
        return not (self._ahead or self._open or self._full)

    def advance(self, blocks_max: int) -> list[IndexBlocks]:
        """Continue the scan. Return the snapshot parts that are complete.

        Args:
            blocks_max: approximate number of (block, rank) pairs to visit or return.
        """
        chunks: list[IndexBlocks] = []
        left = blocks_max
        while left > 0:
            if self._full:
                holder, tier, hashes = self._full.popleft()
                left -= max(RUN_BLOCKS_MAX, len(hashes) // U64_BYTES)
                chunks.append(
                    IndexBlocks(
                        worker_id=holder.worker_id,
                        rank=holder.rank,
                        tier=tier,
                        sequence_hashes=bytes(hashes),
                        worker_epoch=holder.worker_epoch,
                    )
                )
            elif self._ahead:
                left -= self._see(*self._ahead[0])
            elif self._open:
                self._fill(*self._open.popitem())
            else:
                break
        return chunks

    def forget(self, bit: int) -> None:
        """Drop the blocks collected for a retired bit, because the bit may be assigned to another rank."""
        number = bit.bit_length() - 1
        for tier in self._tiers:
            self._open.pop((tier, number), None)

    def _see(self, tier: Tier, sets: BlockSets, cursor: Cursor) -> int:
        """Add the blocks of the next run to the parts of all ranks that have them. Return the cost in blocks."""
        run = sets.next_run(cursor)
        if run is None:
            sets.release(cursor)
            self._ahead.popleft()
            return RUN_BLOCKS_MAX
        written = pack_u64(run.blocks)
        cost = RUN_BLOCKS_MAX
        for number in self._numbers_of(run.mask & self._live()):
            key = tier, number
            hashes = self._open.get(key)
            if hashes is None:
                self._open[key] = bytearray(written)
            else:
                hashes += written
                if len(hashes) > (SCAN_CHUNK_HASHES - RUN_BLOCKS_MAX) * U64_BYTES:
                    self._fill(key, self._open.pop(key))
            cost += RUN_BLOCKS_MAX
        return cost

    def _numbers_of(self, mask: int) -> list[int]:
        """Return the numbers of a mask's bits; results are cached because the same few masks recur."""
        numbers = self._numbers.get(mask)
        if numbers is None:
            if len(self._numbers) == REMEMBERED_MASKS_MAX:
                self._numbers.clear()
            numbers = self._numbers[mask] = [bit.bit_length() - 1 for bit in split_bits(mask)]
        return numbers

    def _fill(self, key: tuple[Tier, int], hashes: bytearray) -> None:
        tier, number = key
        self._full.append(_Chunk(self._holder_of(1 << number), tier, hashes))


class ChangeBuffer:
    """KV events that were applied during a scan, as snapshot parts."""

    def __init__(self) -> None:
        self._chunks: list[IndexChanges] = []
        self._events: list[CacheEvent] = []
        self._bytes = 0

    def add(self, event: CacheEvent) -> None:
        """Record one event, without the engine's own hashes, which the index does not need."""
        for piece in _pieces(event):
            if not isinstance(piece, CacheCleared):
                self._bytes += len(piece.sequence_hashes)
            self._bytes += EVENT_BYTES + NAME_BYTES * len(event.worker_id)
            self._events.append(piece)
            if self._bytes >= PIECE_BYTES:
                self._close()

    def chunks(self) -> list[IndexChanges]:
        """Return all recorded events. No event can be added afterwards."""
        if self._events:
            self._close()
        return self._chunks

    def _close(self) -> None:
        self._chunks.append(IndexChanges(events=tuple(self._events)))
        self._events = []
        self._bytes = 0


def _pieces(event: CacheEvent) -> Iterator[CacheEvent]:
    """Yield an event without the engine's own hashes, split into pieces that fit into a chunk."""
    if isinstance(event, CacheCleared) or (not event.engine_hashes and len(event.sequence_hashes) <= PIECE_BYTES):
        yield event
        return
    hashes = event.sequence_hashes
    for start in range(0, len(hashes), PIECE_BYTES):
        piece = hashes[start : start + PIECE_BYTES]
        yield msgspec.structs.replace(event, sequence_hashes=piece, engine_hashes=b"")
