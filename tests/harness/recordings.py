"""Generate the chapter of docs/events.md on recordings: the SQLite tables, with each column explained."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing

from forebay.transport.recording.manifest import TABLES
from forebay.transport.sqlite import schema as sqlite_schema

TOPIC = "<topic>"
NEW_LINE = r"\1\n    "
_COLUMN = re.compile(r"(^[^(]*\(|,) ?(?=[\"\w]+ [A-Z(])")
ABOUT = f"""\

## Recordings

A recording, made by `forebay record`, is a slice of a log in one SQLite file. A log file of `forebay up --log` has the
same topic tables and `forebay_meta`; whatever reads a recording reads it, too. Any SQLite client opens both. They are
told by `PRAGMA application_id` ({sqlite_schema.APPLICATION_ID:#x}, "FBAY") and `PRAGMA user_version`:
{sqlite_schema.FORMAT_VERSION} for a log, {sqlite_schema.RECORDING_VERSION} for a recording.
[Ten questions in SQL](replay-sql.md) shows how to ask them.

A slice keeps partition numbers and offsets as they were. Of each group it holds the topics that its owner applied
(`requests`, `kv-events`, `metrics`, `progress`, `fleet`, `control`) from the view of the snapshot before the window on,
that snapshot, the journal `decisions` from where it stands on, and `groups`; no answers (`tokens`), and no `work`.
"""
TABLES_SAY = {
    TOPIC: "The records of one topic; the table has its name, without a namespace.",
    "forebay_meta": "What the file says of itself, as text.",
    "forebay_extents": "From where to where each partition is held: what is missing has a name. Recordings only.",
    "forebay_groups": "The groups of a recording. Recordings only.",
    "forebay_seal": "One row. Recordings only.",
}
COLUMNS_SAY = {
    (TOPIC, "id"): f"`partition << {sqlite_schema.OFFSET_BITS} \\| offset`: the order of the log",
    (TOPIC, "at_us"): "when it was appended, microseconds since 1970: for people only, no decision depends on it",
    (TOPIC, "key"): "as given by its producer",
    (TOPIC, "headers"): "a JSON object of strings",
    (TOPIC, "value"): "the event, in the topic's codec",
    (TOPIC, "checksum"): "XXH3-64 of the whole record, signed",
    (TOPIC, "partition"): "from the id",
    (TOPIC, "offset"): "from the id",
    ("forebay_meta", "key"): "see below",
    ("forebay_meta", "value"): "see below",
    ("forebay_extents", "topic"): "its name",
    ("forebay_extents", "partition"): "as in the log",
    ("forebay_extents", "first"): "the first offset that is held",
    ("forebay_extents", "end"): "one past the last",
    ("forebay_extents", "checksum"): "XXH3-64 of the checksums of its records, signed; NULL while it is being written",
    ("forebay_groups", "name"): "of the group: its model",
    ("forebay_groups", "partition"): "its control partition",
    (
        "forebay_groups",
        "start",
    ): "the journal offset from which its decisions are derived: 0, or where the snapshot stands",
    ("forebay_groups", "first"): "the journal offset at which the window begins",
    ("forebay_groups", "end"): "one past its last journal offset",
    ("forebay_groups", "decisions"): "how many are in the window",
    ("forebay_groups", "core_version"): "of the rules that decided; 0 where no record says it",
    ("forebay_seal", "digest"): "XXH3-128 of the file, as if these 32 digits were zeros",
}
META_SAYS = {
    "format": "as `PRAGMA user_version`",
    "created": "when, ISO 8601",
    "namespace": "of the log",
    "writer_pid": "of the process that wrote it last; logs only",
    "source": "what it was recorded from: `log`, `kafka` or `recording`",
    "forebay": "the version of forebay that recorded it",
    "from": "when the first journal record of the window was appended, ISO 8601",
    "to": "when the last one was",
    "asked": "what was asked for, by option, as a JSON object",
    "anonymized": "`yes` or `no`",
    "complete": "`no` while it is being written",
    "content": "XXH3-128 over what it holds: two recordings of the same records have the same",
}


def chapter() -> str:
    """Return the chapter on recordings as Markdown."""
    lines: list[str] = []
    with closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create_meta(db, sqlite_schema.RECORDING_VERSION, {})
        for statement in (sqlite_schema.create_table(TOPIC), *TABLES):
            db.execute(statement)
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in sorted(names, key=list(TABLES_SAY).index):
            lines += _table(db, name)
    lines += ["", "| key of `forebay_meta` | says |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in META_SAYS.items()]
    return ABOUT + "\n".join(lines) + "\n"


def _table(db: sqlite3.Connection, name: str) -> Iterator[str]:
    (statement,) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    yield from (
        "",
        f"### `{name}`",
        "",
        TABLES_SAY[name],
        "",
        "```sql",
        f"{_COLUMN.sub(NEW_LINE, statement)};",
        "```",
        "",
    )
    yield from ("| column | type | holds |", "|---|---|---|")
    for _, column, kind, *_ in db.execute(f'PRAGMA table_xinfo("{name}")').fetchall():
        yield f"| `{column}` | {kind.removesuffix(' GENERATED ALWAYS').lower()} | {COLUMNS_SAY[name, column]} |"
