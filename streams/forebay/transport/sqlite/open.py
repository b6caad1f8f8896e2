"""Open the file of a SQLite log: check its format and namespace, and configure the connection."""

import os
import sqlite3
from pathlib import Path

from forebay.transport.base import LogSync
from forebay.transport.recording.manifest import Contents, is_recording, read_contents
from forebay.transport.sqlite import schema


def open_file(
    path: Path, namespace: str, *, readonly: bool, sync: LogSync
) -> tuple[sqlite3.Connection, str, Contents | None]:
    """Return a connection, the namespace of the log, and the contents of the file if it is a recording.

    A writer initialises an empty file as a log of `namespace`. With `sync` full, each of its commits waits for the
    disk. Raises LogUnusable with a one-line reason.
    """
    try:
        db = schema.connect(path, readonly=readonly)
    except sqlite3.Error as error:
        raise schema.LogUnusable(f"{path}: cannot be opened ({error}); choose another path") from error
    try:
        known = schema.check_format(db, path)
        if readonly and not known:
            raise schema.LogEmpty(f"{path}: is empty; start a writer first, which creates the log")
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
