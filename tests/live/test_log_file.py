"""The log file of an owner: a start reads only intact records, and retention keeps every record that is needed."""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.events.answers import RETENTION_S
from forebay.events.codec import decode, encode
from forebay.events.decisions import SnapshotRecord, SnapshotTaken
from forebay.events.snapshots import IndexCursor, SnapshotChunk
from forebay.events.tokens import TokenChunk, TokensEmitted
from forebay.events.topics import ANSWERS, CONTROL, DECISIONS, FLEET, GROUPS, INPUTS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.journal.groups import groups_of
from forebay.journal.records import Validity, journal, last_append_us
from forebay.journal.snapshots import load_snapshot, newest_snapshot
from forebay.journal.start import oldest_state
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.retention import Retention, RetentionLimits, retention_metrics
from forebay.live.owner.start_check import GROUPS_MAX, open_checked
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.schema import WriterLock, checksum
from tests.benchmarks.recordings import Shape, write_recording
from tests.depth import sampled
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import followed, opened_one
from tests.replay.mutations import rewrite_topic
from tests.system import SLOT, System, settings, submitted, take_snapshot, until

PLACES = 150
READ_MAX = 100_000


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with several snapshots, requests in flight, and the tokens of one response per request."""
    path = tmp_path_factory.mktemp("intact") / "log.db"

    async def make() -> None:
        await write_recording(path, Shape(workers=2, decisions=264, cached_blocks=64, snapshot_every=60))
        with closing(SqliteLog.open(path)) as log:
            await log.append([Draft(TOKENS.name, 0, encode(TOKENS, _tokens(number))) for number in range(264)])
            await log.append([Draft(DECISIONS.name, 1, b"of another group"), Draft("dead-letters", 0, b"letter")])

    asyncio.run(make())
    return path


def _tokens(number: int) -> TokensEmitted:
    chunk = TokenChunk(request_id=f"request-{number}", attempt=1, first_index=0, token_ids=bytes(40))
    return TokensEmitted(worker_id="worker", worker_epoch=0, owner_epoch=0, chunks=(chunk,))


@pytest.fixture
def path(intact: Path, tmp_path: Path) -> Path:
    """Return a copy of the intact log."""
    return Path(shutil.copy(intact, tmp_path / "log.db"))


async def verified(path: Path) -> VerifyReport:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        log.check()
        report = await verify(log)
    assert (report.divergence, report.failed) == (None, {})
    assert report.decisions == report.verified
    return report


@asynccontextmanager
async def owned(path: Path) -> AsyncIterator[tuple[SqliteLog, Owner]]:
    """Open the log as a process that has just started, with an owner that continues from the state of the check."""
    log, standby = await opened_one(path)
    assert standby is not None
    group = GroupSettings(group="bench", partition=0, owner_id="next")
    owner, seen_us = Owner(log, embedded_leases(), group, clock_us=lambda: 0), await last_append_us(log, 0)
    await owner.start(standby)
    (claim,) = log.records(DECISIONS.name, 0, owner.journal.epoch, 1)
    assert 0 < seen_us <= decode(DECISIONS, claim.value).previous_seen_us
    assert owner.world is standby.world, "the state is not recovered twice"
    yield log, owner
    owner.drop()
    log.close()


def content_of(path: Path) -> bytes:
    return path.read_bytes()


async def in_flight(path: Path) -> list[int]:
    """Return the offsets of the requests that are in flight at the end of the journal."""
    with closing(SqliteLog.open(path, readonly=True)) as log:
        cold = await followed(log)
        return [request.submitted.offset for request in cold.world.requests.active()]


async def trusted(log: SqliteLog, offsets: list[int]) -> list[Record]:
    """Return the records that an owner's start depends on, including the requests at `offsets`, without the check."""
    end = log.next_offset(DECISIONS.name, 0)
    taken = await newest_snapshot(log, 0, end)
    assert isinstance(taken, SnapshotTaken)
    world = await load_snapshot(log, 0, taken)
    places = [(topic.name, world.view[topic.name]) for topic in INPUTS if topic.name in world.view]
    places += [(DECISIONS.name, taken.journal_offset), (SNAPSHOTS.name, taken.first_offset)]
    places += [(GROUPS.name, 0), (CONTROL.name, 0), (TOKENS.name, 0)]
    found = [record for name, offset in places for record in log.records(name, 0, offset, READ_MAX)]
    for offset in offsets:
        found += log.records(REQUESTS.name, 0, offset, 1)
    return found


def flip(path: Path, chance: random.Random) -> None:
    """Change one to four bytes, or cut the file off."""
    content = bytearray(path.read_bytes())
    if chance.random() < 0.05:
        path.write_bytes(content[: chance.randrange(len(content))])
        return
    first = chance.randrange(len(content))
    for place in range(first, min(len(content), first + chance.randint(1, 4))):
        content[place] ^= chance.randint(1, 255)
    path.write_bytes(content)


async def start(path: Path) -> str:
    """Return the reason why a start is refused, or an empty string."""
    try:
        opened, standby = await opened_one(path)
    except LogError as error:
        return str(error)
    opened.close()
    assert standby is not None
    return ""


async def test_a_start_that_is_not_refused_depends_only_on_intact_records(intact: Path, tmp_path: Path) -> None:
    chance = random.Random(20261122)
    offsets = await in_flight(intact)
    with closing(SqliteLog.open(intact, readonly=True)) as whole:
        before = await trusted(whole, offsets)
    refused = 0
    places = sampled(range(PLACES), 25)
    for number in places:
        path = Path(shutil.copy(intact, tmp_path / f"{number}.db"))
        flip(path, chance)
        damaged = content_of(path)
        why = await start(path)
        if why:
            refused += 1
            assert "\n" not in why
            assert str(path) in why
            assert content_of(path) == damaged, "a refused file is not modified"
            continue
        with closing(SqliteLog.open(path, readonly=True)) as log:
            assert await trusted(log, offsets) == before
    assert len(places) / 10 < refused < len(places), "damage to history is not read, so some starts succeed"


CASES = [
    ("snapshots", 'UPDATE snapshots SET value = zeroblob(9) WHERE "offset" = {last}', "snapshots/0: .*offset {last} "),
    ("snapshots", 'DELETE FROM snapshots WHERE "offset" = {last}', "chunk . of the snapshot"),
    ("decisions", 'UPDATE decisions SET at_us = 5 WHERE "offset" = {last}', "decisions/0: .*offset {last} "),
    ("decisions", 'DELETE FROM decisions WHERE "offset" = {last} - 3', "decisions/0: .*missing"),
    ("requests", 'DELETE FROM requests WHERE "offset" = {last}', "requests/0 ends at offset {last}, but"),
    ("requests", 'DELETE FROM requests WHERE "offset" > 9', "requests/0 ends at offset"),
    ("control", "UPDATE control SET value = zeroblob(9)", "control/0: .*offset 0 "),
    ("control", "DELETE FROM control", "control/0 ends at offset 0, but "),
    ("fleet", "DELETE FROM fleet", "fleet/0 ends at offset 0, but "),
    ("tokens", 'UPDATE tokens SET value = zeroblob(9) WHERE "offset" = 3', "tokens/0: .*offset 3 "),
    ("kv-events", 'UPDATE "kv-events" SET checksum = 5 WHERE "offset" = {last}', "kv-events/0: .*offset {last} "),
    ("metrics", "ALTER TABLE metrics RENAME COLUMN value TO worth", "the table of topic metrics is not as"),
]


@pytest.mark.parametrize(("topic", "change", "message"), CASES)
async def test_a_refusal_names_the_damaged_record_and_the_remedies(
    path: Path, topic: str, change: str, message: str
) -> None:
    with closing(SqliteLog.open(path, readonly=True)) as reader:
        last = reader.next_offset(topic, 0) - 1
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(change.format(last=last))
    damaged = content_of(path)
    with pytest.raises(LogUnusable, match=message.format(last=last)) as caught:
        await open_checked(path, ["m"])
    text = str(caught.value)
    assert "restore a copy" in text
    assert "pass a new file to --log" in text
    assert f"forebay verify {path}" in text
    assert content_of(path) == damaged
    WriterLock(path).close()  # the lock is free again


async def test_the_prompts_of_requests_in_flight_are_checked_at_any_age(path: Path) -> None:
    with closing(SqliteLog.open(path, readonly=True)) as reader:
        taken = await newest_snapshot(reader, 0, reader.next_offset(DECISIONS.name, 0))
        assert taken is not None
        world = await load_snapshot(reader, 0, taken)
        (oldest, *_) = await in_flight(path)
        assert oldest < world.view[REQUESTS.name], "the request was submitted before the snapshot"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('UPDATE requests SET value = zeroblob(9) WHERE "offset" = ?', (oldest,))
    assert f"requests/0: the record at offset {oldest} " in await start(path)


async def write(path: Path, topic: str) -> int:
    """Append two records that no decision has consumed; return the offset of the first."""
    with closing(SqliteLog.open(path)) as log:
        first, _ = await log.append([Draft(topic, 0, b"one"), Draft(topic, 0, b"two")])
    return first


def damage(path: Path, topic: str, offset: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f'UPDATE "{topic}" SET value = zeroblob(9) WHERE "offset" = ?', (offset,))


UNCONSUMED = [(topic.name, None) for topic in INPUTS]
WHOLE: list[tuple[str, int | None]] = [(GROUPS.name, 0), (CONTROL.name, 0)]


@pytest.mark.parametrize(("topic", "offset"), [*UNCONSUMED, *WHOLE])
async def test_inputs_are_checked_from_the_first_unconsumed_record_and_others_whole(
    path: Path, topic: str, offset: int | None
) -> None:
    unconsumed = await write(path, topic)
    offset = unconsumed if offset is None else offset
    damage(path, topic, offset)
    assert f"{topic}/0: the record at offset {offset} " in await start(path)


async def test_history_before_the_snapshot_is_not_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('UPDATE "kv-events" SET checksum = 5 WHERE "offset" = 0')
        db.execute('DELETE FROM snapshots WHERE "offset" = 0')
    assert not await start(path)


@pytest.mark.parametrize("content", [b"", None])
async def test_a_new_log_has_nothing_to_check(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "new.db"
    if content is not None:
        path.write_bytes(content)
    log, standby = await opened_one(path)
    assert standby is None
    log.close()
    log, standby = await opened_one(path)  # created, and never written to
    assert standby is not None
    log.close()


async def test_a_log_in_use_is_refused_before_it_is_checked(path: Path) -> None:
    opened, _ = await opened_one(path)
    with pytest.raises(LogUnusable, match="another process"):
        await open_checked(path, ["m"])
    opened.close()


async def test_a_file_that_is_not_a_log_gets_no_lock_file(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A page\n")
    with pytest.raises(LogUnusable, match="is not a forebay log"):
        await open_checked(page, ["m"])
    with pytest.raises(LogUnusable, match="is not a forebay log"):
        SqliteLog.open(page)
    assert not page.with_name("README.md.lock").exists()


async def test_a_log_of_one_model_gets_partitions_for_others(path: Path) -> None:
    """The model that had the log alone keeps partition 0, also if it is not served any more."""
    first = await open_checked(path, ["other", "third"])
    assert {name: group.partition for name, group in first.groups.items()} == {"other": 1, "third": 2}
    assert first.partitions == GROUPS_MAX
    first.log.close()
    second = await open_checked(path, ["third", "bench", "new"])
    assert {name: group.partition for name, group in second.groups.items()} == {"third": 2, "bench": 0, "new": 3}
    recorded = second.groups["bench"].standby
    assert recorded is not None
    assert recorded.world.requests.active()
    second.log.close()
    with closing(SqliteLog.open(path, readonly=True)) as reader:
        assert await groups_of(reader) == {"bench": 0, "new": 3, "other": 1, "third": 2}


async def test_one_model_needs_no_placement(tmp_path: Path) -> None:
    opened = await open_checked(tmp_path / "log.db", ["m"])
    assert (opened.groups["m"].partition, opened.partitions) == (0, 1)
    assert await opened.log.end(GROUPS.name, 0) == 0
    opened.log.close()
    several = await open_checked(None, ["m", "n"])
    assert await several.log.end(GROUPS.name, 0) == 2
    several.log.close()


async def test_a_log_has_a_limited_number_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    opened = await open_checked(path, [f"m{number}" for number in range(GROUPS_MAX)])
    opened.log.close()
    with pytest.raises(LogUnusable, match="no control partition for the model new: all 64 belong to other models"):
        await open_checked(path, ["new"])


# Retention trims a log behind a verified snapshot

SMALL = RetentionLimits(size_bytes=1)
HOURS = RetentionLimits(size_bytes=1 << 40, age_s=3_600.0)


async def test_history_behind_a_verified_snapshot_is_deleted_and_the_rest_verifies(path: Path) -> None:
    whole = await verified(path)
    async with owned(path) as (log, owner):
        ends = log.topics()
        taken = await newest_snapshot(log, 0, log.next_offset(DECISIONS.name, 0))
        assert taken is not None
        retention = Retention(log, owner, 0, SMALL)
        await retention.enforce()
        assert [(name, part, log.next_offset(name, part)) for name, part, _ in ends] == ends, "no offset changes"
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


def damage_checksums(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE snapshots SET checksum = 5")


def add_applied_events(path: Path) -> None:
    """Rewrite the snapshots with one more applied KV event for each rank."""

    def rewritten(value: bytes) -> bytes:
        chunk: SnapshotChunk = decode(SNAPSHOTS, value)
        parts = [
            msgspec.structs.replace(part, last_seq=part.last_seq + 1) if isinstance(part, IndexCursor) else part
            for part in chunk.parts
        ]
        return encode(SNAPSHOTS, msgspec.structs.replace(chunk, parts=tuple(parts)))

    rewrite_topic(path, SNAPSHOTS, lambda values: [*map(rewritten, values)])


def replace_seals(path: Path) -> None:
    """Let the chunks match the digest in the journal, although the journal has another record in place of the seal."""
    columns = "id, at_us, key, headers, value"
    with closing(sqlite3.connect(path)) as db, db:
        rows = db.execute(f'SELECT {columns} FROM decisions WHERE "partition" = 0').fetchall()
        for offset, at_us, key, headers, value in rows:
            taken = decode(DECISIONS, value)
            if isinstance(taken, SnapshotRecord):
                other = encode(DECISIONS, msgspec.structs.replace(taken, journal_offset=taken.journal_offset + 1))
                seal = checksum(DECISIONS.name, 0, offset, at_us, key, headers, other)
                db.execute("UPDATE decisions SET value = ?, checksum = ? WHERE id = ?", (other, seal, offset))


@pytest.mark.parametrize("falsify", [damage_checksums, add_applied_events, replace_seals])
async def test_nothing_is_deleted_behind_an_invalid_snapshot(path: Path, falsify: Callable[[Path], None]) -> None:
    async with owned(path) as (log, owner):
        falsify(path)
        retention = Retention(log, owner, 0, SMALL)
        await retention.enforce()
        assert (log.starts(), dict(retention.trimmed)) == ({}, {})
        assert retention.refused > 1


async def test_damaged_history_does_not_prevent_trimming(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.base.PAGE_RECORDS", 32)  # page size of the search for the newest snapshot
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


async def test_answers_are_kept_for_their_own_time(path: Path) -> None:
    """They are removed earlier only if the log is too large without its other old records."""
    async with owned(path) as (log, owner):
        await log.append([Draft(ANSWERS.name, number, b"answer") for number in (0, 1)])
        await take_snapshot(owner)
        used, _ = log.bytes_used()
        await Retention(log, owner, 0, RetentionLimits(size_bytes=used * 3 // 4, age_s=3_600.0)).enforce()
        assert await log.begin(DECISIONS.name, 0) > 0
        starts = dict(log.starts())
        assert not {place for place in starts if place[0] == ANSWERS.name}
        with runtime.use(FakeRuntime(wall_shift_s=RETENTION_S + 1)):
            await Retention(log, owner, 0, RetentionLimits(size_bytes=1 << 40)).enforce()
        assert log.starts() == {**starts, (ANSWERS.name, 0): 1, (ANSWERS.name, 1): 1}
        await log.append([Draft(ANSWERS.name, 0, b"answer")])
        await take_snapshot(owner)
        await Retention(log, owner, 0, SMALL).enforce()
        assert await log.begin(ANSWERS.name, 0) == 2


async def test_the_responses_of_requests_of_other_groups_are_kept(path: Path) -> None:
    async with owned(path) as (log, owner):
        other = Owner(log, embedded_leases(), settings(partition=2, groups=3))
        await other.start()
        await log.append([Draft(TOKENS.name, 5, encode(TOKENS, _tokens(number))) for number in range(3)])
        waiting = submitted("waiting", [1, 2, 3], reply_slot=5, reply_from=1)
        await log.append([Draft(REQUESTS.name, 2, encode(REQUESTS, waiting))])
        await take_snapshot(owner)
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
        end = log.next_offset(DECISIONS.name, 0)
        offsets = [offset async for offset, _ in journal(log, 0, start.offset, end, Validity.after(start))]
        assert offsets == list(range(start.offset, end))


async def test_decisions_go_on_while_history_is_deleted(tmp_path: Path) -> None:
    """A system serves many requests while its log stays within the limit and verifies."""
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    registry = CollectorRegistry()
    async with System(log).started(workers=2) as system, system.owned(log, snapshot_every=1_000, fleet=2) as owner:
        retention = Retention(log, owner, 0, RetentionLimits(size_bytes=500_000))
        registry.register(retention_metrics(log, retention))
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
