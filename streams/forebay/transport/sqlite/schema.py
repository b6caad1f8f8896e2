"""Schema of a log file: its tables, its checksums, and the checks when a file is opened, which raise `LogUnusable`."""

import fcntl
import os
import re
import sqlite3
import stat
import struct
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from forebay import runtime
from forebay.events.topics import topic_named
from forebay.transport.base import LogError, Record

SQLITE_MAGIC = b"SQLite format 3\0"  # the first bytes of every database
APPLICATION_ID = 0x46424159  # "FBAY", so that file(1) and other programs recognise the file
FORMAT_VERSION = 1
RECORDING_VERSION = 2  # a log that also has the tables of `forebay.transport.sqlite.recording`, and accepts no appends
OFFSET_BITS = 40
OFFSETS_MAX = 1 << OFFSET_BITS
PARTITIONS_MAX = 1 << (63 - OFFSET_BITS)  # ids are signed 64-bit
BUSY_TIMEOUT_S = 2.0  # maximum wait for another SQLite client that writes; it blocks the event loop
# Errors that a damaged file may raise. SQLite's message about a damaged schema may not be valid UTF-8.
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)

# Some builds of SQLite write zeros over every page that a deletion frees, which costs as much as the append did.
SECURE_DELETE = "PRAGMA secure_delete = FAST"

_TOPIC_NAME = re.compile(r"[a-z0-9.-]{1,200}")
_FRAME = struct.Struct("<IQqIii")
_DECODER = msgspec.json.Decoder(dict[str, str])

Row = tuple[int, int, bytes | None, str | None, bytes, int]


class LogUnusable(LogError):
    """The file cannot be opened as a log. The text names the file, the reason and the remedy."""


class LogEmpty(LogUnusable):
    """The file holds no log yet."""


class CorruptRecord(LogError):
    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(
            f"{topic}/{partition}: the record at offset {offset} does not match its checksum;"
            " the file was damaged or edited: restore a copy"
        )


class MissingRecords(LogError):
    """Records at offsets `first` to `last` inclusive are missing."""

    def __init__(self, topic: str, partition: int, first: int, last: int) -> None:
        super().__init__(
            f"{topic}/{partition}: the records at offsets {first} to {last} are missing;"
            " the file was damaged or edited: restore a copy"
        )
        self.first = first
        self.last = last


def require_topic(name: str) -> None:
    if not _TOPIC_NAME.fullmatch(name):
        raise ValueError(f"invalid topic name {name!r}: expected 1 to 200 characters of a-z, 0-9, '.' and '-'")


def create_table(topic: str) -> str:
    """Return the statement that creates the table of a topic. The id is the only index, so a row is written once."""
    return (
        f'CREATE TABLE "{topic}" (id INTEGER PRIMARY KEY, at_us INTEGER NOT NULL, key BLOB, headers TEXT,'
        " value BLOB NOT NULL, checksum INTEGER NOT NULL,"
        f' "partition" INTEGER GENERATED ALWAYS AS (id >> {OFFSET_BITS}) VIRTUAL,'
        f' "offset" INTEGER GENERATED ALWAYS AS (id & {OFFSETS_MAX - 1}) VIRTUAL)'
    )


def insert_row(topic: str) -> str:
    return (
        f'INSERT INTO "{topic}" (id, at_us, key, headers, value, checksum)'  # noqa: S608 - a checked name
        " VALUES (?, ?, ?, ?, ?, ?)"
    )


def select_rows(topic: str) -> str:
    """Return the statement that reads rows with ids from first to last inclusive, in order, up to a limit.

    It returns headers as bytes, so that damaged text fails the checksum and not the decoding.
    """
    return (
        "SELECT id, at_us, key, CAST(headers AS BLOB), value, checksum"  # noqa: S608 - a checked name
        f' FROM "{topic}" WHERE id >= ? AND id <= ? ORDER BY id LIMIT ?'
    )


def encode_headers(headers: Mapping[str, str] | None) -> bytes | None:
    """Return headers as a JSON object, in the form that is stored and checksummed."""
    return None if headers is None else msgspec.json.encode(headers)


def decode_headers(headers: bytes | None) -> dict[str, str] | None:
    return None if headers is None else _DECODER.decode(headers)


def checksum(
    topic: str,
    partition: int,
    offset: int,
    at_us: int,
    key: bytes | None,
    headers: bytes | None,
    value: bytes,
) -> int:
    """Return the XXH3-64 digest of a whole record as a signed integer. Absent and empty fields differ."""
    name = topic.encode()
    frame = _FRAME.pack(
        partition,
        offset,
        at_us,
        len(name),
        -1 if key is None else len(key),
        -1 if headers is None else len(headers),
    )
    return signed(xxhash.xxh3_64_intdigest(b"".join((frame, name, key or b"", headers or b"", value))))


def signed(digest: int) -> int:
    """Return a 64-bit digest as a signed integer, for storage in SQLite."""
    return digest - (1 << 64) if digest >> 63 else digest


def encode_row(
    topic: str, partition: int, offset: int, at_us: int, key: bytes | None, headers: bytes | None, value: bytes
) -> Row:
    text = None if headers is None else headers.decode()
    digest = checksum(topic, partition, offset, at_us, key, headers, value)
    return (partition << OFFSET_BITS) | offset, at_us, key, text, value, digest


def decode_row(topic: str, partition: int, row: tuple[Any, ...]) -> Record:
    """Return the record in a row. Raises CorruptRecord if the checksum or a column does not match."""
    row_id, at_us, key, headers, value, stored = row
    offset = row_id & (OFFSETS_MAX - 1)
    try:
        if checksum(topic, partition, offset, at_us, key, headers, value) != stored:
            raise CorruptRecord(topic, partition, offset)
        named = decode_headers(headers)
    except (TypeError, struct.error, msgspec.MsgspecError) as error:  # a column of another type
        raise CorruptRecord(topic, partition, offset) from error
    return Record(topic, partition, offset, at_us, value, key, named)


def table_names(db: sqlite3.Connection) -> list[str]:
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [name for (name,) in rows if _TOPIC_NAME.fullmatch(name)]


def partition_end(db: sqlite3.Connection, topic: str, partition: int) -> int:
    """Return the offset after the last record of a partition, 0 if it has no records."""
    first = partition << OFFSET_BITS
    query = f'SELECT max(id) FROM "{topic}" WHERE id >= ? AND id <= ?'  # noqa: S608 - a checked name
    (last,) = db.execute(query, (first, first + OFFSETS_MAX - 1)).fetchone()
    return 0 if last is None else last - first + 1


def partition_ends(db: sqlite3.Connection, topic: str) -> list[tuple[int, int]]:
    """Return (partition, end offset) of every partition of a topic with records, with two lookups per partition."""
    query = f'SELECT id FROM "{topic}" WHERE id >= ? ORDER BY id LIMIT 1'  # noqa: S608 - a checked name
    ends: list[tuple[int, int]] = []
    partition = 0
    while row := db.execute(query, (partition << OFFSET_BITS,)).fetchone():
        partition = row[0] >> OFFSET_BITS
        ends.append((partition, partition_end(db, topic, partition)))
        partition += 1
        if partition == PARTITIONS_MAX:
            break
    return ends


def check_structure(db: sqlite3.Connection) -> None:
    """Check the table definitions and the list of free pages without reading records. Raises LogError if damaged.

    Later appends overwrite free pages, so a used page that is listed as free would be lost.
    """
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    for topic, statement in rows:
        if _is_forebay_topic(topic) and statement != create_table(topic):
            raise LogError(f"the table of topic {topic} is not as forebay created it")
    (found,) = db.execute("PRAGMA quick_check(sqlite_master)").fetchone()
    if found != "ok":
        raise LogError(f"the file is damaged ({' '.join(found.split())})")


def _is_forebay_topic(name: str) -> bool:
    """Return whether a table belongs to a topic. Users may keep tables of their own in the file."""
    try:
        topic_named(name)
    except KeyError:
        return False
    return True


def read_starts(db: sqlite3.Connection) -> dict[tuple[str, int], int]:
    """Return the first offset of each trimmed partition."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'forebay_starts'"
    if db.execute(query).fetchone() == (0,):
        return {}
    rows = db.execute("SELECT topic, number, first FROM forebay_starts")
    return {(topic, number): first for topic, number, first in rows}


def trim(db: sqlite3.Connection, topic: str, partition: int, first: int, before: int) -> None:
    """Delete the records from `first` up to but excluding `before`, and store the new start, in one transaction."""
    base = partition << OFFSET_BITS
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute(
            "CREATE TABLE IF NOT EXISTS forebay_starts"
            " (topic TEXT, number INTEGER, first INTEGER NOT NULL, PRIMARY KEY (topic, number)) WITHOUT ROWID"
        )
        delete = f'DELETE FROM "{topic}" WHERE id >= ? AND id < ?'  # noqa: S608 - a checked name
        db.execute(delete, (base + first, base + before))
        db.execute("INSERT OR REPLACE INTO forebay_starts VALUES (?, ?, ?)", (topic, partition, before))
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


class WriterLock:
    """Lock that allows one writer per log file, by flock on a separate file. It is released when its process dies.

    The lock is not on the database file, because closing any descriptor of it would drop SQLite's own POSIX locks.
    """

    def __init__(self, path: Path) -> None:
        if not _is_database(path):
            raise LogUnusable(f"{path}: is not a forebay log (file is not a database); choose another path")
        beside = path.with_name(path.name + ".lock")
        try:
            self._descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            reason = error.strerror
            raise LogUnusable(
                f"{beside}: cannot be written ({reason}); move the log into a folder that can be written"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise LogUnusable(
                f"{path}: another process (pid {holder}) writes this log; stop it or choose another path"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. The empty lock file stays, because deleting it would race with the next writer."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def check_place(path: Path, *, readonly: bool) -> None:
    """Check that a log can be opened at a path, before SQLite opens it. Raises LogUnusable otherwise."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError) as error:  # for example a name that is too long, or a loop of links
        reason = getattr(error, "strerror", None) or error
        raise LogUnusable(f"{path}: cannot be accessed ({reason}); choose another path") from error
    if not path.parent.is_dir():
        raise LogUnusable(f"{path}: there is no directory {path.parent}; create it or choose another path")
    if stat.S_ISDIR(mode):
        raise LogUnusable(f"{path}: is a directory; name a file in it")
    if mode and not stat.S_ISREG(mode):  # opening a pipe would wait for its writer
        raise LogUnusable(f"{path}: is not a regular file; choose another path")
    if readonly and not mode:
        raise LogUnusable(f"{path}: no such log file; check the path")
    if readonly and not os.access(path, os.R_OK):
        raise LogUnusable(f"{path}: no permission to read it; check its owner and mode")
    if not readonly and not os.access(path.parent, os.W_OK):
        raise LogUnusable(f"{path}: no permission to write in {path.parent}; choose another path")
    if not readonly and mode and not os.access(path, os.W_OK):
        raise LogUnusable(f"{path}: no permission to write it; choose another path")


def _is_database(path: Path) -> bool:
    """Return whether a file is missing, empty or begins like a SQLite database."""
    try:
        with path.open("rb") as opened:
            start = opened.read(len(SQLITE_MAGIC))
    except OSError:
        return True  # opening the database reports the reason
    return start in (b"", SQLITE_MAGIC)


def check_wal(path: Path) -> bool:
    """Return whether a log has a WAL with commits. Raises LogUnusable if it is that of another log.

    Call this function before a writer opens the log, because SQLite would move the other log into the file.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists() or not wal.stat().st_size:
        return False
    created: set[Any] = set()
    try:
        for mode in ("mode=ro&immutable=1", "mode=ro"):  # an immutable file is read without its WAL
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as db:
                created.add(read_meta(db).get("created"))
    except UNREADABLE:  # nothing is in the file yet; other errors are reported when the log is opened
        return True
    if len(created) > 1:
        raise LogUnusable(f"{path}: {wal.name} belongs to another log; put the WAL of this log in its place")
    return True


def connect(path: Path | None, *, readonly: bool) -> sqlite3.Connection:
    """Return a connection in autocommit mode, because the log executes BEGIN and COMMIT itself."""
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    mode = "ro" if readonly else "rwc"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)


def check_format(db: sqlite3.Connection, path: Path | None) -> int:
    """Return `FORMAT_VERSION`, `RECORDING_VERSION`, or 0 for an empty database. Raises LogUnusable otherwise."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except UNREADABLE as error:
        match code_of(error):
            case sqlite3.SQLITE_NOTADB:
                raise LogUnusable(f"{path}: is not a forebay log ({error}); choose another path") from error
            case sqlite3.SQLITE_BUSY:
                raise LogUnusable(f"{path}: another process writes it; wait for that one") from error
            case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:  # for its -shm
                text = f"a log in use needs files beside it, and {path and path.parent} cannot be written ({error})"
                raise LogUnusable(f"{path}: {text}; copy the log and its -wal into another folder") from error
            case sqlite3.SQLITE_CORRUPT:
                raise LogUnusable(f"{path}: is damaged or cut off ({error}); restore a copy") from error
            case _:
                raise LogUnusable(f"{path}: cannot be read ({error}); restore a copy") from error
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise LogUnusable(f"{path}: is a database of another program; choose another path")
    if version > RECORDING_VERSION:
        raise LogUnusable(
            f"{path}: has format {version}, this forebay reads up to {RECORDING_VERSION}; use a newer forebay"
        )
    if version < FORMAT_VERSION:
        raise LogUnusable(f"{path}: has format {version}, which no forebay wrote; restore a copy")
    return int(version)


def initialise(db: sqlite3.Connection, namespace: str) -> None:
    db.execute("BEGIN IMMEDIATE")
    create_meta(db, FORMAT_VERSION, {"namespace": namespace})
    db.execute("COMMIT")


def code_of(error: Exception) -> int:
    """Return SQLite's primary result code of an error whose type is in `UNREADABLE`."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the upper bytes are the extended code


def create_meta(db: sqlite3.Connection, version: int, meta: Mapping[str, str]) -> None:
    """Create the meta table and set the format of an empty database, within a transaction of the caller.

    The name of the meta table contains an underscore, so it cannot be a topic name.
    """
    db.execute("CREATE TABLE forebay_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
    created = datetime.fromtimestamp(runtime.wall_s(), UTC).isoformat()
    db.executemany(
        "INSERT INTO forebay_meta VALUES (?, ?)", {"format": str(version), "created": created, **meta}.items()
    )
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {version}")


def read_meta(db: sqlite3.Connection) -> dict[str, str]:
    """Return the metadata of a log: format, namespace, creation time and pid of the writer."""
    return dict(db.execute("SELECT key, value FROM forebay_meta").fetchall())
