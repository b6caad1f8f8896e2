"""Copy a prefix index into a snapshot while the index keeps changing. No call takes long, and the result is exact.

A scan visits all blocks, a bounded number per call. Every KV event that is applied meanwhile is recorded, and so is
every shared store that is dropped. A restore applies the blocks that the scan visited and then these changes, in order.
The result is the index at the end of the scan: a block without a change is as the scan visited it, and for every other
block its last change decides.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from forebay.core.state.block_sets import RUN_BLOCKS_MAX, BlockSets, Cursor, split_bits
from forebay.events.base import U64_BYTES, pack_u64
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from forebay.events.snapshots import IndexBlocks, IndexChanges, StoreBlocks, StoreDropped

SCAN_CHUNK_HASHES = 16_384  # 128 KiB: a chunk is copied, encoded and written in one call
PIECE_BYTES = SCAN_CHUNK_HASHES * U64_BYTES  # maximum of hashes per event in `IndexChanges`; larger events are split
EVENT_BYTES = 256  # upper bound of an event's size beside its hashes and its names
REMEMBERED_MASKS_MAX = 1_024  # masks whose bits are cached: more than there are ranks; a few megabytes at most
NAME_BYTES = 4  # maximum bytes per character in UTF-8


ScannedBlocks = IndexBlocks | StoreBlocks
RecordedChange = IndexChanges | StoreDropped


class ScanSource(NamedTuple):
    """Blocks that a scan visits: those of one tier, or those of all shared stores.

    Attributes:
        live: returns the mask of the bits in use.
        part: returns blocks of the holder with a bit as a part of a snapshot.
    """

    name: str
    sets: BlockSets
    live: Callable[[], int]
    part: Callable[[int, bytearray], ScannedBlocks]


class IndexScan:
    """Scan over all blocks of a prefix index, in steps."""

    def __init__(self, sources: Sequence[ScanSource]) -> None:
        self._sources = {source.name: source for source in sources}
        self._ahead = deque((source, source.sets.cursor()) for source in sources)
        self._open: dict[tuple[str, int], bytearray] = {}  # by name of the source and number of a bit
        self._full: deque[ScannedBlocks] = deque()
        self._numbers: dict[int, list[int]] = {}

    @property
    def done(self) -> bool:
        return not (self._ahead or self._open or self._full)

    def advance(self, blocks_max: int) -> list[ScannedBlocks]:
        """Visit or return about `blocks_max` (block, holder) pairs. Return the snapshot parts that are complete."""
        chunks: list[ScannedBlocks] = []
        left = blocks_max
        while left > 0:
            if self._full:
                chunk = self._full.popleft()
                left -= max(RUN_BLOCKS_MAX, len(chunk.sequence_hashes) // U64_BYTES)
                chunks.append(chunk)
            elif self._ahead:
                left -= self._see(*self._ahead[0])
            elif self._open:
                # In the order of opening: a restored index assigns bits in this order, so its snapshot is the same.
                key = next(iter(self._open))
                self._fill(key, self._open.pop(key))
            else:
                break
        return chunks

    def forget(self, bit: int, names: Collection[str]) -> None:
        """Drop the blocks collected for a retired bit of some sources, because the bit may get another meaning."""
        number = bit.bit_length() - 1
        for name in names:
            self._open.pop((name, number), None)

    def _see(self, source: ScanSource, cursor: Cursor) -> int:
        run = source.sets.next_run(cursor)
        if run is None:
            source.sets.release(cursor)
            self._ahead.popleft()
            return RUN_BLOCKS_MAX
        written = pack_u64(run.blocks)
        cost = RUN_BLOCKS_MAX
        for number in self._numbers_of(run.mask & source.live()):
            key = source.name, number
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

    def _fill(self, key: tuple[str, int], hashes: bytearray) -> None:
        name, number = key
        self._full.append(self._sources[name].part(1 << number, hashes))


class ChangeBuffer:
    """KV events that were applied during a scan, and stores that were dropped, as snapshot parts."""

    def __init__(self) -> None:
        self._chunks: list[RecordedChange] = []
        self._events: list[AnyKvEvent] = []
        self._bytes = 0

    def add(self, event: AnyKvEvent) -> None:
        """Record one event, without the engine's own hashes, which the index does not need."""
        for piece in _pieces(event):
            if not isinstance(piece, CacheCleared):
                self._bytes += len(piece.sequence_hashes)
            names = event.worker_id if isinstance(event, KvEvent) else event.worker_id + event.store
            self._bytes += EVENT_BYTES + NAME_BYTES * len(names)
            self._events.append(piece)
            if self._bytes >= PIECE_BYTES:
                self._close()

    def drop(self, store: str) -> None:
        self._close()
        self._chunks.append(StoreDropped(store=store))

    def chunks(self) -> list[RecordedChange]:
        """Return all recorded changes. No change can be added afterwards."""
        self._close()
        return self._chunks

    def _close(self) -> None:
        if self._events:
            self._chunks.append(IndexChanges(events=tuple(self._events)))
            self._events = []
            self._bytes = 0


def _pieces(event: AnyKvEvent) -> Iterator[AnyKvEvent]:
    """Yield an event without the engine's own hashes, split into pieces that fit into a chunk."""
    if isinstance(event, BlocksStored | BlocksRemoved) and event.engine_hashes:
        event = msgspec.structs.replace(event, engine_hashes=b"")
    if isinstance(event, CacheCleared) or len(event.sequence_hashes) <= PIECE_BYTES:
        yield event
        return
    hashes = event.sequence_hashes
    for start in range(0, len(hashes), PIECE_BYTES):
        yield msgspec.structs.replace(event, sequence_hashes=hashes[start : start + PIECE_BYTES])
