"""Trimming a SQLite log: offsets are kept, the file stops growing, and readers see where the log begins."""

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import MissingRecords, SqliteLog, TrimmedRecords
from tests.depth import examples
from tests.transport.conftest import Wakes, drafts, drain, numbers, stored

PLACES = [("topic", 0), ("topic", 1), ("other", 0)]
RECORD_BYTES = 20_000

# Appends and trims forever; prints the first and last offset after each trim.
TRIMMER = """
import asyncio, sys
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog

async def main():
    log = SqliteLog.open(sys.argv[1])
    while True:
        (end,) = await log.append([Draft("topic", 0, bytes(20_000))])
        log.trim("topic", 0, end - 5, 3)
        print(await log.begin("topic", 0), end, flush=True)

asyncio.run(main())
"""


def size(path: Path) -> int:
    return path.stat().st_size


async def test_trimmed_records_are_deleted_and_offsets_are_kept(log: SqliteLog) -> None:
    await log.append([*drafts(10), *drafts(3, partition=1)])
    assert log.trim("topic", 0, 7, 5) == 5
    assert log.trim("topic", 0, 7, 5) == 2
    assert log.trim("topic", 0, 7, 5) == 0
    assert (await log.begin("topic", 0), await log.end("topic", 0)) == (7, 10)
    assert (await log.begin("topic", 1), log.starts()) == (0, {("topic", 0): 7})
    assert numbers(stored(log, offset=7)) == [7, 8, 9]
    for offset in (0, 6):
        with pytest.raises(TrimmedRecords, match=f"topic/0 no longer holds offset {offset}: .* before 7"):
            stored(log, offset=offset)
    assert await log.append(drafts(1, first=10)) == [10]
    assert log.trim("topic", 0, 99, 99) == 4, "only existing records are deleted"
    with pytest.raises(TrimmedRecords):
        await log.read("topic", 0, 10, 1)
    assert await log.read("topic", 0, 11, 1) == []
    assert await log.append(drafts(1, first=11)) == [11]
    assert numbers(stored(log, offset=11)) == [11]


async def test_a_trimmed_log_keeps_its_beginning_when_reopened(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append([*drafts(5), *drafts(5, "other")])
    log.trim("topic", 0, 5, 9)
    log.trim("other", 0, 2, 9)
    log.close()
    for readonly in (True, False):
        with closing(SqliteLog.open(path, readonly=readonly)) as log:
            assert (await log.begin("topic", 0), await log.end("topic", 0)) == (5, 5)
            assert (await log.begin("other", 0), await log.end("other", 0)) == (2, 5)
            with pytest.raises(TrimmedRecords):
                stored(log)
    with closing(SqliteLog.open(path)) as log:
        assert await log.append(drafts(1)) == [5], "offsets continue after all records of a partition were deleted"


async def test_a_missing_record_is_not_mistaken_for_a_trimmed_one(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append(drafts(9))
    log.trim("topic", 0, 3, 9)
    log.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('DELETE FROM topic WHERE "offset" < 5')
    with closing(SqliteLog.open(path)) as log, pytest.raises(MissingRecords, match="3 to 4 are missing"):
        stored(log, offset=3)


async def test_records_that_a_local_tail_has_not_taken_are_kept(log: SqliteLog) -> None:
    await log.append(drafts(9))
    tail = log.tail("topic", 0, 2, Wakes())
    assert log.trim("topic", 0, 9, 99) == 2
    tail.take(3)
    assert log.trim("topic", 0, 9, 99) == 3
    assert numbers(drain(tail)) == [5, 6, 7, 8]
    tail.close()
    assert log.trim("topic", 0, 9, 99) == 4


async def test_a_concurrent_reader_finishes_its_read_then_sees_the_new_beginning(path: Path) -> None:
    writer = SqliteLog.open(path)
    await writer.append([Draft("topic", 0, bytes(9_000)) for _ in range(50)])
    reader = SqliteLog.open(path, readonly=True)
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT id FROM topic ORDER BY id")
        assert rows.fetchone() == (0,)
        while writer.trim("topic", 0, 40, 7):
            await writer.append(drafts(1))
        assert [row for (row,) in rows] == list(range(1, 50)), "a read sees the snapshot that it began with"
    assert await reader.begin("topic", 0) == 40
    with pytest.raises(TrimmedRecords):
        stored(reader, offset=39)
    assert len(stored(reader, offset=40)) == 10 + 6
    reader.close()
    writer.close()


async def test_the_file_stops_growing_because_free_pages_are_reused(path: Path) -> None:
    log = SqliteLog.open(path)
    largest = 0
    for _ in range(60):
        await log.append([Draft("topic", 0, bytes(RECORD_BYTES)) for _ in range(20)])
        end = log.next_offset("topic", 0)
        while log.trim("topic", 0, end - 100, 16):
            pass
        used, file = log.bytes_used()
        assert used <= 120 * (RECORD_BYTES + 5_000)
        largest = max(largest, file)
    log.close()
    assert size(path) <= largest <= 140 * (RECORD_BYTES + 5_000), "100 of 1,200 records remain"


async def test_a_failed_trim_deletes_nothing(path: Path) -> None:
    log = SqliteLog.open(path)
    await log.append(drafts(9))
    log.trim("topic", 0, 2, 9)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TRIGGER t BEFORE INSERT ON forebay_starts BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(LogError, match="no room"):
        log.trim("topic", 0, 5, 9)
    log.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TRIGGER t")
    with closing(SqliteLog.open(path)) as log:
        assert await log.begin("topic", 0) == 2
        assert numbers(stored(log, offset=2)) == [2, 3, 4, 5, 6, 7, 8]


def test_kill_9_during_a_trim_leaves_a_complete_log(path: Path) -> None:
    heard = (0, 0)
    for lines in (40, 7, 90):
        with subprocess.Popen([sys.executable, "-c", TRIMMER, str(path)], stdout=subprocess.PIPE) as trimmer:
            assert trimmer.stdout is not None
            for _ in range(lines):
                first, last = trimmer.stdout.readline().split()
            trimmer.send_signal(signal.SIGKILL)
        heard = (int(first), int(last))
        with closing(SqliteLog.open(path)) as log:
            log.check()
            begin, end = asyncio.run(log.begin("topic", 0)), log.next_offset("topic", 0)
            assert (begin >= heard[0], end > heard[1]) == (True, True)
            assert [record.offset for record in stored(log, offset=begin)] == list(range(begin, end))


class TrimMachine(RuleBasedStateMachine):
    """Compares a log with lists under appends, trims, restarts, and crashes (a copy of file and write-ahead log)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.life = 0
        self.path = Path(self.folder.name) / "0.db"
        self.loop = asyncio.new_event_loop()
        self.log = SqliteLog.open(self.path)
        self.ends = dict.fromkeys(PLACES, 0)
        self.begins = dict.fromkeys(PLACES, 0)

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 8), size=st.sampled_from([1, 3_000, 30_000]))
    def append(self, place: tuple[str, int], count: int, size: int) -> None:
        first = self.ends[place]
        values = [str(number).encode().ljust(size) for number in range(first, first + count)]
        offsets = self.loop.run_until_complete(self.log.append([Draft(*place, value) for value in values]))
        assert offsets == list(range(first, first + count))
        self.ends[place] += count

    @rule(place=st.sampled_from(PLACES), before=st.integers(0, 60), count_max=st.integers(1, 9))
    def trim(self, place: tuple[str, int], before: int, count_max: int) -> None:
        begin = self.begins[place]
        wanted = max(0, min(before, self.ends[place], begin + count_max) - begin)
        assert self.log.trim(*place, before, count_max) == wanted
        self.begins[place] = begin + wanted

    @rule()
    def restart(self) -> None:
        self.log.close()
        self.log = SqliteLog.open(self.path)

    @precondition(lambda self: self.life < 4)
    @rule()
    def crash(self) -> None:
        self.life += 1
        fresh = self.path.with_name(f"{self.life}.db")
        for suffix in ("", "-wal"):
            if self.path.with_name(self.path.name + suffix).exists():
                shutil.copy(f"{self.path}{suffix}", f"{fresh}{suffix}")
        self.log.close()
        self.path, self.log = fresh, SqliteLog.open(fresh)

    @invariant()
    def matches_the_model(self) -> None:
        for place, end in self.ends.items():
            begin = self.begins[place]
            assert self.loop.run_until_complete(self.log.begin(*place)) == begin
            assert self.log.next_offset(*place) == end
            assert [int(record.value) for record in stored(self.log, *place, begin)] == list(range(begin, end))
            if begin:
                with pytest.raises(TrimmedRecords):
                    stored(self.log, *place, begin - 1)

    def teardown(self) -> None:
        self.log.check()
        self.log.close()
        self.loop.close()
        self.folder.cleanup()


TestTrimmed = TrimMachine.TestCase
TestTrimmed.settings = examples(0.25, stateful_step_count=20)
