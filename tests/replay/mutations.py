"""Edits of recordings that are sealed again, so that every checksum matches."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from forebay.events.codec import decode, encode
from forebay.events.topics import DECISIONS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.schema import checksum

Values = list[bytes]


def rewrite_topic(path: Path, topic: Topic, change: Callable[[Values], Values]) -> None:
    """Replace the records of a topic, with new offsets and checksums."""
    db = sqlite3.connect(path)
    values = [value for (value,) in db.execute(f'SELECT value FROM "{topic.name}" ORDER BY id')]
    changed = change(list(values))
    assert changed != values
    db.execute(f'DELETE FROM "{topic.name}"')
    db.executemany(
        f'INSERT INTO "{topic.name}" (id, at_us, key, headers, value, checksum) VALUES (?, 0, NULL, NULL, ?, ?)',
        [(at, value, checksum(topic.name, 0, at, 0, None, None, value)) for at, value in enumerate(changed)],
    )
    db.commit()
    db.close()


def replace_record(path: Path, topic: Topic, offset: int, change: Callable[[bytes], bytes]) -> None:
    """Change one record."""

    def at(values: Values) -> Values:
        values[offset] = change(values[offset])
        return values

    rewrite_topic(path, topic, at)


def find(path: Path, topic: Topic, wanted: Callable[[Any], bool]) -> tuple[int, Any]:
    """Return the first event of a topic that matches, with its offset."""
    log = SqliteLog.open(path, readonly=True)
    try:
        for record in log.records(topic.name, 0, 0, 100_000):
            event = decode(topic, record.value)
            if wanted(event):
                return record.offset, event
    finally:
        log.close()
    raise AssertionError("the recording holds no such event")


def read_more(path: Path) -> None:
    """Let the owner of a recording announce that it reads later event types than this version."""

    def change(value: bytes) -> bytes:
        return encode(DECISIONS, msgspec.structs.replace(decode(DECISIONS, value), events_version=EVENTS_VERSION + 1))

    replace_record(path, DECISIONS, 0, change)
