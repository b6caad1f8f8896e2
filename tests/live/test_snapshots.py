"""Snapshots written beside decisions are exact and taken when due; a planned stop ends the journal with `Sealed`."""

import asyncio
import gc

import msgspec
import pytest

from forebay.events.base import U64_BYTES, pack_u64, unpack_u64
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, RequestRouted, Sealed, SnapshotRecord
from forebay.events.kv import BlocksStored
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import IndexBlocks, IndexChanges, SnapshotChunk
from forebay.events.topics import KV_EVENTS, REQUESTS, SNAPSHOTS
from forebay.journal.snapshots import OtherState, load_snapshot
from forebay.live.owner import snapshot_writer
from forebay.live.owner.owner import Owner
from forebay.live.standby import Standby
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import (
    PREFIX,
    Altered,
    SharedLog,
    admit,
    all_ended,
    followed,
    journal_end,
    nothing,
    prompt,
    proven,
    run_until_append,
    scenario,
)
from tests.system import System, settings, submitted, take_snapshot, until, until_ended


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each turn do one small step, so that a snapshot takes many turns."""
    monkeypatch.setattr(snapshot_writer, "SLICE_NS", 0)
    monkeypatch.setattr(snapshot_writer, "WALK_BLOCKS", 1)
    monkeypatch.setattr(snapshot_writer, "CHUNK_BYTES", 200)


async def require_restored_state_equals(log: SqliteLog, owner: Owner) -> None:
    cold = await followed(log)
    assert cold.world.digest() == owner.world.digest()


@pytest.mark.usefixtures("small_steps")
async def test_decisions_go_on_while_a_snapshot_is_written(log: SqliteLog) -> None:
    """Another prompt is cached before each chunk is appended, and the snapshot is still exact."""
    written = 0

    async def serve_first(draft: Draft | None) -> None:
        nonlocal written
        if draft is not None and draft.topic == SNAPSHOTS.name and written < 10:
            written += 1
            system.send(submitted(f"during-{written}", [100 + written] * 16))
            await until_cached(system, owner, f"during-{written}")

    shared = SharedLog(log)
    async with System(log).started(workers=6) as system:
        await admit(system, 6)
        async with system.owned(shared, snapshot_every=30) as owner:
            for number in range(24):
                system.send(submitted(f"before-{number}", [number] * 16))
                await until_cached(system, owner, f"before-{number}")
            index = owner.world.index
            assert len([key for key in index.holders() if index.blocks_held(*key, "device")]) > 4
            shared.hook = serve_first
            for number in range(6):
                system.send(submitted(f"due-{number}", [number] * 16))
            await until(lambda: written == 10 and owner.snapshots.taken and not owner.snapshots.eager)
            shared.hook = nothing
        journal = list(enumerate(system.decisions()))
        (_, (offset, taken), *_) = (one for one in journal if isinstance(one[1], SnapshotRecord))
        between = [record for _, record in journal[taken.journal_offset : offset] if isinstance(record, RequestRouted)]
        assert between
        sealed = journal[taken.journal_offset - 1][1]
        assert isinstance(sealed, Advanced)
        assert sealed.digest == taken.digest
        assert (await load_snapshot(log, 0, taken)).digest() == int(taken.digest, 16)
        parts = [part for chunk in system.events(SNAPSHOTS, SnapshotChunk) for part in chunk.parts]
        assert any(isinstance(part, IndexChanges) and part.events for part in parts), (
            "the index did not change while the snapshot was written"
        )
        await require_restored_state_equals(log, owner)


async def until_cached(system: System, owner: Owner, name: str) -> None:
    """Serve a prompt and wait until the owner has applied its KV events."""
    await until_ended(system, name)
    request = next(event for event in system.events(REQUESTS, RequestSubmitted) if event.request_id == name)
    await until(lambda: owner.world.index.overlaps(unpack_u64(request.sequence_hashes)))


@pytest.mark.usefixtures("small_steps")
async def test_an_index_larger_than_a_chunk_is_restored(log: SqliteLog) -> None:
    """The blocks are written in several chunks, before the world that they belong to."""
    blocks = list(range(1, 200_000))
    async with System(log).started(workers=1) as system:
        async with system.owned(fleet=1) as owner:
            epoch = owner.world.fleet.workers()[0].worker_epoch
            stored = BlocksStored(worker_id="w0", worker_epoch=epoch, seq=1, sequence_hashes=pack_u64(blocks))
            log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, stored))])
            await until(lambda: owner.world.index.blocks_held("w0", 0, "device") == len(blocks))
        parts = [part for chunk in system.events(SNAPSHOTS, SnapshotChunk) for part in chunk.parts]
        held = [part for part in parts if isinstance(part, IndexBlocks)]
        assert len(held) > 1
        assert parts.index(held[-1]) < len(parts) - 2
        await require_restored_state_equals(log, owner)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("small_steps")
async def test_a_kill_at_any_point_of_a_snapshot_loses_nothing(log: SqliteLog) -> None:
    """Owners of growing run length on one log each leave an incomplete snapshot, which later owners ignore."""
    async with System(log).started(workers=2) as system:
        await admit(system, 2)
        sending = asyncio.create_task(scenario(system))
        deaths = 0
        for appends in range(2, 22):
            deaths += await run_until_append(system, appends, snapshot_every=3)
        async with system.owned(snapshot_every=3) as owner:
            await until(lambda: all_ended(system, owner))
        await sending
        named = {(taken.owner_epoch, taken.chunks) for taken in system.decisions(SnapshotRecord)}
        chunks = {chunk.owner_epoch for chunk in system.events(SNAPSHOTS, SnapshotChunk)}
        assert chunks - {epoch for epoch, _ in named}, "no snapshot was interrupted, so the test checks nothing"
        assert deaths > 3
        await require_restored_state_equals(log, owner)


async def test_an_aged_owner_takes_a_snapshot_only_after_changes(log: SqliteLog) -> None:
    """With a maximum age of zero, each change is followed by a snapshot, but idle turns are not."""
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        owner = Owner(log, system.leases, settings(snapshot_age_s=0.0))
        await owner.start()
        taken = -1
        for number in range(3):
            system.send(submitted(f"r{number}", prompt(number)))
            while not (f"r{number}" in system.ends() and not len(owner.world.requests) and not owner.snapshots.eager):
                await owner.turn()
                await asyncio.sleep(0)
            await quiet(owner)
            assert owner.snapshots.taken > taken
            taken = owner.snapshots.taken
        await quiet(owner)
        assert owner.snapshots.taken == taken
        await owner.close()


async def quiet(owner: Owner) -> None:
    """Take turns without new records to apply."""
    for _ in range(50):
        await owner.turn()
        await owner.snapshots.settle()


async def test_a_planned_stop_seals_the_last_state(log: SqliteLog) -> None:
    """A stop seals the last state even while a snapshot of an earlier state is being written."""
    held = asyncio.Event()

    async def hold(draft: Draft | None) -> None:
        if draft is not None and draft.topic == SNAPSHOTS.name:
            await held.wait()

    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        shared = SharedLog(log, hold)
        async with system.owned(shared, snapshot_every=1) as owner:
            system.send(submitted("a", PREFIX))
            await until(lambda: owner.snapshots.sealed)
            await system.serve("b", PREFIX)
            await until(lambda: not len(owner.world.requests))
            held.set()
        last = system.decisions()[-1]
        assert isinstance(last, Sealed)
        assert (await load_snapshot(log, 0, last)).view == owner.world.view


async def test_the_index_is_frozen_for_the_garbage_collector_each_time_it_doubles(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []
    owner: Owner
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(owner.world.index.blocks_held("w0", 0, "device")))
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        owner = Owner(log, system.leases, settings())
        await owner.start()
        epoch = owner.world.fleet.workers()[0].worker_epoch
        for seq, count in enumerate((99_999, 1, 99_999, 1), 1):
            hashes = pack_u64(range(seq << 32, (seq << 32) + count))
            stored = BlocksStored(worker_id="w0", worker_epoch=epoch, seq=seq, sequence_hashes=hashes)
            await log.append([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, stored))])
            await owner.turn()
            await take_snapshot(owner)
        assert frozen == [100_000, 200_000]
        owner.drop()
        owner = Owner(log, system.leases, settings())
        await owner.start()
        assert frozen == [100_000, 200_000, 200_000]
        await owner.close()


async def test_a_state_difference_without_a_decision_is_found_at_the_next_digest(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_writer, "DIGEST_EVERY", 3)
    async with System(log).started(workers=1) as system:
        async with system.owned(fleet=1) as owner:
            for number in range(10):
                await system.serve(f"r{number}", prompt(number))
            assert owner.snapshots.digests == 3
        journal = system.decisions()
    await proven(log)
    stored = system.events(KV_EVENTS, BlocksStored)[0]
    asked_by_nobody_else = stored.sequence_hashes[:-U64_BYTES] + pack_u64([9])
    replacement = msgspec.structs.replace(stored, sequence_hashes=asked_by_nobody_else)
    value, at = encode(KV_EVENTS, replacement), system.events(KV_EVENTS).index(stored)
    report = await verify(Altered(log, KV_EVENTS.name, lambda _: value, at=at))
    assert report.divergence is not None
    assert list(report.divergence.differs) == ["digest"]
    first_digest = next(offset for offset, record in enumerate(journal) if isinstance(record, Advanced))
    assert report.divergence.offset == first_digest


class SlowLog(SharedLog):
    """A log that acknowledges effects only after `acknowledge`. `flushing` is set when an owner waits for that."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log)
        self.flushing = asyncio.Event()
        self.acknowledge = asyncio.Event()

    async def flush(self) -> None:
        self.flushing.set()
        await self.acknowledge.wait()
        await super().flush()


async def test_an_owner_seals_after_its_effects_are_durable_and_applies_nothing_more(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        slow = SlowLog(log)
        owner = Owner(slow, system.leases, settings())
        await owner.start()
        running = asyncio.create_task(owner.run())
        await system.serve("a", PREFIX)
        await owner.stop()
        await running
        closing = asyncio.create_task(owner.close())
        await slow.flushing.wait()
        applied = owner.world.view[REQUESTS.name]
        system.send(submitted("late", PREFIX))
        await until(lambda: log.next_offset(REQUESTS.name, 0) == applied + 1)
        assert len(system.decisions(Sealed)) == 1, "only the owner of `admit` has sealed"
        slow.acknowledge.set()
        await closing
        last: JournalRecord = system.decisions()[-1]
        assert isinstance(last, Sealed)
        assert last.consumed == ()
        world = await load_snapshot(log, 0, last)
        assert world.view[REQUESTS.name] == applied
        assert (world.digest(), world.seq + 1) == (owner.world.digest(), owner.world.seq)
        async with system.owned():
            await until_ended(system, "late")
    report = await proven(log)
    assert report.snapshots == 3


@pytest.mark.usefixtures("small_steps")
async def test_an_owner_decides_while_it_walks_the_blocks_for_its_last_snapshot(log: SqliteLog) -> None:
    served: list[str] = []

    async def serve_first(draft: Draft | None) -> None:
        is_walking = stopping and not owner.snapshots.sealed
        if is_walking and draft is not None and draft.topic == SNAPSHOTS.name and len(served) < 2:
            served.append(f"during-{len(served)}")
            await system.serve(served[-1], [100 + len(served)] * 16)

    stopping = False
    shared = SharedLog(log, serve_first)
    async with System(log).started(workers=4) as system:
        await admit(system, 4)
        async with system.owned(shared) as owner:
            for number in range(24):
                await system.serve(f"before-{number}", [number] * 16)
            await until(lambda: owner.world.index.blocks_held("w0", 0, "device"))
            stopping = True
        assert len(served) == 2
        routed = [decided.request_id for decided in system.decisions(RequestRouted)]
        assert set(served) <= set(routed)
        last = system.decisions()[-1]
        assert isinstance(last, Sealed)
        assert last.chunks > 3


async def test_a_standby_knows_that_the_last_owner_released_the_group(log: SqliteLog) -> None:
    """The next claim names the seal. A claim after the death of an owner names none."""
    async with System(log).started(workers=1) as system:
        standby = Standby(log, 0)
        following = asyncio.create_task(standby.run())
        async with system.owned() as owner:
            await until(lambda: standby.position == journal_end(log) > 0)
            assert not standby.released
        await until(lambda: standby.position == journal_end(log))
        assert standby.released
        sealed_at = journal_end(log) - 1
        dying = Owner(log, system.leases, settings())
        await dying.start()
        await until(lambda: standby.world.owner_epoch == dying.journal.epoch)
        assert not standby.released
        dying.drop()
        async with system.owned() as owner:
            assert owner.journal.epoch > dying.journal.epoch
        following.cancel()
        assert [claim.seal for claim in system.decisions(OwnerClaimed)] == [-1, sealed_at, -1]


def with_a_field(value: bytes) -> bytes:
    """Return other bytes for the same parts of a snapshot."""
    chunk = msgspec.msgpack.decode(value, type=SnapshotChunk)
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(SNAPSHOTS, chunk)) | {"added": 1})


async def test_the_checksum_of_a_seal_covers_the_bytes_of_the_chunks(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        last = system.decisions()[-1]
        assert isinstance(last, Sealed)
    changed = Altered(log, SNAPSHOTS.name, with_a_field)
    with pytest.raises(OtherState, match="has checksum"):
        await load_snapshot(changed, 0, last)
    report = await verify(changed)
    assert report.divergence is not None
    assert "has checksum" in report.divergence.reason
