"""Shared stores as holders of the prefix index: any order of several writers, with any coming and going of workers."""

from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import digest_of_snapshot, restore
from forebay.core.state import holder_bits, index_scan
from forebay.core.state.holder_bits import RETIRED_BITS_MAX
from forebay.core.state.index_digest import IndexTally
from forebay.core.state.index_scan import ScannedBlocks
from forebay.core.state.prefix_index import TIERS, IndexPart, Overlap, PrefixIndex
from forebay.core.state.store_sets import StoreSets
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.fleet import WorkerLost
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, StoreBlocksAdded, StoreBlocksRemoved, Tier
from forebay.events.snapshots import IndexChanges, SnapshotChunk, StoreBlocks, StoreDropped
from tests.core.worlds import PROMPTS, Driver, joined, pool, request
from tests.depth import examples

RECORD_BYTES_MAX = 1 << 20
STORES = ("r", "s", "t")
WORKERS = ("a", "b", "c", "d")
READS = {"a": "s", "b": "s", "c": "t", "d": ""}
STORES_MAX, BLOCKS_MAX = 2, 25


def added(store: str, blocks: Any, worker: str = "a") -> StoreBlocksAdded:
    return StoreBlocksAdded(store=store, worker_id=worker, sequence_hashes=pack_u64(blocks))


def removed(store: str, blocks: Any, worker: str = "a", **changes: Any) -> StoreBlocksRemoved:
    return StoreBlocksRemoved(store=store, worker_id=worker, sequence_hashes=pack_u64(blocks), **changes)


class Naive:
    """Workers and stores as sets of blocks, beside the index that they describe."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.stores = StoreSets(STORES_MAX, BLOCKS_MAX)
        self.stores: dict[str, set[int]] = {}
        self.caches: dict[str, dict[Tier, set[int]]] = {}
        self.epochs: dict[str, int] = {}
        self.epoch = 0
        self.seq = 0

    def join(self, worker: str) -> None:
        self.leave(worker)
        self.epoch += 1
        self.index.use_store(worker, READS[worker])
        self.index.add_holder(worker, 0, self.epoch)
        self.caches[worker] = {tier: set() for tier in TIERS}
        self.epochs[worker] = self.epoch

    def leave(self, worker: str) -> None:
        self.index.use_store(worker, "")
        self.index.drop_holder(worker, 0)
        self.caches.pop(worker, None)

    def store(self, name: str, blocks: list[int]) -> None:
        self.index.apply_store(added(name, blocks))
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
        return len({*self.stores, name}) <= STORES_MAX and sum(map(len, self.stores.values())) < BLOCKS_MAX

    def unstore(self, name: str, blocks: list[int]) -> None:
        self.index.apply_store(removed(name, blocks, stale=bool(len(blocks) % 2)))
        self.stores.get(name, set()).difference_update(blocks)
        self.stores = {name: held for name, held in self.stores.items() if held}

    def cache(self, worker: str, tier: Tier, blocks: list[int], kind: int) -> None:
        if worker not in self.caches:
            return
        self.seq += 1
        fields: dict[str, Any] = {"worker_id": worker, "worker_epoch": self.epochs[worker], "seq": self.seq}
        self.index.apply(CacheCleared(**fields))
        self.seq += 1
        fields["seq"] = self.seq
        self.caches[worker] = {each: set() for each in TIERS}
        if kind:
            self.index.apply(BlocksStored(**fields, sequence_hashes=pack_u64(blocks), tier=tier))
            self.caches[worker][tier].update(blocks)
        else:
            self.index.apply(BlocksRemoved(**fields, sequence_hashes=pack_u64(blocks), tier=tier))

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

    def perform(self, action: tuple[str, str, str, list[int], int]) -> None:
        kind, worker, store, blocks, number = action
        match kind:
            case "join":
                self.join(worker)
            case "leave":
                self.leave(worker)
            case "lose all":
                for name in WORKERS:
                    self.leave(name)
            case "add":
                self.store(store, blocks)
            case "remove":
                self.unstore(store, blocks)
            case _:
                self.cache(worker, TIERS[number % 3], blocks, number % 4)


runs = st.tuples(st.integers(1, 12), st.integers(0, 12)).map(lambda ends: list(range(ends[0], ends[1] + 1)))
actions = st.tuples(
    st.sampled_from(["add"] * 4 + ["remove"] * 3 + ["cache"] * 3 + ["join", "join", "leave", "lose all"]),
    st.sampled_from(WORKERS),
    st.sampled_from(STORES),
    runs | st.lists(st.integers(1, 12), max_size=5),
    st.integers(0, 11),
)
queries = st.lists(runs, min_size=1, max_size=3)


def copy_of(index: PrefixIndex, parts: list[IndexPart]) -> PrefixIndex:
    found = PrefixIndex()
    for worker, _ in index.holders():
        found.use_store(worker, READS[worker])
    for part in parts:
        found.restore(part)
    return found


def contents(index: PrefixIndex) -> dict[str, set[int]]:
    held: dict[str, set[int]] = {}
    for part in index.snapshot():
        if isinstance(part, StoreBlocks):
            held.setdefault(part.store, set()).update(unpack_u64(part.sequence_hashes))
    return held


@examples(4)
@given(st.lists(actions, max_size=40), queries)
def test_the_index_agrees_with_sets_of_blocks(history: list[Any], asked: list[list[int]]) -> None:
    naive = Naive()
    for action in history:
        naive.perform(action)
        assert naive.index.stores.sizes() == {name: len(held) for name, held in sorted(naive.stores.items())}
    assert contents(naive.index) == naive.stores
    restored = copy_of(naive.index, [*naive.index.snapshot()])
    assert restored.digest() == naive.index.digest()
    for query in asked:
        assert naive.index.overlaps(query) == naive.overlaps(query) == restored.overlaps(array("Q", query))


@examples(4)
@given(st.lists(actions, max_size=15), st.lists(actions | st.integers(1, 200), max_size=40), queries)
def test_a_scan_and_its_changes_give_the_final_state(
    before: list[Any], during: list[Any], asked: list[list[int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_bits, "RETIRED_BITS_MAX", 1)  # so that bits are swept and given out again meanwhile
        patch.setattr(holder_bits, "SWEEP_STEPS", 3)
        patch.setattr(index_scan, "SCAN_CHUNK_HASHES", 36)
        naive = Naive()
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
        for part in parts:
            tally.restore(part)
        assert restored.digest() == tally.digest() == naive.index.digest()
        assert contents(restored) == naive.stores
        for query in asked:
            assert restored.overlaps(query) == naive.overlaps(query)


@examples(2)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), runs), max_size=12), st.data())
def test_several_writers_in_any_order_leave_what_the_last_event_of_each_block_says(
    history: list[tuple[bool, str, list[int]]], data: st.DataObject
) -> None:
    index, held = PrefixIndex(), set[int]()
    for adds, worker, blocks in history:
        event = added("s", blocks, worker) if adds else removed("s", blocks, worker)
        for _ in range(data.draw(st.integers(1, 2), label="deliveries")):
            index.apply_store(event)
        (held.update if adds else held.difference_update)(blocks)
    assert contents(index).get("s", set()) == held
    once = PrefixIndex()
    once.apply_store(added("s", sorted(held)))
    assert index.digest() == once.digest()


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


def test_blocks_of_the_store_follow_those_of_all_tiers_and_are_counted_for_its_readers_only() -> None:
    index = PrefixIndex()
    for worker, store in (("a", "s"), ("b", "s"), ("c", "t"), ("d", "")):
        index.use_store(worker, store)
        index.add_holder(worker, 0, 1)
        index.add_holder(worker, 1, 1)
    query = list(range(1, 10))
    for seq, (tier, blocks) in enumerate((("device", [1, 2]), ("host", [3]), ("disk", [4, 5])), 1):
        for worker in "ad":
            fields: dict[str, Any] = {"worker_id": worker, "worker_epoch": 1, "seq": seq, "tier": tier}
            index.apply(BlocksStored(**fields, sequence_hashes=pack_u64(blocks)))
    index.apply_store(added("s", [1, 6, 7, 9]))
    assert index.overlaps(query) == {
        ("a", 0): Overlap(2, 1, 2, 2),
        ("a", 1): Overlap(store=1),
        ("b", 0): Overlap(store=1),
        ("b", 1): Overlap(store=1),
        ("d", 0): Overlap(2, 1, 2),
    }
    index.apply_store(removed("s", [1], stale=True))
    assert index.overlaps(query) == {("a", 0): Overlap(2, 1, 2, 2), ("d", 0): Overlap(2, 1, 2)}
    assert index.stores.stale_blocks == 1


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
    assert contents(copy_of(index, [*seen, *kept])) == {"new": {3}}
    assert contents(copy_of(index, [StoreDropped(store="old"), *kept])) == {"new": {3}}
    tally = IndexTally()
    foreign = BlocksStored(worker_id="nobody", worker_epoch=1, seq=1, sequence_hashes=pack_u64([9]))
    for part in (*seen, *kept, IndexChanges(events=(foreign,))):
        tally.restore(part)
    assert tally.digest() == index.digest()


def test_bits_of_emptied_stores_are_used_again() -> None:
    index = PrefixIndex()
    for number in range(3 * RETIRED_BITS_MAX):
        index.apply_store(added(f"s{number}", range(number, number + 40)))
        index.apply_store(removed(f"s{number}", range(number, number + 40)))
    index.apply_store(added("last", [1]))
    assert index.stores.live.bit_length() <= 2 * RETIRED_BITS_MAX + 2
    assert contents(index) == {"last": {1}}


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


def stored_world(*, workers: tuple[str, ...] = ("a", "b")) -> Driver:
    """A fleet of one pool whose workers use the store "s", which has the first prompt."""
    drive = Driver()
    drive("control", pool())
    for slot, name in enumerate(workers):
        drive("fleet", joined(name, slot, kv_store="s"))
    drive("kv-events", added("s", PROMPTS[0]))
    return drive


def test_a_store_survives_the_loss_of_all_workers_and_a_snapshot() -> None:
    drive = stored_world()
    for name in "ab":
        drive("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=drive.epoch(name)))
    assert drive.world.index.stores.counts == {}
    drive("kv-events", removed("s", PROMPTS[0][7:], "b"))
    assert drive.world.index.stores.counts == {"unused": 1}
    drive.world.take_consumed()
    chunks = [*drive.world.snapshot()]
    copy = restore(chunks)
    assert copy.digest() == drive.world.digest() == digest_of_snapshot(chunks)
    other = Driver(copy)
    other.now_us = drive.now_us
    other("fleet", joined("new", 0, kv_store="s"))
    (routed,) = other("requests", request("r", PROMPTS[0]))
    assert (routed.worker_id, routed.terms.device_overlap, routed.terms.store_overlap) == ("new", 0, 7)


def test_a_restored_worker_reads_the_store_that_it_read_before() -> None:
    drive = stored_world()
    drive.world.take_consumed()
    copy = restore(drive.world.snapshot())
    assert copy.index.overlaps(PROMPTS[0]) == drive.world.index.overlaps(PROMPTS[0]) != {}


def test_a_scan_without_changes_records_none() -> None:
    index = PrefixIndex()
    index.apply_store(added("s", [1]))
    scan = index.begin_scan()
    assert [type(one) for one in scan.advance(1_000)] == [StoreBlocks]
    assert index.end_scan() == []
