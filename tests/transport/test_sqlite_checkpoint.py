"""Checkpoints of the WAL: commits are delayed only if they would prevent the WAL from starting over."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite import checkpoint as sqlite_checkpoint
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.checkpoint import PAGE_BYTES, Checkpointer
from forebay.transport.sqlite.log import SqliteLog
from tests.transport.conftest import drafts

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


async def test_a_failed_checkpoint_is_reported_by_the_next_step(writer: Writer, path: Path) -> None:
    make_unopenable(path)
    writer.commit(LARGE)
    writer.step()
    await writer.finished.wait()
    with pytest.raises(sqlite3.Error):
        writer.step()


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
