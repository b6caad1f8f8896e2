"""Recordings with changed records."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from forebay.events.codec import decode
from forebay.events.topics import Topic
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.schema import checksum


def rewrite(path: Path, topic: Topic, offset: int, change: Callable[[bytes], bytes]) -> None:
    """Change a record together with its checksum, like a forger."""
    db = sqlite3.connect(path)
    query = f'SELECT at_us, key, headers, value FROM "{topic.name}" WHERE id = ?'
    at_us, key, headers, value = db.execute(query, (offset,)).fetchone()
    changed = change(value)
    assert changed != value
    sealed = checksum(topic.name, 0, offset, at_us, key, headers, changed)
    db.execute(f'UPDATE "{topic.name}" SET value = ?, checksum = ? WHERE id = ?', (changed, sealed, offset))
    db.commit()
    db.close()


def find(path: Path, topic: Topic, wanted: Callable[[object], bool]) -> tuple[int, object]:
    log = SqliteLog.open(path, readonly=True)
    for record in log.records(topic.name, 0, 0, 10_000):
        event = decode(topic, record.value)
        if wanted(event):
            log.close()
            return record.offset, event
    raise AssertionError("the recording holds no such event")
