"""Decoding of engines' KV events: captured batches, the formats of all releases, and invalid bytes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.block_hashes import mm_hash
from forebay.engine_model.steps import StoreChange
from forebay.events.base import U64_MASK, unpack_u32
from forebay.workers.kv_events.engine_events import (
    Batch,
    ClearedBlocks,
    Decode,
    KvEventError,
    OwnRemoved,
    OwnStored,
    RemovedBlocks,
    StoredBlocks,
)
from forebay.workers.kv_events.zmq_wire import VllmDecoder, decode_sglang
from tests.workers.kv_events.captured import (
    A_HASHES,
    LORA_HASHES,
    OFFLOADED,
    PROMPT,
    SALTED_HASHES,
    SGLANG_BATCHES,
    SGLANG_HASHES,
    VLLM_BATCHES,
    VLLM_HEAD,
    payload,
    sglang_stored,
    vllm_removed,
    vllm_stored,
)

DECODERS: list[Callable[[], Decode]] = [VllmDecoder, lambda: decode_sglang]
DIGEST = "00ff" * 16


def vllm(*events: Any) -> Batch:
    return VllmDecoder()(payload(events))


def sglang(*events: Any) -> Batch:
    return decode_sglang(payload(events))


def stored(batch: Batch) -> StoredBlocks:
    [event] = batch.events
    assert isinstance(event, StoredBlocks)
    return event


def test_the_captured_batches_are_the_bytes_that_were_captured() -> None:
    for length, events in VLLM_BATCHES + SGLANG_BATCHES:
        assert len(payload(events)) == length
    assert payload(VLLM_BATCHES[0][1])[10:].startswith(VLLM_HEAD)


def test_captured_vllm_batches_decode() -> None:
    decode = VllmDecoder()
    batches = [decode(payload(events)) for _, events in VLLM_BATCHES]
    assert not any(batch.skipped for batch in batches)
    assert [len(batch.events) for batch in batches] == [1, 1, 1, 1, 1, 1, 1, 5, 7, 2, 2]
    first, generated, _, salted, adapted = (stored(batch) for batch in batches[:5])
    assert first.hashes == tuple(A_HASHES) and first.parent is None
    assert unpack_u32(first.token_ids) == PROMPT[:64] and first.block_size == 32 and first.tier == "device"
    assert generated.parent == A_HASHES[1] and unpack_u32(generated.token_ids)[:16] == PROMPT[64:]
    assert (salted.hashes, salted.cache_salt, salted.lora_name) == (tuple(SALTED_HASHES), "tenant-1", "")
    assert (adapted.hashes, adapted.cache_salt, adapted.lora_name) == (tuple(LORA_HASHES), "", "tiny-lora")
    assert not first.mm_hashes and not salted.mm_hashes and not adapted.mm_hashes
    assert batches[7].events[2] == RemovedBlocks(hashes=(A_HASHES[1],))
    assert batches[9].events[0] == ClearedBlocks()


def test_further_fields_of_removed_blocks_of_sglang_are_ignored() -> None:
    assert sglang(["BlockRemoved", [5], "GPU", "later"]).events == (RemovedBlocks(hashes=(5,)),)


def test_captured_sglang_batches_decode_with_unsigned_hashes() -> None:
    batches = [decode_sglang(payload(events)) for _, events in SGLANG_BATCHES]
    first = stored(batches[0])
    assert first.hashes == tuple(h & U64_MASK for h in SGLANG_HASHES)
    assert stored(batches[1]).parent == first.hashes[1] == SGLANG_HASHES[1] + 2**64
    assert batches[3].events == (ClearedBlocks(),)


def test_array_format_of_older_releases_decodes_equally() -> None:
    keys = [[["a", "tenant"], 1, "x"], None]
    event = vllm_stored([5, 6], PROMPT[:64], 4, lora_id=1, lora_name="a", extra_keys=keys)
    row = list(event.values())
    assert vllm(row).events == vllm(event).events
    assert vllm(row[:8]).events == vllm({**event, "extra_keys": None}).events, "before extra keys"
    assert vllm(["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]).events == (
        RemovedBlocks(hashes=(5,)),
        ClearedBlocks(),
    )
    as_map = msgspec.msgpack.encode({"ts": 1.0, "events": [event], "data_parallel_rank": 0})
    assert VllmDecoder()(as_map).events == vllm(event).events
    assert sglang(list(sglang_stored([5, -6], PROMPT[:32], 4).values())) == sglang(
        sglang_stored([5, -6], PROMPT[:32], 4)
    )


def test_full_hashes_equal_their_short_forms() -> None:
    whole = [h.to_bytes(32, "big") for h in (7 << 64 | A_HASHES[0], 9 << 128 | A_HASHES[1])]
    event = stored(vllm(vllm_stored(whole, PROMPT[:64], whole[1])))
    assert event.hashes == tuple(A_HASHES) and event.parent == A_HASHES[1]
    with pytest.raises(KvEventError, match="empty"):
        vllm(vllm_stored([b""], PROMPT[:32]))


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", "device"),
        ("CPU", "host"),
        ("STORAGE", "disk"),
        (None, "device"),
        ("CPU_PINNED", "host"),
        ("DISK", "disk"),
    ],
)
def test_media_of_kv_events_name_tiers(medium: str | None, tier: str) -> None:
    for event in (vllm_stored([1], PROMPT[:32], medium=medium), vllm_removed(1, medium=medium)):
        [read] = vllm(event).events
        assert isinstance(read, StoredBlocks | RemovedBlocks) and read.tier == tier
    assert stored(sglang(sglang_stored([1], PROMPT[:16], medium=medium))).tier == tier


def test_events_of_shared_storage_are_skipped_and_counted() -> None:
    assert sglang(sglang_stored([1], PROMPT[:16], medium="EXTERNAL")) == Batch((), Counter(shared=1))
    remote = vllm(vllm_stored([1], PROMPT[:32], medium="STORAGE", locality="REMOTE"), vllm_removed(1, medium="TAPE"))
    assert remote.events == () and remote.skipped == {"shared": 1, "unknown_medium": 1}


def test_unknown_events_are_counted_and_the_others_read() -> None:
    for unknown in ({"type": "BlockMoved", "x": 1}, ["BlockMoved", 1]):
        batch = vllm(unknown, {"type": "AllBlocksCleared", "why": "new field"}, unknown)
        assert batch.events == (ClearedBlocks(),) and batch.skipped == {"unknown_event": 2}


def test_groups_without_full_attention_are_skipped() -> None:
    decode = VllmDecoder()
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 64,
    }
    # A window may have fewer blocks than its tokens would fill.
    first = decode(payload([vllm_stored([1], PROMPT[:64], **window), vllm_stored([1, 2], PROMPT[:64])]))
    assert [type(event) for event in first.events] == [StoredBlocks] and first.skipped == {"other_group": 1}
    second = decode(payload([vllm_removed(1, group_idx=1), vllm_removed(2), vllm_removed(2, group_idx=7)]))
    assert second.events == (RemovedBlocks(hashes=(2,)),)
    attends: dict[str, Any] = {"group_idx": 7, "kv_cache_spec_kind": "mla_attention"}
    assert len(decode(payload([vllm_stored([3], PROMPT[:32], **attends), vllm_removed(3, group_idx=7)])).events) == 2


def test_extra_keys_identify_adapters_salts_and_media() -> None:
    keys = [["ada", [DIGEST, 3], ["clip", -4], DIGEST], ["ada", ["clip", 0]], ["ada", "odd", b"\1" * 32], ["ada"]]
    event = stored(vllm(vllm_stored([1, 2, 3, 4], range(128), lora_id=2, lora_name="ada", extra_keys=keys)))
    assert event.cache_salt == DIGEST and event.lora_name == "ada"
    assert event.mm_hashes == {
        0: [mm_hash(DIGEST), mm_hash("clip")],
        1: [mm_hash("clip")],
        2: [mm_hash("odd"), 0x0101010101010101],
    }
    goes_on = stored(vllm(vllm_stored([5], range(32), 4, extra_keys=[["not a salt"]])))
    assert goes_on.cache_salt == "" and goes_on.mm_hashes == {0: [mm_hash("not a salt")]}


def test_media_of_the_next_tokens_are_not_part_of_a_block() -> None:
    keys = [[["clip", 31], ["next", 32]], [["next", 0]]]
    ahead: dict[str, Any] = {"extra_keys": keys, "lookahead_token_ids": [[32], [64]], "session_id": "s"}
    event = stored(vllm(vllm_stored([1, 2], range(64), **ahead)))
    assert event.mm_hashes == {0: [mm_hash("clip")], 1: [mm_hash("next")]}


def test_salt_may_equal_the_adapter_name() -> None:
    event = stored(vllm(vllm_stored([1], range(32), lora_id=2, lora_name="ada", extra_keys=[["ada", "ada"]])))
    assert (event.lora_name, event.cache_salt, dict(event.mm_hashes)) == ("ada", "ada", {})


def test_before_pairs_media_were_bare_digests() -> None:
    row = list(vllm_stored([1], range(32), extra_keys=[[DIGEST, "tenant"]]).values())
    event = stored(vllm(row))
    assert event.mm_hashes == {0: [mm_hash(DIGEST)]} and event.cache_salt == "tenant"


def test_blocks_without_tokens_are_skipped_and_counted() -> None:
    batch = vllm(
        vllm_stored([1], [], block_size=0, medium="CPU", extra_keys=None), vllm_stored([1], range(32), lora_id=3)
    )
    assert batch.events == () and batch.skipped == {"no_tokens": 1, "unnamed_lora": 1}


def test_pairs_of_tokens_count_by_the_first() -> None:
    pairs = [(token, token + 1) for token in range(16)]
    assert stored(sglang(sglang_stored([1], pairs, lora_name="ada", cache_salt="t"))) == StoredBlocks(
        hashes=(1,),
        parent=None,
        token_ids=stored(sglang(sglang_stored([1], range(16)))).token_ids,
        block_size=16,
        lora_name="ada",
        cache_salt="t",
    )


@pytest.mark.parametrize(
    "events",
    [
        [vllm_stored([1], range(31))],
        [vllm_stored([1], range(32), block_size=-1)],
        [vllm_stored([1], [-1] * 32)],
        [vllm_stored([1], [2**32] * 32)],
        [vllm_stored([1], ["x"] * 32)],
        [{"type": "BlockStored"}],
        [["BlockRemoved"]],
        [[]],
        [{}],
        [7],
        7,
    ],
)
@pytest.mark.parametrize("decoder", DECODERS)
def test_invalid_fields_of_known_events_are_errors(decoder: Callable[[], Decode], events: Any) -> None:
    with pytest.raises(KvEventError):
        decoder()(payload(events))


def test_extra_keys_must_match_the_blocks() -> None:
    with pytest.raises(KvEventError, match="extra_keys has 2 entries, expected one per block: 1"):
        vllm(vllm_stored([1], range(32), extra_keys=[None, None]))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["type", "ts", "events", *vllm_stored([], [])]) | st.integers(0, 3), inner, max_size=6
        )
    ),
    max_leaves=20,
)
likely = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
    optional={name: anything for name in [*vllm_stored([], []), "locality", "cache_salt"] if name != "type"},
)
event = likely | likely.map(lambda one: list(one.values())) | anything
batch = st.builds(lambda events: [1.0, events, 0], st.lists(event, max_size=4)) | anything


@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.binary(max_size=200) | batch.map(msgspec.msgpack.encode))
@example(data=b"\x92\x01\x91" + b"\x91" * 50_000 + b"\xc0")  # nested too deeply
@example(data=b"\x92\x01\x91" + b"\x82\xa4type\xabBlockStored\xa1x" + b"\x91" * 50_000 + b"\xc0")
@example(data=b"\x92\x01\x91\x81\xa4type\xa2\xff\xff")  # invalid UTF-8
@example(data=b"\x92\x01\xdd\xff\xff\xff\xff")
@example(data=b"")
def test_any_bytes_are_a_batch_or_an_error(decoder: Callable[[], Decode], data: bytes) -> None:
    try:
        read = decoder()(data)
    except KvEventError:
        return
    assert all(isinstance(one, StoredBlocks | RemovedBlocks | ClearedBlocks) for one in read.events)
    for one in read.events:
        if isinstance(one, StoredBlocks):
            assert len(one.token_ids) == 4 * len(one.hashes) * one.block_size
            assert all(0 <= content <= U64_MASK for contents in one.mm_hashes.values() for content in contents)
        if isinstance(one, StoredBlocks | RemovedBlocks):
            assert all(0 <= name <= U64_MASK for name in one.hashes)


def test_events_of_our_own_connector_name_blocks_by_sequence_hash() -> None:
    own: dict[str, Any] = {"ownership": "forebay"}
    batch = vllm(
        {**vllm_stored([7, 8], [], 6, medium="CPU", locality="LOCAL"), **own},
        {**vllm_removed(7, medium="DISK", locality="LOCAL"), **own},
        {**vllm_stored([9], [], medium="SHARED", locality="REMOTE"), **own},
        {**vllm_removed(9, medium="SHARED", locality="REMOTE"), **own},
        {**vllm_removed(8, medium="SHARED_STALE", locality="REMOTE"), **own},
        {**vllm_removed(8, medium="TAPE"), **own},
    )
    assert batch.events == (
        OwnStored(parent=6, hashes=(7, 8), tier="host"),
        OwnRemoved(hashes=(7,), tier="disk"),
        StoreChange(stored=(9,)),
        StoreChange(removed=(9,)),
        StoreChange(stale=(8,)),
    )
    assert batch.skipped == {"unknown_medium": 1}


def test_events_of_shared_storage_are_used_if_it_has_a_name() -> None:
    """Events of vLLM's OffloadingConnector with a secondary tier, and of SGLang's HiCache with a storage back end."""
    decode = VllmDecoder(has_store=True)
    local = vllm_stored([1, 2], PROMPT[:64], medium="CPU")
    remote = vllm_stored([1, 2], PROMPT[:64], medium="STORAGE", locality="REMOTE", ownership="fs")
    removed = vllm_removed(2, medium="STORAGE", locality="REMOTE", ownership="fs")
    batch = decode(payload([local, remote, removed]))
    assert [event.tier for event in batch.events if isinstance(event, StoredBlocks)] == ["host", "store"]
    assert batch.events[2] == RemovedBlocks(hashes=(2,), tier="store") and not batch.skipped
    hicache = payload([sglang_stored([1], PROMPT[:16], medium=medium) for medium in ("GPU", "CPU_PINNED", "EXTERNAL")])
    tiers = [event.tier for event in decode_sglang(hicache, has_store=True).events if isinstance(event, StoredBlocks)]
    assert tiers == ["device", "host", "store"]


def test_recorded_events_of_vllms_tiers_name_host_disk_and_store() -> None:
    """As vLLM 0.32.0 encoded them for one block in host memory, a directory, and a directory that workers share."""
    batch = VllmDecoder(has_store=True)(payload(OFFLOADED))
    assert [event.tier for event in batch.events if isinstance(event, StoredBlocks)] == ["host", "disk", "store"]
    assert batch.events[3] == RemovedBlocks(hashes=(0x101010101010101,), tier="host") and not batch.skipped


def test_events_that_do_not_describe_blocks_are_skipped() -> None:
    placeholder = vllm_stored([1], [], medium="CPU", block_size=0)  # OffloadingConnector by default
    lmcache = vllm_stored([1], PROMPT[:64], medium="cpu", block_size=64)  # it never reports removals
    batch = vllm(placeholder, lmcache)
    assert batch == Batch((), Counter(no_tokens=1, unknown_medium=1))
