"""A SQLite log after a power loss, after kill -9, and after trims: its records are those of its first commits."""

import asyncio
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerJoined
from forebay.events.tokens import ResponseEnded, TokensEmitted
from forebay.events.topics import DECISIONS, FLEET, REQUESTS, TOKENS, Topic, work_topic
from forebay.events.work import WorkItem
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft, LogError, LogSync, RecordsRemoved
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import MissingRecords, SqliteLog
from tests.depth import examples, sampled
from tests.live.shared import SENT, all_ended, opened_one, proven, scenario
from tests.system import SLOT, System, settings, until
from tests.transport.conftest import Wakes, drafts, drain, numbers, stored

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
PAGE_BYTES = 4096
FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES
SALTS = slice(16, 24)  # in the header; in a frame, 8 bytes from byte 8 on


class Outage:
    """Content of the database and of the write-ahead log at one moment, while no commit is in progress.

    SQLite accepts frames of the write-ahead log up to the first frame whose salts or running checksum do not match, and
    of these the frames up to the last one that ends a commit.

    Attributes:
        wal: Content of the write-ahead log, including frames that remain from before it last started over.
        commit_ends: Length of the write-ahead log at the end of each commit since it last started over.
    """

    def __init__(self, path: Path) -> None:
        self.database = path.read_bytes()
        self.wal = path.with_name(path.name + "-wal").read_bytes()
        self.commit_ends: list[int] = []
        for start in range(HEADER_BYTES, len(self.wal) - FRAME_BYTES + 1, FRAME_BYTES):
            if self.wal[start + 8 : start + 16] != self.wal[SALTS]:
                break
            (pages_after_commit,) = struct.unpack_from(">I", self.wal, start + 4)
            if pages_after_commit:
                self.commit_ends.append(start + FRAME_BYTES)

    @property
    def frame_ends(self) -> range:
        """Length of the write-ahead log at the end of each frame up to the last commit, and of its header."""
        return range(HEADER_BYTES, self.commit_ends[-1] + 1, FRAME_BYTES)

    def commits_within(self, intact_bytes: int) -> int:
        """Return how many commits survive if only this many bytes of the write-ahead log are intact."""
        return sum(end <= intact_bytes for end in self.commit_ends)

    def restore(self, path: Path, wal: bytes) -> None:
        """Write the database and this write-ahead log to `path`, as they are after a restart of the machine."""
        for name in (path, path.with_name(path.name + "-shm"), path.with_name(path.name + "-wal")):
            name.unlink(missing_ok=True)
        path.write_bytes(self.database)
        path.with_name(path.name + "-wal").write_bytes(wal)


CHECKPOINTED = 8  # commits before the write-ahead log starts over, whose frames stay behind the newer ones
COMMITS = 30
PLACES = (("topic", 0), ("topic", 3), ("other", 0), ("work.a", 7))

State = dict[tuple[str, int], list[bytes]]


def commit_of(number: int) -> list[Draft]:
    """Return the records of one commit, some of them larger than a page."""
    chance = random.Random(number)
    count = chance.randint(1, 4)
    places = [chance.choice(PLACES) for _ in range(count)]
    return [Draft(topic, part, f"{number} ".encode() * chance.choice((1, 50, 3_000))) for topic, part in places]


def state_of(log: SqliteLog) -> State:
    return {(topic, part): [one.value for one in stored(log, topic, part)] for topic, part, _ in log.topics()}


class Written:
    """A log in use at the moment of a power loss, and its records after each commit since the last checkpoint."""

    def __init__(self, outage: Outage, states: list[State]) -> None:
        self.outage = outage
        self.states = states

    async def require_prefix(self, path: Path, wal: bytes, intact_bytes: int) -> None:
        """Check that a log with this write-ahead log holds the commits of its intact part, and continues after them."""
        self.outage.restore(path, wal)
        expected = self.states[self.outage.commits_within(intact_bytes)]
        with closing(SqliteLog.open(path, readonly=True)) as log:
            assert state_of(log) == expected
            log.check_ends()
        with closing(SqliteLog.open(path)) as log:
            await log.append([Draft("topic", 0, b"after it")])
        with closing(SqliteLog.open(path)) as log:
            assert state_of(log) == {**expected, ("topic", 0): [*expected.get(("topic", 0), []), b"after it"]}
            log.check()


@pytest.fixture
async def written(tmp_path: Path) -> Written:
    path = tmp_path / "in-use.db"
    log = SqliteLog.open(path)
    for number in range(CHECKPOINTED):
        await log.append(commit_of(number))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    states = [state_of(log)]
    for number in range(CHECKPOINTED, COMMITS):
        await log.append(commit_of(number))
        states.append(state_of(log))
    outage = Outage(path)
    log.close()
    assert len(outage.commit_ends) == COMMITS - CHECKPOINTED
    return Written(outage, states)


async def test_a_truncated_write_ahead_log_leaves_the_commits_before_the_cut(written: Written, path: Path) -> None:
    chance = random.Random(1)
    wal, last = written.outage.wal, written.outage.commit_ends[-1]
    ends = written.outage.frame_ends
    cuts = [0, 1, HEADER_BYTES - 1, *ends, *(end - 1 for end in ends), *(chance.randrange(last) for _ in ends)]
    for cut in sampled(cuts, 25):
        await written.require_prefix(path, wal[:cut], cut)


GARBAGE: dict[str, Callable[[random.Random, int], bytes]] = {
    "random": lambda chance, count: chance.randbytes(count),
    "zeros": lambda _, count: bytes(count),
    "ones": lambda _, count: b"\xff" * count,
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_after_the_cut_is_not_read(written: Written, path: Path, kind: str) -> None:
    chance = random.Random(kind)
    wal, ends = written.outage.wal, written.outage.frame_ends
    for cut in sampled([*ends, *(chance.randrange(end) for end in ends)], 12):
        await written.require_prefix(path, wal[:cut] + GARBAGE[kind](chance, len(wal) - cut), cut)


async def test_frames_written_out_of_order_do_not_leave_a_hole(written: Written, path: Path) -> None:
    """The disk may store a later part of the write-ahead log and lose an earlier part."""
    wal, ends = written.outage.wal, written.outage.frame_ends
    for lost in sampled(ends[:-1], 15):
        await written.require_prefix(path, wal[:lost] + bytes(FRAME_BYTES) + wal[lost + FRAME_BYTES :], lost)


def flips(outage: Outage, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield a place in the write-ahead log, and the log with one to four changed bytes from there on."""
    chance = random.Random(count)
    for _ in range(count):
        place = chance.randrange(outage.commit_ends[-1] - 4)
        changed = bytearray(outage.wal)
        for at in range(place, place + chance.randint(1, 4)):
            changed[at] ^= chance.randint(1, 255)
        yield place, bytes(changed)


async def test_changed_bytes_end_the_log_before_their_commit(written: Written, path: Path) -> None:
    for place, wal in sampled(list(flips(written.outage, 150)), 25):
        await written.require_prefix(path, wal, 0 if place < HEADER_BYTES else place)


def test_a_missing_write_ahead_log_leaves_the_checkpointed_commits(written: Written, path: Path) -> None:
    written.outage.restore(path, b"")
    path.with_name("log.db-wal").unlink()
    with closing(SqliteLog.open(path, readonly=True)) as log:
        assert state_of(log) == written.states[0]


@pytest.mark.parametrize(("sync", "value"), [("normal", 1), ("full", 2)])
async def test_only_full_sync_makes_commits_wait_for_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, sync: LogSync, value: int
) -> None:
    connect, connections = schema.connect, []

    def connected(path: Path | None, *, readonly: bool) -> sqlite3.Connection:
        connections.append(connect(path, readonly=readonly))
        return connections[-1]

    monkeypatch.setattr(schema, "connect", connected)
    with closing(SqliteLog.open(path, sync=sync)) as log:
        await log.append([Draft("topic", 0, b"value")])
        (writer,) = connections
        assert writer.execute("PRAGMA synchronous").fetchone() == (value,)
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


WORK = work_topic("default")
READ_MAX = 100_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Return the log of a system that has served requests with two workers, and still runs."""
    path = tmp_path_factory.mktemp("running") / "log.db"

    async def run() -> Outage:
        with closing(SqliteLog.open(path)) as log:
            async with System(log).started(2) as system, system.owned(snapshot_every=9, fleet=2) as owner:
                await scenario(system)
                await until(lambda: all_ended(system, owner))
                log.topics()  # commits pending records
                return Outage(path)

    return asyncio.run(run())


def events_of(log: SqliteLog, topic: Topic, partition: int) -> list[object]:
    return [decode(topic, one.value) for one in log.records(topic.name, partition, 0, READ_MAX)]


def require_causes(log: SqliteLog) -> None:
    """Check that each effect on the log has its cause: work its decision, output its work, an end its request."""
    journal = [one for one in events_of(log, DECISIONS, 0) if isinstance(one, RequestRouted)]
    decided = {(one.request_id, one.attempt, one.owner_epoch) for one in journal}
    requests = {getattr(one, "request_id", "") for one in events_of(log, REQUESTS, 0)}
    joined = [one for one in events_of(log, FLEET, 0) if isinstance(one, WorkerJoined)]
    items = [one for member in joined for one in events_of(log, WORK, member.slot) if isinstance(one, WorkItem)]
    assert {(one.request_id, one.attempt, one.owner_epoch) for one in items} <= decided
    output = events_of(log, TOKENS, SLOT)
    streamed = {chunk.request_id for one in output if isinstance(one, TokensEmitted) for chunk in one.chunks}
    assert streamed <= {one.request_id for one in items}
    assert {one.request_id for one in output if isinstance(one, ResponseEnded)} <= requests
    assert {name for name, *_ in decided} <= requests


def remains(running: Outage) -> Iterator[bytes]:
    """Yield write-ahead logs as a power loss may leave them, with and without garbage behind the cut."""
    chance = random.Random(20261124)
    wal = running.wal
    for end in running.frame_ends:
        yield wal[:end]
        cut = chance.randrange(end)
        yield wal[:cut] + chance.choice((b"", bytes(len(wal) - cut), chance.randbytes(len(wal) - cut)))


async def test_every_prefix_of_the_commits_is_a_log_from_which_an_owner_continues(
    running: Outage, tmp_path: Path
) -> None:
    path = tmp_path / "log.db"
    cases = list(remains(running))
    longest = 0
    for wal in sampled(cases, 20):
        running.restore(path, wal)
        log, standby = await opened_one(path)
        with closing(log):
            require_causes(log)
            await proven(log)
            longest = max(longest, log.next_offset(DECISIONS.name, 0))
            owner = Owner(log, System(log).leases, settings(owner_id="next"))
            await owner.start(standby)
            await owner.close()
            await proven(log)
    assert longest > len(SENT), "the sample includes long prefixes"


TRIMMED = [("topic", 0), ("topic", 1), ("other", 0)]
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
        with pytest.raises(RecordsRemoved, match=f"topic/0 no longer holds offset {offset}: .* before 7"):
            stored(log, offset=offset)
    assert await log.append(drafts(1, first=10)) == [10]
    assert log.trim("topic", 0, 99, 99) == 4, "only existing records are deleted"
    with pytest.raises(RecordsRemoved):
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
            with pytest.raises(RecordsRemoved):
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
    with pytest.raises(RecordsRemoved):
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
        self.ends = dict.fromkeys(TRIMMED, 0)
        self.begins = dict.fromkeys(TRIMMED, 0)

    @rule(place=st.sampled_from(TRIMMED), count=st.integers(1, 8), size=st.sampled_from([1, 3_000, 30_000]))
    def append(self, place: tuple[str, int], count: int, size: int) -> None:
        first = self.ends[place]
        values = [str(number).encode().ljust(size) for number in range(first, first + count)]
        offsets = self.loop.run_until_complete(self.log.append([Draft(*place, value) for value in values]))
        assert offsets == list(range(first, first + count))
        self.ends[place] += count

    @rule(place=st.sampled_from(TRIMMED), before=st.integers(0, 60), count_max=st.integers(1, 9))
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
                with pytest.raises(RecordsRemoved):
                    stored(self.log, *place, begin - 1)

    def teardown(self) -> None:
        self.log.check()
        self.log.close()
        self.loop.close()
        self.folder.cleanup()


TestTrimmed = TrimMachine.TestCase
TestTrimmed.settings = examples(0.25, stateful_step_count=20)
