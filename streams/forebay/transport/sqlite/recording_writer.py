"""Write a recording to OUT.part page by page, and rename it to OUT when it is complete.

A page is a transaction. At the end, every record is read back and
verified against its checksum, and then the file is fsynced. An exclusive SQLite lock keeps other processes out of
OUT.part.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Self

import msgspec

from forebay.transport.base import LogError, Record
from forebay.transport.sqlite import recording, schema
from forebay.transport.sqlite.log import LogUnusable, MissingRecords, SqliteLog
from forebay.transport.sqlite.recording import PART, UNSEALED, Contents, Extent


class RecordingWriter:
    """Writer of one recording, used from one thread. Always call `close`."""

    def __init__(self, db: sqlite3.Connection, out: Path, contents: Contents) -> None:
        self.contents = contents
        self.log = SqliteLog(db, part_of(out), None, contents.namespace, contents)
        self._db = db
        self._out = out
        self._extents = {(extent.topic, extent.partition): extent for extent in contents.extents}
        self._positions = {
            place: max(extent.first, schema.partition_end(db, *place)) for place, extent in self._extents.items()
        }

    @classmethod
    def create(cls, out: Path, contents: Contents) -> Self:
        """Begin a recording at `out`, in place of an unfinished one that no process writes any more.

        Raises LogUnusable if the file exists or another process writes it.
        """
        require_free(out)
        part = part_of(out)
        with _explained(part):
            db = _locked(part)
            try:
                require_free(out)  # the previous holder of the lock may have finished meanwhile
                if schema.check_format(db, part):
                    _drop_unfinished(db, part)
                _initialise(db, contents)
                return cls(db, out, contents)
            except BaseException:
                db.close()
                raise

    @property
    def total(self) -> int:
        return sum(extent.count for extent in self.contents.extents)

    @property
    def done(self) -> int:
        return sum(self._positions[place] - extent.first for place, extent in self._extents.items())

    def position(self, extent: Extent) -> int:
        return self._positions[extent.topic, extent.partition]

    def write(self, records: Sequence[Record]) -> None:
        """Write the next records of each extent in one transaction.

        Raises MissingRecords if an offset is skipped, and LogError if the disk is full.
        """
        positions = dict(self._positions)
        rows: dict[str, list[schema.Row]] = {}
        for record in records:
            place = record.topic, record.partition
            if record.offset != positions[place]:
                raise MissingRecords(*place, positions[place], record.offset - 1)
            assert record.offset < self._extents[place].end, "records are written up to the end of their extent"
            positions[place] += 1
            rows.setdefault(record.topic, []).append(_row(record))
        with _explained(part_of(self._out)):
            self._db.execute("BEGIN")
            for topic, topic_rows in rows.items():
                self._db.executemany(schema.insert_row(topic), topic_rows)
            self._db.execute("COMMIT")
        self._positions = positions

    def finish(self) -> Contents:
        """Verify, seal and rename the recording, close the writer, and return the contents.

        Raises CorruptRecord or MissingRecords if the disk did not store a record correctly, or LogError.
        """
        assert self.done == self.total, "write all records first"
        part = part_of(self._out)
        with _explained(part):
            checksums = {extent: recording.extent_checksum(self._db, extent) for extent in self.contents.extents}
            self.contents = msgspec.structs.replace(
                self.contents, content=recording.content_digest(self.contents, checksums)
            )
            self._mark_complete(checksums)
            self.close()
            recording.seal(part)
            _sync(part)
            require_free(self._out)
            part.rename(self._out)
            with suppress(OSError):  # some file systems sync no folders
                _sync(self._out.parent)
        return self.contents

    def _mark_complete(self, checksums: Mapping[Extent, int]) -> None:
        self._db.execute("BEGIN")
        self._db.executemany(
            'UPDATE forebay_extents SET checksum = ? WHERE topic = ? AND "partition" = ?',
            [(checksum, extent.topic, extent.partition) for extent, checksum in checksums.items()],
        )
        meta = {"content": self.contents.content, "complete": "yes"}
        self._db.executemany("UPDATE forebay_meta SET value = ? WHERE key = ?", [(v, k) for k, v in meta.items()])
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file and release its lock. May be called twice."""
        self.log.close()


def part_of(out: Path) -> Path:
    return out.with_name(out.name + PART)


def require_free(out: Path) -> None:
    """Check that a recording can be created at a path without overwriting a file. Raises LogUnusable."""
    for path in (out, part_of(out)):
        schema.check_place(path, readonly=False)
    if os.path.lexists(out):
        raise LogUnusable(f"{out}: exists already; remove it or choose another path")


def _row(record: Record) -> schema.Row:
    place, headers = (record.topic, record.partition, record.offset), schema.encode_headers(record.headers)
    return schema.encode_row(*place, record.at_us, record.key, headers, record.value)


def _initialise(db: sqlite3.Connection, contents: Contents) -> None:
    """Write the manifest in one transaction."""
    db.execute("BEGIN")
    for statement in recording.TABLES:
        db.execute(statement)
    for topic in sorted({extent.topic for extent in contents.extents}):
        db.execute(schema.create_table(topic))
    db.executemany(
        "INSERT INTO forebay_extents VALUES (?, ?, ?, ?, NULL)",
        [msgspec.structs.astuple(extent) for extent in contents.extents],
    )
    db.executemany(
        "INSERT INTO forebay_groups VALUES (?, ?, ?, ?, ?, ?, ?)",
        [msgspec.structs.astuple(group) for group in contents.groups],
    )
    db.execute("INSERT INTO forebay_seal VALUES (?)", (UNSEALED,))
    meta = {
        "namespace": contents.namespace,
        "source": contents.source,
        "forebay": version("forebay"),
        "from": recording.utc(contents.from_us),
        "to": recording.utc(contents.to_us),
        "asked": msgspec.json.encode(contents.asked).decode(),
        "anonymized": "yes" if contents.anonymized else "no",
        "complete": "no",
        "content": "",
    }
    schema.create_meta(db, schema.RECORDING_VERSION, meta)
    db.execute("COMMIT")


def _locked(part: Path) -> sqlite3.Connection:
    """Return an exclusively locked connection to an unfinished recording. Raises sqlite3.Error."""
    db = schema.connect(part, readonly=False)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN EXCLUSIVE")
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _drop_unfinished(db: sqlite3.Connection, part: Path) -> None:
    """Empty the file of a recording that its writer left unfinished. Raises LogUnusable for another file."""
    if not recording.is_recording(db):
        raise LogUnusable(f"{part}: is a log, expected an unfinished recording; remove it or choose another path")
    _, is_complete, _ = recording.read_tables(db, part)
    if is_complete:
        raise LogUnusable(f"{part}: another process may be renaming it; wait for that one, or remove the file")
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        db.execute(f'DROP TABLE "{table}"')
    db.execute("VACUUM")  # so that no dropped record stays in the file


@contextmanager
def _explained(part: Path) -> Iterator[None]:
    """Translate errors of the disk and of SQLite into LogError or LogUnusable with a remedy."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if schema.code_of(error) == sqlite3.SQLITE_BUSY:
            raise LogUnusable(f"{part}: another process writes it; wait for that one") from error
        raise LogError(f"{part}: cannot be written ({error}); free disk space, then run the command again") from error
    except schema.UNREADABLE as error:
        raise LogUnusable(f"{part}: cannot be read ({error}); remove it, then run the command again") from error
    except OSError as error:
        raise LogError(f"{part}: cannot be written ({error.strerror}); check the disk, then run again") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
