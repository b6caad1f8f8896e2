"""Verification checks fields other than decisions in edited and resealed files."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.core.step import AnyDecision
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, ConsumedRun, JournalRecord, OwnerClaimed, RequestRouted, SnapshotTaken
from forebay.events.groups import GroupPlaced
from forebay.events.snapshots import SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, FLEET, GROUPS, PROGRESS, SNAPSHOTS
from forebay.replay.record.slice import Window
from forebay.transport.base import Draft, LogError
from forebay.transport.recording.writer import RecordingWriter
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.up import forebay as process
from tests.replay.mutations import find, replace_record, rewrite_topic
from tests.replay.mutations import verify as command
from tests.replay.slices import contents, journal_of, opened, report_of, run

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "original.db"
    asyncio.run(run(path, owners=2, requests=40, snapshot_every=8))
    return path


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "changed.db"))


def falsify(path: Path, offset: int, change: Callable[[JournalRecord], JournalRecord]) -> None:
    replace_record(path, DECISIONS, offset, lambda value: encode(DECISIONS, change(decode(DECISIONS, value))))


def a_snapshot(path: Path) -> tuple[int, SnapshotTaken]:
    """Return a snapshot other than the first, with its offset."""
    offset, taken = find(path, DECISIONS, lambda event: isinstance(event, SnapshotTaken) and event.seq > 20)
    assert taken.first_offset
    return offset, taken


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
    offset, _ = find(recording, DECISIONS, lambda event: isinstance(event, RequestRouted) and event.seq > 20)
    replace_record(recording, DECISIONS, offset, change)
    ran = command(recording, "--json")
    assert (ran.returncode, json.loads(ran.stdout)["unverified"]) == (1, {"unread-fields": 1})
    assert "accept it with --allow unread-fields" in ran.stderr
    assert command(recording, "--allow", "unread-fields").returncode == 0


def test_a_claim_that_consumes_events_is_rejected(recording: Path) -> None:
    """No owner would apply these events."""
    runs = (ConsumedRun(topic=FLEET.name, count=1, now_us=0),)
    falsify(recording, 0, lambda claim: replace(claim, consumed=runs))
    divergence = report_of(recording).divergence
    assert divergence is not None
    assert (divergence.offset, divergence.reason) == (0, "an ownership claim must not consume events")


def test_decisions_of_a_claim_with_another_core_version_are_not_verified(recording: Path) -> None:
    """They are named even if they match the decisions of this version, and no snapshot names the other version."""
    decisions = report_of(recording).decisions
    falsify(recording, 0, lambda claim: replace(claim, core_version=CORE_VERSION + 1))
    report = report_of(recording)
    assert [(span.rules, span.first) for span in report.others] == [(CORE_VERSION + 1, 0)]
    assert report.verified < decisions
    assert f"a forebay with version {CORE_VERSION + 1} of the rules" in command(recording).stdout


def test_decisions_without_a_claim_are_rejected(recording: Path) -> None:
    """Without a claim, the core version of the decisions is unknown."""

    def unclaimed(values: list[bytes]) -> list[bytes]:
        records = [decode(DECISIONS, value) for value in values[1:9]]
        return [encode(DECISIONS, replace(one, owner_epoch=-1)) for one in records]

    rewrite_topic(recording, DECISIONS, unclaimed)
    with pytest.raises(LogError, match="journal record 0 has the owner epoch -1, whose claim is missing"):
        report_of(recording)


@pytest.mark.parametrize("journal_offset", [0, 1, 20, 1_000_000])
def test_a_snapshot_with_another_offset_is_rejected(recording: Path, journal_offset: int) -> None:
    """The state matches its digest, but a replay from there would apply the wrong events."""
    offset, _ = a_snapshot(recording)
    falsify(recording, offset, lambda taken: replace(taken, journal_offset=journal_offset))
    divergence = report_of(recording).divergence
    assert divergence is not None
    assert divergence.offset == offset


def test_a_state_with_another_owner_epoch_or_seq_is_rejected(recording: Path) -> None:
    """The digest of a state covers neither field."""
    offset, taken = a_snapshot(recording)
    for field, value in (("owner_epoch", 10**9), ("seq", 3)):
        path = Path(shutil.copy(recording, recording.with_name(field)))
        replace_record(path, SNAPSHOTS, taken.first_offset, with_state(field, value))
        divergence = report_of(path).divergence
        assert divergence is not None, field
        assert divergence.offset == offset


def with_state(field: str, value: int) -> Callable[[bytes], bytes]:
    def change(chunk: bytes) -> bytes:
        report: SnapshotChunk = decode(SNAPSHOTS, chunk)
        parts = [replace(one, **{field: value}) if isinstance(one, WorldState) else one for one in report.parts]
        assert tuple(parts) != report.parts
        return encode(SNAPSHOTS, replace(report, parts=tuple(parts)))

    return change


def test_a_slice_that_begins_with_an_unknown_owner_is_rejected(original: Path, tmp_path: Path) -> None:
    """All later records would be stale, with no record left to verify."""
    journal = journal_of(original)
    last_claim = max(one.offset for one in journal if isinstance(decode(DECISIONS, one.value), OwnerClaimed))
    newest_us = max(one.at_us for one in journal if isinstance(decode(DECISIONS, one.value), AnyDecision))
    out = tmp_path / "out.rec"
    with opened(original) as log:
        held = asyncio.run(contents(log, Window(newest_us, None)))
        assert held.groups[0].start > last_claim
        writer = RecordingWriter.create(out, held)
        for extent in held.extents:
            records = log.records(extent.topic, extent.partition, extent.first, extent.count)
            if extent.topic == SNAPSHOTS.name:
                records = [
                    replace(one, value=with_state("owner_epoch", 10**9)(one.value))
                    if any(isinstance(part, WorldState) for part in decode(SNAPSHOTS, one.value).parts)
                    else one
                    for one in records
                ]
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
    ran = command(tmp_path / "empty.db", "--json")
    assert (ran.returncode, json.loads(ran.stdout)["decisions"]) == (0, 0)


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


def test_the_original_is_verified(original: Path) -> None:
    report = report_of(original)
    assert (report.divergence, report.unverified, report.verified) == (None, {}, report.decisions)
    assert (report.claims, report.snapshots > 1) == (2, True)
    assert any(isinstance(decode(DECISIONS, one.value), Advanced) for one in journal_of(original))
