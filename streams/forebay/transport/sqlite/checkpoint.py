"""Moves committed records from the WAL of a SQLite log into its file, in a thread: this is where fsync is.

Never touches the writer's connection. Tells the writer to hold its commits only when the WAL would
otherwise never start over.
"""

import contextlib
import logging
import sqlite3
from asyncio import AbstractEventLoop
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from forebay.transport.sqlite import schema

CHECKPOINT_BYTES = 16 << 20  # WAL growth between checkpoints: seldom enough, and quick to redo at start
# A WAL starts over only when a commit finds every frame checkpointed, which a busy writer prevents; from
# this size on, commits wait the few milliseconds that the last frames take.
WAL_BYTES_MAX = 64 << 20
PAGE_BYTES = 4096  # of the WAL that a commit writes at least, for each table it touches

logger = logging.getLogger(__name__)


class Checkpointer:
    """Decides when to checkpoint, and runs it. `holding` asks the writer to keep its commits back."""

    def __init__(self, path: Path) -> None:
        self.holding = False
        self._path = path
        self._growth = 0
        self._running: Future[tuple[int, int]] | None = None
        self._executor = ThreadPoolExecutor(1, "forebay-checkpoint")

    def grew(self, value_bytes: int, tables: int) -> None:
        """Note a commit: the bytes of its values and the number of tables it wrote to."""
        self._growth += value_bytes + tables * PAGE_BYTES

    def step(self, loop: AbstractEventLoop, flush: Callable[[], None]) -> None:
        """Take the result of a finished run and start one when it is due; `flush` is called after it.

        Raises sqlite3.Error when a run failed: the disk is full or broken.
        """
        hold = False
        if self._running is not None:
            if not self._running.done():
                return
            frames, done = self._running.result()
            behind = done < frames or self._growth > 0
            hold = behind and not self.holding and frames * PAGE_BYTES > WAL_BYTES_MAX
            if self.holding and done < frames:
                logger.warning("%s: a long read in another process keeps the WAL growing", self._path)
            self._running = None
            self.holding = False
        if hold or self._growth >= CHECKPOINT_BYTES:
            self._growth = 0
            self.holding = hold
            self._running = self._executor.submit(_checkpoint, self._path)
            self._running.add_done_callback(lambda _: _call(loop, flush))

    def close(self) -> None:
        """Wait for a run in progress; its outcome no longer matters."""
        self._executor.shutdown(wait=True)


def fold(db: sqlite3.Connection) -> None:
    """Leave one plain file, so that a recording opens on read-only media; other readers may prevent it."""
    try:
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        logger.info("the WAL stays beside the log and is part of it: %s", error)


def _checkpoint(path: Path) -> tuple[int, int]:
    with contextlib.closing(schema.connect(path, readonly=False)) as db:
        db.execute("PRAGMA synchronous = NORMAL")
        _busy, frames, done = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return frames, done


def _call(loop: AbstractEventLoop, flush: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed; the next append takes the result
        loop.call_soon_threadsafe(flush)
