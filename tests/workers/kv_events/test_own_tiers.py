"""Blocks that forebay's own connector reports: by sequence hash, beside the blocks that the engine reports."""

from forebay.engine_model.steps import Removed, StoreChange, Stored
from forebay.events.base import pack_u32
from forebay.workers.engine import Cleared
from forebay.workers.kv_events.engine_events import (
    Batch,
    ClearedBlocks,
    OwnRemoved,
    OwnStored,
    RemovedBlocks,
    StoredBlocks,
)
from forebay.workers.kv_events.resident import KvTracker, ResidentBlocks

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
