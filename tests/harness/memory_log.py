"""A log in memory together with its database connection, for tests that break the database under the log."""

import sqlite3

from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import SqliteLog

NAMESPACE = "forebay"


def memory_log() -> tuple[SqliteLog, sqlite3.Connection]:
    """Return an empty log in memory, and the connection that it uses."""
    db = schema.connect(None, readonly=False)
    schema.initialise(db, NAMESPACE)
    return SqliteLog(db, None, None, NAMESPACE), db


def fail_commits(db: sqlite3.Connection) -> None:
    """Fail every later commit of the log on this connection, as a full disk does."""
    db.execute("PRAGMA query_only = ON")
