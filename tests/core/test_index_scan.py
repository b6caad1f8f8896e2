"""A prefix index written down while it changes: what was seen and what was kept are exactly the state at the end."""

from itertools import product
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state import holder_bits, index_scan
from forebay.core.state.holder_bits import RETIRED_BITS_MAX
from forebay.core.state.index_digest import IndexTally
from forebay.core.state.index_scan import SCAN_CHUNK_HASHES, IndexScan, RecordedChange, ScannedBlocks
from forebay.core.state.prefix_index import TIERS, IndexPart, PrefixIndex
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.snapshots import IndexBlocks, IndexChanges, SnapshotChunk
from tests.depth import examples

WORKERS = ("a", "b", "c")
RECORD_BYTES_MAX = 1 << 20
Contents = dict[tuple[str, int, str], set[int]]


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """Blocks in order, mostly, with pieces cut out."""
    if draw(st.integers(0, 3)):
        start = draw(st.integers(1, 90))
        holes = draw(st.sets(st.integers(1, 100), max_size=3))
        return [block for block in range(start, min(101, start + draw(st.integers(1, 50)))) if block not in holes]
    return draw(st.lists(st.integers(1, 100), max_size=12))


changes = st.tuples(
    st.sampled_from(["store"] * 6 + ["remove"] * 3 + ["clear", "rejoin", "leave"]),
    st.sampled_from(WORKERS),
    st.sampled_from(["device"] * 3 + ["host", "disk"]),
    stretches(),
    st.none() | st.integers(1, 100),
)
steps = st.one_of(changes, changes, st.integers(1, 400))


class Fleet:
    """Workers that come, go and tell what they cache."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.epochs = dict.fromkeys(WORKERS, 0)
        self.seq = dict.fromkeys(WORKERS, 0)
        for worker in WORKERS:
            self.join(worker)

    def join(self, worker: str) -> None:
        self.epochs[worker] += 1
        self.seq[worker] = 0
        self.index.add_holder(worker, 0, self.epochs[worker])

    def change(
        self, kind: str, worker: str, tier: Literal["device", "host", "disk"], blocks: list[int], parent: int | None
    ) -> None:
        if kind == "leave":
            self.index.drop_holder(worker, 0)
            return
        if kind == "rejoin":
            self.join(worker)
            return
        self.seq[worker] += 1
        fields: dict[str, Any] = {
            "worker_id": worker, "worker_epoch": self.epochs[worker], "seq": self.seq[worker],
        }  # fmt: skip
        hashes = pack_u64(blocks)
        if kind == "store":
            self.index.apply(BlocksStored(**fields, sequence_hashes=hashes, parent_hash=parent, tier=tier))
        elif kind == "remove":
            self.index.apply(BlocksRemoved(**fields, sequence_hashes=hashes, tier=tier))
        else:
            self.index.apply(CacheCleared(**fields))


def contents(index: PrefixIndex) -> Contents:
    held: Contents = {(worker, rank, tier): set() for (worker, rank), tier in product(index.holders(), TIERS)}
    for chunk in index.snapshot():
        if isinstance(chunk, IndexBlocks):
            held[chunk.worker_id, chunk.rank, chunk.tier].update(unpack_u64(chunk.sequence_hashes))
    return held


def taken_in(index: PrefixIndex, seen: list[ScannedBlocks], kept: list[RecordedChange]) -> PrefixIndex:
    restored = PrefixIndex()
    chunks: list[IndexPart] = [*index.cursors(), *seen, *kept]
    for chunk in chunks:
        restored.restore(chunk)
    return restored


def tallied(index: PrefixIndex, seen: list[ScannedBlocks], kept: list[RecordedChange]) -> int:
    """The digest of the same chunks without an index; those of ranks that are not there do not count."""
    tally = IndexTally()
    nobody = IndexBlocks(worker_id="nobody", rank=0, tier="device", sequence_hashes=pack_u64([1]), worker_epoch=1)
    chunks: list[IndexPart] = [*index.cursors(), nobody, *seen, *kept]
    for chunk in chunks:
        tally.restore(chunk)
    return tally.digest()


@examples(3)
@given(st.lists(changes, max_size=12), st.lists(steps, max_size=40), stretches())
def test_a_scan_and_its_changes_give_the_final_state(before: list[Any], during: list[Any], query: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder_bits, "RETIRED_BITS_MAX", 2)  # so that bits are swept and given out again meanwhile
        patch.setattr(holder_bits, "SWEEP_STEPS", 3)
        patch.setattr(index_scan, "SCAN_CHUNK_HASHES", 40)
        patch.setattr(index_scan, "REMEMBERED_MASKS_MAX", 2)
        fleet = Fleet()
        for change in before:
            fleet.change(*change)
        walk = fleet.index.begin_scan()
        seen: list[ScannedBlocks] = []
        for step in during:
            if isinstance(step, int):
                seen += walk.advance(step)
            else:
                fleet.change(*step)
        while not walk.done:
            seen += walk.advance(50)
        kept = fleet.index.end_scan()
        restored = taken_in(fleet.index, seen, kept)
        assert restored.digest() == fleet.index.digest()
        assert tallied(fleet.index, seen, kept) == fleet.index.digest()
        assert contents(restored) == contents(fleet.index)
        assert restored.overlaps(query) == fleet.index.overlaps(query)
        assert restored.holders() == fleet.index.holders()
        assert not restored.counts


def filled(workers: int, blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for number in range(workers):
        index.add_holder(f"w{number}", 0, 1)
        index.apply(
            BlocksStored(worker_id=f"w{number}", worker_epoch=1, seq=1, sequence_hashes=pack_u64(range(1, blocks + 1)))
        )
    return index


def test_an_empty_index_is_scanned_at_once() -> None:
    index = PrefixIndex()
    walk = index.begin_scan()
    assert not walk.done
    assert walk.advance(1_000_000) == []
    assert walk.done
    assert index.end_scan() == []


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
    restored = taken_in(index, [], kept)
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
    index.apply(BlocksStored(worker_id="w0", worker_epoch=1, seq=2, sequence_hashes=pack_u64(range(101, 201))))
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
                index.apply(
                    BlocksStored(worker_id="w0", worker_epoch=1, seq=made + 1, sequence_hashes=pack_u64(blocks))
                )
        index.end_scan()
        return made

    assert calls(growing=True) == calls(growing=False)


def test_blocks_and_changes_of_others_are_left_out() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    before = index.digest()
    hashes = pack_u64([1, 2])
    for worker, epoch in (("b", 5), ("a", 4), ("a", 6)):
        index.restore(IndexBlocks(worker_id=worker, rank=0, tier="device", sequence_hashes=hashes, worker_epoch=epoch))
        event = BlocksStored(worker_id=worker, worker_epoch=epoch, seq=1, sequence_hashes=hashes)
        index.restore(IndexChanges(events=(event,)))
    assert index.digest() == before
    assert index.overlaps([1]) == {}


def test_cached_masks_are_dropped_when_bits_are_reassigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_bits, "REMEMBERED_KEYS_MAX", 20)
    index = PrefixIndex()
    names = [f"w{number}" for number in range(9)]
    for at, name in enumerate(names):
        index.add_holder(name, 0, 1)
        hashes = pack_u64(range(1, 10 - at))
        index.apply(BlocksStored(worker_id=name, worker_epoch=1, seq=1, sequence_hashes=hashes))
    for _ in range(2):
        for block in range(1, 10):
            assert set(index.overlaps([block])) == {(name, 0) for name in names[: 10 - block]}
    index.drop_holder("w0", 0)
    index.add_holder("v", 0, 1)
    assert set(index.overlaps([1])) == {(name, 0) for name in names[1:]}


def test_a_bit_that_is_given_out_again_takes_nothing_of_its_last_holder_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_bits, "RETIRED_BITS_MAX", 0)
    index = filled(workers=2, blocks=100)
    walk = index.begin_scan()
    seen = walk.advance(1)
    index.drop_holder("w0", 0)
    for seq in range(2, 5):
        index.apply(BlocksStored(worker_id="w1", worker_epoch=1, seq=seq, sequence_hashes=b""))
    index.add_holder("new", 0, 1)
    while not walk.done:
        seen += walk.advance(100)
    restored = taken_in(index, seen, index.end_scan())
    assert contents(restored) == contents(index)
    assert not restored.blocks_held("new", 0, "device")


def test_a_bit_that_is_retired_during_a_sweep_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_bits, "RETIRED_BITS_MAX", 0)
    monkeypatch.setattr(holder_bits, "SWEEP_STEPS", 1)
    index = filled(workers=3, blocks=100)
    seq = 1

    def go_on() -> None:
        nonlocal seq
        seq += 1
        index.apply(BlocksStored(worker_id="w2", worker_epoch=1, seq=seq, sequence_hashes=b""))

    index.drop_holder("w0", 0)
    go_on()
    go_on()
    index.drop_holder("w1", 0)
    for number in range(30):
        go_on()
        index.add_holder(f"new{number}", 0, 1)
        assert set(index.overlaps([1])) == {("w2", 0)}


def test_bits_are_swept_and_given_out_again_while_events_go_on() -> None:
    index = filled(workers=8, blocks=400)
    seqs = [1] * 8
    held: Contents = {(f"w{number}", 0, tier): set() for number, tier in product(range(8), TIERS)}
    for turn in range(RETIRED_BITS_MAX * 4):
        number = turn % 8
        for kind in ("clear", "store"):
            seqs[number] += 1
            fields: dict[str, Any] = {"worker_id": f"w{number}", "worker_epoch": 1, "seq": seqs[number]}
            blocks = pack_u64(range(turn, turn + 300))
            index.apply(CacheCleared(**fields) if kind == "clear" else BlocksStored(**fields, sequence_hashes=blocks))
        held[f"w{number}", 0, "device"] = set(range(turn, turn + 300))
    assert contents(index) == held
