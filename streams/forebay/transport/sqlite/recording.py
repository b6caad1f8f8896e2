"""Read and verify the manifest of a recording.

Theory of operation. A recording is a slice of a log in one SQLite file. Its topic tables keep the partition numbers and
offsets of the log. `forebay_extents` holds the offset range of each recorded partition, with a checksum over its
records. `forebay_groups` lists the groups. `forebay_meta` holds the other metadata, with a digest over all of these.
`forebay_seal` holds a digest over the whole file except its own 32 digits, so that any changed byte is detected.
"""

import sqlite3
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from xxhash import xxh3_64, xxh3_128

from forebay.transport.sqlite import schema
from forebay.transport.sqlite.schema import LogUnusable, MissingRecords

PART = ".part"  # added to the name of a recording that is being written
UNSEALED = "0" * 32
_READ_BYTES = 1 << 20  # a multiple of every page size that SQLite has
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CHECKSUM = struct.Struct("<q")

TABLES = (
    'CREATE TABLE forebay_extents (topic TEXT NOT NULL, "partition" INTEGER NOT NULL, "first" INTEGER NOT NULL,'
    ' "end" INTEGER NOT NULL, checksum INTEGER, PRIMARY KEY (topic, "partition")) WITHOUT ROWID',
    "CREATE TABLE forebay_groups (name TEXT PRIMARY KEY,"
    ' "partition" INTEGER NOT NULL, "start" INTEGER NOT NULL, "first" INTEGER NOT NULL, "end" INTEGER NOT NULL,'
    " decisions INTEGER NOT NULL, core_version INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE forebay_seal (digest TEXT NOT NULL)",
)


class Extent(msgspec.Struct, frozen=True, order=True):
    """Recorded offset range of one partition, from `first` up to but excluding `end`."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first


class RecordedGroup(msgspec.Struct, frozen=True, order=True):
    """Group of a recording. Its window is the range of journal records that the recording was made for.

    Attributes:
        start: Journal offset from which the decisions are derived: 0, or that of a snapshot before the window.
        core_version: Version of the decision rules that led to these decisions, 0 if unknown.
    """

    name: str
    partition: int
    start: int
    first: int
    end: int
    decisions: int
    core_version: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a recording, and the options of the command that made it.

    Attributes:
        source: Kind of the recorded log: `log`, `kafka` or `recording`.
        content: Digest of these contents and of every record, empty while the recording is being written.
    """

    namespace: str
    source: str
    from_us: int
    to_us: int
    groups: tuple[RecordedGroup, ...]
    extents: tuple[Extent, ...]
    asked: Mapping[str, str] = {}
    anonymized: bool = False
    content: str = ""


def utc(at_us: int) -> str:
    """Return a time in microseconds since 1970 as ISO 8601 text in UTC."""
    return (_EPOCH + timedelta(microseconds=at_us)).isoformat(timespec="microseconds")


def microseconds(text: str) -> int:
    """Return the microseconds since 1970 of a text that `utc` returned, else raise ValueError."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


def content_digest(contents: Contents, checksums: Mapping[Extent, int]) -> str:
    """Return the XXH3-128 digest of the contents. It does not depend on when and how the recording was made."""
    digested = (
        contents.namespace,
        contents.source,
        contents.from_us,
        contents.to_us,
        contents.anonymized,
        contents.groups,
        [(extent, checksums[extent]) for extent in contents.extents],
    )
    return xxh3_128(msgspec.json.encode(digested)).hexdigest()


def is_recording(db: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name IN ('forebay_extents', 'forebay_groups', 'forebay_seal')"
    (found,) = db.execute(query).fetchone()
    return bool(found)


def read_contents(db: sqlite3.Connection, path: Path) -> Contents:
    """Return the contents of a finished recording after checking their digest. Raises LogUnusable."""
    (size,) = db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()
    if path.stat().st_size != size:
        raise LogUnusable(f"{path}: is damaged or cut off (it should have {size} bytes); restore a copy")
    contents, complete, checksums = read_tables(db, path)
    if not complete:
        raise LogUnusable(f"{path}: is a recording that was not finished; run the `forebay record` command again")
    if None in checksums.values() or content_digest(contents, _known(checksums)) != contents.content:
        raise LogUnusable(f"{path}: its manifest was damaged or edited; restore a copy")
    return contents


def read_tables(db: sqlite3.Connection, path: Path) -> tuple[Contents, bool, dict[Extent, int | None]]:
    """Return the contents of a recording, whether it is complete, and its checksums. Raises LogUnusable."""
    try:
        meta = schema.read_meta(db)
        extents = db.execute('SELECT topic, "partition", "first", "end", checksum FROM forebay_extents').fetchall()
        groups = db.execute(
            'SELECT name, "partition", "start", "first", "end", decisions, core_version FROM forebay_groups'
        ).fetchall()
        checksums = {
            Extent(*msgspec.convert(row[:4], tuple[str, int, int, int])): msgspec.convert(row[4], int | None)
            for row in extents
        }
        contents = Contents(
            namespace=meta["namespace"],
            source=meta["source"],
            from_us=microseconds(meta["from"]),
            to_us=microseconds(meta["to"]),
            groups=tuple(
                sorted(RecordedGroup(*msgspec.convert(row, tuple[str, int, int, int, int, int, int])) for row in groups)
            ),
            extents=tuple(sorted(checksums)),
            asked=msgspec.json.decode(meta["asked"], type=dict[str, str]),
            anonymized=_FLAGS[meta["anonymized"]],
            content=meta["content"],
        )
        complete = _FLAGS[meta["complete"]]
    except (sqlite3.Error, KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise LogUnusable(f"{path}: its manifest cannot be read ({error}); restore a copy") from error
    return contents, complete, checksums


_FLAGS = {"yes": True, "no": False}


def extent_checksum(db: sqlite3.Connection, extent: Extent) -> int:
    """Return the XXH3-64 digest of an extent's checksums, verifying each. Raises CorruptRecord or MissingRecords."""
    base = extent.partition << schema.OFFSET_BITS
    hasher = xxh3_64()
    expected = extent.first
    span = (base + extent.first, base + extent.end - 1, extent.count)
    with closing(db.execute(schema.select_rows(extent.topic), span)) as rows:
        for row in rows:
            record = schema.decode_row(extent.topic, extent.partition, row)
            if record.offset != expected:
                raise MissingRecords(extent.topic, extent.partition, expected, record.offset - 1)
            hasher.update(_CHECKSUM.pack(row[5]))
            expected += 1
    if expected < extent.end:
        raise MissingRecords(extent.topic, extent.partition, expected, extent.end - 1)
    return schema.signed(hasher.intdigest())


def require_sealed(db: sqlite3.Connection, path: Path) -> None:
    """Check that no byte of a recording has changed. Raises LogError that names the changed part, if possible."""
    try:
        digest, hole = _seal_of(db, path)
        if digest != UNSEALED and file_digest(path, hole, len(digest)) == digest:
            return
        _name_damage(db, path)
    except schema.UNREADABLE as error:
        raise LogUnusable(f"{path}: is damaged ({error}); restore a copy") from error
    except OSError as error:
        raise LogUnusable(f"{path}: cannot be read ({error.strerror}); restore a copy") from error
    raise LogUnusable(f"{path}: was changed after it was written, but its records are intact; restore a copy")


def seal(path: Path) -> None:
    """Write the digest of a recording into its table `forebay_seal`. No connection to the file may be open.

    Raises LogUnusable, sqlite3.Error or OSError.
    """
    with closing(schema.connect(path, readonly=True)) as db:
        digest, hole = _seal_of(db, path)
    found = file_digest(path, hole, len(digest))
    with path.open("r+b") as file:
        file.seek(hole)
        file.write(found.encode())


def file_digest(path: Path, hole: int, length: int) -> str:
    """Return the XXH3-128 digest of a file with `length` bytes at offset `hole` set to zero. Raises OSError."""
    hasher = xxh3_128()
    position = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            start = hole - position
            if 0 <= start < len(chunk):
                chunk = chunk[:start] + bytes(length) + chunk[start + length :]
            hasher.update(chunk)
            position += len(chunk)
    return hasher.hexdigest()


def _seal_of(db: sqlite3.Connection, path: Path) -> tuple[str, int]:
    """Return the digest that a recording stores about itself, and the byte offset of this digest in the file."""
    found = db.execute("SELECT digest FROM forebay_seal").fetchall()
    roots = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'forebay_seal'").fetchall()
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    if len(found) != 1 or len(roots) != 1 or not isinstance(found[0][0], str) or not found[0][0]:
        raise LogUnusable(f"{path}: its seal is damaged; restore a copy")
    digest = found[0][0]
    start = (roots[0][0] - 1) * page_bytes
    with path.open("rb") as file:
        file.seek(start)
        page = file.read(page_bytes)
    if page.count(digest.encode()) != 1:
        raise LogUnusable(f"{path}: its seal is damaged; restore a copy")
    return digest, start + page.index(digest.encode())


def _name_damage(db: sqlite3.Connection, path: Path) -> None:
    """Raise LogUnusable that names the changed part of a recording, if it can be found."""
    _, _, checksums = read_tables(db, path)
    held: Counter[str] = Counter()
    for extent, checksum in checksums.items():
        held[extent.topic] += extent.count
        if extent_checksum(db, extent) != checksum:
            raise LogUnusable(f"{path}: records of {extent.topic}/{extent.partition} were replaced; restore a copy")
    for topic, count in held.items():
        (rows,) = db.execute(f'SELECT count(*) FROM "{topic}"').fetchone()  # noqa: S608 - a name just read from
        if rows != count:
            raise LogUnusable(f"{path}: {topic} has {rows} records where {count} were written; restore a copy")


def _known(checksums: Mapping[Extent, int | None]) -> dict[Extent, int]:
    return {extent: checksum for extent, checksum in checksums.items() if checksum is not None}
