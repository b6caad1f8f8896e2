"""A planned stop ends the journal with `Sealed`, after time stopped and every effect is durable."""

import asyncio

import msgspec
import pytest

from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestRouted, Sealed
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import REQUESTS, SNAPSHOTS
from forebay.live.owner import snapshots
from forebay.live.owner.owner import Owner
from forebay.live.router.standby import Standby
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft
from forebay.transport.history.snapshots import OtherState, load_snapshot
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import Altered, SharedLog, admit, journal_end, proven
from tests.system import System, settings, submitted, until, until_ended

PREFIX = list(range(12))


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


async def test_an_owner_decides_while_it_walks_the_blocks_for_its_last_snapshot(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SLICE_NS", 0)
    monkeypatch.setattr(snapshots, "WALK_BLOCKS", 1)
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 200)
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
