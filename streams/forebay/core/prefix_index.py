"""Which worker ranks hold which prompt prefixes, by tier: a fold over the topic `kv-events`.

Theory of operation. Every admitted (worker, rank) is a holder with a bit. Clearing or losing a holder
retires its bit at once and in constant time; the masks are swept when enough bits have been retired.
Each holder's events carry a dense sequence number: lower ones are redeliveries and change nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, assert_never, get_args

from xxhash import xxh3_64_intdigest

from forebay.core.block_sets import BlockSets
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored, CacheCleared, Tier
from forebay.events.snapshots import CHUNK_HASHES_MAX, IndexBlocks, IndexCursor

RETIRED_BITS_MAX = 64  # bounds the width of the masks; a sweep walks every block, so it must be rare
TIERS: tuple[Tier, ...] = get_args(Tier)
DIGIT_VALUES = bytes.maketrans(b"01", b"\0\1")

HolderKey = tuple[str, int]


class Overlap(NamedTuple):
    """Blocks of a query found at one holder: a prefix on the device, then on the host, then on disk."""

    device: int = 0
    host: int = 0
    disk: int = 0


NO_OVERLAP = Overlap()


@dataclass(slots=True)
class _Holder:
    bit: int
    worker_epoch: int
    last_seq: int = 0


class PrefixIndex:
    """The index. `counts` are diagnostics and no part of the state."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._holders: dict[HolderKey, _Holder] = {}
        self._keys: list[HolderKey] = []  # by bit, lowest first; what a retired bit was stays until it is taken
        self._tiers: dict[Tier, BlockSets] = {tier: BlockSets() for tier in TIERS}
        self._live = 0
        self._retired = 0

    def add_holder(self, worker_id: str, rank: int, worker_epoch: int) -> None:
        """Admit a rank with an empty cache, in place of any earlier epoch of it."""
        self.drop_holder(worker_id, rank)
        self._holders[worker_id, rank] = _Holder(self._take_bit(worker_id, rank), worker_epoch)

    def drop_holder(self, worker_id: str, rank: int) -> None:
        """A rank is gone, and all it held with it. Unknown ranks are none to drop."""
        holder = self._holders.pop((worker_id, rank), None)
        if holder is not None:
            self._retire(holder.bit)

    def apply(self, event: AnyKvEvent) -> None:
        """Fold one event. Redelivered, foreign and outdated ones are counted and change nothing."""
        holder = self._holders.get((event.worker_id, event.rank))
        if holder is None:
            self.counts["unknown_worker"] += 1
            return
        if event.worker_epoch != holder.worker_epoch:
            self.counts["stale_epoch"] += 1
            return
        if event.seq <= holder.last_seq:
            self.counts["duplicate"] += 1
            return
        if event.seq > holder.last_seq + 1:
            self.counts["gap"] += 1
        holder.last_seq = event.seq
        match event:
            case BlocksStored():
                self._store(holder.bit, event)
            case BlocksRemoved():
                blocks = unpack_u64(event.sequence_hashes)
                removed = self._tiers[event.tier].remove(holder.bit, blocks)
                self.counts["unknown_block"] += len(blocks) - removed
            case CacheCleared():
                self._retire(holder.bit)
                holder.bit = self._take_bit(event.worker_id, event.rank)
            case _:
                assert_never(event)

    def overlaps(self, query: Sequence[int]) -> dict[HolderKey, Overlap]:
        """What each holder has of a prompt's blocks; holders with nothing are left out."""
        device, host, disk = (self._tiers[tier] for tier in TIERS)
        found: dict[HolderKey, Overlap] = {}
        for on_device, at_device in device.drops(query, self._live):
            for on_host, at_host in host.drops(query, at_device, on_device):
                for on_disk, at_disk in disk.drops(query, at_host, on_host):
                    if on_disk:
                        overlap = Overlap(on_device, on_host - on_device, on_disk - on_host)
                        found.update(dict.fromkeys(self._keys_of(at_disk), overlap))
        return found

    def blocks_held(self, worker_id: str, rank: int, tier: Tier) -> int:
        """How many blocks a rank holds in a tier. Raises KeyError for an unknown rank."""
        return self._tiers[tier].counts.get(self._holders[worker_id, rank].bit, 0)

    def holders(self) -> list[HolderKey]:
        """Every admitted rank, in order."""
        return sorted(self._holders)

    def digest(self) -> int:
        """64 bits over every holder's epoch, cursor, block counts and block sums."""
        parts: list[str] = []
        for (worker_id, rank), holder in sorted(self._holders.items()):
            sums = ((sets.counts.get(holder.bit, 0), sets.sums.get(holder.bit, 0)) for sets in self._tiers.values())
            parts.append(f"{worker_id}\0{rank}\0{holder.worker_epoch}\0{holder.last_seq}\0{list(sums)}")
        return xxh3_64_intdigest("\n".join(parts).encode())

    def snapshot(self) -> Iterator[IndexCursor | IndexBlocks]:
        """A cursor for each holder, then its blocks, tier by tier."""
        for (worker_id, rank), holder in sorted(self._holders.items()):
            yield IndexCursor(
                worker_id=worker_id, rank=rank, last_seq=holder.last_seq, worker_epoch=holder.worker_epoch
            )
            for tier, sets in self._tiers.items():
                blocks = sets.blocks_of(holder.bit)
                for start in range(0, len(blocks), CHUNK_HASHES_MAX):
                    packed = pack_u64(blocks[start : start + CHUNK_HASHES_MAX])
                    yield IndexBlocks(worker_id=worker_id, rank=rank, tier=tier, sequence_hashes=packed)

    def restore(self, chunk: IndexCursor | IndexBlocks) -> None:
        """Take in one chunk of a snapshot, in the order of `snapshot`."""
        match chunk:
            case IndexCursor():
                self.add_holder(chunk.worker_id, chunk.rank, chunk.worker_epoch)
                self._holders[chunk.worker_id, chunk.rank].last_seq = chunk.last_seq
            case IndexBlocks():
                bit = self._holders[chunk.worker_id, chunk.rank].bit
                self._tiers[chunk.tier].add(bit, unpack_u64(chunk.sequence_hashes))
            case _:
                assert_never(chunk)

    def _store(self, bit: int, event: BlocksStored) -> None:
        sets = self._tiers[event.tier]
        parent = event.parent_hash
        if parent is not None and not (sets.has(bit, parent) or self._has(bit, parent)):
            # Kept all the same: a sequence hash names its whole prefix, so the block counts as soon as
            # the blocks before it are there.
            self.counts["unknown_parent"] += 1
        sets.add(bit, unpack_u64(event.sequence_hashes), parent)

    def _has(self, bit: int, block: int) -> bool:
        return any(sets.has(bit, block) for sets in self._tiers.values())

    def _keys_of(self, mask: int) -> Iterator[HolderKey]:
        digits = f"{mask:b}"[::-1]
        return compress(self._keys, digits.encode().translate(DIGIT_VALUES))

    def _take_bit(self, worker_id: str, rank: int) -> int:
        taken = self._live | self._retired
        bit = ~taken & (taken + 1)
        at = bit.bit_length() - 1
        self._keys[at : at + 1] = [(worker_id, rank)]
        self._live |= bit
        return bit

    def _retire(self, bit: int) -> None:
        for sets in self._tiers.values():
            sets.retire(bit)
        self._live ^= bit
        self._retired |= bit
        if self._retired.bit_count() > RETIRED_BITS_MAX:
            for sets in self._tiers.values():
                sets.sweep(self._retired)
            self._retired = 0
