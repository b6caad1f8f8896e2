"""Records of other owners and other programs, in the journal and on `fleet`, end no owner and lose no request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from forebay.core.state.fleet import WorkerPhase
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, RequestRouted, SnapshotRecord
from forebay.events.fleet import (
    FleetEvent,
    IngressJoined,
    IngressLost,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.snapshots import SnapshotChunk
from forebay.events.tokens import TokensEmitted
from forebay.events.topics import DEAD_LETTERS, DECISIONS, FLEET, HEARTBEATS, SNAPSHOTS, TOKENS, work_topic
from forebay.events.work import WorkItem
from forebay.journal.snapshots import newest_snapshot
from forebay.journal.start import recorded_view
from forebay.live.owner import snapshot_writer
from forebay.live.owner.owner import Owner, OwnershipLost
from forebay.live.router.router import Router, readiness_metrics, ready
from forebay.live.standby import AbandonedTail, Standby
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft, LogError
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite import log as sqlite_log
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import examples
from tests.live.shared import (
    PREFIX,
    Edited,
    SharedLog,
    admit,
    background,
    journal_end,
    nothing,
    prompt,
    proven,
    routing,
    samples,
    serve_unsealed,
    valid,
)
from tests.system import MODEL, SLOT, System, settings, submitted, take_snapshot, until, until_ended

BATCH = 4
NAMES = [f"r{number}" for number in range(BATCH)]


def work_of(system: System, epoch: int, workers: int) -> list[WorkItem]:
    """Return the work items that the owner of `epoch` sent."""
    items = [item for slot in range(workers) for item in system.events(work_topic("default"), WorkItem, slot)]
    return [item for item in items if item.owner_epoch == epoch]


def send_all(system: System) -> None:
    for number, name in enumerate(NAMES):
        system.send(submitted(name, prompt(number)))


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
    monkeypatch.setattr(snapshot_writer, "CHUNK_BYTES", 200)
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
            shared.hook = nothing
        await require_each_once(system)
        end = journal_end(log)
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

        before = await newest_snapshot(log, 0, journal_end(log))
        shared.hook = claim_before_the_snapshot
        with pytest.raises(OwnershipLost):
            await take_snapshot(old)
        old.drop()
        assert len(system.decisions(SnapshotRecord)) == 2
        assert await newest_snapshot(log, 0, journal_end(log)) == before
        await new.stop()


async def test_of_two_claims_after_the_same_owner_the_first_is_valid(log: SqliteLog) -> None:
    """So a repeated claim, or the claim of a router that did not know the newest owner, ends no owner."""
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        first = OwnerTask(system)

        async def claim_before(draft: Draft | None) -> None:
            if draft is not None and draft.topic == DECISIONS.name and first.owner.journal.epoch < 0:
                await first.start()

        second = Owner(SharedLog(log, claim_before), system.leases, settings())
        with pytest.raises(OwnershipLost, match="another router claimed the group first"):
            await second.start()
        second.drop()
        await system.serve("b", PREFIX)
        await first.stop()
    assert (await proven(log)).void == 1


async def test_a_request_of_another_group_is_answered_and_dead_lettered(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1) as owner:
        system.send(submitted("lost", PREFIX, model="elsewhere"))
        await system.serve("ours", PREFIX)
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
        await system.serve("small", PREFIX)
        await until_ended(system, "large")
        (ended,) = system.ends()["large"]
        assert ended.error is not None
        assert ended.error.code == "deadline_exceeded"
        assert owner.unsent == 1


# Records that no owner wrote to the journal

Forge = Callable[[list[JournalRecord]], list[bytes]]


def copies(records: list[JournalRecord]) -> list[bytes]:
    return [encode(DECISIONS, record) for record in records]


def of_another_group(records: list[JournalRecord]) -> list[bytes]:
    """Records of a group whose owner has the same epoch and the next number, and the claim after it."""
    epoch, seq = records[-1].owner_epoch, records[-1].seq
    routed = next(record for record in records if isinstance(record, RequestRouted))
    ahead = [replace(routed, owner_nonce="other", owner_epoch=epoch, seq=seq + 1 + more) for more in (0, 7)]
    claim = next(record for record in records if isinstance(record, OwnerClaimed))
    follower = replace(claim, owner_nonce="another", previous_nonce="other", snapshot=0)
    return copies([*ahead, follower])


UNDECODABLE = [b"", b"\x00", b"{}", b'{"type":"request.routed","owner_epoch":0,"seq":1}', b"[" * 10_000]
FORGERIES: dict[str, Forge] = {
    "newest": lambda records: copies(records[-1:]),
    "all again": copies,
    "claims": lambda records: copies([one for one in records if isinstance(one, OwnerClaimed)]),
    "of another group": of_another_group,
    "undecodable": lambda _: UNDECODABLE,
    "beyond any claim": lambda records: copies([replace(records[-1], owner_epoch=1 << 40)]),
}


async def forge(log: SqliteLog, kind: str, records: list[JournalRecord]) -> int:
    """Append records to the journal, and return how many."""
    forged = FORGERIES[kind](records)
    return len(await log.append([Draft(DECISIONS.name, 0, value) for value in forged]))


@asynccontextmanager
async def owning(system: System, log: SharedLog | None = None, **options: Any) -> AsyncIterator[Router]:
    """Run a router until it owns the group."""
    async with routing(system, "new", log, **options) as router:
        await until(lambda: 0 in router.owners)
        yield router


@pytest.mark.parametrize("kind", FORGERIES)
async def test_a_router_takes_over_after_invalid_records(
    kind: str, log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
        forged = await forge(log, kind, system.decisions())
        async with owning(system) as router:
            await system.serve("c", PREFIX)
            skipped = router.owners[0].journal
            assert skipped.void + skipped.foreign == forged
            assert ready(router) == (True, "ready")
        assert "skipped record" in caplog.text or kind == "claims"
    report = await proven(log)
    assert report.void + report.repeated + report.unverified.get("foreign-records", 0) == forged


@pytest.mark.parametrize("kind", FORGERIES)
async def test_invalid_records_between_appends_do_not_end_the_owner(kind: str, log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        async with system.owned(snapshot_every=4, fleet=2) as owner:
            await system.serve("first", PREFIX)
            forged = 0
            for number in range(4):
                forged += await forge(log, kind, await valid(log))
                await system.serve(f"r{number}", prompt(number))
            assert owner.journal.void + owner.journal.foreign == forged
        assert system.ends().keys() >= {"first", *NAMES}
    assert (await proven(log)).claims == 1


async def test_repeated_chunks_of_snapshots_are_skipped(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated chunk of an earlier snapshot may be right where the chunk of the next one is expected."""
    monkeypatch.setattr("forebay.live.owner.snapshot_writer.CHUNK_BYTES", 1)  # a chunk per part

    async def repeat(draft: Draft | None) -> None:
        chunks = log.records(SNAPSHOTS.name, 0, 0, 1_000)
        if draft is not None and draft.topic == SNAPSHOTS.name and chunks:
            await log.append([Draft(SNAPSHOTS.name, 0, chunk.value) for chunk in chunks[:20]])

    async with System(log).started(workers=2) as system:
        async with system.owned(SharedLog(log, repeat), snapshot_every=2, fleet=2):
            for number in range(6):
                await system.serve(f"r{number}", prompt(number))
        async with system.owned():
            await system.serve("last", PREFIX)
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
        end = journal_end(log)
        async with background(RouterHeartbeats(log, MODEL).follow(0)), routing(system, "new", losing(system)) as router:
            registry = CollectorRegistry()
            registry.register(readiness_metrics(router))
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
            assert journal_end(log) == end


@pytest.mark.parametrize("has_snapshot", [False, True])
async def test_an_operator_lets_a_router_take_over_a_journal_that_lost_a_record(
    has_snapshot: bool, log: SqliteLog
) -> None:
    """A young group without a snapshot continues from its beginning."""
    async with System(log).started(workers=2) as system:
        if has_snapshot:
            await admit(system, 2)
        await serve_unsealed(system, "a", "b")
        losses: list[AbandonedTail] = []
        broken = losing(system)
        async with owning(system, broken, on_loss=losses.append) as router:
            await system.serve("c", PREFIX)
            assert ready(router) == (True, "ready")
        (loss,) = losses
        assert (loss.snapshot > 0) == has_snapshot
        assert ("continues from its beginning" in loss.text()) != has_snapshot
        claim = system.decisions(OwnerClaimed)[-1]
        assert claim.snapshot == loss.snapshot
        async with owning(system, broken):
            await system.serve("d", PREFIX)
    report = await verify(log)
    assert (report.divergence, report.verified) == (None, report.decisions)


async def test_a_stopped_standby_follows_again_after_a_planned_stop(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
        async with routing(system, "new", losing(system)) as router:
            await until(lambda: not ready(router)[0])
            await admit(system, 2)
            await until(lambda: 0 in router.owners)
            assert ready(router) == (True, "ready")


# Records on `fleet` that the owner did not write: copies of old records, and forged events

WORKERS = ("w0", "w1", "w2")
FACTS = (WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost)
REQUESTS_SENT = 6
Forgery = tuple[str, int]


def joined_of(system: System, name: str) -> tuple[int, WorkerJoined]:
    """Return the newest `WorkerJoined` of a worker, with its offset."""
    found = [(at, one) for at, one in enumerate(system.events(FLEET)) if isinstance(one, WorkerJoined)]
    return [(at, one) for at, one in found if one.spec.worker_id == name][-1]


def forged_fact(system: System, kind: str, number: int) -> FleetEvent:
    """Return an event of the newest owner epoch, about a member or about a worker or ingress that does not exist."""
    events = system.events(FLEET)
    if kind == "copy":
        copied: FleetEvent = events[number % len(events)]
        return copied
    offset, joined = joined_of(system, WORKERS[number % len(WORKERS)])
    of_owner: dict[str, Any] = {"owner_epoch": max(event.owner_epoch for event in events)}
    match kind:
        case "ghost":
            spec = replace(joined.spec, worker_id=f"ghost-{number}", kv_blocks_total=1 << 20)
            return replace(joined, spec=spec, lease=f"forged-{number}", **of_owner)
        case "twin":
            return replace(joined, lease="forged", **of_owner)
        case "ingress":
            return IngressJoined(ingress_id=f"i{number}", incarnation="forged", **of_owner)
        case "no ingress":
            return IngressLost(ingress_id="i0", incarnation="mine", **of_owner)
        case _:
            fact = FACTS[number % len(FACTS)]
            return fact(worker_id=joined.spec.worker_id, worker_epoch=offset, **of_owner)


def is_as_leased(system: System, owner: Any) -> bool:
    """Return whether the fleet has exactly the members with leases, and each worker works in the epoch of the fleet."""
    fleet = {worker.spec.worker_id: worker for worker in owner.world.fleet.workers()}
    ready = all(worker.phase is WorkerPhase.READY for worker in fleet.values())
    epochs = all(system.workers[name].worker_epoch == worker.worker_epoch for name, worker in fleet.items())
    ingresses = [one.incarnation for one in owner.world.fleet.ingresses()]
    return fleet.keys() == set(WORKERS) and ready and epochs and ingresses == ["mine"]


async def check(forgeries: list[Forgery]) -> None:
    log, leases = SqliteLog.open(None), embedded_leases()
    async with System(log).started(workers=3) as system, system.owned(ingress_leases=leases) as owner:
        leases.acquire(MODEL, "i0", "mine", b"", 60_000)
        await until(lambda: is_as_leased(system, owner))
        await system.stop_worker("w0")
        system.start_worker("w0")
        await until(lambda: is_as_leased(system, owner) and len(system.events(FLEET, WorkerJoined)) > len(WORKERS))
        for kind, number in forgeries:
            system.append(FLEET, forged_fact(system, kind, number))
            system.send(submitted(f"r{number}-{kind}-{len(system.events(FLEET))}", [1, 2, 3, number]))
            await asyncio.sleep(0)
        for number in range(REQUESTS_SENT):
            system.send(submitted(f"last-{number}", [5, 6, 7, number]))
        for number in range(REQUESTS_SENT):
            await until_ended(system, f"last-{number}")
        await until(lambda: is_as_leased(system, owner) and not len(owner.world.requests))
        assert system.decisions(RequestRouted)
        assert {name: ends[0].error for name, ends in system.ends().items() if ends[0].error is not None} == {}
    await proven(log)
    log.close()


KINDS = ["copy", "copy", "ghost", "twin", "fact", "fact", "ingress", "no ingress"]


@examples(0.3, phases=(Phase.generate,))  # shrinking a hang takes minutes
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), min_size=1, max_size=4))
def test_foreign_fleet_records_neither_hang_nor_lose_a_request(forgeries: list[Forgery]) -> None:
    asyncio.run(check(forgeries))
