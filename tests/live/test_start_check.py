"""A start either reads only intact records or is refused and leaves the file unchanged; damage is seeded."""

import asyncio
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from forebay.events.codec import encode
from forebay.events.decisions import SnapshotTaken
from forebay.events.tokens import TokenChunk, TokensEmitted
from forebay.events.topics import CONTROL, DECISIONS, GROUPS, INPUTS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.start_check import GROUPS_MAX, open_checked
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.history.groups import groups_of
from forebay.transport.history.snapshots import load_snapshot, newest_snapshot
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.schema import WriterLock
from tests.benchmarks.recordings import Shape, write_recording
from tests.depth import sampled
from tests.live.shared import followed, opened_one

PLACES = 150
READ_MAX = 100_000


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with snapshots, a journal after the newest, requests in flight and their first tokens."""
    path = tmp_path_factory.mktemp("intact") / "log.db"

    async def make() -> None:
        await write_recording(path, Shape(workers=2, decisions=134, cached_blocks=64, snapshot_every=60))
        log = SqliteLog.open(path)
        await log.append([Draft(TOKENS.name, 0, encode(TOKENS, event)) for event in map(_tokens, range(20))])
        log.close()

    asyncio.run(make())
    return path


@pytest.fixture
def log(intact: Path, tmp_path: Path) -> Path:
    """Return a copy of the intact log."""
    return Path(shutil.copy(intact, tmp_path / "log.db"))


def _tokens(number: int) -> TokensEmitted:
    chunk = TokenChunk(request_id=f"request-{number}", attempt=1, first_index=0, token_ids=bytes(400))
    return TokensEmitted(worker_id="worker", worker_epoch=0, owner_epoch=0, chunks=(chunk,))


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


def content_of(path: Path) -> bytes:
    return path.read_bytes()


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
    places = sampled(range(PLACES), 60)
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
    log: Path, topic: str, change: str, message: str
) -> None:
    with closing(SqliteLog.open(log, readonly=True)) as reader:
        last = reader.next_offset(topic, 0) - 1
    with closing(sqlite3.connect(log)) as db, db:
        db.execute(change.format(last=last))
    damaged = content_of(log)
    with pytest.raises(LogUnusable, match=message.format(last=last)) as caught:
        await open_checked(log, ["m"])
    text = str(caught.value)
    assert "restore a copy" in text
    assert "pass a new file to --log" in text
    assert f"forebay verify {log}" in text
    assert content_of(log) == damaged
    WriterLock(log).close()  # the lock is free again


async def test_the_prompts_of_requests_in_flight_are_checked_at_any_age(log: Path) -> None:
    with closing(SqliteLog.open(log, readonly=True)) as reader:
        taken = await newest_snapshot(reader, 0, reader.next_offset(DECISIONS.name, 0))
        assert taken is not None
        world = await load_snapshot(reader, 0, taken)
        (oldest, *_) = await in_flight(log)
        assert oldest < world.view[REQUESTS.name], "the request was submitted before the snapshot"
    with closing(sqlite3.connect(log)) as db, db:
        db.execute('UPDATE requests SET value = zeroblob(9) WHERE "offset" = ?', (oldest,))
    assert f"requests/0: the record at offset {oldest} " in await start(log)


async def write(path: Path, topic: str) -> int:
    """Append two records that no decision has consumed; return the offset of the first."""
    with closing(SqliteLog.open(path)) as log:
        first, _ = await log.append([Draft(topic, 0, b"one"), Draft(topic, 0, b"two")])
    return first


def damage(path: Path, topic: str, offset: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f'UPDATE "{topic}" SET value = zeroblob(9) WHERE "offset" = ?', (offset,))


@pytest.mark.parametrize("topic", [topic.name for topic in INPUTS])
async def test_unconsumed_inputs_are_checked(log: Path, topic: str) -> None:
    damage(log, topic, offset := await write(log, topic))
    assert f"{topic}/0: the record at offset {offset} " in await start(log)


@pytest.mark.parametrize("topic", [GROUPS.name, CONTROL.name])
async def test_groups_and_control_are_checked_from_their_first_record(log: Path, topic: str) -> None:
    await write(log, topic)
    damage(log, topic, 0)
    assert f"{topic}/0: the record at offset 0 " in await start(log)


async def test_history_before_the_snapshot_is_not_read(log: Path) -> None:
    with closing(sqlite3.connect(log)) as db, db:
        db.execute('UPDATE "kv-events" SET checksum = 5 WHERE "offset" = 0')
        db.execute('DELETE FROM snapshots WHERE "offset" = 0')
    assert not await start(log)


async def test_an_owner_continues_from_the_state_of_the_check(log: Path) -> None:
    opened, standby = await opened_one(log)
    assert standby is not None
    assert standby.position == opened.next_offset(DECISIONS.name, 0)
    owner = Owner(opened, embedded_leases(), GroupSettings(group="bench", partition=0, owner_id="next"))
    await owner.start(standby)
    assert owner.world is standby.world, "the state is not recovered twice"
    owner.drop()
    opened.close()
    assert (await verified(log)).divergence is None


async def verified(path: Path) -> VerifyReport:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        return await verify(log)


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


async def test_a_log_in_use_is_refused_before_it_is_checked(log: Path) -> None:
    opened, _ = await opened_one(log)
    with pytest.raises(LogUnusable, match="another process"):
        await open_checked(log, ["m"])
    opened.close()


async def test_a_file_that_is_not_a_log_gets_no_lock_file(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A page\n")
    with pytest.raises(LogUnusable, match="is not a forebay log"):
        await open_checked(page, ["m"])
    with pytest.raises(LogUnusable, match="is not a forebay log"):
        SqliteLog.open(page)
    assert names_in(tmp_path) == ["README.md"]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_log_of_one_model_gets_partitions_for_others(log: Path) -> None:
    """The model that had the log alone keeps partition 0, also if it is not served any more."""
    first = await open_checked(log, ["other", "third"])
    assert {name: group.partition for name, group in first.groups.items()} == {"other": 1, "third": 2}
    assert first.partitions == GROUPS_MAX
    first.log.close()
    second = await open_checked(log, ["third", "bench", "new"])
    assert {name: group.partition for name, group in second.groups.items()} == {"third": 2, "bench": 0, "new": 3}
    recorded = second.groups["bench"].standby
    assert recorded is not None
    assert recorded.world.requests.active()
    second.log.close()
    with closing(SqliteLog.open(log, readonly=True)) as reader:
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
