"""Prefix index: which worker ranks cache which prompt prefixes, per tier. It is built from the topic `kv-events`.

Every worker rank in the fleet is a holder and has one bit in the masks of `BlockSets`. If the cache of a rank is
cleared or the worker is lost, its bit is retired, which takes constant time. The events of each holder have consecutive
sequence numbers. Lower numbers are redeliveries and have no effect. If a number is missing, the content of the cache is
no longer known. The owner then orders the worker to re-announce its cache: the worker sends `CacheCleared` and the
blocks that it has.

The shared stores of the group are holders of their own (`StoreSets`). Their events have no sequence numbers. The index
knows which store each worker reads, and counts the blocks of this store for every rank of the worker.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, assert_never, get_args

from forebay.core.state.block_sets import BlockSets, as_block_array
from forebay.core.state.holder_bits import HolderBits, HolderKey
from forebay.core.state.index_scan import ChangeBuffer, IndexScan, RecordedChange, ScannedBlocks, ScanSource
from forebay.core.state.store_sets import StoreSets
from forebay.core.state_machine import digest_of
from forebay.events.base import U64_BYTES, U64_MASK, array_u64
from forebay.events.kv import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    KvEvent,
    LowerTier,
    StoreBlocksAdded,
    StoreBlocksRemoved,
    StoreEvent,
    Tier,
)
from forebay.events.snapshots import IndexBlocks, IndexChanges, IndexCursor, StoreBlocks, StoreDropped

TIERS: tuple[Tier, ...] = get_args(Tier)
STORE = "store"  # name of the shared stores among the sources of a scan
IndexPart = IndexCursor | ScannedBlocks | RecordedChange


class Overlap(NamedTuple):
    """Numbers of leading prompt blocks that one worker rank has cached, by tier.

    Attributes:
        device: blocks from the first block of the prompt on, in device memory.
        host: blocks that follow them, in host memory.
        disk: blocks that follow those in host memory, on disk.
        store: blocks that follow those on disk, in the shared store of the worker.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    store: int = 0


NO_OVERLAP = Overlap()
APPLIED: dict[type[KvEvent] | type[StoreEvent], str] = {
    BlocksStored: "stored",
    BlocksRemoved: "removed",
    CacheCleared: "cleared",
    StoreBlocksAdded: "store_added",
    StoreBlocksRemoved: "store_removed",
}


class Gap(NamedTuple):
    """Missing KV events of a worker rank, from `expected_seq` on. The event that arrived instead is `found_seq`."""

    worker_id: str
    worker_epoch: int
    rank: int
    expected_seq: int
    found_seq: int


@dataclass(slots=True)
class _Holder:
    bit: int
    worker_epoch: int
    last_seq: int = 0
    resync: bool = False


class PrefixIndex:
    """Which blocks each worker rank of the fleet has cached, per tier, and which blocks each shared store has.

    `applied` counts applied events by kind, and `counts` events and blocks that did not fit the index, such as `gap` or
    `unknown_block`. Both are for diagnostics, not part of the state.
    """

    def __init__(self) -> None:
        self.applied: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._holders: dict[HolderKey, _Holder] = {}
        self._ranks: Counter[str] = Counter()  # number of ranks by worker
        self._tiers: dict[Tier, BlockSets] = {tier: BlockSets() for tier in TIERS}
        self.bits = HolderBits(list(self._tiers.values()))
        self.stores = StoreSets()
        self._store_of: dict[str, str] = {}  # shared store by worker
        self._readers: dict[str, int] | None = None  # cached result of `_readers_of_stores`
        self._scan: IndexScan | None = None
        self._changes: ChangeBuffer | None = None

    def add_holder(self, worker_id: str, rank: int, worker_epoch: int) -> None:
        """Add a rank with an empty cache. It replaces the rank's earlier epoch. An epoch must not be added twice."""
        self.drop_holder(worker_id, rank)
        self._holders[worker_id, rank] = _Holder(self._take(worker_id, rank), worker_epoch)
        self._ranks[worker_id] += 1

    def drop_holder(self, worker_id: str, rank: int) -> None:
        """Remove a rank and all its blocks. Unknown ranks are ignored."""
        holder = self._holders.pop((worker_id, rank), None)
        if holder is not None:
            self._ranks[worker_id] -= 1
            if not self._ranks[worker_id]:
                del self._ranks[worker_id]
            self._retire(holder)

    def use_store(self, worker_id: str, store: str) -> None:
        """Set the shared store that a worker reads; the empty name for none."""
        self._readers = None
        if store:
            self._store_of[worker_id] = store
        else:
            self._store_of.pop(worker_id, None)

    def is_new(self, event: CacheEvent) -> bool:
        """Return whether the event is from a known rank in its current epoch and was not applied before."""
        holder = self._holders.get((event.worker_id, event.rank))
        return holder is not None and event.worker_epoch == holder.worker_epoch and event.seq > holder.last_seq

    def apply(self, event: CacheEvent) -> Gap | None:
        """Apply one event. Redelivered events and events of unknown ranks or stale epochs are only counted.

        Return the gap, if events are missing before this event and the rank had no gap so far; otherwise None. After a
        gap the rank counts as resyncing until its worker sends `CacheCleared`.
        """
        holder = self._holders.get((event.worker_id, event.rank))
        if holder is None:
            self.counts["unknown_rank" if self._ranks[event.worker_id] else "unknown_worker"] += 1
            return None
        if event.worker_epoch != holder.worker_epoch:
            self.counts["stale_epoch"] += 1
            return None
        expected = holder.last_seq + 1
        seq = event.seq
        if seq < expected:
            self.counts["duplicate"] += 1
            return None
        holder.last_seq = seq
        self.applied[APPLIED[type(event)]] += 1
        if self._changes is not None:
            self._changes.add(event)
        if isinstance(event, BlocksStored):
            parent = event.parent_hash
            if parent is not None and not (
                self._tiers[event.tier].has(holder.bit, parent) or self._has(holder.bit, parent)
            ):
                # Store the block nevertheless: a sequence hash identifies its whole prefix, so the block counts as
                # soon as the blocks before it are stored.
                self.counts["unknown_parent"] += 1
        if missing := self._fold(holder, event):
            self.counts["unknown_block"] += missing
        if self.bits.sweeping:
            self.bits.sweep()
        return self._gap(holder, event, expected) if seq != expected or holder.resync else None

    def apply_store(self, event: StoreEvent) -> None:
        """Apply a change of a shared store.

        If there is no room for the blocks, stores that no worker uses are dropped. If this does not suffice, the event
        has no effect. It is counted in both cases.
        """
        counts, used = self.stores.counts, self._store_of.values()
        if event.store not in used:
            counts["unused"] += 1
        if isinstance(event, StoreBlocksRemoved) and event.stale:
            self.stores.stale_blocks += len(event.sequence_hashes) // U64_BYTES
        dropped = self.stores.dropped_for(event, used)
        if dropped is None:
            counts["full"] += 1
            return
        for name in dropped:
            counts["dropped"] += 1
            self._drop_store(name)
        self.applied[APPLIED[type(event)]] += 1
        if self._changes is not None:
            self._changes.add(event)
        self._forget_store(self.stores.fold(event))

    def resyncing(self) -> list[IndexCursor]:
        """Return the cursors of the ranks whose worker was ordered to re-announce its cache and has not begun yet."""
        return [cursor for cursor in self.cursors() if cursor.resync]

    def overlaps(self, query: Sequence[int]) -> dict[HolderKey, Overlap]:
        """Return how many leading blocks of a prompt each rank has cached. Ranks without such blocks are omitted."""
        return {key: overlap for mask, overlap in self.overlap_groups(query) for key in self.bits.keys_of(mask)}

    def overlap_groups(self, query: Sequence[int]) -> list[tuple[int, Overlap]]:
        """Like `overlaps`, but return the mask of the ranks with each overlap, as in `bits`."""
        device, host, disk = self._tiers.values()
        query = as_block_array(query)
        if host or disk or self.stores.names:
            return list(self._in_all_tiers(query))
        return [(mask, Overlap(depth)) for depth, mask in device.match_depths(query, self.bits.live) if depth]

    def blocks_held(self, worker_id: str, rank: int, tier: Tier) -> int:
        """Return how many blocks a rank has in a tier. Raises KeyError for an unknown rank."""
        return self._tiers[tier].counts.get(self._holders[worker_id, rank].bit, 0)

    def cached(self, key: HolderKey) -> tuple[int, LowerTier | None] | None:
        """Return a rank's device blocks, and the highest lower tier with blocks of it; None for an unknown rank."""
        holder = self._holders.get(key)
        if holder is None:
            return None
        bit, (device, host, disk) = holder.bit, self._tiers.values()
        below: LowerTier | None = "host" if host.counts.get(bit) else "disk" if disk.counts.get(bit) else None
        return device.counts.get(bit, 0), below

    def holders(self) -> list[HolderKey]:
        return sorted(self._holders)

    def digest(self) -> int:
        """Return a 64-bit digest over every rank's epoch, last sequence number, block counts and block sums.

        Without blocks in shared stores it is the same as in versions that knew no such stores.
        """
        tiers = self._tiers.values()
        ranks = digest_of(
            *(
                (
                    key,
                    holder.worker_epoch,
                    holder.last_seq,
                    holder.resync,
                    [(sets.counts.get(holder.bit, 0), sets.sums.get(holder.bit, 0)) for sets in tiers],
                )
                for key, holder in sorted(self._holders.items(), key=_by_key)
            )
        )
        return (ranks + self.stores.digest()) & U64_MASK

    def cursors(self) -> Iterator[IndexCursor]:
        """Yield the sequence number of the last applied event of each rank, in order of (worker id, rank)."""
        for (worker_id, rank), holder in sorted(self._holders.items(), key=_by_key):
            yield IndexCursor(
                worker_id=worker_id,
                rank=rank,
                last_seq=holder.last_seq,
                worker_epoch=holder.worker_epoch,
                resync=holder.resync,
            )

    def begin_scan(self) -> IndexScan:
        """Start to copy all blocks for a snapshot while the index keeps changing.

        Only one scan can be active. The index records events that are applied from now on, for `end_scan`.
        """
        assert self._scan is None, "one scan at a time"
        self._scan = self._new_scan()
        self._changes = ChangeBuffer()
        return self._scan

    def end_scan(self) -> list[RecordedChange]:
        """End a completed scan. Return the changes since `begin_scan`, to restore after the scanned blocks."""
        assert self._scan is not None, "no scan is active"
        assert self._changes is not None, "a scan records changes"
        assert self._scan.done, "the scan is not done"
        changes = self._changes.chunks()
        self._scan = self._changes = None
        return changes

    def snapshot(self) -> Iterator[IndexCursor | ScannedBlocks]:
        """Yield the state as snapshot parts: a cursor per rank, then all blocks. No event may be applied meanwhile."""
        yield from self.cursors()
        scan = self._new_scan()
        while not scan.done:
            yield from scan.advance(1)

    def restore(self, chunk: IndexPart) -> None:
        """Apply one part of a snapshot: first all cursors, then blocks, then changes in order.

        Blocks and changes of ranks without a cursor, or with a cursor of another epoch, are ignored.
        """
        match chunk:
            case IndexCursor():
                self.add_holder(chunk.worker_id, chunk.rank, chunk.worker_epoch)
                holder = self._holders[chunk.worker_id, chunk.rank]
                holder.last_seq, holder.resync = chunk.last_seq, chunk.resync
            case IndexBlocks():
                known = self._holders.get((chunk.worker_id, chunk.rank))
                if known is not None and known.worker_epoch == chunk.worker_epoch:
                    self._tiers[chunk.tier].add(known.bit, array_u64(chunk.sequence_hashes))
            case IndexChanges():
                for event in chunk.events:
                    if not isinstance(event, KvEvent):
                        self.stores.fold(event)
                        continue
                    known = self._holders.get((event.worker_id, event.rank))
                    if known is not None and known.worker_epoch == event.worker_epoch:
                        self._fold(known, event)
            case StoreBlocks():
                self.stores.add(chunk.store, array_u64(chunk.sequence_hashes))
            case StoreDropped():
                self.stores.drop(chunk.store)
            case _:
                assert_never(chunk)

    def _fold(self, holder: _Holder, event: CacheEvent) -> int:
        """Apply an event regardless of its sequence number; return how many blocks to remove were not there."""
        if isinstance(event, BlocksStored):
            self._tiers[event.tier].add(holder.bit, array_u64(event.sequence_hashes), event.parent_hash)
        elif isinstance(event, BlocksRemoved):
            blocks = array_u64(event.sequence_hashes)
            return len(blocks) - self._tiers[event.tier].remove(holder.bit, blocks)
        else:
            self._retire(holder)
            holder.bit = self._take(event.worker_id, event.rank)
        return 0

    def _take(self, worker_id: str, rank: int) -> int:
        self._readers = None
        return self.bits.take((worker_id, rank))

    def _retire(self, holder: _Holder) -> None:
        self._readers = None
        self.bits.retire(holder.bit)
        if self._scan is not None:
            self._scan.forget(holder.bit, TIERS)

    def _drop_store(self, name: str) -> None:
        self._forget_store(self.stores.drop(name))
        if self._changes is not None:
            self._changes.drop(name)

    def _forget_store(self, bit: int) -> None:
        if bit and self._scan is not None:
            self._scan.forget(bit, (STORE,))

    def _new_scan(self) -> IndexScan:
        sources = [
            ScanSource(tier, sets, lambda: self.bits.live, partial(self._part, tier))
            for tier, sets in self._tiers.items()
        ]
        stores = self.stores
        return IndexScan([*sources, ScanSource(STORE, stores.sets, lambda: stores.live, stores.part)])

    def _part(self, tier: Tier, bit: int, hashes: bytearray) -> IndexBlocks:
        worker_id, rank = self.bits.key_of(bit)
        return IndexBlocks(
            worker_id=worker_id,
            rank=rank,
            tier=tier,
            sequence_hashes=bytes(hashes),
            worker_epoch=self._holders[worker_id, rank].worker_epoch,
        )

    def _gap(self, holder: _Holder, event: CacheEvent, expected: int) -> Gap | None:
        missed = event.seq != expected
        if missed:
            self.counts["gap"] += 1
        if isinstance(event, CacheCleared):
            holder.resync = False  # the cache is empty, so missed events no longer matter
        elif missed and not holder.resync:
            holder.resync = True
            return Gap(event.worker_id, event.worker_epoch, event.rank, expected, event.seq)
        return None

    def _has(self, bit: int, block: int) -> bool:
        return any(sets.has(bit, block) for sets in self._tiers.values())

    def _by_depths(self, query: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield the ends of overlaps with device, host and disk, by rising end on the device, and the ranks' mask."""
        device, host, disk = self._tiers.values()
        for on_device, at_device in device.match_depths(query, self.bits.live):
            for on_host, at_host in host.match_depths(query, at_device, on_device):
                for on_disk, at_disk in disk.match_depths(query, at_host, on_host):
                    yield on_device, on_host, on_disk, at_disk

    def _in_all_tiers(self, query: Sequence[int]) -> Iterator[tuple[int, Overlap]]:
        """Yield the overlaps, including the blocks of shared stores, each with the mask of the ranks that have it."""
        stores, masks = self.stores, self._readers_of_stores()
        readers = [(stores.runs(name, query), masks[name]) for name in stores.names if name in masks]
        for on_device, on_host, end, ranks in self._by_depths(query):
            alone = ranks
            for runs, of_store in readers:
                within = ranks & of_store
                alone ^= within
                if within and (blocks := runs.after(end)) + end:
                    yield within, Overlap(on_device, on_host - on_device, end - on_host, blocks)
            if end and alone:
                yield alone, Overlap(on_device, on_host - on_device, end - on_host)

    def _readers_of_stores(self) -> Mapping[str, int]:
        """Return the mask of the ranks that read each shared store, by name, without stores that no rank reads."""
        if self._readers is None:
            self._readers = {}
            for (worker_id, _), holder in self._holders.items():
                if store := self._store_of.get(worker_id):
                    self._readers[store] = self._readers.get(store, 0) | holder.bit
        return self._readers


def _by_key(item: tuple[HolderKey, _Holder]) -> HolderKey:
    return item[0]
