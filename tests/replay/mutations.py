"""Edits of recordings that are sealed again, so that every checksum matches, and logs that lost a record."""

import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from forebay.events.codec import decode, encode
from forebay.events.topics import DECISIONS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.transport.base import Log, LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.schema import checksum
from tests.cli.in_process import forebay

Values = list[bytes]


def rewrite_topic(path: Path, topic: Topic, change: Callable[[Values], Values]) -> None:
    """Replace the records of a topic, with new offsets and checksums."""
    with closing(sqlite3.connect(path)) as db, db:
        values = [value for (value,) in db.execute(f'SELECT value FROM "{topic.name}" ORDER BY id')]
        changed = change(list(values))
        assert changed != values
        db.execute(f'DELETE FROM "{topic.name}"')
        db.executemany(
            f'INSERT INTO "{topic.name}" (id, at_us, key, headers, value, checksum) VALUES (?, 0, NULL, NULL, ?, ?)',
            [(at, value, checksum(topic.name, 0, at, 0, None, None, value)) for at, value in enumerate(changed)],
        )


def replace_record(path: Path, topic: Topic, offset: int, change: Callable[[bytes], bytes]) -> None:
    """Change one record together with its checksum, like a forger."""
    with closing(sqlite3.connect(path)) as db, db:
        query = f'SELECT at_us, key, headers, value FROM "{topic.name}" WHERE id = ?'
        at_us, key, headers, value = db.execute(query, (offset,)).fetchone()
        changed = change(value)
        assert changed != value
        sealed = checksum(topic.name, 0, offset, at_us, key, headers, changed)
        db.execute(f'UPDATE "{topic.name}" SET value = ?, checksum = ? WHERE id = ?', (changed, sealed, offset))


def find(path: Path, topic: Topic, wanted: Callable[[Any], bool]) -> tuple[int, Any]:
    """Return the first event of a topic that matches, with its offset."""
    with closing(SqliteLog.open(path, readonly=True)) as log:
        events = ((one.offset, decode(topic, one.value)) for one in log.records(topic.name, 0, 0, 100_000))
        return next(found for found in events if wanted(found[1]))


def verify(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command that verifies a recording."""
    return forebay("verify", str(path), *options)


def read_more(path: Path) -> None:
    """Let the owner of a recording announce that it reads later event types than this version."""

    def change(value: bytes) -> bytes:
        return encode(DECISIONS, msgspec.structs.replace(decode(DECISIONS, value), events_version=EVENTS_VERSION + 1))

    replace_record(path, DECISIONS, 0, change)


class LogWithout:
    """Log that lost a record in the middle of a topic, as after accidental compaction."""

    def __init__(self, log: Log, topic: Topic, missing: int) -> None:
        self._log = log
        self._topic = topic
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> Any:
        records = await self._log.read(topic, partition, offset, limit)
        return [one for one in records if (topic, one.offset) != (self._topic.name, self._missing)]


class Trimmed(SqliteLog):
    """Log from which retention removed the beginning of some topics."""

    begins: dict[str, int]

    async def begin(self, topic: str, partition: int) -> int:
        """Return the first offset that retention kept."""
        return self.begins.get(topic, await super().begin(topic, partition))

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return records, unless retention removed some of them."""
        if offset < await self.begin(topic, partition):
            raise LogError(f"{topic}/{partition} no longer holds offset {offset}")
        return await super().read(topic, partition, offset, limit)
