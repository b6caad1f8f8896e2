"""Checkpoint the WAL of a SQLite log in a thread. Unless commits wait for the disk, only this thread calls fsync.

The checkpointer uses its own connection. It makes the writer delay commits only if the WAL would otherwise never
restart from the beginning.
"""

import contextlib
import logging
import sqlite3
from asyncio import AbstractEventLoop
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from forebay import runtime
from forebay.transport.sqlite import schema

CHECKPOINT_BYTES = 16 << 20  # WAL growth between checkpoints: rare enough, and quick to replay at start
# A WAL restarts only when a commit finds every frame checkpointed, which a busy writer prevents. Above this size,
# commits wait a few milliseconds for the checkpoint of the last frames.
WAL_BYTES_MAX = 64 << 20
PAGE_BYTES = 4096  # minimum WAL growth of a commit per table that it writes to

logger = logging.getLogger(__name__)


class Checkpointer:
    """Runs the checkpoints of one log file, one at a time. While `holding`, the writer has to delay its commits."""

    def __init__(self, path: Path) -> None:
        self.holding = False
        self.checkpoint_bytes = CHECKPOINT_BYTES
        self.wal_bytes_max = WAL_BYTES_MAX
        self._path = path
        self._growth = 0
        self._running: Future[tuple[int, int]] | None = None
        self._executor = runtime.executor(1, "forebay-checkpoint")

    def grew(self, value_bytes: int, tables: int) -> None:
        """Record a commit. `tables` is the number of tables it wrote to."""
        self._growth += value_bytes + tables * PAGE_BYTES

    def step(self, loop: AbstractEventLoop, flush: Callable[[], None]) -> None:
        """Handle the result of a finished checkpoint, and start the next checkpoint if it is due.

        When the started checkpoint finishes, `flush` is called on `loop`. Raises sqlite3.Error if a checkpoint failed
        because the disk is full or broken.
        """
        hold = False
        if self._running is not None:
            if not self._running.done():
                return
            frames, done = self._running.result()
            behind = done < frames or self._growth > 0
            hold = behind and not self.holding and frames * PAGE_BYTES > self.wal_bytes_max
            if self.holding and done < frames:
                logger.warning("%s: a long read in another process prevents the WAL from restarting", self._path)
            self._running = None
            self.holding = False
        if hold or self._growth >= self.checkpoint_bytes:
            self._growth = 0
            self.holding = hold
            self._running = self._executor.submit(_checkpoint, self._path)
            self._running.add_done_callback(lambda _: _call(loop, flush))

    def close(self) -> None:
        """Wait for a checkpoint in progress and ignore its result."""
        self._executor.shutdown(wait=True)


def fold(db: sqlite3.Connection) -> None:
    """Move the WAL into the log file, so that it can be opened on read-only media. A WAL that is being read stays."""
    try:
        db.execute("PRAGMA busy_timeout = 0")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        logger.info("the WAL file was kept and is part of the log: %s", error)


def _checkpoint(path: Path) -> tuple[int, int]:
    with contextlib.closing(schema.connect(path, readonly=False)) as db:
        db.execute("PRAGMA synchronous = NORMAL")
        _busy, frames, done = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return frames, done


def _call(loop: AbstractEventLoop, flush: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed; the next append handles the result
        loop.call_soon_threadsafe(flush)
