"""Conversion of engine events to cache changes: block hashes, copy counts, and removals."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain, mm_hash
from forebay.core.state.prefix_index import PrefixIndex
from forebay.engine_model.steps import Removed, StoreChange, Stored
from forebay.events.base import pack_u32
from forebay.events.codec import decode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import Tier
from forebay.events.topics import KV_EVENTS
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.kv_events.engine_events import (
    Batch,
    ClearedBlocks,
    EngineEvent,
    OwnRemoved,
    OwnStored,
    RemovedBlocks,
    StoredBlocks,
)
from forebay.workers.kv_events.resident import CONTRADICTIONS_MAX, KvTracker, ResidentBlocks, TrackerResult
from forebay.workers.kv_events.zmq_wire import VllmDecoder, decode_sglang
from forebay.workers.runtime.cache_events import CacheEvents
from tests.workers.kv_events.captured import (
    A_HASHES,
    BRANCH,
    GENERATED,
    PROMPT,
    SGLANG_BATCHES,
    VLLM_BATCHES,
    ours,
    payload,
)

SIZE = 2


def stored(
    hashes: list[int], tokens: list[int], parent: int | None = None, tier: Tier = "device", **more: Any
) -> StoredBlocks:
    return StoredBlocks(
        hashes=tuple(hashes), parent=parent, token_ids=pack_u32(tokens), block_size=SIZE, tier=tier, **more
    )


def removed(*hashes: int, tier: Tier = "device") -> RemovedBlocks:
    return RemovedBlocks(hashes=hashes, tier=tier)


def resident(*, counts_copies: bool = True) -> ResidentBlocks:
    return ResidentBlocks(SIZE, counts_copies=counts_copies)


def names(tokens: list[int], lora_name: str = "", cache_namespace: str = "") -> tuple[int, ...]:
    return tuple(ours(tokens, SIZE, lora_name, cache_namespace))


def test_hashes_of_vllm_events_equal_those_of_prompts() -> None:
    decoder, blocks = VllmDecoder(), ResidentBlocks(32, counts_copies=True)
    changes = [
        [change for event in decoder(payload(events)).events for change in blocks.apply(event)]
        for _, events in VLLM_BATCHES
    ]
    prompt = tuple(ours([*PROMPT, *GENERATED], 32))
    assert changes[0] == [Stored(None, prompt[:2], "device", tuple(A_HASHES))]
    [generated], [branch], [salted], [adapted] = changes[1:5]
    assert isinstance(generated, Stored) and (generated.parent, generated.hashes) == (prompt[1], prompt[2:])
    assert isinstance(branch, Stored) and branch.parent == prompt[1]
    assert branch.hashes == (ours(BRANCH, 32)[2],)
    assert isinstance(salted, Stored) and salted.hashes == tuple(ours(PROMPT, 32, "", "tenant-1"))
    assert isinstance(adapted, Stored) and adapted.hashes == tuple(ours(PROMPT, 32, "tiny-lora"))
    gone = [block for change in changes[7] if isinstance(change, Removed) for block in change.hashes]
    assert gone == [prompt[2], branch.hashes[0], prompt[1], prompt[0]]
    assert changes[9] == [Cleared(), changes[0][0]] == changes[10]
    assert not blocks.counts and blocks.held() == prompt[:2] and len(blocks) == 2


def test_hashes_of_sglang_events_equal_those_of_prompts() -> None:
    blocks = ResidentBlocks(16, counts_copies=False)
    held = []
    for _, events in SGLANG_BATCHES:
        for event in decode_sglang(payload(events)).events:
            blocks.apply(event)
        held.append(set(blocks.held()))
    prompt = ours([*range(100, 140), 235, 241, 264, 106, 295, 128, 415, 47], 16)
    branch = ours([*range(100, 132), *range(300, 316)], 16)
    assert held == [set(prompt[:2]), set(prompt), {*prompt, *branch}, set(), set(prompt[:2])]


def test_hashes_depend_on_media() -> None:
    event = StoredBlocks(
        hashes=(1, 2), parent=None, token_ids=pack_u32([5, 5, 5, 5]), block_size=2, mm_hashes={1: [mm_hash("cat")]}
    )
    [change] = resident().apply(event)
    assert isinstance(change, Stored)
    expected = extend_chain(None, block_hashes(event.token_ids, 2, mm_hashes={1: [mm_hash("cat")]}))
    assert list(change.hashes) == expected and expected != list(names([5, 5, 5, 5]))


def test_one_removal_suffices_if_copies_are_not_counted() -> None:
    blocks = resident(counts_copies=False)
    blocks.apply(stored([1], [1, 2]))
    assert blocks.apply(stored([1], [1, 2])) == []
    assert blocks.apply(removed(1)) == [Removed(names([1, 2]), "device", (1,))]
    assert len(blocks) == 0


def test_two_engine_hashes_may_be_one_block() -> None:
    blocks = resident()
    assert len(blocks.apply(stored([1], [1, 2]))) == 1
    assert blocks.apply(stored([9], [1, 2])) == []
    assert blocks.apply(removed(1)) == []
    assert blocks.apply(stored([3], [3, 4], 9)) == [Stored(names([1, 2])[0], names([1, 2, 3, 4])[1:], "device", (3,))]
    assert blocks.apply(removed(9)) == [Removed(names([1, 2]), "device", (9,))]


def test_offloaded_blocks_keep_the_salt_of_the_device() -> None:
    """VLLM's events of offloaded blocks have neither the salt nor the images of the prompt."""
    blocks, salted = resident(), names([1, 2, 3, 4], cache_namespace="tenant")
    blocks.apply(stored([1, 2], [1, 2, 3, 4], cache_salt="tenant"))
    assert blocks.apply(stored([1], [1, 2], tier="host")) == [Stored(None, salted[:1], "host", (1,))]
    assert blocks.apply(stored([2], [3, 4], 1, tier="host")) == [Stored(salted[0], salted[1:], "host", (2,))]
    assert blocks.held("host") == salted and not blocks.counts
    assert blocks.apply(removed(1, tier="host")) == [Removed(salted[:1], "host", (1,))]


def test_invalid_events_are_counted_and_ignored() -> None:
    blocks = resident()
    blocks.apply(stored([1], [1, 2]))
    assert blocks.apply(stored([3, 4], [5, 6, 7, 8], 2)) == []
    assert blocks.apply(removed(2)) == [] and blocks.apply(removed(1, tier="host")) == []
    small = StoredBlocks(hashes=(7,), parent=1, token_ids=pack_u32([9]), block_size=1)
    assert blocks.apply(small) == [] and blocks.apply(removed(7)) == []
    assert blocks.apply(stored([1], [3, 4])) == []
    assert blocks.counts == {"orphans": 2, "unknown_removed": 3, "other_block_size": 1, "renamed": 1}
    assert blocks.held() == names([1, 2])


class Engine:
    """Cache with copies of the blocks of a few sequences in two tiers, which reports its changes."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Tier, tuple[str, tuple[int, ...]]]] = Counter()

    def held(self, tier: Tier) -> set[int]:
        return {
            names(list(tokens), "", salt)[-1]
            for (where, (salt, tokens)), n in self.copies.items()
            if n and where == tier
        }

    @staticmethod
    def name(salt: str, tokens: tuple[int, ...]) -> int:
        return xxh3_64_intdigest(f"{salt} {tokens}".encode())

    def store(self, salt: str, tokens: tuple[int, ...], start: int, tier: Tier) -> StoredBlocks | None:
        parent = (salt, tokens[: start * SIZE])
        if start and not self.copies["device", parent] and not self.copies["host", parent]:
            return None
        chain = [tokens[: end * SIZE] for end in range(start + 1, len(tokens) // SIZE + 1)]
        for one in chain:
            self.copies[tier, (salt, one)] += 1
        return stored(
            [self.name(salt, one) for one in chain],
            list(tokens[start * SIZE :]),
            self.name(*parent) if start else None,
            tier,
            cache_salt="" if start else salt,
        )

    def evict(self, pick: int) -> RemovedBlocks | None:
        there = sorted(key for key, n in self.copies.items() if n)
        if not there:
            return None
        tier, one = there[pick % len(there)]
        self.copies[tier, one] -= 1
        return removed(self.name(*one), tier=tier)


sequences = st.lists(st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE), min_size=1, max_size=3).map(
    lambda blocks: tuple(token for block in blocks for token in block)
)
tiers: st.SearchStrategy[Tier] = st.sampled_from(["device", "host"])
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["", "t"]), sequences, st.integers(0, 2), tiers),
        st.integers(0, 1_000),
        st.just("clear"),
    ),
    max_size=40,
)


@given(steps)
def test_an_index_holds_what_the_engine_holds(
    history: list[tuple[str, tuple[int, ...], int, Tier] | int | str],
) -> None:
    engine, blocks = Engine(), resident()
    spec = WorkerSpec(
        worker_id="w", model="m", block_size=SIZE, kv_blocks_total=9, max_num_seqs=1, max_num_batched_tokens=9
    )
    log = CacheEvents(spec, 1, 0)
    index, again = PrefixIndex(), PrefixIndex()
    for one in (index, again):
        one.add_holder("w", 0, 1)
    announced: dict[Tier, set[int]] = {"device": set(), "host": set(), "disk": set()}
    for step in history:
        event: EngineEvent | None
        if isinstance(step, tuple):
            salt, tokens, start, tier = step
            event = engine.store(salt, tokens, min(start, len(tokens) // SIZE - 1), tier)
        elif isinstance(step, int):
            event = engine.evict(step)
        else:
            engine.copies.clear()
            event = ClearedBlocks()
        if event is None:
            continue
        changes = [change for change in blocks.apply(event) if not isinstance(change, StoreChange)]
        fold(announced, changes)
        for draft in log.changes(0, changes):
            assert index.apply(decode(KV_EVENTS, draft.value)) is None
        for tier in ("device", "host"):
            assert announced[tier] == engine.held(tier) == set(blocks.held(tier))
            assert index.blocks_held("w", 0, tier) == len(announced[tier])
    assert not blocks.counts
    assert not index.counts["unknown_block"]
    assert len(blocks) == len({one for (_, one), n in engine.copies.items() if n}), "as many names as blocks"
    for draft in log.reannouncement(0, 0):
        again.apply(decode(KV_EVENTS, draft.value))
    for tier in ("device", "host", "disk"):
        assert again.blocks_held("w", 0, tier) == len(announced[tier])
    for salt, tokens in {one for _, one in engine.copies}:
        query = names(list(tokens), "", salt)
        assert again.overlaps(query) == index.overlaps(query)


def fold(announced: dict[Tier, set[int]], changes: list[CacheChange]) -> None:
    """Return the blocks of a reader that requires every block to be reported once."""
    for change in changes:
        match change:
            case Stored(hashes=hashes, tier=tier):
                assert not announced[tier] & set(hashes) and len(change.engine_hashes) == len(hashes)
                announced[tier] |= set(hashes)
            case Removed(hashes=hashes, tier=tier):
                assert announced[tier] >= set(hashes) and len(change.engine_hashes) == len(hashes)
                announced[tier] -= set(hashes)
            case Cleared():
                for held in announced.values():
                    held.clear()


def of(*events: EngineEvent) -> Batch:
    return Batch(events)


def test_block_after_an_unknown_one_is_a_loss() -> None:
    tracker = KvTracker(resident())
    tracker.batch(of(stored([1], [1, 2])))
    outcome = tracker.batch(of(stored([3], [3, 4], 2)))
    assert outcome.changes == (Cleared(),) and "unknown block" in outcome.lost
    assert tracker.resident.held() == () and tracker.lost
    assert tracker.batch(of(stored([3], [3, 4], 2))) == TrackerResult(), "it is known that more is there than we know"
    assert tracker.batch(of(stored([5], [5, 6]))).changes == (Stored(None, names([5, 6]), "device", (5,)),)
    assert tracker.batch(of(ClearedBlocks())) == TrackerResult((Cleared(),)) and not tracker.lost


def test_block_in_a_lower_tier_may_outlive_its_parent() -> None:
    tracker = KvTracker(resident())
    assert tracker.batch(of(stored([3], [3, 4], 2, "host"))) == TrackerResult()
    assert tracker.resident.counts["orphans"] == 1


def test_loss_empties_the_rank_and_is_reported_once() -> None:
    tracker = KvTracker(resident())
    tracker.batch(of(stored([1], [1, 2])))
    assert tracker.missed("gone") == TrackerResult((Cleared(),), "gone")
    assert tracker.missed("more gone") == TrackerResult((Cleared(),))
    assert tracker.restarted() == TrackerResult((Cleared(),)) and not tracker.lost
    assert tracker.missed("again").lost == "again"


@pytest.mark.parametrize("odd", ["undecodable", "orphan"])
def test_an_engine_that_contradicts_itself_keeps_its_cache_after_a_while(odd: str) -> None:
    tracker = KvTracker(resident())
    requested = 0
    for _ in range(CONTRADICTIONS_MAX + 3):
        outcome = tracker.undecodable("?") if odd == "undecodable" else tracker.batch(of(stored([3], [3, 4], 2)))
        assert outcome.changes == (Cleared(),)
        requested += bool(outcome.lost)
        tracker.batch(of(ClearedBlocks()))
    assert requested == CONTRADICTIONS_MAX
    assert tracker.missed("a real gap").lost


ENGINE = StoredBlocks(hashes=(1, 2), parent=None, token_ids=pack_u32(range(8)), block_size=4)


def test_own_blocks_are_in_their_tiers_beside_the_blocks_of_the_engine() -> None:
    resident = ResidentBlocks(4, counts_copies=True)
    resident.apply(ENGINE)
    device = resident.held()
    assert resident.apply(OwnStored(parent=None, hashes=device, tier="host")) == [Stored(None, device, "host")]
    assert resident.apply(OwnStored(parent=device[0], hashes=(9,), tier="disk")) == [Stored(device[0], (9,), "disk")]
    assert (resident.held(), resident.held("host"), resident.held("disk")) == (device, device, (9,))
    again = OwnStored(parent=None, hashes=(*device, 10, 11), tier="host")
    assert resident.apply(again) == [Stored(device[1], (10, 11), "host")], "each block is reported once"
    assert resident.apply(OwnRemoved(hashes=(11, 10), tier="host")) == [Removed((11, 10), "host")]
    assert resident.lower() == [Stored(None, device, "host"), Stored(None, (9,), "disk")]
    assert resident.apply(OwnRemoved(hashes=(device[0], 77), tier="host")) == [Removed((device[0],), "host")]
    assert resident.apply(OwnRemoved(hashes=(77,), tier="host")) == []
    assert resident.held() == device
    assert not resident.counts


def test_cleared_rank_keeps_the_blocks_of_the_shared_store() -> None:
    tracker = KvTracker(ResidentBlocks(4, counts_copies=True))
    changes = (StoreChange(stored=(5, 6, 7)), StoreChange(removed=(5,)), StoreChange(stale=(6,)))
    assert tracker.batch(Batch(changes)).changes == changes
    again = OwnStored(parent=None, hashes=(8,), tier="disk")
    outcome = tracker.batch(Batch((OwnStored(parent=None, hashes=(3,), tier="host"), ClearedBlocks(), again)))
    assert outcome.changes[1:] == (Cleared(), Stored(None, (8,), "disk"))
    assert (tracker.resident.shared(), tracker.resident.held("host"), tracker.resident.held("disk")) == ((7,), (), (8,))
    tracker.missed("gap")
    assert (tracker.resident.shared(), tracker.resident.held("disk")) == ((7,), ())


def test_shared_storage_of_the_engine_is_a_store_and_survives_the_rank() -> None:
    resident = ResidentBlocks(4, counts_copies=True)
    changes = resident.apply(ENGINE)
    [device] = changes
    assert isinstance(device, Stored)
    shared = StoredBlocks(hashes=(1, 2), parent=None, token_ids=pack_u32(range(8)), block_size=4, tier="store")
    assert resident.apply(shared) == [StoreChange(stored=device.hashes)]
    assert resident.apply(ClearedBlocks()) == [Cleared()]
    assert (resident.held(), resident.shared(), len(resident)) == ((), device.hashes, 2)
    gone = RemovedBlocks(hashes=(2,), tier="store")
    assert resident.apply(gone) == [StoreChange(removed=device.hashes[1:])]
    assert (resident.shared(), len(resident)) == (device.hashes[:1], 1)
