"""Retention trims an embedded log behind a verified snapshot and keeps every record that is still needed."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.events.codec import decode, encode
from forebay.events.decisions import RequestRouted, SnapshotRecord
from forebay.events.snapshots import IndexCursor, SnapshotChunk
from forebay.events.tokens import TokenChunk, TokensEmitted
from forebay.events.topics import CONTROL, DECISIONS, FLEET, GROUPS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.retention import Retention, RetentionLimits
from forebay.live.owner.retention_metrics import RetentionMetrics
from forebay.replay.recorded import applied
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft
from forebay.transport.history import snapshots as recorded
from forebay.transport.history.reader import Validity, journal
from forebay.transport.history.snapshots import newest_snapshot
from forebay.transport.history.start import oldest_state
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.schema import checksum
from tests.benchmarks.recordings import Shape, write_recording
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import followed, opened_one
from tests.replay.mutations import rewrite_topic
from tests.system import SLOT, System, settings, submitted, until

SMALL = RetentionLimits(size_bytes=1)
HOURS = RetentionLimits(size_bytes=1 << 40, age_s=3_600.0)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with several snapshots, requests in flight, and the tokens of one response per request."""
    path = tmp_path_factory.mktemp("history") / "log.db"

    async def make() -> None:
        await write_recording(path, Shape(workers=2, decisions=300, cached_blocks=64, snapshot_every=60))
        log = SqliteLog.open(path)
        await log.append([Draft(TOKENS.name, 0, encode(TOKENS, _tokens(number))) for number in range(300)])
        await log.append([Draft(DECISIONS.name, 1, b"of another group"), Draft("dead-letters", 0, b"letter")])
        log.close()

    asyncio.run(make())
    return path


def _tokens(number: int) -> TokensEmitted:
    chunk = TokenChunk(request_id=f"request-{number}", attempt=1, first_index=0, token_ids=bytes(40))
    return TokensEmitted(worker_id="worker", worker_epoch=0, owner_epoch=0, chunks=(chunk,))


@pytest.fixture
def path(history: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(history, tmp_path / "log.db"))


@asynccontextmanager
async def owned(path: Path) -> AsyncIterator[tuple[SqliteLog, Owner]]:
    """Open the log as a process that has just started, with an owner."""
    log, standby = await opened_one(path)
    owner = Owner(
        log, embedded_leases(), GroupSettings(group="bench", partition=0, owner_id="next"), clock_us=lambda: 0
    )
    await owner.start(standby)
    yield log, owner
    owner.drop()
    log.close()


async def verified(path: Path) -> VerifyReport:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        log.check()
        report = await verify(log)
        assert (report.divergence, report.failed) == (None, {})
        assert report.decisions == report.verified
        return report


async def test_history_behind_a_verified_snapshot_is_deleted_and_the_rest_verifies(path: Path) -> None:
    whole = await verified(path)
    async with owned(path) as (log, owner):
        ends = log.topics()
        taken = await newest_snapshot(log, 0, log.next_offset(DECISIONS.name, 0))
        assert taken is not None
        retention = Retention(log, owner, 0, SMALL)
        await retention.enforce()
        assert [(topic, partition, end) for topic, partition, end in log.topics()] == ends, "no offset changes"
        assert await log.begin(DECISIONS.name, 0) == taken.journal_offset
        assert await log.begin(SNAPSHOTS.name, 0) == taken.first_offset
        assert await log.begin(FLEET.name, 0) > 0
        assert [await log.begin(name, 0) for name in (CONTROL.name, GROUPS.name)] == [0, 0]
        assert await log.begin(DECISIONS.name, 1) == 0, "another partition is not this group's"
        assert retention.trimmed[DECISIONS.name] == taken.journal_offset
        oldest = owner.world.requests.active()[0]
        assert await log.begin(REQUESTS.name, 0) <= oldest.submitted.offset
        await followed(log)
    after = await verified(path)
    assert after.start == taken.journal_offset
    assert 0 < after.decisions < whole.decisions
    async with owned(path) as (log, _):
        assert await log.begin(DECISIONS.name, 0) == taken.journal_offset


async def test_the_log_then_begins_at_the_oldest_sufficient_snapshot(path: Path) -> None:
    async with owned(path) as (log, owner):
        used, _ = log.bytes_used()
        retention = Retention(log, owner, 0, RetentionLimits(size_bytes=used * 3 // 4))
        await retention.enforce()
        newest = await newest_snapshot(log, 0, log.next_offset(DECISIONS.name, 0))
        assert newest is not None
        assert 0 < await log.begin(DECISIONS.name, 0) < newest.journal_offset
        assert used // 2 < log.bytes_used()[0] <= used * 3 // 4
    await verified(path)


async def test_nothing_is_deleted_behind_a_damaged_snapshot(path: Path) -> None:
    async with owned(path) as (log, owner):
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE snapshots SET checksum = 5")
        await require_refused(log, owner)


async def require_refused(log: SqliteLog, owner: Owner) -> None:
    """Check that retention refuses all snapshots, and deletes nothing."""
    retention = Retention(log, owner, 0, SMALL)
    await retention.enforce()
    assert (log.starts(), dict(retention.trimmed)) == ({}, {})
    assert retention.refused > 1


def with_another_state(value: bytes) -> bytes:
    """Return the snapshot part with one more applied KV event for each rank."""
    chunk: SnapshotChunk = decode(SNAPSHOTS, value)
    parts = [
        msgspec.structs.replace(part, last_seq=part.last_seq + 1) if isinstance(part, IndexCursor) else part
        for part in chunk.parts
    ]
    return encode(SNAPSHOTS, msgspec.structs.replace(chunk, parts=tuple(parts)))


async def test_nothing_is_deleted_behind_a_snapshot_that_differs_from_its_seal(path: Path) -> None:
    async with owned(path) as (log, owner):
        rewrite_topic(path, SNAPSHOTS, lambda values: [*map(with_another_state, values)])
        await require_refused(log, owner)


async def test_nothing_is_deleted_behind_a_snapshot_that_the_journal_did_not_seal(path: Path) -> None:
    """The chunks match the digest in the journal, but the journal has another record in place of the seal."""
    async with owned(path) as (log, owner):
        with closing(sqlite3.connect(path)) as db, db:
            columns = "id, at_us, key, headers, value"
            for offset, at_us, key, headers, value in db.execute(
                f'SELECT {columns} FROM decisions WHERE "partition" = 0'
            ).fetchall():
                taken = decode(DECISIONS, value)
                if isinstance(taken, SnapshotRecord):
                    moved = msgspec.structs.replace(taken, journal_offset=taken.journal_offset + 1)
                    other = encode(DECISIONS, moved)
                    seal = checksum(DECISIONS.name, 0, offset, at_us, key, headers, other)
                    db.execute("UPDATE decisions SET value = ?, checksum = ? WHERE id = ?", (other, seal, offset))
        await require_refused(log, owner)


async def test_damaged_history_does_not_prevent_trimming(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PAGE_RECORDS", 32)  # page size of the search for the newest snapshot
    async with owned(path) as (log, owner):
        with closing(sqlite3.connect(path)) as db, db:
            db.execute('UPDATE decisions SET checksum = 5 WHERE "offset" = 3')
        await Retention(log, owner, 0, SMALL).enforce()
        assert await log.begin(DECISIONS.name, 0) > 3
    await verified(path)


async def test_only_records_older_than_the_age_limit_are_deleted(path: Path) -> None:
    async with owned(path) as (log, owner):
        await Retention(log, owner, 0, HOURS).enforce()
        assert log.starts() == {}
        with runtime.use(FakeRuntime(wall_shift_s=3_700)):
            retention = Retention(log, owner, 0, HOURS)
            await retention.enforce()
            assert await log.begin(DECISIONS.name, 0) > 0
            first = dict(log.starts())
            await retention.enforce()
            assert log.starts() == first, "the age is checked at intervals"
    await verified(path)


async def test_the_responses_of_requests_in_flight_are_kept(path: Path) -> None:
    """Each submission names the offset where its response may begin, here the first record of the slot."""
    async with owned(path) as (log, owner):
        assert len(owner.world.requests)
        await Retention(log, owner, 0, SMALL).enforce()
        assert await log.begin(TOKENS.name, 0) == 0


async def test_the_responses_of_requests_of_other_groups_are_kept(path: Path) -> None:
    async with owned(path) as (log, owner):
        other = Owner(log, embedded_leases(), settings(partition=2, groups=3))
        await other.start()
        await log.append([Draft(TOKENS.name, 5, encode(TOKENS, _tokens(number))) for number in range(3)])
        waiting = submitted("waiting", [1, 2, 3], reply_slot=5, reply_from=1)
        await log.append([Draft(REQUESTS.name, 2, encode(REQUESTS, waiting))])
        await owner.take_snapshot()
        retention, peer = Retention(log, owner, 0, SMALL), Retention(log, other, 2, SMALL)
        retention.peers = [peer]
        await retention.enforce()
        assert await log.begin(DECISIONS.name, 0) > 0
        assert [await log.begin(name, place) for name, place in ((TOKENS.name, 5), (REQUESTS.name, 2))] == [1, 0]
        other.drop()


async def test_records_before_a_snapshot_are_kept_while_requests_in_flight_need_them(path: Path) -> None:
    """Topics that retention never trims stay whole, even if all their records are older than the snapshot."""
    async with owned(path) as (log, owner):
        await log.append([Draft(GROUPS.name, 0, b"placed")])
        oldest, end = owner.world.requests.active()[0], log.next_offset(DECISIONS.name, 0)
        owner.snapshots.request()
        while not owner.snapshots.taken:
            await owner.turn(())
            await owner.snapshots.settle()
        assert owner.world.view[REQUESTS.name] > oldest.submitted.offset
        await Retention(log, owner, 0, SMALL).enforce()
        assert await log.begin(DECISIONS.name, 0) >= end
        assert 0 < await log.begin(REQUESTS.name, 0) <= oldest.submitted.offset
        assert await log.begin(TOKENS.name, 0) == 0, "responses in flight may begin at this offset"
        assert [await log.begin(name, 0) for name in (CONTROL.name, GROUPS.name)] == [0, 0]
    await verified(path)


async def test_a_log_over_its_size_limit_takes_one_snapshot_until_it_grows_again(path: Path) -> None:
    async with owned(path) as (log, owner):
        await Retention(log, owner, 0, SMALL).enforce()
        begin = await log.begin(DECISIONS.name, 0)
        retention = Retention(log, owner, 0, SMALL)
        for _ in range(3):
            await retention.enforce()
            for _ in range(20):
                await owner.turn(())
                await owner.snapshots.settle()
            assert owner.snapshots.taken == 1
        assert await log.begin(DECISIONS.name, 0) > begin
    await verified(path)


async def test_tools_read_a_trimmed_log_from_its_first_record(path: Path) -> None:
    async with owned(path) as (log, owner):
        await Retention(log, owner, 0, SMALL).enforce()
    with closing(SqliteLog.open(path, readonly=True)) as log:
        start = await oldest_state(log, 0)
        assert start.offset == await log.begin(DECISIONS.name, 0)
        known = {one.offset: one.journal_offset async for one in applied(log, 0, REQUESTS.name)}
        end = log.next_offset(DECISIONS.name, 0)
        async for offset, record in journal(log, 0, start.offset, end, Validity.after(start)):
            if isinstance(record, RequestRouted):
                (request,) = await log.read(REQUESTS.name, 0, int(record.request_id.removeprefix("request-")), 1)
                assert known[request.offset] == offset, "events belong to the records that consumed them"


async def test_decisions_go_on_while_history_is_deleted(tmp_path: Path) -> None:
    """A system serves many requests while its log stays within the limit and verifies."""
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    registry = CollectorRegistry()
    async with System(log).started(workers=2) as system, system.owned(log, snapshot_every=1_000, fleet=2) as owner:
        retention = Retention(log, owner, 0, RetentionLimits(size_bytes=500_000))
        registry.register(RetentionMetrics(log, retention))
        largest = written = 0
        for batch in range(40):
            for number in range(25):
                system.send(submitted(f"r{batch}-{number}", [batch] * 500))
                written += 2_000
            await until(
                lambda: (
                    not len(owner.world.requests)
                    and log.next_offset(REQUESTS.name, 0) == owner.world.view.get(REQUESTS.name)
                )
            )
            await retention.enforce()
            await asyncio.sleep(0)
            largest = max(largest, log.bytes_used()[1])
        assert owner.snapshots.taken, "only the size limit triggers snapshots here"
        first = registry.get_sample_value("forebay_log_first_offset", {"topic": "requests", "partition": "0"})
        removed = registry.get_sample_value("forebay_log_trimmed_records_total", {"topic": "requests"})
        assert first == removed == await log.begin(REQUESTS.name, 0) > 0
        assert await log.begin(TOKENS.name, SLOT) > 0
    assert largest < 1_500_000 < written
    log.close()
    await verified(path)
