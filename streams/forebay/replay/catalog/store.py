"""The file of a catalog: a SQLite database with one writer and any number of readers.

Theory of operation. A catalog contains nothing that cannot be derived from its log again, so a file that does not fit
is deleted and built anew. A file fits if it has this version, and if the journal record right before its position has
the checksum that the catalog noted for it. Each commit notes the checksum of its newest record, so a log that was
replaced, cut off or trimmed beyond the position is recognized.
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from forebay.core.world import CORE_VERSION
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log

logger = logging.getLogger(__name__)

VERSION = f"4.{CORE_VERSION}"  # the first number is raised whenever a table of the catalog changes
SUFFIX = ".console"
SIZE_MAX = 2 << 30
PAGE_BYTES = 16_384  # checkpoints are large, so small pages would make their removal slow
BUSY_TIMEOUT_S = 5.0
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE live (id INTEGER PRIMARY KEY CHECK (id = 1), state BLOB NOT NULL, status BLOB NOT NULL);
"""


class CatalogError(Exception):
    """Raised if a catalog cannot be used. The message says what to do."""


class CatalogInUse(CatalogError):
    """Raised if another process writes the catalog."""


class CommittedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far the rows of a catalog reach: up to journal offset `position`, exclusive.

    `checksum` is that of the stored bytes of the record right before `position`; 0 if there was none.
    """

    position: int
    checksum: int
    begin_offset: int
    begin_us: int


class Store:
    """A catalog that is open. A writer holds the lock of the file until `close`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, descriptor: int | None) -> None:
        self.path = path
        self.connection = connection
        self._descriptor = descriptor
        self._tables = _SCHEMA

    @classmethod
    async def open(cls, path: Path, log: Log, partition: int, schemas: Iterable[str] = ()) -> Self:
        """Open a catalog to write it, and create it if it is missing or does not fit the log.

        `schemas` are statements that create further tables. Raises CatalogInUse if another process writes the catalog,
        and CatalogError if the file cannot be written.
        """
        descriptor = _lock(path)
        try:
            store = cls(path, _connect(path, "rwc"), descriptor)
            store._tables = "\n".join((_SCHEMA, *schemas))
            reason = await store._misfit(log, partition)
            if reason:
                logger.warning("%s: %s; it is deleted and built anew", path, reason)
            if reason is not None:
                store.rebuild(partition)
            store.connection.execute("PRAGMA synchronous = NORMAL")  # no fsync per commit
        except sqlite3.Error as error:
            os.close(descriptor)
            raise unwritable(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise
        return store

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open an existing catalog beside its writer. Raises CatalogError if it is missing or of another version."""
        try:
            store = cls(path, _connect(path, "ro"), None)
            version = store.meta("version")
        except sqlite3.Error as error:
            raise CatalogError(f"{path}: the catalog cannot be read ({error}); start the console again") from error
        if version != VERSION:
            store.close()
            raise CatalogError(f"{path}: is a catalog of another version; start the console of this version again")
        return store

    @property
    def committed(self) -> CommittedPosition | None:
        """How far the rows reach; None for a new catalog."""
        value = self.meta("committed")
        return None if value is None else msgspec.json.decode(value, type=CommittedPosition)

    @property
    def size(self) -> int:
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        (free,) = self.connection.execute("PRAGMA freelist_count").fetchone()
        return (int(pages) - int(free)) * PAGE_BYTES

    def require_file(self) -> None:
        """Raise CatalogError if the file was deleted, because SQLite would write to the deleted file forever."""
        if not self.path.exists():
            raise CatalogError(f"{self.path}: the catalog was deleted while the console ran; it is built anew")

    async def require_log(self, log: Log, partition: int) -> None:
        """Raise CatalogError if this is the catalog of another log: the file of the log may have been replaced."""
        committed = self.committed
        if committed is not None and not await _is_of_log(committed, log, partition):
            text = (
                "the log was replaced, and this is the catalog of the previous one; it is built anew in a few seconds"
            )
            raise CatalogError(f"{self.path}: {text}")

    def meta(self, name: str) -> str | None:
        row = self.connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, name: str, value: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def commit_position(self, committed: CommittedPosition) -> None:
        self.set_meta("committed", msgspec.json.encode(committed).decode())

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all changes of the block, or none if it raises."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def rebuild(self, partition: int) -> None:
        self.connection.close()
        remove(self.path)
        self.connection = _connect(self.path, "rwc")
        # Readers of an SQLite file in WAL mode never wait for its writer.
        self.connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.executescript(f"BEGIN; {self._tables} COMMIT;")
        values = {"version": VERSION, "tables": _digest(self._tables), "partition": str(partition)}
        for name, value in values.items():
            self.set_meta(name, value)

    def close(self) -> None:
        self.connection.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def _misfit(self, log: Log, partition: int) -> str | None:
        """Return why the file must be built anew; None if it fits, and an empty reason for a new file."""
        try:
            (count,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not count:
                return ""
            if (self.meta("version"), self.meta("tables")) != (VERSION, _digest(self._tables)):
                return "it is the catalog of another version"
            if self.meta("partition") != str(partition):
                return "it is the catalog of another group"
            committed = self.committed
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            if isinstance(error, sqlite3.OperationalError) and not is_damage(error) and not _is_missing(error):
                raise
            return f"the catalog is damaged ({error})"
        if committed is not None and not await _is_of_log(committed, log, partition):
            return "it is the catalog of another log"
        return None


async def checksum_at(log: Log, partition: int, offset: int) -> int:
    """Return the checksum of a stored journal record; 0 if the log does not hold it. Raises LogError."""
    if not await log.begin(DECISIONS.name, partition) <= offset < await log.end(DECISIONS.name, partition):
        return 0
    records = await log.read(DECISIONS.name, partition, offset, 1)
    return checksum_of(records[0].value) if records else 0


def checksum_of(value: bytes) -> int:
    """Return the checksum of the stored bytes of a journal record, which is never 0."""
    return zlib.crc32(value) or 1


def path_beside(log: Path, partition: int, folder: Path | None = None) -> Path:
    """Return the path of the catalog of a log file or a recording, in `folder` or beside the file."""
    if folder is None:
        return log.with_name(log.name + _suffix(partition))
    return folder / f"{log.name}-{_digest(str(log.resolve()))}{_suffix(partition)}"


def path_of_brokers(brokers: str, namespace: str, partition: int, folder: Path | None = None) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"kafka-{_digest(','.join(sorted(brokers.split(','))), namespace)}{_suffix(partition)}"
    return (Path(cache) / "forebay" if folder is None else folder) / name


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def is_damage(error: sqlite3.Error) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGED


def unwritable(path: Path, error: Exception) -> CatalogError:
    reason = getattr(error, "strerror", None) or error
    return CatalogError(f"{path}: the catalog cannot be written ({reason}); name another folder with --cache-dir")


def _is_missing(error: sqlite3.Error) -> bool:
    """Return whether an error names a missing table or column, which another version may cause."""
    return "no such" in str(error)


async def _is_of_log(committed: CommittedPosition, log: Log, partition: int) -> bool:
    if not committed.checksum:
        begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
        return begin <= committed.position <= end and committed.position == committed.begin_offset
    if committed.position <= await log.begin(DECISIONS.name, partition):
        return True  # retention removed the record, so nothing shows another log
    return await checksum_at(log, partition, committed.position - 1) == committed.checksum


def _suffix(partition: int) -> str:
    return SUFFIX if partition == 0 else f".{partition}{SUFFIX}"


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection in autocommit mode. A reader may be used from any thread, one at a time."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    is_writer = mode != "ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=is_writer)


def _lock(path: Path) -> int:
    """Return the descriptor of the lock of a catalog, which ends when the descriptor is closed. Raises CatalogError."""
    beside = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(beside, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        text = f"{path}: another console writes this catalog; use that console, or name another folder with --cache-dir"
        raise CatalogInUse(text) from error
    return descriptor
