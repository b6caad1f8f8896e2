"""The prefix index beside sets of blocks: caches of workers, shared stores, and snapshots written meanwhile."""

from array import array
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import digest_of_snapshot
from forebay.core.state import holder_bits, index_scan
from forebay.core.state.block_sets import RUN_BLOCKS_MAX, BlockSets, split_bits
from forebay.core.state.holder_bits import RETIRED_BITS_MAX
from forebay.core.state.index_digest import IndexTally
from forebay.core.state.index_scan import SCAN_CHUNK_HASHES, IndexScan, ScannedBlocks
from forebay.core.state.prefix_index import TIERS, Gap, IndexPart, Overlap, PrefixIndex
from forebay.core.state.store_sets import StoreSets
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.kv import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    StoreBlocksAdded,
    StoreBlocksRemoved,
    Tier,
)
from forebay.events.snapshots import IndexBlocks, IndexChanges, SnapshotChunk, StoreBlocks, StoreDropped
from tests.core.worlds import PROMPTS, Driver, joined, pool, request
from tests.depth import examples

RECORD_BYTES_MAX = 1 << 20
STORES = ("r", "s", "t")
WORKERS = ("a", "b", "c", "d")
READS = {"a": "s", "b": "s", "c": "t", "d": ""}
STORES_MAX, STORE_BLOCKS_MAX = 2, 60


def added(store: str, blocks: Any, worker: str = "a") -> StoreBlocksAdded:
    return StoreBlocksAdded(store=store, worker_id=worker, sequence_hashes=pack_u64(blocks))


def removed(store: str, blocks: Any, worker: str = "a", **changes: Any) -> StoreBlocksRemoved:
    return StoreBlocksRemoved(store=store, worker_id=worker, sequence_hashes=pack_u64(blocks), **changes)


class Naive:
    """Workers and stores as sets of blocks, beside the index that they describe."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.stores = StoreSets(STORES_MAX, STORE_BLOCKS_MAX)
        self.stores: dict[str, set[int]] = {}
        self.caches: dict[str, dict[Tier, set[int]]] = {}
        self.epochs: dict[str, int] = {}
        self.seq: dict[str, int] = {}
        self.last: dict[str, CacheEvent] = {}
        self.stale_blocks = 0

    def join(self, worker: str) -> None:
        self.leave(worker)
        self.epochs[worker] = self.epochs.get(worker, 0) + 1
        self.seq[worker] = 0
        self.index.use_store(worker, READS[worker])
        self.index.add_holder(worker, 0, self.epochs[worker])
        self.caches[worker] = {tier: set() for tier in TIERS}

    def leave(self, worker: str) -> None:
        self.index.use_store(worker, "")
        self.index.drop_holder(worker, 0)
        self.caches.pop(worker, None)

    def add_to_store(self, name: str, blocks: list[int], worker: str) -> None:
        self.index.apply_store(added(name, blocks, worker))
        if not blocks:
            return
        used = {READS[worker] for worker in self.caches}
        for other in sorted(self.stores):
            if self._fits(name):
                break
            if other not in used and other != name:
                del self.stores[other]
        if self._fits(name):
            self.stores.setdefault(name, set()).update(blocks)

    def _fits(self, name: str) -> bool:
        return len({*self.stores, name}) <= STORES_MAX and sum(map(len, self.stores.values())) < STORE_BLOCKS_MAX

    def remove_from_store(self, name: str, blocks: list[int], worker: str) -> None:
        is_stale = bool(len(blocks) % 2)
        self.index.apply_store(removed(name, blocks, worker, stale=is_stale))
        self.stale_blocks += is_stale * len(blocks)
        self.stores.get(name, set()).difference_update(blocks)
        self.stores = {name: held for name, held in self.stores.items() if held}

    def cache(self, kind: str, worker: str, tier: Tier, blocks: list[int], parent: int | None) -> None:
        if worker not in self.caches:
            return
        self.seq[worker] += 1
        fields: dict[str, Any] = {"worker_id": worker, "worker_epoch": self.epochs[worker], "seq": self.seq[worker]}
        hashes, held = pack_u64(blocks), self.caches[worker][tier]
        match kind:
            case "store":
                event: CacheEvent = BlocksStored(**fields, sequence_hashes=hashes, parent_hash=parent, tier=tier)
                held.update(blocks)
            case "evict":
                event = BlocksRemoved(**fields, sequence_hashes=hashes, tier=tier)
                held.difference_update(blocks)
            case _:
                event = CacheCleared(**fields)
                self.caches[worker] = {each: set() for each in TIERS}
        self.index.apply(event)
        self.last[worker] = event

    def overlaps(self, query: list[int]) -> dict[tuple[str, int], Overlap]:
        found = {}
        for worker, tiers in self.caches.items():
            ends = [0]
            for held in (*tiers.values(), self.stores.get(READS[worker], set())):
                at = ends[-1]
                while at < len(query) and query[at] in held:
                    at += 1
                ends.append(at)
            overlap = Overlap(*(end - start for start, end in pairwise(ends)))
            if any(overlap):
                found[worker, 0] = overlap
        return found

    def perform(self, action: tuple[str, str, str, Tier, list[int], int | None]) -> None:
        kind, worker, store, tier, blocks, parent = action
        match kind:
            case "join":
                self.join(worker)
            case "leave":
                self.leave(worker)
            case "lose all":
                for name in WORKERS:
                    self.leave(name)
            case "add":
                self.add_to_store(store, blocks, worker)
            case "remove":
                self.remove_from_store(store, blocks, worker)
            case "again":
                before = self.index.digest()
                for event in self.last.values():
                    self.index.apply(event)
                assert self.index.digest() == before, "an event that is delivered again changes nothing"
            case _:
                self.cache(kind, worker, tier, blocks, parent)


BLOCKS = st.integers(1, 100)


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """Blocks in order, mostly, with pieces cut out."""
    if draw(st.integers(0, 3)):
        start = draw(st.integers(1, 90))
        holes = draw(st.sets(BLOCKS, max_size=3))
        return [block for block in range(start, min(101, start + draw(st.integers(1, 50)))) if block not in holes]
    return draw(st.lists(BLOCKS, max_size=12))


actions = st.tuples(
    st.sampled_from(
        ["store"] * 6 + ["evict"] * 3 + ["add", "join"] * 3 + ["remove"] * 2 + ["clear", "leave", "lose all", "again"]
    ),
    st.sampled_from(WORKERS),
    st.sampled_from(STORES),
    st.sampled_from(["device"] * 3 + ["host", "disk"]),
    stretches(),
    st.none() | BLOCKS,
)
queries = st.lists(stretches() | st.just(list(range(1, 101))), min_size=1, max_size=3)


def copy_of(index: PrefixIndex, parts: Iterable[IndexPart]) -> PrefixIndex:
    found = PrefixIndex()
    for worker, _ in index.holders():
        found.use_store(worker, READS.get(worker, ""))
    for part in parts:
        found.restore(part)
    return found


def contents(index: PrefixIndex) -> dict[tuple[str, ...], set[int]]:
    """Return the blocks of each worker and tier, and of each store."""
    held: dict[tuple[str, ...], set[int]] = {}
    for part in index.snapshot():
        if isinstance(part, IndexBlocks | StoreBlocks):
            key = (part.worker_id, part.tier) if isinstance(part, IndexBlocks) else (part.store,)
            held.setdefault(key, set()).update(unpack_u64(part.sequence_hashes))
    return held


def expected(naive: Naive) -> dict[tuple[str, ...], set[int]]:
    held: dict[tuple[str, ...], set[int]] = {(name,): blocks for name, blocks in naive.stores.items()}
    for worker, tiers in naive.caches.items():
        held.update({(worker, tier): blocks for tier, blocks in tiers.items() if blocks})
    return held


@examples(3)
@given(st.lists(actions, max_size=40), queries)
def test_the_index_agrees_with_sets_of_blocks(history: list[Any], asked: list[list[int]]) -> None:
    naive = Naive()
    for action in history:
        naive.perform(action)
        assert naive.index.stores.sizes() == {name: len(held) for name, held in sorted(naive.stores.items())}
    assert contents(naive.index) == expected(naive)
    assert naive.index.stores.stale_blocks == naive.stale_blocks
    for worker, tiers in naive.caches.items():
        assert {tier: naive.index.blocks_held(worker, 0, tier) for tier in TIERS} == {
            tier: len(held) for tier, held in tiers.items()
        }
    restored = copy_of(naive.index, naive.index.snapshot())
    assert restored.digest() == naive.index.digest()
    for query in asked:
        assert naive.index.overlaps(query) == naive.overlaps(query) == restored.overlaps(array("Q", query))


@examples(4)
@given(st.lists(actions, max_size=15), st.lists(actions | st.integers(1, 400), max_size=40), queries)
def test_a_scan_and_its_changes_give_the_final_state(
    before: list[Any], during: list[Any], asked: list[list[int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_bits, "RETIRED_BITS_MAX", 1)  # so that bits are swept and given out again meanwhile
        patch.setattr(holder_bits, "SWEEP_STEPS", 3)
        patch.setattr(index_scan, "SCAN_CHUNK_HASHES", 40)
        patch.setattr(index_scan, "REMEMBERED_MASKS_MAX", 2)
        naive = Naive()
        for name in WORKERS:
            naive.join(name)
        for action in before:
            naive.perform(action)
        scan = naive.index.begin_scan()
        seen: list[ScannedBlocks] = []
        for step in during:
            if isinstance(step, int):
                seen += scan.advance(step)
            else:
                naive.perform(step)
        while not scan.done:
            seen += scan.advance(50)
        parts: list[IndexPart] = [*naive.index.cursors(), *seen, *naive.index.end_scan()]
        restored, tally = copy_of(naive.index, parts), IndexTally()
        nobody = IndexBlocks(worker_id="nobody", rank=0, tier="device", sequence_hashes=pack_u64([1]), worker_epoch=1)
        for part in (*parts, nobody):
            tally.restore(part)
        assert restored.digest() == tally.digest() == naive.index.digest()
        assert contents(restored) == expected(naive)
        assert restored.holders() == naive.index.holders()
        assert not restored.counts
        for query in asked:
            assert restored.overlaps(query) == naive.overlaps(query)


def test_foreign_outdated_and_missing_events_are_counted() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    for foreign in ({"worker_id": "z"}, {"worker_epoch": 4}, {"worker_epoch": 6}, {"rank": 1}):
        index.apply(stored(1, 1, 2, **foreign))
    assert index.overlaps([1]) == {}
    for _ in range(2):
        index.apply(stored(1, 1, 2))
    index.apply(stored(4, 4, parent_hash=3))
    index.apply(stored(5, 5, parent_hash=4))
    index.apply(BlocksRemoved(worker_id="a", worker_epoch=5, seq=6, sequence_hashes=pack_u64([77])))
    assert index.counts == {
        "unknown_worker": 1, "unknown_rank": 1, "stale_epoch": 2, "duplicate": 1, "gap": 1, "unknown_parent": 1,
        "unknown_block": 1,
    }  # fmt: skip
    assert index.overlaps([1, 2, 3, 4, 5]) == {("a", 0): Overlap(2)}
    assert index.holders() == [("a", 0)]
    assert index.overlaps([]) == {}
    assert PrefixIndex().overlaps([1]) == {}
    index.drop_holder("a", 0)
    index.apply(stored(7, 1, 2))
    assert index.counts["unknown_worker"] == 2


def stored(seq: int, *blocks: int, **changes: Any) -> BlocksStored:
    fields: dict[str, Any] = {"worker_id": "a", "worker_epoch": 5, "seq": seq, **changes}
    return BlocksStored(sequence_hashes=pack_u64(blocks), **fields)


def cleared(seq: int, rank: int = 0) -> CacheCleared:
    return CacheCleared(worker_id="a", worker_epoch=5, rank=rank, seq=seq)


def test_a_gap_is_reported_once_and_ends_with_the_next_clear() -> None:
    index = PrefixIndex()
    for rank in (1, 0):
        index.add_holder("a", rank, 5)
    before = index.digest()
    assert index.apply(stored(2, 1)) == Gap("a", 5, 0, expected_seq=1, found_seq=2)
    assert index.overlaps([1]) == {("a", 0): Overlap(1)}
    waiting = index.digest()
    assert index.apply(stored(5, 2)) is None
    assert index.counts["gap"] == 2
    assert index.apply(stored(7, 3, rank=1)) == Gap("a", 5, 1, expected_seq=1, found_seq=7)
    assert [(one.rank, one.last_seq) for one in index.resyncing()] == [(0, 5), (1, 7)]
    assert index.apply(cleared(6)) is None
    assert [(one.rank, one.last_seq) for one in index.resyncing()] == [(1, 7)]
    assert index.overlaps([1, 2, 3]) == {}
    assert index.overlaps([3]) == {("a", 1): Overlap(1)}
    assert index.apply(stored(8, 9)) == Gap("a", 5, 0, expected_seq=7, found_seq=8)
    assert len({before, waiting, index.digest()}) == 3


def test_events_missed_before_a_clear_do_not_matter() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    assert index.apply(cleared(3)) is None
    assert (index.counts, index.resyncing()) == ({"gap": 1}, [])


def test_a_worker_is_known_as_long_as_one_of_its_ranks_is() -> None:
    index = PrefixIndex()
    for rank in (0, 1):
        index.add_holder("a", rank, 5)
    for rank in (0, 1):
        index.drop_holder("a", rank)
        index.apply(stored(1, 1, rank=rank))
    assert index.counts == {"unknown_rank": 1, "unknown_worker": 1}
    assert index.overlaps([1]) == {}


def filled(workers: int, blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for name in [f"w{number}" for number in range(workers)]:
        index.add_holder(name, 0, 1)
        index.apply(stored(1, *range(1, blocks + 1), worker_id=name, worker_epoch=1))
    return index


def test_a_scan_step_stays_within_its_budget() -> None:
    index = filled(workers=4, blocks=5_000)
    walk = index.begin_scan()
    most = [sum(len(chunk.sequence_hashes) // 8 for chunk in walk.advance(1_000)) for _ in range(60)]
    assert walk.done
    assert max(most) == 5_000
    assert sum(bool(size) for size in most) == 4


def test_chunks_stay_small() -> None:
    index = filled(workers=2, blocks=3 * SCAN_CHUNK_HASHES)
    walk = index.begin_scan()
    chunks: list[ScannedBlocks] = []
    while not walk.done:
        chunks += walk.advance(10_000)
    assert sum(len(chunk.sequence_hashes) for chunk in chunks) == 2 * 3 * SCAN_CHUNK_HASHES * 8
    assert max(len(chunk.sequence_hashes) for chunk in chunks) <= SCAN_CHUNK_HASHES * 8


def test_changes_stay_below_the_size_of_a_record_and_leave_out_the_engines_own_hashes() -> None:
    index = PrefixIndex()
    index.add_holder("w" * 256, 0, 1)
    index.begin_scan().advance(1_000)
    fields: dict[str, Any] = {"worker_id": "w" * 256, "worker_epoch": 1}
    hashes = pack_u64(range(1 << 63, (1 << 63) + 150_000))
    index.apply(BlocksStored(**fields, seq=1, sequence_hashes=hashes, engine_hashes=hashes, parent_hash=1 << 63))
    for seq in range(2, 2_000):
        index.apply(BlocksRemoved(**fields, seq=seq, sequence_hashes=hashes[seq * 8 : seq * 8 + 8]))
    index.apply(BlocksRemoved(**fields, seq=2_000, sequence_hashes=hashes[:-800], engine_hashes=hashes))
    kept = index.end_scan()
    records = [msgspec.msgpack.encode(SnapshotChunk(owner_epoch=1, number=1, parts=(chunk,))) for chunk in kept]
    assert max(map(len, records)) < RECORD_BYTES_MAX
    assert sum(map(len, records)) < 4_000_000
    restored = copy_of(index, [*index.cursors(), *kept])
    assert restored.digest() == index.digest()
    assert restored.blocks_held("w" * 256, 0, "device") == 100


def test_only_one_scan_is_active() -> None:
    index = filled(workers=1, blocks=100)
    walk = index.begin_scan()
    with pytest.raises(AssertionError, match="one scan at a time"):
        index.begin_scan()
    with pytest.raises(AssertionError, match="not done"):
        index.end_scan()
    while not walk.done:
        walk.advance(1)
    index.end_scan()
    with pytest.raises(AssertionError, match="no scan is active"):
        index.end_scan()
    index.apply(stored(2, *range(101, 201), worker_id="w0", worker_epoch=1))
    again = index.begin_scan()
    (chunk,) = again.advance(100_000)
    assert unpack_u64(chunk.sequence_hashes) == list(range(1, 201))  # in order: nothing is left of the first walk
    assert index.end_scan() == []


def test_blocks_stored_during_a_scan_do_not_prolong_it() -> None:
    def calls(growing: bool) -> int:
        index = filled(workers=1, blocks=2_000)
        walk: IndexScan = index.begin_scan()
        made = 0
        while not walk.done:
            walk.advance(200)
            made += 1
            if growing:
                blocks = range(made * 10_000, made * 10_000 + 300)
                index.apply(stored(made + 1, *blocks, worker_id="w0", worker_epoch=1))
        index.end_scan()
        return made

    assert calls(growing=True) == calls(growing=False)


def test_a_new_holder_has_none_of_the_blocks_of_the_one_before() -> None:
    index = PrefixIndex()
    names = [f"w{number}" for number in range(9)]
    for at, name in enumerate(names):
        index.add_holder(name, 0, 1)
        index.apply(stored(1, *range(1, 10 - at), worker_id=name, worker_epoch=1))
    for _ in range(2):
        for block in range(1, 10):
            assert set(index.overlaps([block])) == {(name, 0) for name in names[: 10 - block]}
    index.drop_holder("w0", 0)
    index.add_holder("v", 0, 1)
    assert set(index.overlaps([1])) == {(name, 0) for name in names[1:]}


def test_without_blocks_in_stores_the_digest_is_as_before() -> None:
    index, plain = PrefixIndex(), PrefixIndex()
    for one in (index, plain):
        one.add_holder("a", 0, 1)
    index.use_store("a", "s")
    index.apply_store(added("s", [1, 2]))
    assert index.digest() != plain.digest()
    index.apply_store(removed("s", [2, 1, 3]))
    assert index.digest() == plain.digest()
    assert [*index.snapshot()] == [*plain.snapshot()]


def test_a_store_that_no_worker_uses_makes_room_and_a_used_one_does_not() -> None:
    index = PrefixIndex()
    index.stores = StoreSets(stores_max=2, blocks_max=6)
    index.use_store("a", "s")
    for name in ("s", "old", "new"):
        index.apply_store(added(name, [1, 2]))
    assert index.stores.sizes() == {"new": 2, "s": 2}
    assert index.stores.counts == {"unused": 2, "dropped": 1}
    index.use_store("b", "new")
    index.apply_store(added("other", [1]))
    assert index.stores.sizes() == {"new": 2, "s": 2}
    assert index.stores.counts["full"] == 1
    index.apply_store(added("s", range(1, 7)))
    index.apply_store(added("s", [7]))
    assert index.stores.sizes() == {"new": 2, "s": 6}, (
        "one event may exceed the limit of blocks, the next has no effect"
    )
    index.apply_store(removed("s", range(1, 5)))
    index.apply_store(added("s", [7]))
    assert index.stores.sizes() == {"new": 2, "s": 3}


def test_bits_of_emptied_stores_are_used_again() -> None:
    index = PrefixIndex()
    for number in range(3 * RETIRED_BITS_MAX):
        index.apply_store(added(f"s{number}", range(number, number + 40)))
        index.apply_store(removed(f"s{number}", range(number, number + 40)))
    index.apply_store(added("last", [1]))
    assert index.stores.live.bit_length() <= 2 * RETIRED_BITS_MAX + 2
    assert contents(index) == {("last",): {1}}


def test_a_store_dropped_during_a_scan_is_recorded() -> None:
    index = PrefixIndex()
    index.stores = StoreSets(stores_max=1)
    index.apply_store(added("old", [1]))
    scan = index.begin_scan()
    index.apply_store(added("old", [2]))
    index.apply_store(added("new", [3]))
    seen: list[IndexPart] = [*scan.advance(1_000)]
    kept = index.end_scan()
    assert [type(one) for one in kept] == [IndexChanges, StoreDropped, IndexChanges]
    assert contents(copy_of(index, [*seen, *kept])) == {("new",): {3}}
    assert contents(copy_of(index, [StoreDropped(store="old"), *kept])) == {("new",): {3}}
    tally = IndexTally()
    for part in (*seen, *kept, IndexChanges(events=(stored(1, 9, worker_id="nobody"),))):
        tally.restore(part)
    assert tally.digest() == index.digest()


def test_changes_of_a_store_stay_below_the_size_of_a_record() -> None:
    index, name = PrefixIndex(), "s" * 256
    index.begin_scan().advance(1_000)
    index.apply_store(added(name, range(1, 150_000)))
    for block in range(1, 2_000):
        index.apply_store(removed(name, [block], "w" * 256))
    kept = index.end_scan()
    records = [msgspec.msgpack.encode(SnapshotChunk(owner_epoch=1, number=1, parts=(part,))) for part in kept]
    assert max(map(len, records)) < RECORD_BYTES_MAX
    assert copy_of(index, [*kept]).digest() == index.digest()


def test_a_store_survives_the_loss_of_all_workers_and_a_snapshot() -> None:
    drive = Driver()
    drive("control", pool())
    for slot, name in enumerate("ab"):
        drive("fleet", joined(name, slot, kv_store="s"))
    drive("kv-events", added("s", PROMPTS[0]))
    for name in "ab":
        drive.lose(name)
    assert drive.world.index.stores.counts == {}
    drive("kv-events", removed("s", PROMPTS[0][7:], "b"))
    assert drive.world.index.stores.counts == {"unused": 1}
    other = drive.copy()
    assert drive.world.digest() == digest_of_snapshot([*drive.world.snapshot()])
    other("fleet", joined("new", 0, kv_store="s"))
    (routed,) = other("requests", request("r", PROMPTS[0]))
    assert (routed.worker_id, routed.terms.device_overlap, routed.terms.store_overlap) == ("new", 0, 7)


# Sets of blocks: runs are cut and joined, answers stay exact


@st.composite
def any_stretches(draw: st.DrawFn) -> list[int]:
    """Blocks in order, or against it, more than a run may have, with holes; or anything, with repetitions."""
    if draw(st.integers(0, 3)):
        start = draw(st.integers(1, 250))
        holes = draw(st.sets(st.integers(1, 300), max_size=4))
        blocks = [block for block in range(start, min(301, start + draw(st.integers(1, 100)))) if block not in holes]
        return blocks[:: draw(st.sampled_from([1, 1, -1]))]
    return draw(st.lists(st.integers(1, 300), max_size=20))


changes = st.tuples(st.integers(0, 4), st.booleans(), any_stretches(), st.none() | st.integers(1, 300))


def blocks_of(sets: BlockSets, bit: int) -> list[int]:
    """What a cursor sees of one holder."""
    cursor = sets.cursor()
    seen: list[int] = []
    while (run := sets.next_run(cursor)) is not None:
        seen += run.blocks if run.mask & bit else []
    sets.release(cursor)
    return sorted(seen)


@examples(2)
@given(st.lists(changes, max_size=25), any_stretches())
def test_block_sets_equal_plain_sets(operations: list[Any], query: list[int]) -> None:
    sets = BlockSets()
    plain: list[set[int]] = [set() for _ in range(5)]
    for holder, stores, blocks, parent in operations:
        if stores:
            assert sets.add(1 << holder, blocks, parent) == len(set(blocks) - plain[holder])
            plain[holder].update(blocks)
        else:
            assert sets.remove(1 << holder, blocks) == len(set(blocks) & plain[holder])
            plain[holder].difference_update(blocks)
    for holder, held in enumerate(plain):
        assert blocks_of(sets, 1 << holder) == sorted(held)
        assert sets.counts.get(1 << holder, 0) == len(held)
        assert sets.sums.get(1 << holder, 0) == sum(held)
        assert all(sets.has(1 << holder, block) == (block in held) for block in range(1, 301))
    assert len(sets) == len(set().union(*plain))
    for blocks_looked_up in (query, list(range(1, 301))):
        depths = {
            bit: depth for depth, mask in sets.match_depths(blocks_looked_up, 0b11111) for bit in split_bits(mask)
        }
        for holder, held in enumerate(plain):
            expected = next(
                (at for at, block in enumerate(blocks_looked_up) if block not in held), len(blocks_looked_up)
            )
            assert depths[1 << holder] == expected


def runs_of(sets: BlockSets) -> list[list[int]]:
    """The runs, in the order of the ring."""
    cursor = sets.cursor()
    runs: list[list[int]] = []
    while (run := sets.next_run(cursor)) is not None:
        runs.append(run.blocks.tolist())
    sets.release(cursor)
    return runs


def test_blocks_that_arrive_one_by_one_form_runs() -> None:
    sets = BlockSets()
    for block in range(1, 71):
        sets.add(1, [block], block - 1 or None)
    runs = [list(range(1, 33)), list(range(33, 65)), list(range(65, 71))]
    assert runs_of(sets) == runs
    for block in range(1, 71):
        sets.add(2, [block], block - 1 or None)
    assert sorted(runs_of(sets)) == runs


def test_retired_bits_are_swept_incrementally() -> None:
    sets = BlockSets()
    for number in range(6):
        sets.add(1 << (number % 2), range(number * RUN_BLOCKS_MAX, (number + 1) * RUN_BLOCKS_MAX))
    sets.retire(1)
    sets.begin_sweep()
    sizes = []
    while not sets.sweep(1, 1):
        sizes.append(len(sets))
    assert sizes == [size * RUN_BLOCKS_MAX for size in (5, 5, 4, 4, 3, 3)]
    assert sets.sweep(1, 7) == 7
    assert blocks_of(sets, 2) == [*range(32, 64), *range(96, 128), *range(160, 192)]


def test_blocks_evicted_by_one_of_two_holders_stay_one_run() -> None:
    sets = BlockSets()
    for bit in (1, 2):
        sets.add(bit, range(1, 31))
    for block in range(30, 10, -1):
        sets.remove(1, [block])
    assert runs_of(sets) == [list(range(1, 11)), list(range(11, 31))]


def test_many_clears_and_losses_are_swept_and_forgotten() -> None:
    naive = Naive()
    for name in WORKERS:
        naive.join(name)
    for number in range(RETIRED_BITS_MAX * 3):
        for worker in WORKERS:
            naive.cache("store", worker, "device", list(range(1, 10)), None)
        worker = WORKERS[number % 4]
        if number % 2:
            naive.cache("clear", worker, "device", [], None)
        else:
            naive.join(worker)
        assert naive.index.overlaps(range(1, 12)) == naive.overlaps(list(range(1, 12)))


def test_holders_that_leave_a_prompt_at_different_depths_are_told_apart() -> None:
    index = PrefixIndex()
    for worker, depth in (("a", 9), ("b", 5), ("c", 5), ("d", 2), ("e", 0)):
        index.add_holder(worker, 0, 5)
        hashes = pack_u64(range(1, depth + 1))
        index.apply(BlocksStored(worker_id=worker, worker_epoch=5, seq=1, sequence_hashes=hashes))
    depths = {("a", 0): Overlap(9), ("b", 0): Overlap(5), ("c", 0): Overlap(5), ("d", 0): Overlap(2)}
    assert index.overlaps(range(1, 20)) == depths


def test_several_stores_make_room_if_one_is_not_enough() -> None:
    index = PrefixIndex()
    index.stores = StoreSets(blocks_max=6)
    index.use_store("a", "s")
    for name, blocks in (("b", [1]), ("c", [2]), ("s", [1, 2, 3, 4])):
        index.apply_store(added(name, blocks))
    index.apply_store(added("s", [5, 6, 7]))
    assert index.stores.sizes() == {"c": 1, "s": 7}
    index.apply_store(added("s", [8]))
    assert index.stores.sizes() == {"s": 7, "c": 1}, "dropping the other store would not make room either"


def test_an_open_cursor_follows_the_split_and_the_removal_of_its_run() -> None:
    sets = BlockSets()
    sets.add(1, [1, 2, 3, 4])
    cursor = sets.cursor()
    sets.add(2, [1, 2])
    first = sets.next_run(cursor)
    assert first is not None and list(first.blocks) == [1, 2]
    sets.remove(1, [3, 4])
    assert sets.next_run(cursor) is None
    sets.release(cursor)
