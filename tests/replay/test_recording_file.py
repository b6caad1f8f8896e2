"""A recording as a file: changed bytes are detected, missing records are named, and read-only media work."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from forebay.replay.record.slice import Window
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import CorruptRecord, LogUnusable, MissingRecords, SqliteLog
from forebay.transport.sqlite.recording import require_sealed
from tests.depth import sampled
from tests.replay.slices import journal_of, opened, report_of, run, sliced

SEED = 42
FLIPS = 1_000
HEADER_BYTES = 100  # length of a SQLite header


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a small recording that begins with a snapshot."""
    folder = tmp_path_factory.mktemp("made")
    asyncio.run(run(folder / "run.db", owners=2, requests=8))
    journal = journal_of(folder / "run.db")
    with opened(folder / "run.db") as log:
        held = asyncio.run(sliced(log, folder / "rec", Window(journal[-8].at_us)))
    assert held.groups[0].start > 0
    return (folder / "rec").read_bytes()


@pytest.fixture
def rec(made: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "slice.rec"
    path.write_bytes(made)
    return path


def edit(path: Path, *statements: str) -> None:
    """Edit the file with a plain SQLite client."""
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount != 0, "the statement changes something"


def test_error_names_any_changed_byte(rec: Path, made: bytes) -> None:
    """Change each header byte, the page of the seal, and random positions of the whole file."""
    rng = random.Random(SEED)
    with closing(sqlite3.connect(rec)) as db:
        (digest,) = db.execute("SELECT digest FROM forebay_seal").fetchone()
    seal_at = made.index(digest.encode())
    places = [*range(HEADER_BYTES), *range(seal_at, seal_at + len(digest)), *rng.sample(range(len(made)), FLIPS)]
    unnamed = []
    with rec.open("r+b", buffering=0) as file:
        for place in sampled(places, 80):
            file.seek(place)
            file.write(bytes([made[place] ^ rng.randint(1, 255)]))
            try:
                report_of(rec)
                unnamed.append(place)
            except LogError as error:
                assert str(error)
            file.seek(place)
            file.write(made[place : place + 1])
    assert unnamed == []
    assert report_of(rec).divergence is None


@pytest.mark.parametrize("column", ["value", "checksum", "at_us"])
def test_error_names_the_position_of_a_changed_record(rec: Path, column: str) -> None:
    changes = {
        "value": "value = CAST(substr(value, 1, 20) || '~' || substr(value, 22) AS BLOB)",
        "checksum": "checksum = checksum + 1",
        "at_us": "at_us = at_us + 1",
    }
    edit(rec, f'UPDATE decisions SET {changes[column]} WHERE "offset" = (SELECT max("offset") - 2 FROM decisions)')
    with pytest.raises(CorruptRecord, match=r"decisions/0: the record at offset \d+ does not match its checksum"):
        report_of(rec)


HEAD, MIDDLE, TAIL = (
    "(SELECT min(id) FROM progress)",
    "(SELECT min(id) + 2 FROM progress)",
    "(SELECT max(id) FROM progress)",
)


@pytest.mark.parametrize("which", [HEAD, MIDDLE, TAIL], ids=["head", "middle", "tail"])
def test_error_names_the_position_of_missing_records(rec: Path, which: str) -> None:
    with closing(sqlite3.connect(rec)) as db:
        (missing,) = db.execute(f"SELECT id FROM progress WHERE id = {which}").fetchone()
        (end,) = db.execute("SELECT max(id) + 1 FROM progress").fetchone()
    edit(rec, f"DELETE FROM progress WHERE id = {which}")
    with opened(rec) as log:
        first = asyncio.run(log.begin("progress", 0))
        assert asyncio.run(log.end("progress", 0)) == end
        with pytest.raises(MissingRecords) as message:
            log.records("progress", 0, first, 10_000)
        assert (message.value.first, message.value.last) == (missing, missing)
        with pytest.raises(MissingRecords) as message:
            log.check()
        assert (message.value.first, message.value.last) == (missing, missing)


EDITS: list[tuple[str, str, str]] = [
    ("extent", 'UPDATE forebay_extents SET "end" = "end" - 1 WHERE topic = \'decisions\'', "manifest was damaged"),
    ("missing extent", "DELETE FROM forebay_extents WHERE topic = 'metrics'", "manifest was damaged"),
    ("extent checksum", "UPDATE forebay_extents SET checksum = NULL WHERE topic = 'fleet'", "manifest was damaged"),
    ("group", "UPDATE forebay_groups SET name = 'another'", "manifest was damaged"),
    ("time", "UPDATE forebay_meta SET value = '2020-01-01T00:00:00+00:00' WHERE key = 'from'", "manifest was damaged"),
    ("no time", "UPDATE forebay_meta SET value = 'yesterday' WHERE key = 'from'", "manifest cannot be read"),
    ("flag", "UPDATE forebay_meta SET value = 'maybe' WHERE key = 'anonymized'", "manifest cannot be read"),
    ("anonymized", "UPDATE forebay_meta SET value = 'yes' WHERE key = 'anonymized'", "manifest was damaged"),
    ("type", "UPDATE forebay_groups SET \"start\" = 'x'", "manifest cannot be read"),
    ("missing meta", "DELETE FROM forebay_meta WHERE key = 'source'", "manifest cannot be read"),
    ("incomplete", "UPDATE forebay_meta SET value = 'no' WHERE key = 'complete'", "was not finished; run the"),
    ("changed options", "UPDATE forebay_meta SET value = '{}' WHERE key = 'asked'", "but its records are intact"),
    ("seal", "UPDATE forebay_seal SET digest = '0123456789abcdef0123456789abcdef'", "but its records are intact"),
    ("unsealed", f"UPDATE forebay_seal SET digest = '{'0' * 32}'", "but its records are intact"),
    ("two seals", "INSERT INTO forebay_seal VALUES ('x')", "its seal is damaged"),
    ("an index", "CREATE INDEX i ON metrics (at_us)", "but its records are intact"),
    ("a table", "CREATE TABLE forebay_more (x)", "but its records are intact"),
    ("no table", "DROP TABLE forebay_groups", "manifest cannot be read"),
    ("a log's format", "PRAGMA user_version = 1", "format of a log but the tables of a recording"),
    ("no format", "PRAGMA user_version = 0", "has format 0, which no forebay wrote"),
    ("newer", "PRAGMA user_version = 3", "format 3, this forebay reads up to 2; use a newer forebay"),
    ("foreign", "PRAGMA application_id = 7", "database of another program"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "text"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_error_names_an_edit(rec: Path, statement: str, text: str) -> None:
    edit(rec, statement)
    with pytest.raises(LogUnusable, match=text) as message:
        report_of(rec)
    assert str(rec) in str(message.value)
    assert "\n" not in str(message.value)


def test_replaced_records_with_valid_checksums_are_detected(rec: Path) -> None:
    """Each record matches its checksum and none is missing. The checksum of the extent reveals the change."""
    with closing(sqlite3.connect(rec)) as db, db:
        row_id, at_us, key, value = db.execute("SELECT id, at_us, key, value FROM progress LIMIT 1").fetchone()
        db.execute("DELETE FROM progress WHERE id = ?", (row_id,))
        sealed = schema.checksum("progress", 0, row_id, at_us + 1, key, None, value)
        db.execute(schema.insert_row("progress"), (row_id, at_us + 1, key, None, value, sealed))
    with pytest.raises(LogUnusable, match="records of progress/0 were replaced"):
        report_of(rec)


def test_added_records_are_detected(rec: Path) -> None:
    edit(rec, 'INSERT INTO fleet (id, at_us, value, checksum) VALUES (1 << 40, 1, x"00", 1)'.replace('x"00"', "x'00'"))
    with pytest.raises(LogUnusable, match=r"fleet has \d+ records where \d+ were written"):
        report_of(rec)


def cut(path: Path, keep: Callable[[int], int]) -> None:
    path.write_bytes(path.read_bytes()[: keep(path.stat().st_size)])


def replace(path: Path, statement: str) -> None:
    path.unlink()
    edit(path, statement)


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", lambda path: cut(path, lambda _: 0), "is empty"),
    ("a few bytes", lambda path: cut(path, lambda _: 60), "damaged or cut off"),
    ("half", lambda path: cut(path, lambda size: size // 2), "damaged or cut off"),
    ("no last page", lambda path: cut(path, lambda size: size - 4096), "damaged or cut off"),
    ("no last byte", lambda path: cut(path, lambda size: size - 1), "damaged or cut off"),
    ("a byte more", lambda path: path.write_bytes(path.read_bytes() + b"\0"), "damaged or cut off"),
    ("text", lambda path: path.write_text("offset,topic\n1,decisions\n" * 50), "is not a forebay log"),
    ("foreign", lambda path: replace(path, "CREATE TABLE t (x)"), "database of another program"),
]


@pytest.mark.parametrize(("spoil", "text"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_a_corrupt_recording_is_rejected_in_one_line(rec: Path, spoil: Callable[[Path], object], text: str) -> None:
    spoil(rec)
    with pytest.raises(LogUnusable, match=text) as message:
        report_of(rec)
    assert str(message.value).startswith(f"{rec}: ")
    assert "\n" not in str(message.value)


def test_a_recording_opens_on_read_only_media_without_creating_files(rec: Path) -> None:
    rec.chmod(0o444)
    rec.parent.chmod(0o555)
    try:
        assert report_of(rec).divergence is None
        assert [path.name for path in rec.parent.iterdir()] == [rec.name]
    finally:
        rec.parent.chmod(0o755)
    with closing(sqlite3.connect(f"file:{rec}?immutable=1", uri=True)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        held = dict(db.execute('SELECT topic, "end" - "first" FROM forebay_extents'))
        for topic, count in held.items():
            assert db.execute(f'SELECT count(*) FROM "{topic}"').fetchone() == (count,)
        meta = dict(db.execute("SELECT key, value FROM forebay_meta"))
    assert (meta["format"], meta["source"], meta["anonymized"], meta["complete"]) == ("2", "log", "no", "yes")
    message = "anonymized asked complete content created forebay format from namespace source to"
    assert sorted(meta) == message.split()


def test_a_recording_is_read_only(rec: Path, made: bytes) -> None:
    with pytest.raises(LogUnusable, match="is a recording, which is read-only"):
        SqliteLog.open(rec)
    with opened(rec) as log, pytest.raises(LogError, match="was opened read-only"):
        asyncio.run(log.append([Draft("fleet", 0, b"")]))
    assert rec.read_bytes() == made


def test_a_recording_deleted_during_its_check(rec: Path) -> None:
    with closing(schema.connect(rec, readonly=True)) as db:
        assert schema.read_meta(db)  # SQLite opens the file here
        rec.unlink()
        with pytest.raises(LogUnusable, match="cannot be read"):
            require_sealed(db, rec)


def test_orphaned_pages_of_a_log_are_found(tmp_path: Path) -> None:
    """A growing log has no seal, but SQLite's check finds an orphaned page."""
    path = tmp_path / "run.db"
    asyncio.run(run(path, owners=1, requests=20))
    assert report_of(path).divergence is None
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'decisions'").fetchone()
    content = bytearray(path.read_bytes())
    start = (root - 1) * 4096
    assert content[start] == 5, "the table's root points to other pages"
    cells = int.from_bytes(content[start + 3 : start + 5], "big")
    content[start + 3 : start + 5] = (cells - 1).to_bytes(2, "big")
    path.write_bytes(content)
    with opened(path) as log, pytest.raises(LogError, match=r"is damaged \(.*on page \d+\); restore a copy"):
        log.check()
