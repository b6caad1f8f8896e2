"""TensorRT-LLM's event dicts, written from its documentation; none was captured from an engine."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import mm_hash
from forebay.engine_model.model import Removed, Stored
from forebay.events.base import U64_MASK, unpack_u32
from forebay.workers.kv_events.engine_events import KvEventError, MovedBlock, RemovedBlocks, StoredBlocks
from forebay.workers.kv_events.resident import KvTracker, ResidentBlocks
from forebay.workers.kv_events.tensorrt_llm_wire import RankEvent, TensorRtLlmReader
from tests.workers.kv_events.captured import ours

DIGEST = "a1b2c3d4e5f60718" + "0" * 48


def event(event_id: int, kind: str, *, rank: int | None = 0, window: int | None = None, **data: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"event_id": event_id, "data": {"type": kind, **data}}
    if rank is not None:
        found["attention_dp_rank"] = rank
    if window is not None:
        found["window_size"] = window
    return found


def block(name: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    reported = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {"type": "stored_block", "block_hash": name, "tokens": reported, "cache_level": 0, "priority": 35, **more}


def stored(event_id: int, *blocks: dict[str, Any], parent: int | None = None, **more: Any) -> dict[str, Any]:
    return event(event_id, "stored", parent_hash=parent, blocks=list(blocks), **more)


def removed(event_id: int, *names: int, **more: Any) -> dict[str, Any]:
    return event(event_id, "removed", block_hashes=list(names), **more)


def read(*events: dict[str, Any]) -> list[RankEvent]:
    reader = TensorRtLlmReader(2)
    return [reader.read(one) for one in events]


def test_a_chain_is_stored_and_removed() -> None:
    first, second = read(stored(0, block(-7, [1, 2]), block(8, [3, 4]), rank=None), removed(1, 8, -7))
    assert first.rank == 0 and not first.missed
    [chain] = first.batch.events
    assert isinstance(chain, StoredBlocks) and unpack_u32(chain.token_ids) == [1, 2, 3, 4]
    assert chain.hashes == (-7 & U64_MASK, 8) and chain.parent is None
    assert second.batch.events == (RemovedBlocks(hashes=(8, -7 & U64_MASK), tier=None),)


def test_events_become_changes_with_canonical_hashes() -> None:
    tracker = KvTracker(ResidentBlocks(2, counts_copies=False))
    names = ours([1, 2, 3, 4], 2, "ada", "tenant")
    reported = read(
        stored(0, block(5, [1, 2], cache_salt="tenant"), lora_name="ada"),
        stored(1, block(6, [3, 4]), block(7, [9]), parent=5, lora_name="ada"),
        removed(2, 7),
        removed(3, 6, 7),
    )
    changes = [list(tracker.batch(one.batch).changes) for one in reported]
    assert changes == [
        [Stored(None, (names[0],), "device", (5,))],
        [Stored(names[0], (names[1],), "device", (6,))],
        [],
        [Removed((names[1],), "device", (6,))],
    ]
    assert tracker.resident.counts == {"unknown_removed": 1}, "a partial block is forgotten once it is removed"


def moved(event_id: int, name: int, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "new_value": new, "old_value": old}
    return event(event_id, "updated", block_hash=name, cache_level=level, priority=None)


def test_updated_events_move_blocks_between_tiers() -> None:
    tracker = KvTracker(ResidentBlocks(2, counts_copies=False))
    names = tuple(ours([1, 2, 3, 4], 2))
    reported = read(
        stored(0, block(5, [1, 2]), block(6, [3, 4]), block(7, [9])),
        moved(1, 6, 0, 1),
        event(2, "updated", block_hash=5, cache_level=None, priority={"new_value": 1, "old_value": 2}),
        moved(3, 7, 0, 1),
        moved(4, 6, 1, 0),
        moved(5, 6, 0, 1),
        moved(6, 99, 0, 1),
        moved(7, 5, 0, 1),
        moved(8, 5, 1, 2),
        removed(9, 6, 5),
    )
    changes = [list(tracker.batch(one.batch).changes) for one in reported]
    to_host = [Stored(None, names[1:], "host", (6,)), Removed(names[1:], "device", (6,))]
    to_device = [Stored(None, names[1:], "device", (6,)), Removed(names[1:], "host", (6,))]
    assert changes[1:7] == [to_host, [], [], to_device, to_host, []]
    assert changes[9] == [Removed(names[1:], "host", (6,)), Removed(names[:1], "disk", (5,))]
    assert not len(tracker.resident) and tracker.resident.counts == {"unknown_removed": 1}


def test_a_block_that_was_partial_can_be_stored_when_it_is_full() -> None:
    reported = read(stored(0, block(7, [1])), stored(1, block(7, [1, 2])), removed(2, 7))
    assert [len(one.batch.events) for one in reported] == [0, 1, 1]
    assert reported[0].batch.skipped == {"partial_blocks": 1}


def test_only_the_largest_window_that_was_created_counts() -> None:
    reported = read(
        event(0, "created", window=512, num_blocks_per_cache_level=[8, 0]),
        event(1, "created", window=4096, num_blocks_per_cache_level=[8, 0]),
        stored(2, block(1, [1, 2]), window=512),
        stored(3, block(2, [1, 2]), window=4096),
        event(4, "created", window=8192, num_blocks_per_cache_level=[8, 0]),
        removed(5, 1, window=512),
        removed(6, 2, window=4096),
        removed(7, 2),
    )
    assert [len(one.batch.events) for one in reported] == [0, 0, 0, 1, 0, 0, 1, 1]
    assert [dict(one.batch.skipped) for one in reported if one.batch.skipped] == [{"other_window": 1}] * 2
    assert not any(one.missed for one in reported)


def test_missing_number_is_a_loss_even_before_skipped_events() -> None:
    reported = read(
        event(0, "created", window=9),
        stored(4, block(1, [1, 2]), rank=1),
        stored(1, block(1, [1, 2])),
        stored(3, block(2, [5]), window=9),
        stored(5, block(3, [1, 2]), rank=1),
        removed(4, 2),
        event(6, "renamed", window=3),
    )
    assert [bool(one.missed) for one in reported] == [False, False, False, True, False, False, True]
    assert reported[3].missed == "expected KV event 2, got 3" and reported[3].rank == 0
    assert reported[5].batch.events == (), "partial blocks of after the gap are remembered"
    assert reported[6].batch.skipped == {"unknown_event": 1}


def test_media_are_identified_by_their_digests() -> None:
    one = block(1, [1, 2], mm_keys=[{"type": "mm_key", "hash": DIGEST, "start_offset": 0}])
    [reported] = read(stored(0, block(9, [7, 8]), one))
    [chain] = reported.batch.events
    assert isinstance(chain, StoredBlocks) and chain.mm_hashes == {1: [mm_hash(DIGEST)]} == {1: [0xA1B2C3D4E5F60718]}


@pytest.mark.parametrize(
    "odd",
    [
        None,
        {},
        {"event_id": "1", "data": {}},
        stored(1, block(1, [1, 2, 3])),
        stored(1, block(1, [1]), block(2, [1, 2])),
        stored(1, block(1, [-1, 2])),
        stored(1, {"block_hash": "x", "tokens": []}),
        event(1, "stored"),
        event(1, "removed", block_hashes=[None]),
        event(1, "updated", block_hash=1, cache_level={"type": "event_diff", "new_value": 3, "old_value": 0}),
    ],
)
def test_invalid_event_is_an_error_and_leaves_a_gap(odd: Any) -> None:
    reader = TensorRtLlmReader(2)
    reader.read(removed(0, 1))
    with pytest.raises(KvEventError):
        reader.read(odd)
    assert reader.read(removed(2, 1)).missed


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
tokens = st.lists(st.fixed_dictionaries({"token_id": st.integers(-1, 2**32)}) | anything, max_size=3)
data = st.fixed_dictionaries(
    {"type": st.sampled_from(["created", "stored", "removed", "updated"]) | anything},
    optional={
        "blocks": st.lists(
            st.fixed_dictionaries({"block_hash": st.integers(-(2**64), 2**65) | anything, "tokens": tokens}), max_size=3
        )
        | anything,
        "block_hash": st.integers(-(2**64), 2**65) | anything,
        "cache_level": st.fixed_dictionaries({"new_value": st.integers(-1, 3) | anything}) | anything,
        "block_hashes": st.lists(st.integers(-(2**64), 2**65), max_size=3) | anything,
        "parent_hash": anything,
        "lora_name": anything,
        "cache_salt": anything,
    },
)
likely = st.fixed_dictionaries(
    {"event_id": st.integers() | anything, "data": data | anything},
    optional={"attention_dp_rank": st.integers(0, 2) | anything, "window_size": st.integers(0, 3) | anything},
)


@given(st.lists(likely | anything, max_size=5))
def test_any_dicts_are_events_or_errors(events: list[Any]) -> None:
    reader = TensorRtLlmReader(2)
    for one in events:
        try:
            reported = reader.read(one)
        except KvEventError:
            continue
        for generated in reported.batch.events:
            assert isinstance(generated, StoredBlocks | RemovedBlocks | MovedBlock)
            hashes = (generated.hash,) if isinstance(generated, MovedBlock) else generated.hashes
            assert all(0 <= name <= U64_MASK for name in hashes)
