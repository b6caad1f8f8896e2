"""Implement the port `Log` on one SQLite file or in memory. Any SQLite client can open the file.

The log survives kill -9. A power loss may remove the newest commits, because only checkpoints call fsync, unless `sync`
is full. The event-loop thread writes, with group commit: the appends of one loop iteration are one transaction. A
writer thread would be slower, because CPython's sqlite3 releases the GIL at every row. Acquiring it again takes up to
the 5 ms switch interval under load, while the row itself takes 5 us.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from forebay import runtime
from forebay.transport.base import Draft, LogError, LogSync, Record, RecordsRemoved, Wake
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.checkpoint import Checkpointer, fold
from forebay.transport.sqlite.recording import Contents, Extent, is_recording, read_contents, require_sealed
from forebay.transport.sqlite.schema import CorruptRecord, LogUnusable, MissingRecords
from forebay.transport.sqlite.tail import TAIL_BYTES_MAX, Partition, SqliteTail

__all__ = ["CorruptRecord", "LogUnusable", "MissingRecords", "SqliteLog", "SqliteTail"]


logger = logging.getLogger(__name__)

COPY = "copy a log in use with its -wal, or use `forebay record`"
RECORD_BYTES_MAX = 16 << 20  # equal to the maximum message size of the Kafka topics
TRIM_PAGES = 4  # minimum number of pages that a deletion changes: the table, the free list and the first offsets
PendingRecord = tuple[Partition, int, Draft, bytes | None]
Waiter = tuple[asyncio.Future[list[int]], list[int]]


class SqliteLog:
    """The port `Log` on SQLite, used from the thread that opened it. Appends need a running event loop."""

    def __init__(
        self,
        db: sqlite3.Connection,
        path: Path | None,
        lock: schema.WriterLock | None,
        namespace: str,
        recording: Contents | None = None,
    ) -> None:
        self.namespace = namespace
        self.recording = recording
        self.on_failure: Callable[[LogError], None] | None = None
        self._name = "the log in memory" if path is None else str(path)
        self._path = path
        self._db = db
        self._lock = lock
        self._readonly = path is not None and lock is None
        self._failure: LogError | None = None
        self._closed = False
        self._partitions: dict[tuple[str, int], Partition] = {}
        extents = () if recording is None else recording.extents
        self._extents = {(extent.topic, extent.partition): extent for extent in extents}
        self._tables = set(schema.table_names(db))
        self._starts = schema.read_starts(db)
        self._pending: list[PendingRecord] = []
        self._waiters: list[Waiter] = []
        self._scheduled: asyncio.AbstractEventLoop | None = None
        self._checkpointer = None if path is None or self._readonly else Checkpointer(path)

    @classmethod
    def open(
        cls,
        path: Path | str | None,
        *,
        namespace: str = "forebay",
        readonly: bool = False,
        lock: schema.WriterLock | None = None,
        sync: LogSync = "normal",
    ) -> Self:
        """Open or create the log at `path`, or in memory if it is None. Raises LogUnusable with a one-line reason.

        A read-only log takes no lock, works beside a running writer, and has the namespace of the file. A recording can
        only be opened read-only. A writer takes the lock of the file, unless the caller passes its own `lock`. The log
        releases the lock at its end. With `sync` full, an acknowledged append survives a power loss.
        """
        if path is None:
            assert not readonly, "a log in memory has one user, and it writes"
            db = schema.connect(None, readonly=False)
            schema.initialise(db, namespace)
            db.execute(schema.SECURE_DELETE)
            return cls(db, None, None, namespace)
        path = Path(path)
        try:
            schema.check_place(path, readonly=readonly)
            if lock is None and not readonly:
                lock = schema.WriterLock(path)
            db, namespace, recording = open_file(path, namespace, readonly=readonly, sync=sync)
            return cls(db, path, lock, namespace, recording)
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    @property
    def failure(self) -> LogError | None:
        return self._failure

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Append all records or none, in one transaction, and return their offsets once they are committed.

        Offsets are assigned in the order of calls. Cancelling the caller does not cancel the append. Raises LogError if
        the commit fails, and on every later call. Raises ValueError for an invalid topic name, partition or size.
        """
        loop = asyncio.get_running_loop()
        offsets = self._enqueue(drafts, loop)
        if not offsets:
            return offsets
        committed: asyncio.Future[list[int]] = loop.create_future()
        self._waiters.append((committed, offsets))
        return await committed

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        """Append without waiting for the commit. `drafts` and `then` become durable in the same transaction."""
        self._enqueue([*drafts, *then], asyncio.get_running_loop())

    async def flush(self) -> None:
        """Wait until all appended records are committed. Raises LogError if a commit failed."""
        if self._pending:
            committed: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
            self._waiters.append((committed, []))
            await committed
        if self._failure is not None:
            raise LogError(str(self._failure))

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> SqliteTail:
        """Return a tail that follows a partition from `offset`, which may be before or after the partition's end."""
        self._require_open()
        place = self._partition(topic, partition)
        tail = SqliteTail(place, offset, wake, self._fetch, pushed=not self._readonly)
        if len(tail):
            wake.set()
        return tail

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records like `records`, but fewer if they are large or a later one is damaged."""
        return self._fetch(self._partition(topic, partition), offset, limit, TAIL_BYTES_MAX)

    async def begin(self, topic: str, partition: int) -> int:
        """Return the offset of the oldest record that `trim` did not delete, or with which a recording begins.

        Raises LogError for a partition that a recording does not hold.
        """
        extent = self._extent(topic, partition)
        return self._start_of(topic, partition) if extent is None else extent.first

    async def end(self, topic: str, partition: int) -> int:
        return self.next_offset(topic, partition)

    def records(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` committed records from `offset`; an empty list at the end.

        Raises CorruptRecord or MissingRecords for damage, and LogError for offsets that a recording does not hold.
        """
        return self._fetch(self._partition(topic, partition), offset, limit, None)

    def next_offset(self, topic: str, partition: int) -> int:
        """Return the offset of the next record to be appended. All records before it can be read.

        Commits pending records, because a reader that loops up to the end must not wait for the event loop.
        """
        place = self._partition(topic, partition)
        self._require_open()
        if self._readonly:
            place.committed = place.next_offset = self._stored_end(topic, partition)
        elif self._pending:
            self._commit()
        if self._failure is not None:
            return place.committed
        return place.next_offset

    def topics(self) -> list[tuple[str, int, int]]:
        """Return (topic, partition, end offset) of every partition with records, sorted."""
        self._require_open()
        if self.recording is not None:
            return [(extent.topic, extent.partition, extent.end) for extent in self.recording.extents if extent.count]
        if self._pending:
            self._commit()
        with self._reading():
            return [
                (topic, partition, end)
                for topic in schema.table_names(self._db)
                for partition, end in schema.partition_ends(self._db, topic)
            ]

    def trim(self, topic: str, partition: int, before: int, count_max: int) -> int:
        """Delete up to `count_max` records of a partition before offset `before`, and return the number deleted.

        The deletion is one transaction, so a crash leaves the log either with or without all of these records. Records
        that a tail of this process has not taken yet are kept, and nothing is deleted while commits wait for a
        checkpoint. Reads before the new start raise RecordsRemoved. Later appends use the pages that become free.
        Raises LogError if the file cannot be written.
        """
        self._require_open()
        if self._failure is not None:
            raise LogError(str(self._failure))
        assert not self._readonly, "a reader deletes nothing"
        place = self._partition(topic, partition)
        first = self._start_of(topic, partition)
        unread = min((tail.position for tail in place.tails), default=place.committed)
        end = min(before, unread, place.committed, first + count_max)
        if end <= first or (self._checkpointer is not None and self._checkpointer.holding):
            return 0
        if self._pending:
            self._commit()
        try:
            schema.trim(self._db, topic, partition, first, end)
        except sqlite3.Error as error:
            self._fail(error)
            raise LogError(str(self._failure)) from error
        self._starts[topic, partition] = end
        if self._checkpointer is not None:
            self._checkpointer.grew(0, TRIM_PAGES)
        return end - first

    def starts(self) -> dict[tuple[str, int], int]:
        self._require_open()
        if self._readonly and self.recording is None:
            with self._reading():
                self._starts = schema.read_starts(self._db)
        return dict(self._starts)

    def bytes_used(self) -> tuple[int, int]:
        """Return the bytes of records, and the bytes of the file including free pages, both without the WAL."""
        self._require_open()
        (pages,), (free,), (size,) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size, pages * size

    def limit_wal(self, wal_bytes: int) -> None:
        """Checkpoint so often that the WAL, and the file that it leaves, hardly exceed `wal_bytes`."""
        if self._checkpointer is not None:
            self._checkpointer.wal_bytes_max = wal_bytes
            self._checkpointer.checkpoint_bytes = min(wal_bytes // 2, self._checkpointer.checkpoint_bytes)
            self._db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")

    def check(self) -> None:
        """Check the whole file. Raises LogError if the file is damaged.

        In a recording, the check finds any changed byte. In a log, it does not read the checksums of records.
        """
        self._require_open()
        if self._path is None:
            return
        if self.recording is not None:
            require_sealed(self._db, self._path)
            return
        with self._reading():
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise LogError(f"{self._name}: is damaged ({' '.join(found.split())}); restore a copy")

    def check_ends(self) -> None:
        """Check the tables and the last record of each partition, in constant time per partition. Raises LogError."""
        with self._reading():
            schema.check_structure(self._db)
        for topic, partition, end in self.topics():
            first = self._start_of(topic, partition)
            if first < end:
                self._fetch(self._partition(topic, partition), end - 1, 1, None)

    def close(self) -> None:
        """Commit pending records, move the WAL into the file, and release the writer lock."""
        if self._closed:
            return
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._pending:
            self._commit()
        self._closed = True
        if self._checkpointer is not None and self._failure is None:
            fold(self._db)
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def _enqueue(self, drafts: Sequence[Draft], loop: asyncio.AbstractEventLoop) -> list[int]:
        if self._failure is not None:
            raise LogError(str(self._failure))
        self._require_open()
        if self._readonly:
            raise LogError(f"{self._name}: was opened read-only")
        checked = [self._check(draft) for draft in drafts]
        offsets: list[int] = []
        for place, draft, headers in checked:
            offset = place.next_offset
            place.next_offset = offset + 1
            offsets.append(offset)
            self._pending.append((place, offset, draft, headers))
        if self._scheduled is not loop:
            self._scheduled = loop
            loop.call_soon(self._flush)
        return offsets

    def _check(self, draft: Draft) -> tuple[Partition, Draft, bytes | None]:
        place = self._partition(draft.topic, draft.partition)
        headers = schema.encode_headers(draft.headers)
        size = len(draft.value) + len(draft.key or b"") + len(headers or b"")
        if size > RECORD_BYTES_MAX:
            raise ValueError(f"{draft.topic}: a record of {size} bytes; the limit is {RECORD_BYTES_MAX}")
        return place, draft, headers

    def _partition(self, topic: str, partition: int) -> Partition:
        place = self._partitions.get((topic, partition))
        if place is None:
            schema.require_topic(topic)
            if not 0 <= partition < schema.PARTITIONS_MAX:
                raise ValueError(f"{topic}: partition {partition} is not in 0 to {schema.PARTITIONS_MAX - 1}")
            self._require_open()
            end = self._stored_end(topic, partition)
            place = self._partitions[topic, partition] = Partition(topic, partition, end)
        return place

    def _stored_end(self, topic: str, partition: int) -> int:
        extent = self._extent(topic, partition)
        if extent is not None and self.recording is not None and self.recording.content:
            return extent.end
        with self._reading():
            end = schema.partition_end(self._db, topic, partition) if self._has_table(topic) else 0
        return max(self._start_of(topic, partition) if extent is None else extent.first, end)

    def _start_of(self, topic: str, partition: int) -> int:
        """Return the first offset of a partition. A read-only log reads the file, because the writer may trim it."""
        starts = self.starts() if self._readonly else self._starts
        return starts.get((topic, partition), 0)

    def _extent(self, topic: str, partition: int) -> Extent | None:
        """Return the extent of a partition in a recording; None for a log. Raises LogError."""
        if self.recording is None:
            return None
        extent = self._extents.get((topic, partition))
        if extent is None:
            raise LogError(f"{self._name}: {topic}/{partition} was not recorded")
        return extent

    def _has_table(self, topic: str) -> bool:
        if self._readonly and topic not in self._tables:
            self._tables.update(schema.table_names(self._db))
        return topic in self._tables

    def _fetch(self, place: Partition, offset: int, limit: int, bytes_max: int | None) -> list[Record]:
        assert offset >= 0
        self._require_open()
        topic, number = place.topic, place.number
        extent = self._extent(topic, number)
        if extent is not None and offset < extent.first:
            raise LogError(f"{self._name}: {topic}/{number} begins at offset {extent.first}; {offset} was not recorded")
        base = number << schema.OFFSET_BITS
        end = schema.OFFSETS_MAX if extent is None else extent.end
        span = (base + offset, base + end - 1, max(0, limit))
        records: list[Record] = []
        size = 0
        with self._reading():
            if not self._has_table(topic):
                return []
            # Close the statement, because an unfinished statement prevents the WAL from restarting.
            with contextlib.closing(self._db.execute(schema.select_rows(topic), span)) as rows:
                for row in rows:
                    try:
                        record = schema.decode_row(topic, number, row)
                    except schema.CorruptRecord:
                        if records and bytes_max is not None:  # the next read raises
                            return records
                        raise
                    expected = offset + len(records)
                    if record.offset != expected:
                        self._require_untrimmed(topic, number, expected)
                        raise MissingRecords(topic, number, expected, record.offset - 1)
                    records.append(record)
                    size += len(record.value)
                    if bytes_max is not None and size >= bytes_max:
                        return records
        past = offset + len(records)
        if not records:
            self._require_untrimmed(topic, number, offset)
        if len(records) < limit and past < place.committed:
            raise MissingRecords(topic, number, past, place.committed - 1)
        return records

    def _require_untrimmed(self, topic: str, number: int, offset: int) -> None:
        """Raise RecordsRemoved for an offset before the start, even if the writer trimmed after the read began."""
        first = 0 if self.recording is not None else self._start_of(topic, number)
        if offset < first:
            text = f"{topic}/{number} no longer holds offset {offset}: retention removed the records before {first}"
            raise RecordsRemoved(text)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except schema.UNREADABLE as error:
            raise LogError(f"{self._name}: cannot be read ({error}); restore a copy") from error

    def _require_open(self) -> None:
        if self._closed:
            raise LogError(f"{self._name}: is closed")

    def _flush(self) -> None:
        self._scheduled = None
        if self._closed or self._failure is not None:
            return
        checkpointer = self._checkpointer
        if self._pending and (checkpointer is None or not checkpointer.holding):
            self._commit()
        if checkpointer is not None and self._failure is None:
            try:
                checkpointer.step(asyncio.get_running_loop(), self._flush)
            except sqlite3.Error as error:
                self._fail(error)
                return
            if self._pending and not checkpointer.holding:
                self._commit()

    def _commit(self) -> None:
        pending, self._pending = self._pending, []
        waiters, self._waiters = self._waiters, []
        at_us = runtime.wall_us()
        size = 0
        rows: dict[str, list[schema.Row]] = {}
        for place, offset, draft, headers in pending:
            topic = place.topic
            row = schema.encode_row(topic, place.number, offset, at_us, draft.key, headers, draft.value)
            rows.setdefault(topic, []).append(row)
            size += len(draft.value)
        try:
            self._write(rows)
        except sqlite3.Error as error:
            self._waiters = waiters
            self._fail(error)
            return
        if self._checkpointer is not None:
            self._checkpointer.grew(size, len(rows))
        for committed, offsets in waiters:
            if not committed.done():
                committed.set_result(offsets)
        self._publish(pending, at_us)

    def _write(self, rows: dict[str, list[schema.Row]]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for topic, topic_rows in rows.items():
            if topic not in self._tables:
                self._db.execute(schema.create_table(topic))
            self._db.executemany(schema.insert_row(topic), topic_rows)
        self._db.execute("COMMIT")
        self._tables.update(rows)

    def _publish(self, pending: list[PendingRecord], at_us: int) -> None:
        wakes: dict[int, Wake] = {}
        for place, offset, draft, headers in pending:
            place.committed = offset + 1
            if place.tails:
                named = schema.decode_headers(headers)
                record = Record(place.topic, place.number, offset, at_us, draft.value, draft.key, named)
                for tail in place.tails:
                    if tail.push(record):
                        wakes[id(tail.wake)] = tail.wake
        for wake in wakes.values():
            wake.set()

    def _fail(self, error: sqlite3.Error) -> None:
        with contextlib.suppress(sqlite3.Error):  # the rollback may fail too; closing the connection rolls back
            self._db.rollback()
        self._failure = LogError(
            f"{self._name}: cannot be written any more ({error}); free disk space or check the disk, then"
            " restart: every acknowledged record is kept"
        )
        logger.error("%s", self._failure)
        self._pending.clear()
        waiters, self._waiters = self._waiters, []
        for committed, _ in waiters:
            if not committed.done():
                committed.set_exception(LogError(str(self._failure)))
        if self.on_failure is not None:
            self.on_failure(self._failure)


def open_file(
    path: Path, namespace: str, *, readonly: bool, sync: LogSync
) -> tuple[sqlite3.Connection, str, Contents | None]:
    """Return a connection, the namespace of the log, and the contents of the file if it is a recording.

    A writer initialises an empty file as a log of `namespace`. With `sync` full, each of its commits waits for the
    disk. Raises LogUnusable with a one-line reason.
    """
    has_wal = schema.check_wal(path)
    try:
        db = schema.connect(path, readonly=readonly)
    except sqlite3.Error as error:
        raise schema.LogUnusable(f"{path}: cannot be opened ({error}); choose another path") from error
    try:
        known = schema.check_format(db, path)
        # Closing a log ends its WAL mode.
        lacks_wal = not has_wal and db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        if readonly and not known:
            if lacks_wal:
                raise schema.LogEmpty(f"{path}: has no records without {path.name}-wal, which is missing; {COPY}")
            raise schema.LogEmpty(f"{path}: is empty; start a writer first, which creates the log")
        if lacks_wal:
            logger.warning("%s: %s-wal is missing, so its newest records may be missing; %s", path, path.name, COPY)
        recording = None
        if known == schema.RECORDING_VERSION:
            recording = read_contents(db, path)
            if not readonly:
                raise schema.LogUnusable(f"{path}: is a recording, which is read-only; choose another path")
        elif known and is_recording(db):
            raise schema.LogUnusable(
                f"{path}: is damaged: it has the format of a log but the tables of a recording; restore a copy"
            )
        if not readonly:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise schema.LogUnusable(
                    f"{path}: the file system does not support SQLite's WAL mode; choose a local disk"
                )
            db.execute(f"PRAGMA synchronous = {sync}")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(schema.SECURE_DELETE)
            if not known:
                schema.initialise(db, namespace)
        stored = schema.read_meta(db)["namespace"]
        if not readonly and stored != namespace:
            raise schema.LogUnusable(f"{path}: belongs to namespace {stored!r}, not {namespace!r}; choose another path")
        if not readonly:
            db.execute("INSERT OR REPLACE INTO forebay_meta VALUES ('writer_pid', ?)", (str(os.getpid()),))
    except schema.UNREADABLE as error:
        db.close()
        raise schema.LogUnusable(f"{path}: cannot be opened ({error}); choose another path") from error
    except schema.LogUnusable:
        db.close()
        raise
    return db, stored, recording
