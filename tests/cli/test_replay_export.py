"""`forebay replay export` writes every record once, flat, with its apply time, and views of the records."""

import asyncio
import base64
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from forebay.events.base import hex_digest, unpack_u64
from forebay.events.codec import decode
from forebay.events.kv import BlocksStored
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.logs import invoke
from tests.replay import incident
from tests.replay.duck import query_export
from tests.replay.slices import opened


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the incident log with an undecodable `progress` record and a stale journal record."""
    path = tmp_path_factory.mktemp("export") / "incident.db"
    asyncio.run(_record(path))
    return path


async def _record(path: Path) -> None:
    await incident.record(path)
    log = SqliteLog.open(path)
    stale = log.records(DECISIONS.name, 0, 1, 1)[0].value
    await log.append([Draft("progress", 0, b"\xff nothing"), Draft(DECISIONS.name, 0, stale)])
    log.close()


def export(path: Path, folder: Path, *options: str) -> Result:
    return invoke("replay", "export", path, folder, *options)


def lines(folder: Path, topic: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{topic}.ndjson").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "new" / "folder"
    result = export(path, folder)
    assert result.exit_code == 0, result.output
    assert "progress.ndjson  " in result.stdout
    assert "1 of them undecodable" in result.stdout
    return folder


def test_every_record_is_exported_once(path: Path, folder: Path) -> None:
    topics: dict[str, list[tuple[int, int, int]]] = {}
    with opened(path) as log:
        for name, partition, end in log.topics():
            records = log.records(name, partition, 0, end)
            topics.setdefault(name, []).extend((partition, one.offset, one.at_us) for one in records)
    assert {file.stem for file in folder.glob("*.ndjson")} == set(topics)
    for name, expected in topics.items():
        places = [(line["log_partition"], line["log_offset"], line["log_at_us"]) for line in lines(folder, name)]
        assert places == expected
    assert not list(folder.glob("*.part"))


def test_hashes_are_hex_and_tokens_are_counted(path: Path, folder: Path, tmp_path: Path) -> None:
    with opened(path) as log:
        first = decode(KV_EVENTS, log.records(KV_EVENTS.name, 0, 0, 1)[0].value)
    assert isinstance(first, BlocksStored)
    (line, *_) = lines(folder, "kv-events")
    assert line["sequence_hashes"] == [hex_digest(number) for number in unpack_u64(first.sequence_hashes)]
    (line, *_) = lines(folder, "requests")
    assert (line["type"], line["token_count"], line["prompt_tokens"]) == ("request.submitted", 120, 120)
    assert "token_ids" not in line
    assert export(path, tmp_path / "with", "--token-ids").exit_code == 0
    (line, *_) = lines(tmp_path / "with", "requests")
    assert len(line["token_ids"]) == 120


def test_records_have_their_apply_time_and_decision(path: Path, folder: Path) -> None:
    journal = {line["log_offset"]: line for line in lines(folder, "decisions")}
    seen: dict[str, list[tuple[int, int]]] = {}
    for offset, record in journal.items():
        if not record["void"]:
            for run in record["consumed"]:
                seen.setdefault(run["topic"], []).extend([(offset, run["now_us"])] * run["count"])
    for topic in ("requests", "kv-events", "metrics", "progress", "fleet", "control"):
        message = [(line["applied_by"], line["applied_us"]) for line in lines(folder, topic)]
        assert message[: len(seen[topic])] == seen[topic]
        assert all(place == (None, None) for place in message[len(seen[topic]) :])


def test_stale_and_undecodable_records_are_marked(folder: Path) -> None:
    *valid, stale = lines(folder, "decisions")
    assert stale["void"] is True
    assert not any(line["void"] for line in valid)
    (*_, broken) = lines(folder, "progress")
    assert broken["undecodable"].startswith("progress: ")
    assert base64.b64decode(broken["value"]) == b"\xff nothing"
    assert "type" not in broken


def test_every_view_has_every_column_of_its_events(folder: Path) -> None:
    files = sorted(folder.glob("*.ndjson"))
    views = [file.stem.replace("-", "_").replace(".", "_") for file in files]
    described = query_export(folder, *[f'DESCRIBE "{view}"' for view in views])
    counted = query_export(folder, *[f'SELECT count(*) FROM "{view}"' for view in views])
    for file, columns, rows in zip(files, described, counted, strict=True):
        written = {name for line in lines(folder, file.stem) for name in line}
        assert written <= {column[0] for column in columns}
        assert rows == [[len(lines(folder, file.stem))]]


def test_a_log_without_records_has_empty_views(tmp_path: Path) -> None:
    SqliteLog.open(tmp_path / "empty.db").close()
    assert export(tmp_path / "empty.db", tmp_path / "out").exit_code == 0
    assert query_export(tmp_path / "out", "SELECT request_id, terms.cost FROM decisions") == [[]]


def test_invalid_exports_are_rejected(path: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    file = tmp_path / "file"
    file.touch()
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(damaged)) as db, db:
        db.execute("UPDATE fleet SET value = x'00' WHERE id = 1")
    for source, folder, message in (
        (path, full, "full is not empty"),
        (path, file, "file is a file"),
        (path, file / "below", "cannot write to"),
        (tmp_path / "nothing.db", tmp_path / "out", "no such log file; check the path"),
        (file, tmp_path / "out", "file: is empty"),
        (damaged, tmp_path / "half", "fleet/0: the record at offset 1 does not match its checksum"),
    ):
        result = export(source, folder)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.stderr
        assert message in result.stderr
    assert not (tmp_path / "half" / "fleet.ndjson").exists(), "what is not whole has not the name of what is"
