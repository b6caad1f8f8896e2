"""Records that no owner wrote to the journal end no owner, and leave no group without one."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestRouted, SnapshotRecord
from forebay.events.topics import DECISIONS, HEARTBEATS, SNAPSHOTS
from forebay.live.owner.owner import Owner, OwnershipLost
from forebay.live.router.abandoned_tail import AbandonedTail
from forebay.live.router.readiness import ReadinessMetrics, ready
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft, LogError
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.history.reader import Validity, journal
from forebay.transport.sqlite.log import SqliteLog
from tests.live.routings import routing
from tests.live.shared import Edited, SharedLog, proven
from tests.live.standbys import serve_unsealed
from tests.system import MODEL, System, settings, until

PROMPT = list(range(12))
Forge = Callable[[list[JournalRecord]], list[bytes]]


def newest(records: list[JournalRecord]) -> list[bytes]:
    return [encode(DECISIONS, records[-1])]


def all_again(records: list[JournalRecord]) -> list[bytes]:
    return [encode(DECISIONS, record) for record in records]


def claims(records: list[JournalRecord]) -> list[bytes]:
    return [encode(DECISIONS, record) for record in records if isinstance(record, OwnerClaimed)]


def of_another_group(records: list[JournalRecord]) -> list[bytes]:
    """Records of a group whose owner has the same epoch and the next number, and the claim after it."""
    epoch, seq = records[-1].owner_epoch, records[-1].seq
    routed = next(record for record in records if isinstance(record, RequestRouted))
    ahead = [
        msgspec.structs.replace(routed, owner_nonce="other", owner_epoch=epoch, seq=seq + 1 + more) for more in (0, 7)
    ]
    claim = next(record for record in records if isinstance(record, OwnerClaimed))
    follower = msgspec.structs.replace(claim, owner_nonce="another", previous_nonce="other", snapshot=0)
    return [encode(DECISIONS, record) for record in (*ahead, follower)]


def undecodable(_: list[JournalRecord]) -> list[bytes]:
    return [b"", b"\x00", b"{}", b'{"type":"request.routed","owner_epoch":0,"seq":1}', b"[" * 10_000]


def beyond_any_claim(records: list[JournalRecord]) -> list[bytes]:
    return [encode(DECISIONS, msgspec.structs.replace(records[-1], owner_epoch=1 << 40))]


FORGERIES: tuple[Forge, ...] = (newest, all_again, claims, of_another_group, undecodable, beyond_any_claim)


async def append(log: SqliteLog, values: Sequence[bytes]) -> None:
    await log.append([Draft(DECISIONS.name, 0, value) for value in values])


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
async def test_a_router_takes_over_after_invalid_records(
    forge: Forge, log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
        forged = forge(system.decisions())
        await append(log, forged)
        async with routing(system, "new") as router:
            router.assign({0})
            await until(lambda: 0 in router.owners)
            await system.serve("c", PROMPT)
            skipped = router.owners[0].journal
            assert skipped.void + skipped.foreign == len(forged)
            assert ready(router) == (True, "ready")
        assert "skipped record" in caplog.text or forge is claims
    report = await proven(log)
    assert report.void + report.repeated + report.unverified.get("foreign-records", 0) == len(forged)


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
async def test_invalid_records_between_appends_do_not_end_the_owner(forge: Forge, log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        async with system.owned(snapshot_every=4, fleet=2) as owner:
            await system.serve("first", PROMPT)
            count = 0
            for number in range(4):
                forged = forge(await valid(log))
                await append(log, forged)
                count += len(forged)
                await system.serve(f"r{number}", [*PROMPT, *[number] * 4])
            assert owner.journal.void + owner.journal.foreign == count
        assert system.ends().keys() >= {"first", "r0", "r1", "r2", "r3"}
    assert (await proven(log)).claims == 1


async def valid(log: SqliteLog) -> list[JournalRecord]:
    return [record async for _, record in journal(log, 0, 0, log.next_offset(DECISIONS.name, 0), Validity())]


async def test_repeated_chunks_of_snapshots_are_skipped(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated chunk of an earlier snapshot may be right where the chunk of the next one is expected."""
    monkeypatch.setattr("forebay.live.owner.snapshots.CHUNK_BYTES", 1)  # a chunk per part
    async with System(log).started(workers=2) as system:
        shared = SharedLog(log)

        async def repeat(draft: Draft | None) -> None:
            chunks = log.records(SNAPSHOTS.name, 0, 0, 1_000)
            if draft is not None and draft.topic == SNAPSHOTS.name and chunks:
                await log.append([Draft(SNAPSHOTS.name, 0, chunk.value) for chunk in chunks[:20]])

        shared.hook = repeat
        async with system.owned(shared, snapshot_every=2, fleet=2):
            for number in range(6):
                await system.serve(f"r{number}", [*PROMPT, *[number] * 4])
        async with system.owned():
            await system.serve("last", PROMPT)
        assert len(system.decisions(SnapshotRecord)) > 2
    report = await proven(log)
    assert report.snapshots == len(system.decisions(SnapshotRecord))


async def test_an_owner_stops_if_the_log_lost_its_last_record(log: SqliteLog) -> None:
    """The log acknowledges the next record at an offset that it had already acknowledged."""

    class Shortened(SharedLog):
        async def append(self, drafts: Sequence[Draft]) -> list[int]:
            offsets = await super().append(drafts)
            return [max(0, offset - 2) for offset in offsets] if drafts[0].topic == DECISIONS.name else offsets

    async with System(log).started(workers=1) as system:
        owner = Owner(Shortened(log), system.leases, settings())
        with pytest.raises(LogError, match="the log lost records"):
            await owner.start()
            owner.snapshots.request()
            await owner.run()
        owner.drop()


def losing(system: System) -> SharedLog:
    """Return the log without the first routing decision, as if no record had ever been at its offset."""
    lost = next(offset for offset, record in enumerate(system.decisions()) if isinstance(record, RequestRouted))
    return Edited(system.log, DECISIONS.name, lambda record: None if record.offset == lost else record)


async def test_a_stopped_standby_is_not_ready_and_is_no_standby(log: SqliteLog) -> None:
    """It also does not claim, because it cannot derive the state of the group."""
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
        heartbeats = RouterHeartbeats(log, MODEL)
        following = asyncio.create_task(heartbeats.follow(0))
        end = log.next_offset(DECISIONS.name, 0)
        async with routing(system, "new", losing(system)) as router:
            registry = CollectorRegistry()
            registry.register(ReadinessMetrics(router))
            router.assign({0})
            await until(lambda: not ready(router)[0])
            assert "the log lost 1 journal records before it" in ready(router)[1]
            assert registry.get_sample_value("forebay_router_blocked", {"group": MODEL}) == 1
            beats = log.next_offset(HEARTBEATS.name, 0)
            standby = router.members[0].standby
            assert standby is not None
            await standby.caught_up.wait()
            for _ in range(50):
                await asyncio.sleep(0)
            assert log.next_offset(HEARTBEATS.name, 0) <= beats + 1
            assert log.next_offset(DECISIONS.name, 0) == end
        following.cancel()


@pytest.mark.parametrize("has_snapshot", [False, True])
async def test_an_operator_lets_a_router_take_over_a_journal_that_lost_a_record(
    has_snapshot: bool, log: SqliteLog
) -> None:
    """A young group without a snapshot continues from its beginning."""
    async with System(log).started(workers=2) as system:
        if has_snapshot:
            async with system.owned(fleet=2):
                pass
        await serve_unsealed(system, "a", "b")
        losses: list[AbandonedTail] = []
        broken = losing(system)
        async with routing(system, "new", broken, losses.append) as router:
            router.assign({0})
            await until(lambda: 0 in router.owners)
            await system.serve("c", PROMPT)
            assert ready(router) == (True, "ready")
        (loss,) = losses
        assert (loss.snapshot > 0) == has_snapshot
        assert ("continues from its beginning" in loss.text()) != has_snapshot
        claim = system.decisions(OwnerClaimed)[-1]
        assert claim.snapshot == loss.snapshot
        async with routing(system, "next", broken) as router:
            router.assign({0})
            await until(lambda: 0 in router.owners)
            await system.serve("d", PROMPT)
    report = await verify(log)
    assert (report.divergence, report.verified) == (None, report.decisions)


async def test_a_stopped_standby_follows_again_after_a_planned_stop(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
        broken = losing(system)
        async with routing(system, "new", broken) as router:
            router.assign({0})
            await until(lambda: not ready(router)[0])
            async with system.owned(fleet=2):
                pass
            await until(lambda: 0 in router.owners)
            assert ready(router) == (True, "ready")


async def test_of_two_claims_after_the_same_owner_the_first_is_valid(log: SqliteLog) -> None:
    """So a repeated claim, or the claim of a router that did not know the newest owner, ends no owner."""
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        shared = SharedLog(log)
        first = Owner(log, system.leases, settings())
        second = Owner(shared, system.leases, settings())

        async def claim_before(draft: Draft | None) -> None:
            if draft is not None and draft.topic == DECISIONS.name and first.journal.epoch < 0:
                await first.start()

        shared.hook = claim_before
        with pytest.raises(OwnershipLost, match="another router claimed the group first"):
            await second.start()
        second.drop()
        running = asyncio.create_task(first.run())
        await system.serve("b", PROMPT)
        await first.stop()
        await running
        await first.close()
    assert (await proven(log)).void == 1
