"""Unverifiable items are counted by name and fail the run unless allowed."""

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted, SnapshotTaken
from forebay.events.topics import DECISIONS, KV_EVENTS, METRICS, PROGRESS, SNAPSHOTS, Topic
from forebay.replay.checks import UNVERIFIED
from forebay.replay.verify.verify import verify
from forebay.transport.base import LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.recordings import Shape, write_recording
from tests.replay.mutations import LogWithout, find, read_more, replace_record, rewrite_topic
from tests.replay.mutations import verify as command


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "original.db"
    asyncio.run(write_recording(path, Shape(3, 120, snapshot_every=50)))
    return path


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "changed.db"))


def put(path: Path, topic: Topic, offset: int, value: bytes) -> None:
    rewrite_topic(path, topic, lambda values: [*values[:offset], value, *values[offset:]])


def test_an_invalid_name_is_rejected(original: Path) -> None:
    run = command(original, "--allow", "everything")
    assert run.returncode == 2
    assert all(name in run.stderr for name in ("everything", *UNVERIFIED))


@pytest.mark.parametrize("value", [b"not a record", b'{"type":"request.routed"}', b'{"type":"other","owner_epoch":-1}'])
def test_foreign_journal_records_are_counted(recording: Path, value: bytes) -> None:
    """Insert after the last snapshot, because snapshots refer to earlier records by offset."""
    last = find(recording, DECISIONS, lambda event: isinstance(event, RequestRouted) and event.seq > 115)[0]
    put(recording, DECISIONS, last, value)
    run = command(recording, "--json")
    assert (run.returncode, json.loads(run.stdout)["unverified"]) == (1, {"foreign-records": 1})
    assert "--allow foreign-records" in run.stderr


def test_allowed_names_are_reported(recording: Path) -> None:
    put(recording, DECISIONS, 110, b"not a record")
    allowed = command(recording, "--allow", "foreign-records")
    assert allowed.returncode == 0
    assert "1 foreign-records" in allowed.stdout
    assert "(allowed)" in allowed.stdout


NEWER = b'{"type":"load.forecast","worker_id":"w0000"}'


def test_events_that_the_owner_did_not_know_either_had_no_effect(recording: Path) -> None:
    """Replace a load report that is superseded before the next digest."""
    replace_record(recording, METRICS, 0, lambda _: NEWER)
    run = command(recording, "--json")
    report = json.loads(run.stdout)
    assert (run.returncode, report["divergence"], report["unverified"], report["malformed"]) == (0, None, {}, 1)


def test_events_of_a_newer_version_are_counted(recording: Path) -> None:
    read_more(recording)
    replace_record(recording, METRICS, 0, lambda _: NEWER)
    run = command(recording, "--json")
    report = json.loads(run.stdout)
    assert (run.returncode, report["divergence"], report["unverified"]) == (2, None, {"unknown-events": 1})
    assert "metrics/0 offset 0: load.forecast" in run.stderr
    assert "use the version that wrote it, or accept it with --allow unknown-events" in run.stderr
    assert command(recording, "--allow", "unknown-events").returncode == 0


def test_a_divergence_after_events_of_a_newer_version_names_them(recording: Path) -> None:
    read_more(recording)
    replace_record(recording, PROGRESS, 0, lambda _: NEWER)
    run = command(recording, "--allow", "unknown-events")
    assert run.returncode == 1
    assert "1 earlier events of unknown types had no effect here: they may be the cause" in run.stdout


def test_malformed_events_are_ignored_and_counted(recording: Path) -> None:
    end = len(SqliteLog.open(recording, readonly=True).records(KV_EVENTS.name, 0, 0, 100_000))
    offset = end - 1
    replace_record(recording, KV_EVENTS, offset, lambda _: b"\xc1")
    report = json.loads(command(recording, "--json").stdout)
    assert report["unverified"] == {}
    assert report["malformed"] == 1


def test_a_snapshot_without_its_chunks(recording: Path) -> None:
    rewrite_topic(recording, SNAPSHOTS, lambda values: values[:-1])
    run = command(recording)
    assert run.returncode == 1
    assert "1 missing-snapshots" in run.stderr
    assert command(recording, "--allow", "missing-snapshots").returncode == 0


def test_a_snapshot_with_a_different_state(recording: Path) -> None:
    offset, taken = find(recording, DECISIONS, lambda event: isinstance(event, SnapshotTaken))

    def less(value: bytes) -> bytes:
        chunk = decode(SNAPSHOTS, value)
        return msgspec.msgpack.encode(msgspec.structs.replace(chunk, parts=chunk.parts[1:]))

    replace_record(recording, SNAPSHOTS, taken.first_offset, less)
    report = json.loads(command(recording, "--json").stdout)
    assert report["divergence"]["offset"] == offset
    assert "snapshot at offset" in report["divergence"]["reason"]


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (b'{"type":"scale.decided","owner_epoch":0,"seq":40}', "scale.decided"),
        (b'{"type":"request.rejected","owner_epoch":0,"seq":40,"reason":"too_dear"}', "request.rejected"),
    ],
)
def test_error_names_decisions_of_a_newer_version(recording: Path, value: bytes, tag: str) -> None:
    put(recording, DECISIONS, 41, value)
    run = command(recording)
    assert run.returncode == 2
    assert f"journal record 41 is a {tag} that this version cannot read" in run.stderr
    assert run.stderr.rstrip().endswith("use the version that wrote it")


def test_a_gap_in_the_offsets_of_an_input(original: Path) -> None:
    log = SqliteLog.open(original, readonly=True)
    with pytest.raises(LogError, match=r"progress/0: 1 records between 0 and \d+ are missing"):
        asyncio.run(verify(LogWithout(log, PROGRESS, 7)))
    log.close()


def test_pending_decisions_are_counted(recording: Path) -> None:
    """If the end of the journal is cut off, the rest is verified and the lost decisions count as pending."""
    rewrite_topic(recording, DECISIONS, lambda values: values[:-10])
    run = command(recording, "--json")
    report = json.loads(run.stdout)
    assert run.returncode == 0
    assert report["unapplied"] > 0
    assert report["verified"] == report["decisions"]
