"""The prefix index against a plain walk over sets, on histories with holes, tiers, clears and lost workers."""

from itertools import product
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.state.holder_bits import RETIRED_BITS_MAX
from forebay.core.state.index_scan import SCAN_CHUNK_HASHES
from forebay.core.state.prefix_index import TIERS, Gap, Overlap, PrefixIndex
from forebay.events.base import pack_u64
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from forebay.events.snapshots import IndexBlocks, IndexCursor

WORKERS = ("a", "b", "c")
BLOCKS = st.integers(1, 40)


def runs_of(draw: st.DrawFn) -> list[int]:
    """Mostly stretches that follow each other, as caches have them; sometimes anything, with repetitions."""
    if draw(st.integers(0, 3)):
        start = draw(BLOCKS)
        return list(range(start, min(41, start + draw(st.integers(1, 20)))))
    return draw(st.lists(BLOCKS, max_size=12))


@st.composite
def operations(draw: st.DrawFn) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(["store"] * 5 + ["remove"] * 2 + ["clear", "drop", "again"]))
    tier = draw(st.sampled_from(["device"] * 3 + ["host", "disk"]))
    return kind, draw(st.sampled_from(WORKERS)), tier, runs_of(draw), draw(st.none() | BLOCKS)


class Plain:
    """What the index should know: a set of blocks for each worker and tier."""

    def __init__(self) -> None:
        self.sets: dict[tuple[str, str], set[int]] = {key: set() for key in product(WORKERS, TIERS)}

    def overlap(self, worker: str, query: list[int]) -> Overlap:
        counts, depth = [], 0
        for tier in TIERS:
            start = depth
            while depth < len(query) and query[depth] in self.sets[worker, tier]:
                depth += 1
            counts.append(depth - start)
        return Overlap(*counts)

    def clear(self, worker: str) -> None:
        for tier in TIERS:
            self.sets[worker, tier].clear()


class Pair:
    """The index and the plain one, side by side."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.plain = Plain()
        self.seq = dict.fromkeys(WORKERS, 0)
        self.last: dict[str, KvEvent] = {}
        for worker in WORKERS:
            self.index.add_holder(worker, 0, 5)

    def do(self, kind: str, worker: str, tier: Any, blocks: list[int], parent: int | None) -> None:
        if kind == "drop":
            self.index.drop_holder(worker, 0)
            self.index.add_holder(worker, 0, 5)
            self.plain.clear(worker)
            self.seq[worker] = 0
            self.last.pop(worker, None)
            return
        if kind == "again":
            if worker in self.last:
                self.index.apply(self.last[worker])  # type: ignore[arg-type]
            return
        self.seq[worker] += 1
        fields: dict[str, Any] = {"worker_id": worker, "worker_epoch": 5, "seq": self.seq[worker]}
        event: Any = CacheCleared(**fields)
        if kind == "store":
            event = BlocksStored(**fields, sequence_hashes=pack_u64(blocks), parent_hash=parent, tier=tier)
            self.plain.sets[worker, tier].update(blocks)
        elif kind == "remove":
            event = BlocksRemoved(**fields, sequence_hashes=pack_u64(blocks), tier=tier)
            self.plain.sets[worker, tier].difference_update(blocks)
        else:
            self.plain.clear(worker)
        self.last[worker] = event
        self.index.apply(event)

    def check(self, query: list[int]) -> None:
        found = self.index.overlaps(query)
        expected = {(worker, 0): self.plain.overlap(worker, query) for worker in WORKERS}
        assert found == {key: overlap for key, overlap in expected.items() if overlap != Overlap()}


@given(st.lists(operations(), max_size=40), st.lists(BLOCKS, max_size=30), st.integers(1, 40), st.integers(1, 40))
@example([("store", "a", "device", [1, 2, 3], None), ("remove", "a", "device", [2], None)], [1, 1, 2], 1, 3)
def test_match_equals_the_plain_walk(operations: list[Any], query: list[int], start: int, end: int) -> None:
    pair = Pair()
    for operation in operations:
        pair.do(*operation)
    pair.check(query)
    pair.check(list(range(start, end)))
    pair.check(list(range(1, 41)))
    for worker, tier in product(WORKERS, TIERS):
        assert pair.index.blocks_held(worker, 0, tier) == len(pair.plain.sets[worker, tier])
    stored = {(worker, tier): set() for worker, tier in product(WORKERS, TIERS)}  # type: ignore[var-annotated]
    restored = PrefixIndex()
    for chunk in pair.index.snapshot():
        restored.restore(chunk)
        if isinstance(chunk, IndexBlocks):
            stored[chunk.worker_id, chunk.tier].update(memoryview(chunk.sequence_hashes).cast("Q").tolist())
    assert stored == pair.plain.sets
    assert restored.digest() == pair.index.digest()
    assert restored.overlaps(query) == pair.index.overlaps(query)


@given(st.lists(operations(), max_size=25))
def test_redelivery_changes_nothing(operations: list[Any]) -> None:
    pair = Pair()
    for operation in operations:
        pair.do(*operation)
        before = pair.index.digest()
        for event in pair.last.values():
            pair.index.apply(event)  # type: ignore[arg-type]
        assert pair.index.digest() == before


@given(st.lists(operations(), max_size=25), st.randoms(use_true_random=False))
def test_any_interleaving_that_keeps_each_workers_order_gives_the_same_digest(
    operations: list[Any], random: Any
) -> None:
    one, other = Pair(), Pair()
    for operation in operations:
        one.do(*operation)
    queues = {worker: [operation for operation in operations if operation[1] == worker] for worker in WORKERS}
    while any(queues.values()):
        worker = random.choice([worker for worker in WORKERS if queues[worker]])
        other.do(*queues[worker].pop(0))
    assert one.index.digest() == other.index.digest()


def test_many_clears_and_losses_are_swept_and_forgotten() -> None:
    pair = Pair()
    for number in range(RETIRED_BITS_MAX * 3):
        for worker in WORKERS:
            pair.do("store", worker, "device", list(range(1, 10)), None)
        pair.do("clear" if number % 2 else "drop", WORKERS[number % 3], "device", [], None)
        pair.check(list(range(1, 12)))


def test_foreign_outdated_and_missing_events_are_counted() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    fields: dict[str, Any] = {"worker_id": "a", "worker_epoch": 5, "sequence_hashes": pack_u64([1, 2])}
    index.apply(BlocksStored(**{**fields, "worker_id": "z"}, seq=1))
    index.apply(BlocksStored(**{**fields, "worker_epoch": 4}, seq=1))
    index.apply(BlocksStored(**fields, rank=1, seq=1))
    assert index.overlaps([1]) == {}
    index.apply(BlocksStored(**fields, seq=1))
    index.apply(BlocksStored(**fields, seq=1))
    index.apply(BlocksStored(**{**fields, "sequence_hashes": pack_u64([4])}, parent_hash=3, seq=4))
    index.apply(BlocksStored(**{**fields, "sequence_hashes": pack_u64([5])}, parent_hash=4, seq=5))
    index.apply(BlocksRemoved(worker_id="a", worker_epoch=5, seq=6, sequence_hashes=pack_u64([77])))
    assert index.counts == {
        "unknown_worker": 1, "unknown_rank": 1, "stale_epoch": 1, "duplicate": 1, "gap": 1, "unknown_parent": 1,
        "unknown_block": 1,
    }  # fmt: skip
    assert index.overlaps([1, 2, 3, 4, 5]) == {("a", 0): Overlap(2)}
    assert index.holders() == [("a", 0)]
    assert index.overlaps([]) == {}
    assert PrefixIndex().overlaps([1]) == {}
    index.drop_holder("a", 0)
    index.apply(BlocksStored(**fields, seq=7))
    assert index.counts["unknown_worker"] == 2


def test_a_parent_in_another_tier_is_known() -> None:
    pair = Pair()
    pair.do("store", "a", "host", [1], None)
    pair.do("store", "a", "device", [2], 1)
    assert not pair.index.counts
    pair.check([1, 2])


def stored(seq: int, *blocks: int, rank: int = 0) -> BlocksStored:
    return BlocksStored(worker_id="a", worker_epoch=5, rank=rank, seq=seq, sequence_hashes=pack_u64(blocks))


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


def test_a_pending_resync_survives_a_restore() -> None:
    index, restored = PrefixIndex(), PrefixIndex()
    index.add_holder("a", 0, 5)
    index.apply(stored(1, 1))
    before = index.digest()
    index.apply(stored(3, 1))
    index.apply(stored(4, 1))
    for chunk in index.snapshot():
        restored.restore(chunk)
    assert restored.digest() == index.digest() != before
    assert restored.resyncing() == index.resyncing()
    assert [(one.worker_id, one.worker_epoch, one.rank, one.last_seq) for one in index.resyncing()] == [("a", 5, 0, 4)]


def test_a_wait_for_a_resync_is_part_of_the_digest() -> None:
    one, other = PrefixIndex(), PrefixIndex()
    for index, resync in ((one, True), (other, False)):
        index.restore(IndexCursor(worker_id="a", rank=0, last_seq=4, worker_epoch=5, resync=resync))
    assert one.digest() != other.digest()


def test_a_cache_of_more_than_a_chunk_is_snapshotted_in_several() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    index.apply(stored(1, *range(1, SCAN_CHUNK_HASHES + 10)))
    chunks = [chunk for chunk in index.snapshot() if isinstance(chunk, IndexBlocks)]
    assert sum(len(chunk.sequence_hashes) // 8 for chunk in chunks) == SCAN_CHUNK_HASHES + 9
    assert [len(chunk.sequence_hashes) // 8 <= SCAN_CHUNK_HASHES for chunk in chunks] == [True, True]
    restored = PrefixIndex()
    for chunk in index.snapshot():
        restored.restore(chunk)
    assert restored.digest() == index.digest()


def test_holders_that_leave_a_prompt_at_different_depths_are_told_apart() -> None:
    index = PrefixIndex()
    for worker, depth in (("a", 9), ("b", 5), ("c", 5), ("d", 2), ("e", 0)):
        index.add_holder(worker, 0, 5)
        hashes = pack_u64(range(1, depth + 1))
        index.apply(BlocksStored(worker_id=worker, worker_epoch=5, seq=1, sequence_hashes=hashes))
    depths = {("a", 0): Overlap(9), ("b", 0): Overlap(5), ("c", 0): Overlap(5), ("d", 0): Overlap(2)}
    assert index.overlaps(range(1, 20)) == depths


def test_a_worker_is_known_as_long_as_one_of_its_ranks_is() -> None:
    index = PrefixIndex()
    for rank in (0, 1):
        index.add_holder("a", rank, 5)
    for rank in (0, 1):
        index.drop_holder("a", rank)
        index.apply(stored(1, 1, rank=rank))
    assert index.counts == {"unknown_rank": 1, "unknown_worker": 1}
    assert index.overlaps([1]) == {}
