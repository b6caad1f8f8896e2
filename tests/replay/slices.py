"""Logs of short runs and recordings of their slices."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from forebay.events.codec import encode
from forebay.events.groups import GroupPlaced
from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SNAPSHOTS
from forebay.journal.groups import groups_of
from forebay.replay.record.slice import OnProgress, Window, contents_of, copy, slice_of
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, Log, Record
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import Contents
from forebay.transport.sqlite.recording_writer import RecordingWriter
from tests.system import MODEL, System, submitted, until, until_ended

PREFIX = list(range(16))
OTHER = "other-model"
ALL = Window()
OPTIONS = {"source": "test"}


async def run(path: Path, *, owners: int = 3, requests: int = 20, snapshot_every: int = 12) -> None:
    """Write a run with several owners, snapshots that overlap with decisions, and a lost worker."""
    log = SqliteLog.open(path)
    async with System(log).started(workers=3) as system:
        for index in range(owners):
            async with system.owned(snapshot_every=snapshot_every) as owner:
                await until(lambda: len(owner.world.fleet) >= 2)
                for number in range(index * requests, (index + 1) * requests):
                    system.send(submitted(f"r{number}", [*PREFIX, *[number % 5] * 8]))
                    if number % 3 == 0:
                        await until_ended(system, f"r{number}")
                    if number == owners * requests // 2:
                        await system.stop_worker("w0")
                await until(lambda: not len(owner.world.requests))
    log.close()


async def sliced(log: SqliteLog, out: Path, window: Window = ALL, names: tuple[str, ...] = ()) -> Contents:
    """Record a window of all groups, or of some."""
    return await written(log, RecordingWriter.create(out, await contents(log, window, names)))


async def contents(log: SqliteLog, window: Window = ALL, names: tuple[str, ...] = ()) -> Contents:
    groups = await groups_of(log)
    slices = [await slice_of(log, name, groups[name], window) for name in names or groups]
    return await contents_of(log, slices, namespace=log.namespace, source="log", asked=OPTIONS)


async def written(log: Log, writer: RecordingWriter, progress: OnProgress | None = None) -> Contents:
    """Write a recording to its end, or until `progress` raises, like a process that is killed there."""
    try:
        await copy(log, writer, progress)
        return writer.finish()
    finally:
        writer.close()


def source_log(folder: Path) -> Path:
    """Return a log of a run with three owners, overlapping snapshots and a lost worker."""
    asyncio.run(run(folder / "run.db"))
    return folder / "run.db"


def joined_log(source: Path, folder: Path) -> Path:
    """Return a log with the group of `source` and another one."""
    asyncio.run(run(folder / "other.db", owners=2, requests=8))
    asyncio.run(join(source, folder / "other.db", folder / "both.db"))
    return folder / "both.db"


def opened(path: Path) -> "closing[SqliteLog]":
    return closing(SqliteLog.open(path, readonly=True))


def report_of(path: Path, partition: int = 0) -> VerifyReport:
    """Return the verification report of a file, as the command creates it."""
    with opened(path) as log:
        log.check()
        return asyncio.run(verify(log, partition))


def journal_of(path: Path) -> list[Record]:
    """Return the whole journal of the first group."""
    with opened(path) as log:
        return log.records(DECISIONS.name, 0, 0, 100_000)


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return the content of a file by table, without its creation time and the seal that depends on it."""
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'forebay_seal'"
        names = [name for (name,) in db.execute(query)]
        content = {name: db.execute(f'SELECT * FROM "{name}" ORDER BY 1').fetchall() for name in names}
    content["forebay_meta"] = [row for row in content["forebay_meta"] if row[0] != "created"]
    return content


def spread(path: Path, out: Path) -> list[Record]:
    """Copy a log so that journal records are one second apart, and return its journal."""
    out.write_bytes(path.read_bytes())
    journal = journal_of(path)
    spaced = [msgspec.structs.replace(one, at_us=journal[0].at_us + one.offset * 1_000_000) for one in journal]
    with closing(sqlite3.connect(out)) as db, db:
        db.execute("DELETE FROM decisions")
        db.executemany(schema.insert_row(DECISIONS.name), [_moved(one, 0) for one in spaced])
    return spaced


async def join(first: Path, second: Path, out: Path) -> None:
    """Write a log with two groups in control partitions 0 and 1, as on Kafka."""
    log = SqliteLog.open(out)
    placed = [GroupPlaced(group=MODEL, partition=0), GroupPlaced(group=OTHER, partition=1)]
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, event)) for event in placed])
    log.close()
    with closing(sqlite3.connect(out)) as db, db:
        for partition, path in enumerate((first, second)):
            for topic in (*INPUTS, DECISIONS, SNAPSHOTS):
                if not partition:
                    db.execute(schema.create_table(topic.name))
                with opened(path) as log:
                    records = log.records(topic.name, 0, 0, 100_000)
                db.executemany(schema.insert_row(topic.name), [_moved(record, partition) for record in records])


def _moved(record: Record, partition: int) -> schema.Row:
    place = record.topic, partition, record.offset
    sealed = schema.checksum(*place, record.at_us, record.key, None, record.value)
    assert record.headers is None
    return (partition << schema.OFFSET_BITS) | record.offset, record.at_us, record.key, None, record.value, sealed
