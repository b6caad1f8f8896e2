"""The file of a SQLite log: durability, checkpoints, locking, permissions, a full disk, and edits by other programs."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite import checkpoint as sqlite_checkpoint
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.checkpoint import PAGE_BYTES, Checkpointer
from forebay.transport.sqlite.log import CorruptRecord, LogUnusable, MissingRecords, SqliteLog
from forebay.transport.sqlite.schema import checksum, decode_headers, encode_headers
from tests.transport.conftest import Wakes, drafts, drain, numbers, stored

# Appends forever with several calls in flight, and prints each offset once it is acknowledged.
WRITER = """
import asyncio, sys
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog

async def write(log, partition):
    while True:
        for offset in await log.append([Draft("topic", partition, bytes(20_000))] * 3):
            print(partition, offset, flush=True)

async def main():
    log = SqliteLog.open(sys.argv[1])
    await asyncio.gather(*[write(log, partition) for partition in range(4)])

asyncio.run(main())
"""


def edit(path: Path, *statements: str) -> None:
    """Change the file with another SQLite client."""
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


def size(path: Path) -> int:
    return path.stat().st_size


async def make(path: Path, records: list[Draft]) -> None:
    log = SqliteLog.open(path)
    await log.append(records)
    log.close()


async def test_a_reopened_log_continues_at_its_end(path: Path) -> None:
    for first in (0, 5, 10):
        log = SqliteLog.open(path, namespace="ns")
        assert numbers(stored(log)) == list(range(first))
        assert await log.append(drafts(5, first=first)) == list(range(first, first + 5))
        log.close()
    with closing(SqliteLog.open(path, readonly=True)) as log:
        assert log.namespace == "ns"
        assert log.topics() == [("topic", 0, 15)]


async def test_pending_appends_survive_closing(path: Path) -> None:
    log = SqliteLog.open(path)
    log.append_soon(drafts(3))
    log.close()
    with closing(SqliteLog.open(path)) as log:
        assert numbers(stored(log)) == [0, 1, 2]


async def test_topics_lists_every_partition_that_has_records(log: SqliteLog) -> None:
    assert log.topics() == []
    await log.append([*drafts(2, "b", 7), *drafts(1, "b", 0), *drafts(1, "a", (1 << 23) - 1)])
    log.append_soon(drafts(1, "a.b-c", 1))
    assert log.topics() == [("a", (1 << 23) - 1, 1), ("a.b-c", 1, 1), ("b", 0, 1), ("b", 7, 2)]


async def test_any_sqlite_client_reads_a_closed_log(path: Path) -> None:
    await make(path, [Draft("topic", 3, b"value", b"key", {"a": "b"}), Draft("topic", 3, b"more")])
    assert not path.with_name("log.db-wal").exists()
    query = 'SELECT "partition", "offset", key, headers, value FROM topic ORDER BY id'
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        assert db.execute(query).fetchall() == [(3, 0, b"key", '{"a":"b"}', b"value"), (3, 1, None, None, b"more")]
        meta = dict(db.execute("SELECT key, value FROM forebay_meta"))
    assert (meta["format"], meta["namespace"], meta["writer_pid"]) == ("1", "forebay", str(os.getpid()))


def test_every_acknowledged_record_survives_kill_9(path: Path) -> None:
    acknowledged: dict[int, list[int]] = {}
    for lines in (200, 1, 1500):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            heard = [writer.stdout.readline() for _ in range(lines)]
            writer.send_signal(signal.SIGKILL)
            heard += [line for line in writer.stdout.readlines() if line.endswith(b"\n")]
        for line in heard:
            partition, offset = map(int, line.split())
            acknowledged.setdefault(partition, []).append(offset)
        with closing(SqliteLog.open(path, readonly=True)) as seen:
            ends = {partition: end for _, partition, end in seen.topics()}
        with closing(SqliteLog.open(path)) as log:
            for partition, offsets in acknowledged.items():
                found = stored(log, "topic", partition)
                assert [record.offset for record in found] == list(range(ends[partition]))
                assert len(found) % 3 == 0  # each append is atomic
                assert max(offsets) < len(found)


async def test_the_wal_is_checkpointed_and_starts_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_checkpoint, "CHECKPOINT_BYTES", 256 << 10)
    monkeypatch.setattr(sqlite_checkpoint, "WAL_BYTES_MAX", 1 << 20)
    log = SqliteLog.open(path)
    record = [Draft("topic", 0, bytes(64 << 10))]
    written = 0
    async with asyncio.timeout(30):
        while written - size(path.with_name("log.db-wal")) < 8 << 20:
            await log.append(record)
            written += 64 << 10
    assert log.failure is None
    assert len(stored(log)) == written >> 16
    log.close()
    assert size(path) > written


async def test_a_full_disk_fails_the_log_and_loses_nothing_acknowledged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = schema.connect

    def small(path: Path | None, *, readonly: bool) -> sqlite3.Connection:
        db = connect(path, readonly=readonly)
        db.execute("PRAGMA max_page_count = 100")
        return db

    monkeypatch.setattr(schema, "connect", small)
    log = SqliteLog.open(path)
    failures: list[LogError] = []
    log.on_failure = failures.append
    tail = log.tail("topic", 0, 0, Wakes())
    acknowledged = 0
    with pytest.raises(LogError, match="full"):
        while True:
            acknowledged += len(await log.append([Draft("topic", 0, bytes(50_000))]))
    assert acknowledged > 0
    assert failures == [log.failure]
    assert "free disk space" in str(log.failure)
    with pytest.raises(LogError, match="free disk space"):
        await log.append(drafts(1, "tiny"))
    with pytest.raises(LogError, match="free disk space"):
        log.append_soon(drafts(1, "tiny"))
    assert log.next_offset("topic", 0) == acknowledged == len(drain(tail)) == len(stored(log))
    log.close()
    monkeypatch.undo()
    with closing(SqliteLog.open(path)) as log:
        assert len(stored(log)) == acknowledged
        assert await log.append(drafts(1)) == [acknowledged]


async def test_every_append_of_a_failed_commit_raises(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append(drafts(1))
    edit(path, "DROP TABLE topic")
    calls = [asyncio.ensure_future(log.append(drafts(1, topic))) for topic in ("topic", "other", "topic")]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LogError] * 3
    assert len({id(outcome) for outcome in outcomes}) == 3
    log.close()
    with closing(SqliteLog.open(path)) as log:
        assert log.topics() == []


@pytest.mark.parametrize(
    "change",
    [
        "value = X'00' || substr(value, 2)",
        "value = value || X'00'",
        "value = CAST(value AS TEXT)",
        "at_us = at_us + 1",
        "at_us = 'noon'",
        "checksum = checksum + 1",
        "checksum = 1.5",
        "key = NULL",
        "key = 17",
        "headers = NULL",
        "headers = '{}'",
        "headers = CAST(X'7BFF7D' AS TEXT)",
    ],
)
async def test_a_changed_record_is_detected(path: Path, change: str) -> None:
    await make(path, [Draft("topic", 2, b"value", b"", {"a": "b"}) for _ in range(3)])
    edit(path, f'UPDATE topic SET {change} WHERE "offset" = 1')
    with closing(SqliteLog.open(path)) as log:
        with pytest.raises(CorruptRecord, match="topic/2: the record at offset 1 "):
            stored(log, "topic", 2)
        assert len(log.records("topic", 2, 0, 1)) == len(log.records("topic", 2, 2, 1)) == 1
        tail = log.tail("topic", 2, 1, Wakes())
        for _ in range(2):
            with pytest.raises(CorruptRecord):
                tail.take(1)


async def test_a_moved_record_is_detected(path: Path) -> None:
    await make(path, [*drafts(1, "topic", 0), *drafts(1, "topic", 1), *drafts(1, "other", 1)])
    columns = "id, at_us, key, headers, value, checksum"
    edit(path, 'DELETE FROM topic WHERE "partition" = 1', f"INSERT INTO topic ({columns}) SELECT {columns} FROM other")
    with closing(SqliteLog.open(path)) as log, pytest.raises(CorruptRecord, match="topic/1"):
        stored(log, "topic", 1)


@pytest.mark.parametrize(("deleted", "missing"), [("0", "0 to 0"), ("1, 2", "1 to 2"), ("0, 1, 2, 3", "0 to 3")])
async def test_a_gap_is_named(path: Path, deleted: str, missing: str) -> None:
    await make(path, drafts(5))
    edit(path, f'DELETE FROM topic WHERE "offset" IN ({deleted})')
    with closing(SqliteLog.open(path)) as log:
        with pytest.raises(MissingRecords, match=f"topic/0: the records at offsets {missing} are missing"):
            stored(log)
        assert numbers(stored(log, offset=4)) == [4]


async def test_records_deleted_from_the_end_of_an_open_log_are_detected(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append(drafts(5))
    tail = log.tail("topic", 0, 2, Wakes())
    edit(path, 'DELETE FROM topic WHERE "offset" >= 3')
    assert numbers(tail.take(1)) == [2]
    with pytest.raises(MissingRecords, match="3 to 4"):
        tail.take(10)
    log.close()


async def test_live_tails_yield_committed_records_even_if_the_file_is_edited(path: Path) -> None:
    log = SqliteLog.open(path)
    tail = log.tail("topic", 0, 0, Wakes())
    await log.append(drafts(5))
    edit(path, "DELETE FROM topic")
    assert numbers(drain(tail)) == [0, 1, 2, 3, 4]
    log.close()


def test_a_second_writer_is_refused_and_the_error_names_the_first(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(LogUnusable, match=f"pid {writer.pid}"):
            SqliteLog.open(path)
        writer.kill()
    with closing(SqliteLog.open(path)), pytest.raises(LogUnusable, match=f"pid {os.getpid()}"):
        SqliteLog.open(path)
    SqliteLog.open(path).close()


async def test_a_reader_follows_a_writer_in_another_connection(path: Path) -> None:
    writer = SqliteLog.open(path)
    reader = SqliteLog.open(path, readonly=True)
    wake = Wakes()
    tail = reader.tail("topic", 0, 0, wake)
    await writer.append(drafts(3))
    assert len(tail) == 0
    assert reader.next_offset("topic", 0) == 3
    assert numbers(drain(tail)) == [0, 1, 2]
    await writer.append(drafts(2, first=3))
    assert reader.next_offset("topic", 0) == 5
    assert numbers(drain(tail)) == [3, 4]
    assert reader.topics() == [("topic", 0, 5)]
    writer.close()
    assert numbers(stored(reader)) == [0, 1, 2, 3, 4]
    reader.close()


async def test_a_reader_cannot_write(path: Path) -> None:
    await make(path, drafts(1))
    with closing(SqliteLog.open(path, readonly=True)) as reader:
        with pytest.raises(LogError, match="read-only"):
            await reader.append(drafts(1))
        with pytest.raises(LogError, match="read-only"):
            reader.append_soon(drafts(1))


async def test_a_long_read_does_not_block_appends(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append(drafts(3))
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT value FROM topic")
        rows.fetchone()
        await log.append(drafts(3, first=3))
        log.close()
        assert len(rows.fetchall()) == 2
    with closing(SqliteLog.open(path)) as log:
        assert numbers(stored(log)) == [0, 1, 2, 3, 4, 5]


def spoil(path: Path, statement: str) -> None:
    SqliteLog.open(path).close()
    edit(path, statement)


UNUSABLE: list[tuple[str, Callable[[Path], object], str]] = [
    ("no SQLite", lambda path: path.write_bytes(b"no database, but long enough to be one" * 9), "is not a forebay"),
    ("foreign", lambda path: edit(path, "CREATE TABLE t (x)"), "database of another program"),
    ("foreign id", lambda path: edit(path, "PRAGMA application_id = 5"), "database of another program"),
    ("newer", lambda path: spoil(path, "PRAGMA user_version = 3"), "format 3, this forebay reads up to 2; use"),
    ("directory", Path.mkdir, "is a directory"),
    ("no meta", lambda path: spoil(path, "DROP TABLE forebay_meta"), "cannot be opened"),
]


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(("prepare", "text"), [case[1:] for case in UNUSABLE], ids=[case[0] for case in UNUSABLE])
def test_a_file_that_is_not_a_log_is_refused_in_one_line(
    path: Path, prepare: Callable[[Path], object], text: str, readonly: bool
) -> None:
    prepare(path)
    for _ in range(2):
        with pytest.raises(LogUnusable, match=text) as caught:
            SqliteLog.open(path, readonly=readonly)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_opening_requires_a_directory_and_reading_an_existing_log(path: Path) -> None:
    with pytest.raises(LogUnusable, match="there is no directory"):
        SqliteLog.open(path / "deeper")
    with pytest.raises(LogUnusable, match="no such log file"):
        SqliteLog.open(path, readonly=True)
    path.touch()
    with pytest.raises(LogUnusable, match="start a writer first"):
        SqliteLog.open(path, readonly=True)
    SqliteLog.open(path).close()
    SqliteLog.open(path, readonly=True).close()


def test_a_log_of_another_namespace_is_refused_and_unchanged(path: Path) -> None:
    SqliteLog.open(path, namespace="a").close()
    before = path.read_bytes()
    with pytest.raises(LogUnusable, match="belongs to namespace 'a', not 'b'"):
        SqliteLog.open(path, namespace="b")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM forebay_meta").fetchone() == (4,)
    assert len(path.read_bytes()) == len(before)


async def test_a_copy_without_its_wal_is_noticed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [path.with_name(name) for name in ("early", "late", "whole", "foreign")]
    early, late, whole, foreign = names
    other = SqliteLog.open(path.with_name("other"))
    await other.append(drafts(2))
    log = SqliteLog.open(path)
    await log.append(drafts(2))
    shutil.copy(path, early)
    edit(path, "PRAGMA wal_checkpoint")
    await log.append(drafts(3, first=2))
    for copy in (late, whole, foreign):
        shutil.copy(path, copy)
    shutil.copy(f"{path}-wal", f"{whole}-wal")
    shutil.copy(f"{path.with_name('other')}-wal", f"{foreign}-wal")
    log.close()
    other.close()
    for _ in range(2):  # opening a log creates files beside it
        with pytest.raises(LogUnusable, match=r"early: has no records without early-wal, .* `forebay record`"):
            SqliteLog.open(early, readonly=True)
        for readonly in (True, False):
            with pytest.raises(LogUnusable, match="foreign: foreign-wal belongs to another log"):
                SqliteLog.open(foreign, readonly=readonly)
        with closing(SqliteLog.open(late, readonly=True)) as opened:
            assert opened.topics() == [("topic", 0, 2)]
        assert "late: late-wal is missing, so its newest records may be missing" in caplog.text
        caplog.clear()
        for complete in (path, whole):
            with closing(SqliteLog.open(complete, readonly=True)) as opened:
                assert opened.topics() == [("topic", 0, 5)]
        assert not caplog.records


@pytest.mark.skipif(os.geteuid() == 0, reason="root bypasses file permissions")
def test_missing_permissions_are_named(path: Path) -> None:
    SqliteLog.open(path).close()
    path.chmod(0o400)
    with pytest.raises(LogUnusable, match="no permission to write it"):
        SqliteLog.open(path)
    path.chmod(0o000)
    with pytest.raises(LogUnusable, match="no permission to read it"):
        SqliteLog.open(path, readonly=True)
    path.parent.chmod(0o500)
    with pytest.raises(LogUnusable, match="no permission to write in"):
        SqliteLog.open(path)
    path.parent.chmod(0o700)


def test_a_log_can_outlive_the_event_loop_of_its_checkpoint(path: Path) -> None:
    log = SqliteLog.open(path)
    megabytes = sqlite_checkpoint.CHECKPOINT_BYTES // (1 << 20) + 1
    asyncio.run(log.append([Draft("topic", 0, bytes(1 << 20))] * megabytes))
    assert asyncio.run(log.append(drafts(1))) == [megabytes]
    log.close()
    with closing(SqliteLog.open(path)) as log:
        assert len(stored(log)) == megabytes + 1


LARGE = 2 << 20
SMALL = 64 << 10


class Writer:
    """A writer's connection and its checkpointer, advanced step by step."""

    def __init__(self, path: Path) -> None:
        self.db = schema.connect(path, readonly=False)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA wal_autocheckpoint = 0")
        self.db.execute("CREATE TABLE t (value BLOB)")
        self.checkpointer = Checkpointer(path)
        self.finished = asyncio.Event()

    def commit(self, size: int) -> None:
        self.db.execute("INSERT INTO t VALUES (zeroblob(?))", (size,))
        self.checkpointer.grew(size, 1)

    def step(self) -> None:
        self.checkpointer.step(asyncio.get_running_loop(), self.finished.set)

    async def run_ends(self) -> None:
        await self.finished.wait()
        self.finished.clear()
        self.step()

    def wal_bytes(self) -> int:
        frames: int = self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
        return frames * PAGE_BYTES


def make_unopenable(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.mkdir()


@pytest.fixture
def writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.setattr(sqlite_checkpoint, "CHECKPOINT_BYTES", LARGE)
    monkeypatch.setattr(sqlite_checkpoint, "WAL_BYTES_MAX", LARGE // 2)
    writer = Writer(path)
    yield writer
    writer.checkpointer.close()
    writer.db.close()


async def test_commits_during_a_checkpoint_delay_the_next_so_that_the_wal_starts_over(writer: Writer) -> None:
    writer.commit(LARGE)
    writer.step()
    assert not writer.checkpointer.holding
    writer.commit(LARGE)
    await writer.run_ends()
    assert writer.checkpointer.holding
    await writer.run_ends()
    assert not writer.checkpointer.holding
    writer.commit(SMALL)
    assert writer.wal_bytes() < LARGE // 2


async def test_commits_are_not_delayed_without_commits_during_the_checkpoint(writer: Writer) -> None:
    writer.commit(LARGE)
    writer.step()
    await writer.run_ends()
    assert not writer.checkpointer.holding
    writer.commit(SMALL)
    assert writer.wal_bytes() < LARGE // 2


async def test_a_small_wal_is_not_checkpointed(writer: Writer) -> None:
    writer.commit(SMALL)
    writer.step()
    writer.step()
    assert not writer.finished.is_set()
    assert writer.wal_bytes() > SMALL


async def test_a_long_read_in_another_connection_delays_commits_briefly(
    writer: Writer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = sqlite3.connect(path)
    writer.commit(SMALL)
    rows = reader.execute("SELECT rowid FROM t UNION ALL SELECT 2")
    rows.fetchone()
    writer.commit(LARGE)
    writer.step()
    await writer.run_ends()
    assert writer.checkpointer.holding
    await writer.run_ends()
    assert not writer.checkpointer.holding
    assert "a long read in another process" in caplog.text
    rows.close()
    reader.close()
    writer.commit(LARGE)
    writer.step()
    await writer.run_ends()
    writer.commit(SMALL)
    assert writer.wal_bytes() < LARGE // 2


async def test_the_wal_shrinks_to_its_limit(path: Path) -> None:
    wal = path.with_name(f"{path.name}-wal")
    with closing(SqliteLog.open(path)) as log:
        log.limit_wal(1 << 20)
        await log.append([Draft("topic", 0, bytes(1 << 20))] * 8)
        assert size(wal) > 8 << 20
        while size(wal) > 1 << 20:
            await log.append(drafts(1))


async def test_a_failed_checkpoint_fails_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_checkpoint, "CHECKPOINT_BYTES", SMALL)
    log = SqliteLog.open(path)
    await log.append(drafts(1))
    make_unopenable(path)
    with pytest.raises(LogError, match="check the disk"):
        while True:
            await log.append([Draft("topic", 0, bytes(SMALL))])
    assert log.failure is not None
    log.close()


FIELDS = st.tuples(
    st.from_regex(r"[a-z0-9.-]{1,8}", fullmatch=True),
    st.integers(0, (1 << 23) - 1),
    st.integers(0, (1 << 40) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.none() | st.binary(max_size=8),
    st.none() | st.binary(max_size=8),
    st.binary(max_size=8),
)


def test_the_checksum_is_part_of_the_format() -> None:
    assert checksum("topic", 3, 17, 1_700_000_000_000_000, b"key", b'{"a":"b"}', b"value") == -3_468_606_920_563_239_622
    assert checksum("t", 0, 0, 0, None, None, b"") == -3_150_651_442_173_487_104


@given(FIELDS, FIELDS)
def test_different_records_have_different_checksums(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    assert (checksum(*one) == checksum(*other)) == (one == other)
    assert -(1 << 63) <= checksum(*one) < 1 << 63


@given(st.binary(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_moving_bytes_between_fields_changes_the_checksum(joined: bytes, first: int, second: int) -> None:
    low, high = sorted((min(first, len(joined)), min(second, len(joined))))
    plain = checksum("t", 0, 0, 0, b"", b"", joined)
    moved = checksum("t", 0, 0, 0, joined[:low], joined[low:high], joined[high:])
    assert (plain == moved) == (high == 0)


def test_absent_and_empty_values_have_different_checksums() -> None:
    variants = [(key, headers) for key in (None, b"") for headers in (None, b"")]
    assert len({checksum("t", 0, 0, 0, key, headers, b"") for key, headers in variants}) == 4


@given(st.none() | st.dictionaries(st.text(), st.text(), max_size=4))
def test_headers_round_trip(headers: dict[str, str] | None) -> None:
    encoded = encode_headers(headers)
    assert decode_headers(encoded) == headers
    assert encoded is None or encoded.decode().encode() == encoded
