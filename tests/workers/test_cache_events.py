"""KV events of a worker: dense sequence numbers, bounded records, and re-announcements without gaps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import unpack_u64
from forebay.events.codec import decode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from forebay.events.topics import KV_EVENTS
from forebay.transport.base import Draft
from forebay.workers.runtime import cache_events
from forebay.workers.runtime.cache_events import CacheEvents, chains

EPOCH = 7


def spec(**changes: Any) -> WorkerSpec:
    sizes: dict[str, Any] = {"block_size": 4, "kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return WorkerSpec(worker_id="w1", model="m", **sizes, **changes)


def generated(drafts: list[Draft]) -> list[CacheEvent]:
    return [decode(KV_EVENTS, draft.value) for draft in drafts]


def fold(held: dict[int, list[int]], events: list[CacheEvent]) -> None:
    """Return the blocks of each rank for a reader that requires parents before children."""
    for event in events:
        rank = held.setdefault(event.rank, [])
        match event:
            case BlocksStored():
                assert event.parent_hash is None or event.parent_hash in rank
                new = unpack_u64(event.sequence_hashes)
                rank += [block for block in new if block not in rank]
            case BlocksRemoved():
                for block in unpack_u64(event.sequence_hashes):
                    if block in rank:
                        rank.remove(block)
            case CacheCleared():
                rank.clear()


blocks = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True).map(tuple)
changes = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.builds(Stored, st.none() | st.integers(1, 12), blocks), st.builds(Removed, blocks)),
    ),
    max_size=30,
)


@given(changes, st.integers(0, 1))
def test_reannouncement_equals_the_announced_cache(history: list[tuple[int, Stored | Removed]], requested: int) -> None:
    events = CacheEvents(spec(dp_size=2), EPOCH, 0)
    log: list[CacheEvent] = []
    held: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, change in history:
        log += generated(events.changes(rank, [change]))
        held[rank] = held[rank] | set(change.hashes) if isinstance(change, Stored) else held[rank] - set(change.hashes)
    anew = generated(events.reannouncement(requested, 0))
    assert type(anew[0]) is CacheCleared
    assert all(type(event) is BlocksStored for event in anew[1:])
    assert {event.rank for event in anew} == {requested}
    again: dict[int, list[int]] = {}
    fold(again, anew)
    assert set(again[requested]) == held[requested]
    hashes = [
        block for event in anew[1:] if isinstance(event, BlocksStored) for block in unpack_u64(event.sequence_hashes)
    ]
    assert len(hashes) == len(held[requested])
    for rank in (0, 1):
        numbers = [event.seq for event in log + anew if event.rank == rank]
        assert numbers == list(range(1, len(numbers) + 1))
    assert {(event.worker_id, event.worker_epoch) for event in anew} == {("w1", EPOCH)}


def test_reannouncement_keeps_chains() -> None:
    parents = {1: None, 2: 1, 3: 2, 4: 2, 5: None, 6: 99}
    assert chains(parents) == [Stored(None, (6,)), Stored(None, (5,)), Stored(None, (1, 2, 4)), Stored(2, (3,))]


def test_a_circle_of_parents_loses_no_block() -> None:
    found = chains({1: 3, 2: 1, 3: 2, 4: 3})
    assert sorted(block for chain in found for block in chain.hashes) == [1, 2, 3, 4]
    assert found[0].parent is None


def test_every_record_fits_and_continues_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "EVENT_HASHES_MAX", 3)
    events = CacheEvents(spec(), EPOCH, 0)
    stored = generated(events.announcement(0, range(1, 9)))
    assert [event.parent_hash for event in stored if isinstance(event, BlocksStored)] == [None, 3, 6]
    anew = generated(events.reannouncement(0, 0))
    assert [event.seq for event in anew] == [4, 5, 6, 7]
    assert [len(unpack_u64(event.sequence_hashes)) for event in anew[1:] if isinstance(event, BlocksStored)] == [
        3,
        3,
        2,
    ]
    removed = generated(events.changes(0, [Removed((1, 2, 3, 4))]))
    assert [(type(event), event.seq) for event in removed] == [(BlocksRemoved, 8), (BlocksRemoved, 9)]


def test_empty_cache_is_reannounced_as_cleared() -> None:
    events = CacheEvents(spec(), EPOCH, 0)
    assert events.announcement(0, ()) == []
    assert [type(event) for event in generated(events.reannouncement(0, 0))] == [CacheCleared]


def test_no_events_without_kv_events() -> None:
    events = CacheEvents(spec(kv_events=False), EPOCH, 0)
    assert events.announcement(0, [1]) + events.changes(0, [Stored(None, (1,))]) + events.reannouncement(0, 0) == []
