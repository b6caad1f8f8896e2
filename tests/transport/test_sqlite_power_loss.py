"""After a power loss a SQLite log holds the records of its first commits, whatever is left of its write-ahead log."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.transport.base import Draft, LogSync
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import sampled
from tests.transport.conftest import stored
from tests.transport.power_loss import FRAME_BYTES, HEADER_BYTES, Outage

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
    for cut in sampled(cuts, 40):
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
    for cut in sampled([*ends, *(chance.randrange(end) for end in ends)], 20):
        await written.require_prefix(path, wal[:cut] + GARBAGE[kind](chance, len(wal) - cut), cut)


async def test_frames_written_out_of_order_do_not_leave_a_hole(written: Written, path: Path) -> None:
    """The disk may store a later part of the write-ahead log and lose an earlier part."""
    wal, ends = written.outage.wal, written.outage.frame_ends
    for lost in sampled(ends[:-1], 20):
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
    for place, wal in sampled(list(flips(written.outage, 150)), 50):
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
