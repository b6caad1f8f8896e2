"""Write the JSON Schemas and docs/events.md from the event types, and the fields of the APIs: `make schemas`.

The last chapter of docs/events.md is about recordings: their SQLite tables, with each column explained.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from forebay.transport.sqlite import schema as sqlite_schema
from forebay.transport.sqlite.recording import TABLES
from tests.harness.event_schemas import document, registry
from tests.harness.field_tables import pages

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = ROOT / "schemas/forebay/events/registry"
DOCUMENT = ROOT / "docs/events.md"
TOPIC = "<topic>"
NEW_LINE = r"\1\n    "
_COLUMN = re.compile(r"(^[^(]*\(|,) ?(?=[\"\w]+ [A-Z(])")
ABOUT = f"""\

## Recordings

A recording, made by `forebay record`, is a slice of a log in one SQLite file. A log file of `forebay up --log` has the
same topic tables and `forebay_meta`, and every command that reads recordings reads log files too. Any SQLite client
opens both. They are identified by `PRAGMA application_id` ({sqlite_schema.APPLICATION_ID:#x}, "FBAY") and
`PRAGMA user_version`: {sqlite_schema.FORMAT_VERSION} for a log, {sqlite_schema.RECORDING_VERSION} for a recording.
[replay-sql.md](replay-sql.md) has example queries.

A slice keeps the partition numbers and offsets of the log. For each group it has the snapshot before the window, the
topics that its owner applied (`requests`, `kv-events`, `metrics`, `progress`, `fleet`, `control`) from the view of that
snapshot on, the journal `decisions` from the snapshot on, and `groups`. It has no responses (`tokens`) and no `work`.
"""
TABLE_DESCRIPTIONS = {
    TOPIC: "The records of one topic; the table has its name, without a namespace.",
    "forebay_meta": "Metadata of the file, as text.",
    "forebay_extents": "The range of offsets of each partition. Recordings only.",
    "forebay_groups": "The groups of a recording. Recordings only.",
    "forebay_seal": "One row. Recordings only.",
}
COLUMN_DESCRIPTIONS = {
    (TOPIC, "id"): f"`partition << {sqlite_schema.OFFSET_BITS} \\| offset`: the order of the log",
    (TOPIC, "at_us"): "time of the append, microseconds since 1970; informative only, no decision depends on it",
    (TOPIC, "key"): "key set by the producer",
    (TOPIC, "headers"): "a JSON object of strings",
    (TOPIC, "value"): "the event, in the topic's codec",
    (TOPIC, "checksum"): "XXH3-64 of the whole record, signed",
    (TOPIC, "partition"): "derived from `id`",
    (TOPIC, "offset"): "derived from `id`",
    ("forebay_meta", "key"): "see below",
    ("forebay_meta", "value"): "see below",
    ("forebay_extents", "topic"): "name of the topic",
    ("forebay_extents", "partition"): "partition number in the log",
    ("forebay_extents", "first"): "first offset in the recording",
    ("forebay_extents", "end"): "one past the last offset in the recording",
    ("forebay_extents", "checksum"): "XXH3-64 of the checksums of its records, signed; NULL while it is being written",
    ("forebay_groups", "name"): "name of the group, which is its model",
    ("forebay_groups", "partition"): "control partition of the group",
    ("forebay_groups", "start"): "journal offset from which decisions are derived: 0, or the offset of the snapshot",
    ("forebay_groups", "first"): "journal offset at which the window begins",
    ("forebay_groups", "end"): "one past the last journal offset of the window",
    ("forebay_groups", "decisions"): "number of decisions in the window",
    ("forebay_groups", "core_version"): "version of the rules that decided; 0 if no record has it",
    ("forebay_seal", "digest"): "XXH3-128 of the file, as if these 32 digits were zeros",
}
META_DESCRIPTIONS = {
    "format": "value of `PRAGMA user_version`",
    "created": "creation time, ISO 8601",
    "namespace": "namespace of the log",
    "writer_pid": "process id of the last writer; logs only",
    "source": "source of the recording: `log`, `kafka` or `recording`",
    "forebay": "version of forebay that made the recording",
    "from": "time of the first journal record of the window, ISO 8601",
    "to": "time of the last journal record of the window, ISO 8601",
    "asked": "options of the recording command, as a JSON object",
    "anonymized": "`yes` or `no`",
    "complete": "`no` while it is being written",
    "content": "XXH3-128 of the content; recordings of the same records have the same value",
}


def main() -> None:
    """Replace the whole registry; schemas of removed topics are deleted."""
    REGISTRY.mkdir(exist_ok=True)
    for stale in REGISTRY.glob("*.json"):
        stale.unlink()
    for stem, schema in registry().items():
        (REGISTRY / f"{stem}.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    DOCUMENT.write_text(page())
    for path, text in pages().items():
        path.write_text(text)


def page() -> str:
    """Return the text of docs/events.md: the events, and the files that store them."""
    return document() + recordings_chapter()


def recordings_chapter() -> str:
    lines: list[str] = []
    with closing(sqlite3.connect(":memory:")) as db:
        sqlite_schema.create_meta(db, sqlite_schema.RECORDING_VERSION, {})
        for statement in (sqlite_schema.create_table(TOPIC), *TABLES):
            db.execute(statement)
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in sorted(names, key=list(TABLE_DESCRIPTIONS).index):
            lines += _table(db, name)
    lines += ["", "| key of `forebay_meta` | value |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in META_DESCRIPTIONS.items()]
    return ABOUT + "\n".join(lines) + "\n"


def _table(db: sqlite3.Connection, name: str) -> Iterator[str]:
    (statement,) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    yield from (
        "",
        f"### `{name}`",
        "",
        TABLE_DESCRIPTIONS[name],
        "",
        "```sql",
        f"{_COLUMN.sub(NEW_LINE, statement)};",
        "```",
        "",
    )
    yield from ("| column | type | holds |", "|---|---|---|")
    for _, column, kind, *_ in db.execute(f'PRAGMA table_xinfo("{name}")').fetchall():
        yield f"| `{column}` | {kind.removesuffix(' GENERATED ALWAYS').lower()} | {COLUMN_DESCRIPTIONS[name, column]} |"


if __name__ == "__main__":
    main()
