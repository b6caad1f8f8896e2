"""Two concurrent owners of one group on one log, one of which does not know yet that it was replaced."""

import asyncio
from contextlib import suppress

import pytest

from forebay.events.codec import encode
from forebay.events.decisions import Advanced, OwnerClaimed, RequestRouted, SnapshotRecord
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.snapshots import SnapshotChunk
from forebay.events.tokens import TokensEmitted
from forebay.events.topics import DEAD_LETTERS, DECISIONS, FLEET, SNAPSHOTS, TOKENS, work_topic
from forebay.events.work import WorkItem
from forebay.live.owner import snapshots
from forebay.live.owner.owner import Owner, OwnershipLost
from forebay.live.router.standby import Standby
from forebay.transport.base import Draft
from forebay.transport.history.snapshots import newest_snapshot
from forebay.transport.history.start import recorded_view
from forebay.transport.sqlite import log as sqlite_log
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import sampled
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.live.shared import SharedLog, admit, proven, samples, valid
from tests.system import SLOT, System, settings, submitted, until, until_ended

PREFIX = list(range(12))
BATCH = 4
NAMES = [f"r{number}" for number in range(BATCH)]
APPENDS_MAX = 26  # of an owner that serves the requests below alone


def work_of(system: System, epoch: int, workers: int) -> list[WorkItem]:
    """Return the work items that the owner of `epoch` sent."""
    items = [item for slot in range(workers) for item in system.events(work_topic("default"), WorkItem, slot)]
    return [item for item in items if item.owner_epoch == epoch]


def send_all(system: System) -> None:
    for number, name in enumerate(NAMES):
        system.send(submitted(name, [*PREFIX, number, number, number, number]))


def all_ended(system: System, owner: Owner) -> bool:
    return set(system.ends()) >= set(NAMES) and not len(owner.world.requests)


async def require_each_once(system: System) -> None:
    for name in NAMES:
        assert len(system.ends()[name]) == 1, name
        assert len(system.answer(name)) == 3, name
    routed = [(routed.request_id, routed.attempt) for routed in await valid(system.log, RequestRouted)]
    assert sorted(routed) == [(name, 1) for name in NAMES]


class OwnerTask:
    def __init__(self, system: System, **changes: int) -> None:
        self.owner = Owner(system.log, system.leases, settings(**changes))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.owner.start()
        self._task = asyncio.create_task(self.owner.run())

    async def stop(self) -> None:
        assert self._task is not None, "it was never started"
        await self.owner.stop()
        await self._task
        await self.owner.close()


@pytest.mark.parametrize("position", range(BATCH + 1))
async def test_a_claim_between_the_records_of_one_append(log: SqliteLog, position: int) -> None:
    """Records before the claim are valid and the new owner acts on them; a claim after the last record is too late."""
    async with System(log).started(workers=2) as system:
        await admit(system, 2)
        shared = SharedLog(log)
        old, new = Owner(shared, system.leases, settings()), OwnerTask(system)
        await old.start()
        before: list[Draft | None] = []

        async def claim_in_between(draft: Draft | None) -> None:
            if draft is None or draft.topic == DECISIONS.name:
                before.append(draft)
                if len(before) == position + 1:
                    await new.start()

        shared.hook = claim_in_between
        send_all(system)
        await asyncio.sleep(0)
        if position < BATCH:
            with pytest.raises(OwnershipLost, match="another owner claimed the group"):
                await old.turn()
            assert work_of(system, old.journal.epoch, 2) == []
        else:
            await old.turn()
            await asyncio.sleep(0)
            assert len(work_of(system, old.journal.epoch, 2)) == BATCH
        with pytest.raises(OwnershipLost):
            await old.close()
        old.drop()
        assert [draft.topic for draft in before[:BATCH] if draft] == [DECISIONS.name] * BATCH
        await until(lambda: all_ended(system, new.owner))
        await require_each_once(system)
        mine = [routed for routed in await valid(log, RequestRouted) if routed.owner_epoch == old.journal.epoch]
        assert len(mine) == position
        await new.stop()


async def test_an_idle_owner_notices_its_successor_and_stops_writing(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system:
        shared = SharedLog(log)
        old, new = Owner(shared, system.leases, settings()), OwnerTask(system)
        await old.start()
        running = asyncio.create_task(old.run())
        await until(lambda: len(old.world.fleet) == 1)
        await new.start()
        with pytest.raises(OwnershipLost, match="newer owner"):
            await running
        written = shared.appends
        system.start_worker("late")
        await until(lambda: len(new.owner.world.fleet) == 2)
        with pytest.raises(OwnershipLost):
            await old.turn()
        assert shared.appends == written
        old.drop()
        await new.stop()


async def test_late_work_of_a_replaced_owner_is_not_executed_twice(log: SqliteLog) -> None:
    """An owner sleeps after its records were acknowledged, and wakes after another owner took over."""
    async with System(log).started(workers=2) as system:
        await admit(system, 2)
        asleep, awake = asyncio.Event(), asyncio.Event()
        shared = SharedLog(log)
        old, new = Owner(shared, system.leases, settings()), OwnerTask(system)
        await old.start()

        async def fall_asleep(draft: Draft | None) -> None:
            if draft is None:
                asleep.set()
                await awake.wait()

        shared.hook = fall_asleep
        send_all(system)
        running = asyncio.create_task(old.run())
        await asleep.wait()
        await new.start()
        await until(lambda: all_ended(system, new.owner))
        assert work_of(system, old.journal.epoch, 2) == []
        awake.set()
        with pytest.raises(OwnershipLost):
            await running
        old.drop()
        await until(lambda: len(work_of(system, old.journal.epoch, 2)) == BATCH)
        await system.serve("after", PREFIX)
        emitted = [chunk.request_id for event in system.events(TOKENS, TokensEmitted, SLOT) for chunk in event.chunks]
        for name in NAMES:
            assert len(system.ends()[name]) == 1
            assert emitted.count(name) <= 3
            assert len(system.answer(name)) == 3
        await new.stop()


async def test_interleaved_stale_records_change_nothing(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late journal records, fleet events and snapshot chunks of an earlier owner precede each current record."""
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 200)
    async with System(log).started(workers=2) as system:
        await admit(system, 2)
        w0 = next(fact for fact in system.events(FLEET) if getattr(fact, "slot", 1) == 0)
        w0_epoch = system.events(FLEET).index(w0)
        stale = {
            DECISIONS: Advanced(owner_epoch=0, seq=99, digest="0" * 16),
            FLEET: WorkerLost(owner_epoch=0, worker_id=w0.spec.worker_id, worker_epoch=w0_epoch),
        }
        number = 0

        async def write_stale_records(draft: Draft | None) -> None:
            nonlocal number
            if draft is not None and draft.topic == DECISIONS.name:
                await log.append([Draft(topic.name, 0, encode(topic, event)) for topic, event in stale.items()])
            elif draft is not None and draft.topic == SNAPSHOTS.name:
                foreign = SnapshotChunk(owner_epoch=0, number=number, parts=())
                number += 1
                await log.append([Draft(SNAPSHOTS.name, 0, encode(SNAPSHOTS, foreign))])

        shared = SharedLog(log)
        async with system.owned(shared, snapshot_every=3) as owner:
            shared.hook = write_stale_records
            send_all(system)
            await until(lambda: all_ended(system, owner) and owner.world.fleet.owner_epoch > 0)
            await until(lambda: owner.snapshots.taken)
            assert number > 2
            assert owner.journal.void > 2
            assert samples(owner)["forebay_owner_void_records_total",] == owner.journal.void
            assert len(owner.world.fleet) == 2
            shared.hook = SharedLog(log).hook
        await require_each_once(system)
        end = log.next_offset(DECISIONS.name, 0)
        taken = await newest_snapshot(log, 0, end)
        assert taken is not None
        assert taken.chunks > 1
        warm, cold = Standby(log, 0), Standby(log, 0)
        await warm.catch_up(2)
        await warm.catch_up(end)
        await cold.catch_up(end)
        assert warm.world.digest() == cold.world.digest() == owner.world.digest()
        assert await recorded_view(log, 0) == {
            topic: position for topic, position in owner.world.view.items() if topic != "clock"
        }
        async with system.owned() as owner:
            assert len(owner.world.fleet) == 2


async def test_a_stale_snapshot_is_not_used(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        shared, new = SharedLog(log), OwnerTask(system)
        old = Owner(shared, system.leases, settings())
        await old.start()

        async def claim_before_the_snapshot(draft: Draft | None) -> None:
            if draft is not None and draft.topic == SNAPSHOTS.name:
                await new.start()

        before = await newest_snapshot(log, 0, log.next_offset(DECISIONS.name, 0))
        shared.hook = claim_before_the_snapshot
        with pytest.raises(OwnershipLost):
            await old.take_snapshot()
        old.drop()
        assert len(system.decisions(SnapshotRecord)) == 2
        assert await newest_snapshot(log, 0, log.next_offset(DECISIONS.name, 0)) == before
        await new.stop()


async def test_of_two_concurrent_starts_the_first_claim_wins(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        send_all(system)
        owners = [Owner(SharedLog(log), system.leases, settings()) for _ in range(2)]
        started = await asyncio.gather(*(owner.start() for owner in owners), return_exceptions=True)
        running = [asyncio.create_task(owner.run()) for owner, error in zip(owners, started, strict=True) if not error]
        winner = min(owners, key=lambda owner: owner.journal.epoch)
        await until(lambda: len(winner.world.fleet) == 2)
        await winner.stop()
        ended = await asyncio.gather(*running, return_exceptions=True)
        lost = [error for error in (*started, *ended) if error is not None]
        assert [type(error) for error in lost] == [OwnershipLost]
        await winner.close()
        for owner in owners:
            owner.drop()
        assert len(system.decisions(OwnerClaimed)) == 2
        announced = [fact.owner_epoch for fact in system.events(FLEET, OwnershipAnnounced)]
        assert winner.journal.epoch == max(announced)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lead", range(3))
async def test_a_kill_after_any_append_beside_a_second_owner_loses_nothing(lead: int) -> None:
    """Kill the first owner at its k-th append, for every k, after a second owner claimed `lead` appends earlier."""
    deaths = 0
    points = sampled(range(lead + 1, APPENDS_MAX), 7)
    for appends in points:
        log = SqliteLog.open(None)
        async with System(log).started(workers=2) as system:
            await admit(system, 2)
            deaths += await _beside_a_second(system, appends, appends - lead)
            await require_each_once(system)
        await proven(log)
        log.close()
    assert (
        deaths > len(points) // 6 or lead
    )  # the earlier the second owner claims, the more often the first notices before it is killed


async def _beside_a_second(system: System, appends: int, second_at: int) -> bool:
    shared = SharedLog(FaultyLog(system.log, appends))
    second = OwnerTask(system)
    first = Owner(shared, system.leases, settings(snapshot_every=3))

    async def serve_until_killed() -> None:
        await first.start()
        await first.run()

    killed = asyncio.create_task(serve_until_killed())
    sender = asyncio.create_task(_send_one_by_one(system))
    try:
        await until(lambda: shared.appends >= second_at or killed.done() or sender.done())
        await second.start()
        await until(lambda: sender.done() and all_ended(system, second.owner))
        await second.stop()
        await first.stop()
        await killed
    except OwnershipLost:
        return False
    except Crashed:
        return True
    finally:
        killed.cancel()
        with suppress(asyncio.CancelledError, OwnershipLost, Crashed):
            await killed
        first.drop()
    return False


async def _send_one_by_one(system: System) -> None:
    for number, name in enumerate(NAMES):
        await system.serve(name, [*PREFIX, number, number, number, number])


async def test_a_foreign_journal_record_is_ignored(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        for life in range(2):
            async with system.owned(fleet=2) as owner:
                await log.append([Draft(DECISIONS.name, 0, b"\x00not a journal record")])
                await system.serve(f"r{life}", [*range(12)])
                assert owner.journal.foreign == 1
    report = await proven(log)
    assert (report.verified, report.unverified, report.claims) == (2, {"foreign-records": 2}, 2)


async def test_a_request_of_another_group_is_answered_and_dead_lettered(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1) as owner:
        system.send(submitted("lost", [*range(12)], model="elsewhere"))
        await system.serve("ours", [*range(12)])
        (ended,) = system.ends()["lost"]
        assert ended.error is not None
        assert (ended.error.status, ended.error.code) == (404, "model_not_found")
        (letter,) = log.records(DEAD_LETTERS.name, 0, 0, 10)
        assert letter.headers is not None
        assert "not to elsewhere" in letter.headers["reason"]
        assert owner.dead_letters == 1


async def test_an_effect_too_large_for_its_topic_is_dropped_without_blocking_others(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1) as owner:
        system.send(submitted("large", [*range(40)] * 20, timeout_us=50_000))
        await log.append([])
        monkeypatch.setattr(sqlite_log, "RECORD_BYTES_MAX", 2_000)
        await system.serve("small", [*range(12)])
        await until_ended(system, "large")
        (ended,) = system.ends()["large"]
        assert ended.error is not None
        assert ended.error.code == "deadline_exceeded"
        assert owner.unsent == 1
