"""Verification of edited and resealed recordings: divergences are reported in full, and nothing is passed over."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.step import AnyDecision
from forebay.core.world import CORE_VERSION
from forebay.events.base import U64_BYTES
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, CommandSent, ConsumedRun, OwnerClaimed, RequestRouted, SnapshotTaken
from forebay.events.groups import GroupPlaced
from forebay.events.kv import BlocksStored
from forebay.events.progress import CommandDone, FirstTokenEmitted, RequestFinished
from forebay.events.snapshots import SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, FLEET, GROUPS, KV_EVENTS, METRICS, PROGRESS, SNAPSHOTS, Topic
from forebay.journal.checks import UNVERIFIED
from forebay.replay.record.slice import Window
from forebay.replay.verify.divergence import DivergenceReport
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording_writer import RecordingWriter
from tests.benchmarks.recordings import Shape, write_recording
from tests.cli.up import forebay as process
from tests.core.worlds import commanded
from tests.replay.mutations import LogWithout, find, read_more, replace_record, rewrite_topic
from tests.replay.mutations import verify as command
from tests.replay.recorder import fleet
from tests.replay.slices import contents, journal_of, opened, report_of, run

WORKERS, DECISIONS_MADE = 4, 120
NEWER = b'{"type":"load.forecast","worker_id":"w0000"}'

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with shared prompts whose journal ends with a digest."""
    path = tmp_path_factory.mktemp("recordings") / "original.db"
    asyncio.run(write_recording(path, Shape(WORKERS, DECISIONS_MADE, snapshot_every=50)))
    return path


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "changed.db"))


@pytest.fixture(scope="module")
def original_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of a system with two owners and several snapshots."""
    path = tmp_path_factory.mktemp("recordings") / "original.db"
    asyncio.run(run(path, owners=2, requests=40, snapshot_every=8))
    return path


@pytest.fixture
def recording_of_two(original_of_two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original_of_two, tmp_path / "changed.db"))


def checked(path: Path, code: int, *options: str) -> tuple[dict[str, Any], str]:
    """Return the report of the command that verifies a recording with this exit code, and its errors."""
    ran = command(path, "--json", *options)
    assert ran.returncode == code, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def divergence(path: Path) -> dict[str, Any]:
    result, _ = checked(path, 1)
    report: dict[str, Any] = result["divergence"]
    assert result["verified"] == result["decisions"] - (report["recorded"]["type"].startswith("request."))
    return report


def divergence_of(path: Path) -> DivergenceReport:
    found = report_of(path).divergence
    assert found is not None
    return found


def routed(path: Path, after: int = 60) -> tuple[int, RequestRouted]:
    """Return the first decision after `seq` `after` that had another candidate."""

    def wanted(event: object) -> bool:
        return isinstance(event, RequestRouted) and event.seq > after and event.runner_up is not None

    return find(path, DECISIONS, wanted)


def first_of(path: Path, topic: Topic, kind: type) -> tuple[int, Any]:
    return find(path, topic, lambda event: isinstance(event, kind))


def edit(path: Path, topic: Topic, offset: int, event: Any, **changes: Any) -> None:
    replace_record(path, topic, offset, lambda _: encode(topic, replace(event, **changes)))


def insert(path: Path, offset: int, value: bytes) -> None:
    rewrite_topic(path, DECISIONS, lambda values: [*values[:offset], value, *values[offset:]])


def test_the_original_is_verified(original: Path, original_of_two: Path) -> None:
    ran = process("verify", str(original))
    assert ran.returncode == 0
    assert f"decisions  {DECISIONS_MADE}, verified {DECISIONS_MADE}" in ran.stdout
    report = report_of(original_of_two)
    assert (report.divergence, report.unverified, report.verified) == (None, {}, report.decisions)
    assert (report.claims, report.snapshots > 1) == (2, True)


# Divergences


def test_changed_kv_event_that_alters_an_overlap(recording: Path) -> None:
    offset, stored = find(
        recording, KV_EVENTS, lambda event: isinstance(event, BlocksStored) and event.parent_hash is None
    )
    edit(recording, KV_EVENTS, offset, stored, sequence_hashes=stored.sequence_hashes[: 2 * U64_BYTES])
    report = divergence(recording)
    assert report["recorded"]["type"] == report["derived"]["type"] == "request.routed"
    table = report["table"]
    assert table["digest"] != table["recorded_digest"]
    assert len(table["rows"]) == table["recorded_candidates"] == WORKERS
    (differing,) = [row for row in table["rows"] if "device_overlap" in row["differs"]]
    assert differing["worker_id"] == stored.worker_id
    assert differing["derived"]["device_overlap"] < differing["recorded"]["device_overlap"]
    assert report["events"][-1]["type"] == "request.submitted"
    assert report["events"][-1]["now_us"] == report["recorded"]["consumed"][-1]["now_us"]
    assert report["previous"]["offset"] == report["offset"] - 1
    assert report["held"]["since"]["kv-events"][0] <= offset < report["held"]["since"]["kv-events"][1]
    shown = command(recording)
    assert shown.returncode == 1
    for words in ("DIVERGENCE", "Cost table", "!=", "holds only the terms of the winner"):
        assert words in shown.stdout, shown.stdout


def test_changed_fields_of_a_decision(recording: Path) -> None:
    offset, event = routed(recording)
    assert event.runner_up is not None
    for field, value, hint in (
        ("worker_id", event.runner_up.worker_id, "equal digests"),
        ("table_digest", "0" * 16, "the digest or a candidate"),
    ):
        edit(recording, DECISIONS, offset, event, **{field: value})
        report = divergence(recording)
        assert (report["offset"], list(report["differs"])) == (offset, [field])
        assert hint in report["hint"]


def test_a_removed_decision_is_a_divergence(recording: Path) -> None:
    offset, event = routed(recording)
    rewrite_topic(recording, DECISIONS, lambda values: values[:offset] + values[offset + 1 :])
    report = divergence(recording)
    assert report["offset"] == offset
    assert f"its seq is {event.seq + 1}, that of the previous record is {event.seq - 1}: 1 records" in report["hint"]


def test_a_repeated_decision_is_skipped_and_counted(recording: Path) -> None:
    """It has no effect, so it is counted and does not fail the verification."""
    offset, _ = routed(recording)
    before, _ = checked(recording, 0)
    rewrite_topic(recording, DECISIONS, lambda values: [*values, values[offset]])
    after, _ = checked(recording, 0)
    assert (after["repeated"], after | {"repeated": 0}) == (1, before)
    assert "repeated   1 records that repeat an earlier record" in command(recording).stdout


def test_a_changed_digest_is_a_divergence(recording: Path) -> None:
    offset, event = first_of(recording, DECISIONS, Advanced)
    edit(recording, DECISIONS, offset, event, digest="0" * 16)
    report = divergence(recording)
    assert (report["offset"], list(report["differs"]), report["table"]) == (offset, ["digest"], None)
    assert "differs from the sealed digest" in command(recording).stdout


def test_a_later_divergence_is_bracketed_by_the_previous_digest(recording: Path) -> None:
    digest, _ = first_of(recording, DECISIONS, Advanced)
    offset, event = routed(recording, after=digest + 5)
    edit(recording, DECISIONS, offset, event, ties=event.ties + 1)
    report = divergence(recording)
    assert (report["held"]["sealed"], report["held"]["journal_offset"]) == (True, digest)


# Fields and records that are no decisions


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[:-1] + b',"transfer_cost":3}',
        lambda value: value.replace(b'{"type"', b'{"worker_id":"another","type"', 1),
        lambda value: value.replace(b'{"type"', b'{"type":"request.routed","type"', 1),
        lambda value: value.replace(b",", b", ", 1),
    ],
    ids=["a field of a newer version", "a field twice", "its kind twice", "a space"],
)
def test_a_decision_with_unknown_fields_diverges(recording: Path, change: Callable[[bytes], bytes]) -> None:
    """Other readers might use fields that verification ignores."""
    replace_record(recording, DECISIONS, routed(recording)[0], change)
    report, error = checked(recording, 1)
    assert report["unverified"] == {"unread-fields": 1}
    assert "accept it with --allow unread-fields" in error
    assert command(recording, "--allow", "unread-fields").returncode == 0


def test_a_claim_that_consumes_events_is_rejected(recording: Path) -> None:
    """No owner would apply these events."""
    _, claim = first_of(recording, DECISIONS, OwnerClaimed)
    edit(recording, DECISIONS, 0, claim, consumed=(ConsumedRun(topic=FLEET.name, count=1, now_us=0),))
    found = divergence_of(recording)
    assert (found.offset, found.reason) == (0, "an ownership claim must not consume events")


def test_decisions_of_a_claim_with_another_core_version_are_not_verified(recording_of_two: Path) -> None:
    """They are named even if they match the decisions of this version, and no snapshot names the other version."""
    decisions = report_of(recording_of_two).decisions
    _, claim = first_of(recording_of_two, DECISIONS, OwnerClaimed)
    edit(recording_of_two, DECISIONS, 0, claim, core_version=CORE_VERSION + 1)
    report = report_of(recording_of_two)
    assert [(span.rules, span.first) for span in report.others] == [(CORE_VERSION + 1, 0)]
    assert report.verified < decisions
    assert f"a forebay with version {CORE_VERSION + 1} of the rules" in command(recording_of_two).stdout


def test_decisions_without_a_claim_are_rejected(recording: Path) -> None:
    """Without a claim, the core version of the decisions is unknown."""

    def unclaimed(values: list[bytes]) -> list[bytes]:
        records = [decode(DECISIONS, value) for value in values[1:9]]
        return [encode(DECISIONS, replace(one, owner_epoch=-1)) for one in records]

    rewrite_topic(recording, DECISIONS, unclaimed)
    with pytest.raises(LogError, match="journal record 0 has the owner epoch -1, whose claim is missing"):
        report_of(recording)


def a_snapshot(path: Path) -> tuple[int, SnapshotTaken]:
    """Return a snapshot other than the first, with its offset."""
    offset, taken = find(path, DECISIONS, lambda event: isinstance(event, SnapshotTaken) and event.seq > 20)
    assert taken.first_offset
    return offset, taken


@pytest.mark.parametrize("journal_offset", [0, 1, 20, 1_000_000])
def test_a_snapshot_with_another_offset_is_rejected(recording_of_two: Path, journal_offset: int) -> None:
    """The state matches its digest, but a replay from there would apply the wrong events."""
    offset, taken = a_snapshot(recording_of_two)
    edit(recording_of_two, DECISIONS, offset, taken, journal_offset=journal_offset)
    assert divergence_of(recording_of_two).offset == offset


@pytest.mark.parametrize(("field", "value"), [("owner_epoch", 10**9), ("seq", 3)])
def test_a_state_with_another_owner_epoch_or_seq_is_rejected(recording_of_two: Path, field: str, value: int) -> None:
    """The digest of a state covers neither field."""
    offset, taken = a_snapshot(recording_of_two)
    replace_record(recording_of_two, SNAPSHOTS, taken.first_offset, with_state(field, value))
    assert divergence_of(recording_of_two).offset == offset


def with_state(field: str, value: int) -> Callable[[bytes], bytes]:
    def change(chunk: bytes) -> bytes:
        report: SnapshotChunk = decode(SNAPSHOTS, chunk)
        parts = [replace(one, **{field: value}) if isinstance(one, WorldState) else one for one in report.parts]
        return encode(SNAPSHOTS, replace(report, parts=tuple(parts)))

    return change


def test_a_slice_that_begins_with_an_unknown_owner_is_rejected(original_of_two: Path, tmp_path: Path) -> None:
    """All later records would be stale, with no record left to verify."""
    journal = [(one, decode(DECISIONS, one.value)) for one in journal_of(original_of_two)]
    last_claim = max(one.offset for one, record in journal if isinstance(record, OwnerClaimed))
    newest_us = max(one.at_us for one, record in journal if isinstance(record, AnyDecision))
    out, lie = tmp_path / "out.rec", with_state("owner_epoch", 10**9)
    with opened(original_of_two) as log:
        held = asyncio.run(contents(log, Window(newest_us, None)))
        assert held.groups[0].start > last_claim
        writer = RecordingWriter.create(out, held)
        for extent in held.extents:
            records = log.records(extent.topic, extent.partition, extent.first, extent.count)
            if extent.topic == SNAPSHOTS.name:
                records = [replace(one, value=lie(one.value)) for one in records]
            writer.write(records)
        writer.finish()
    with pytest.raises(LogError, match="has checksum"):
        report_of(out)


def test_a_missing_journal_is_rejected(recording: Path) -> None:
    rewrite_topic(recording, DECISIONS, lambda _: [])
    ran = command(recording)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "nothing to verify: the journal of control partition 0 in" in ran.stderr


def test_an_empty_log_verifies_nothing(tmp_path: Path) -> None:
    SqliteLog.open(tmp_path / "empty.db").close()
    assert checked(tmp_path / "empty.db", 0)[0]["decisions"] == 0


def test_a_journal_that_applies_more_events_than_exist_is_rejected(recording: Path) -> None:
    rewrite_topic(recording, PROGRESS, lambda values: values[:3])
    with pytest.raises(LogError, match="progress"):
        report_of(recording)


async def test_a_group_in_another_partition_is_rejected(recording: Path) -> None:
    log = SqliteLog.open(recording)
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group="m", partition=5)))])
    log.close()
    ran = process("verify", str(recording))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "nothing to verify: the journal of control partition 5 in" in ran.stderr


# What cannot be verified is counted by name, and fails unless allowed


def test_an_invalid_name_is_rejected(original: Path) -> None:
    ran = command(original, "--allow", "everything")
    assert ran.returncode == 2
    assert all(name in ran.stderr for name in ("everything", *UNVERIFIED))


@pytest.mark.parametrize("value", [b"not a record", b'{"type":"request.routed"}', b'{"type":"other","owner_epoch":-1}'])
def test_foreign_journal_records_are_counted(recording: Path, value: bytes) -> None:
    """Insert after the last snapshot, because snapshots refer to earlier records by offset."""
    insert(recording, find(recording, DECISIONS, is_one_of_the_last)[0], value)
    report, error = checked(recording, 1)
    assert report["unverified"] == {"foreign-records": 1}
    assert "--allow foreign-records" in error
    allowed = command(recording, "--allow", "foreign-records")
    assert allowed.returncode == 0
    assert "1 foreign-records" in allowed.stdout
    assert "(allowed)" in allowed.stdout


def is_one_of_the_last(event: object) -> bool:
    return isinstance(event, RequestRouted) and event.seq > DECISIONS_MADE - 5


def test_events_that_the_owner_did_not_know_either_had_no_effect(recording: Path) -> None:
    """Replace a load report that is superseded before the next digest."""
    replace_record(recording, METRICS, 0, lambda _: NEWER)
    report, _ = checked(recording, 0)
    assert (report["divergence"], report["unverified"], report["malformed"]) == (None, {}, 1)
    replace_record(recording, KV_EVENTS, 0, lambda _: b"\xc1")
    report = json.loads(command(recording, "--json").stdout)
    assert (report["unverified"], report["malformed"]) == ({}, 1), "it diverges before the load report"


def test_events_of_a_newer_version_are_counted(recording: Path) -> None:
    read_more(recording)
    replace_record(recording, METRICS, 0, lambda _: NEWER)
    report, error = checked(recording, 2)
    assert (report["divergence"], report["unverified"]) == (None, {"unknown-events": 1})
    assert "metrics/0 offset 0: load.forecast" in error
    assert "use the version that wrote it, or accept it with --allow unknown-events" in error
    assert command(recording, "--allow", "unknown-events").returncode == 0
    replace_record(recording, PROGRESS, 0, lambda _: NEWER)
    diverging = command(recording, "--allow", "unknown-events")
    assert diverging.returncode == 1
    assert "1 earlier events of unknown types had no effect here: they may be the cause" in diverging.stdout


def test_a_snapshot_without_its_chunks(recording: Path) -> None:
    rewrite_topic(recording, SNAPSHOTS, lambda values: values[:-1])
    assert "1 missing-snapshots" in checked(recording, 1)[1]
    assert command(recording, "--allow", "missing-snapshots").returncode == 0


def test_a_snapshot_with_a_different_state(recording: Path) -> None:
    offset, taken = first_of(recording, DECISIONS, SnapshotTaken)

    def less(value: bytes) -> bytes:
        chunk = decode(SNAPSHOTS, value)
        return encode(SNAPSHOTS, replace(chunk, parts=chunk.parts[1:]))

    replace_record(recording, SNAPSHOTS, taken.first_offset, less)
    found = divergence_of(recording)
    assert (found.offset, "snapshot at offset" in found.reason) == (offset, True)


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (b'{"type":"scale.decided","owner_epoch":0,"seq":40}', "scale.decided"),
        (b'{"type":"request.rejected","owner_epoch":0,"seq":40,"reason":"too_dear"}', "request.rejected"),
    ],
)
def test_error_names_decisions_of_a_newer_version(recording: Path, value: bytes, tag: str) -> None:
    insert(recording, 41, value)
    ran = command(recording)
    assert ran.returncode == 2
    assert f"journal record 41 is a {tag} that this version cannot read" in ran.stderr
    assert ran.stderr.rstrip().endswith("use the version that wrote it")


def test_a_gap_in_the_offsets_of_an_input(original: Path) -> None:
    with opened(original) as log, pytest.raises(LogError, match=r"progress/0: 1 records between 0 and \d+ are missing"):
        asyncio.run(verify(LogWithout(log, PROGRESS, 7)))


def test_pending_decisions_are_counted(recording: Path) -> None:
    """If the end of the journal is cut off, the rest is verified and the lost decisions count as pending."""
    rewrite_topic(recording, DECISIONS, lambda values: values[:-10])
    report, _ = checked(recording, 0)
    assert report["unapplied"] > 0
    assert report["verified"] == report["decisions"]


# Progress of workers that were not selected, in contrast to late progress


def record_progress(path: Path, *, foreign: bool) -> list[int]:
    """Write a log at `path`. Return the offsets of its foreign progress, empty if not `foreign`."""
    made, offsets = fleet("a", "b"), list[int]()
    epochs = {name: made.epoch(name) for name in ("a", "b")}

    def report(kind: Any, worker: str, name: str = "r", attempt: int = 1, **fields: Any) -> None:
        """Apply an event of a worker about a request, or about a command if there are fields."""
        about = fields or {"request_id": name, "attempt": attempt}
        ending = {"finish_reason": "stop"} if kind is RequestFinished else {}
        epoch = epochs.get(worker, epochs["a"])
        made("progress", kind(worker_id=worker, worker_epoch=epoch, owner_epoch=0, **about, **ending))

    def strange(*event: Any, **fields: Any) -> None:
        """Report foreign progress, if there is to be any."""
        if foreign:
            report(*event, **fields)
            offsets.append(made.world.view[PROGRESS.name] - 1)

    def other_than(worker: str) -> str:
        return "b" if worker == "a" else "a"

    selected = made.ask("r").worker_id
    other = other_than(selected)
    strange(FirstTokenEmitted, other)
    report(FirstTokenEmitted, selected)
    for _ in range(2):  # the second report is late: the request has ended
        report(RequestFinished, selected)
    strange(RequestFinished, other)
    strange(FirstTokenEmitted, other, "of another model")
    first = made.ask("moved").worker_id
    second = other_than(first)
    made.lose(first)
    report(FirstTokenEmitted, first, "moved")  # a lost worker reports on its request while another worker runs it
    report(RequestFinished, second, "moved", 2)
    (sent,) = made("control", commanded("c", "pause", timeout_us=60_000_000))
    assert isinstance(sent, CommandSent)
    strange(CommandDone, "stranger", command_id="c", action="pause")
    strange(CommandDone, second, command_id="of another model", action="pause")
    report(CommandDone, second, command_id="c", action="pause")
    made.seal()
    # The live core forgets ended requests and does not check command responses.
    assert made.world.counts["foreign_progress"] == (2 if foreign else 0)
    asyncio.run(made.log(path)).close()
    return offsets


def test_foreign_progress_fails_the_verification_and_names_both_workers(tmp_path: Path) -> None:
    path = tmp_path / "strange.db"
    offsets = record_progress(path, foreign=True)
    ran = command(path)
    assert ran.returncode == 1
    lines = [line for line in ran.stdout.splitlines() if line.startswith("foreign ")]
    assert len(lines) == len(offsets) == 5
    for line, offset in zip(lines, offsets, strict=True):
        assert f"at offset {offset} of progress is from worker " in line
    assert "request r, attempt 1: was sent to " in lines[0]
    assert "request of another model, attempt 1: was sent to no worker of this group" in lines[2]
    assert "command c: was sent to " in lines[3]
    assert "is from worker stranger" in lines[3]
    assert "command of another model: was sent to no worker of this group" in lines[4]
    assert "not verified: 5 foreign-progress" in ran.stderr
    report, _ = checked(path, 0, "--allow", "foreign-progress")
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
    assert report["unverified"] == {"foreign-progress": 5}
    first = report["foreign_progress"][0]
    assert (first["about"], first["attempt"], first["offset"]) == ("r", 1, offsets[0])
    assert first["type"] == "progress.first_token_emitted"
    (selected,) = first["selected"]
    assert {first["reported_by"], selected.split(",")[0]} == {"a", "b"}


def test_late_progress_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "late.db"
    assert record_progress(path, foreign=False) == []
    ran = command(path)
    assert (ran.returncode, "foreign" in ran.stdout) == (0, False), ran.stdout
