"""Slices of logs are self-contained, and a command after an interrupted one gives the same recording."""

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from forebay.core.step import AnyDecision
from forebay.core.world import World
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, SnapshotRecord
from forebay.events.topics import DECISIONS, PROGRESS
from forebay.journal.groups import groups_of, pools_of
from forebay.journal.reader import JournalReader
from forebay.journal.snapshots import newest_snapshot, snapshots_taken
from forebay.journal.start import Start
from forebay.replay.record import slice as record
from forebay.replay.record.slice import NothingDecided, Window, offset_at, slice_of
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.sqlite import recording, schema
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.recording_writer import RecordingWriter, part_of
from tests.depth import sampled
from tests.replay.mutations import Trimmed
from tests.replay.owner_histories import WrittenDriver, log_with
from tests.replay.slices import (
    OTHER,
    contents,
    joined_log,
    journal_of,
    opened,
    report_of,
    rows,
    sliced,
    source_log,
    spread,
    written,
)
from tests.system import MODEL

SEED = 20_260
CUTS = sampled(range(24), 12)
PAGE = 16  # records; small, so that a copy has many pages


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_log(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def joined(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return joined_log(source, tmp_path_factory.mktemp("joined"))


@pytest.fixture(scope="module")
def journal(source: Path) -> list[Record]:
    return journal_of(source)


@pytest.fixture
def log(source: Path) -> Iterator[SqliteLog]:
    with opened(source) as log:
        yield log


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


async def state_at(log: Log, end: int) -> str:
    """Return the digest of the state right before a journal offset, replayed from the beginning of the log."""
    reader = JournalReader(log, 0, Start(World(), 0), end)
    async for step in reader:
        assert step.divergence is None
    return f"{reader.world.digest():016x}"


def verified(path: Path, partition: int = 0) -> VerifyReport:
    """Return the report of a recording in which every decision is verified."""
    report = report_of(path, partition)
    assert report.divergence is None
    assert report.verified == report.decisions > 0
    return report


def test_every_window_verifies_and_reaches_the_state_of_the_whole_log(
    log: SqliteLog, journal: list[Record], tmp_path: Path
) -> None:
    """Windows can start and end anywhere: between a seal and its snapshot, or within the records of one event."""
    rng = random.Random(SEED)
    from_snapshot = 0
    for number in CUTS:
        first, last = sorted(rng.sample(range(len(journal)), 2))
        from_us, to_us = journal[first].at_us, journal[last].at_us
        out = tmp_path / f"{number}.rec"
        try:
            held = asyncio.run(sliced(log, out, Window(from_us, to_us)))
        except NothingDecided:
            continue
        report, group = verified(out), held.groups[0]
        assert (report.state, report.start) == (asyncio.run(state_at(log, group.end)), group.start)
        assert report.decisions >= group.decisions > 0
        inside = [one for one in journal if from_us <= one.at_us < to_us]
        assert (group.first, group.end) == (inside[0].offset, inside[-1].offset + 1)
        assert (held.from_us, held.to_us) == (inside[0].at_us, inside[-1].at_us)
        assert group.decisions == sum(isinstance(decode(DECISIONS, one.value), AnyDecision) for one in inside)
        from_snapshot += group.start > 0
    assert from_snapshot > len(CUTS) // 6


def test_a_slice_contains_only_the_records_it_needs(log: SqliteLog, journal: list[Record], out: Path) -> None:
    held = asyncio.run(sliced(log, out, Window(journal[-6].at_us)))
    ends = {(topic, partition): end for topic, partition, end in log.topics()}
    extents = {extent.topic: extent for extent in held.extents}
    topics = "groups requests kv-events metrics progress fleet control decisions snapshots"
    assert set(extents) == set(topics.split())
    assert extents["requests"].first > 0 < extents["snapshots"].first
    assert (extents["control"].first, extents["control"].count) == (1, 0)
    assert all(one.end <= ends.get((one.topic, one.partition), 0) for one in held.extents)
    with opened(out) as copy:
        assert asyncio.run(copy.begin("requests", 0)) == extents["requests"].first
        assert asyncio.run(copy.end("requests", 0)) == extents["requests"].end
        assert ("control", 0, 1) not in copy.topics()
        with pytest.raises(LogError, match=r"begins at offset \d+; 0 was not recorded"):
            copy.records("requests", 0, 0, 1)
        with pytest.raises(LogError, match="tokens/3 was not recorded"):
            copy.records("tokens", 3, 0, 1)
        assert [pool.pool for pool in asyncio.run(pools_of(copy, 0))] == ["default"]


def test_a_slice_can_be_sliced_again(source: Path, tmp_path: Path) -> None:
    journal = spread(source, tmp_path / "spread.db")
    outer, inner, whole = (tmp_path / f"{name}.rec" for name in ("outer", "inner", "whole"))
    with opened(tmp_path / "spread.db") as log:
        (early, seal), (late, _), *_ = asyncio.run(seals_of(log, len(journal)))
        held = asyncio.run(sliced(log, outer, Window(journal[early].at_us, journal[-2].at_us)))
    group = held.groups[0]
    assert group.start == seal.journal_offset
    with opened(outer) as log:
        within = asyncio.run(sliced(log, inner, Window(journal[late].at_us))).groups[0]
        assert asyncio.run(sliced(log, whole)).extents == held.extents
        assert asyncio.run(newest_snapshot(log, 0, early + 1)) == seal
    assert verified(whole).digest == verified(outer).digest
    verified(inner)
    assert within.end == group.end
    with opened(inner) as log, pytest.raises(LogError, match="the window begins too early") as raised:
        asyncio.run(contents(log, Window(journal[early].at_us)))
    assert recording.utc(journal[within.start].at_us) in str(raised.value)
    assert "requests before offset" in str(raised.value)


def test_a_window_that_ends_before_its_snapshot_was_written(source: Path, tmp_path: Path, out: Path) -> None:
    """A slice of only the decisions between a seal and its `SnapshotTaken` would have no snapshot."""
    journal = spread(source, tmp_path / "spread.db")
    with opened(tmp_path / "spread.db") as log:
        taken, seal = asyncio.run(seals_of(log, len(journal)))[1]
        group = asyncio.run(sliced(log, out, Window(journal[taken].at_us))).groups[0]
    assert group.start == seal.journal_offset <= taken == group.first
    with opened(out) as log, pytest.raises(LogError, match="no part of this window can be recorded"):
        asyncio.run(contents(log, Window(None, journal[taken].at_us)))


async def seals_of(log: SqliteLog, end: int) -> list[tuple[int, SnapshotRecord]]:
    return [found async for found in snapshots_taken(log, 0, 0, end)]


def test_groups_keep_their_partitions(joined: Path, source: Path, tmp_path: Path) -> None:
    with opened(joined) as log:
        assert asyncio.run(groups_of(log)) == {MODEL: 0, OTHER: 1}
        both = asyncio.run(sliced(log, tmp_path / "both.rec"))
        asyncio.run(sliced(log, tmp_path / "other.rec", names=(OTHER,)))
    assert [(group.name, group.partition) for group in both.groups] == [(MODEL, 0), (OTHER, 1)]
    # Events not yet applied at the end of the log are not recorded.
    assert report_of(tmp_path / "both.rec", 0) == msgspec.structs.replace(report_of(source), unapplied=0)
    assert report_of(tmp_path / "both.rec", 1) == report_of(tmp_path / "other.rec", 1)
    with opened(tmp_path / "other.rec") as log:
        assert asyncio.run(groups_of(log)) == {OTHER: 1}
        with pytest.raises(LogError, match="decisions/0 was not recorded"):
            asyncio.run(slice_of(log, MODEL, 0, Window()))


def test_an_embedded_log_names_its_group_by_its_model(log: SqliteLog) -> None:
    assert asyncio.run(groups_of(log)) == {MODEL: 0}
    with closing(SqliteLog.open(None)) as empty:
        assert asyncio.run(groups_of(empty)) == {"": 0}
        with pytest.raises(NothingDecided, match="journal of group 0 is empty"):
            asyncio.run(contents(empty))


@pytest.mark.parametrize("choose", [lambda at: Window(at + 1), lambda at: Window(None, 1), lambda _: Window(1, 2)])
def test_a_window_without_decisions_is_rejected(
    log: SqliteLog, journal: list[Record], choose: Callable[[int], Window]
) -> None:
    with pytest.raises(NothingDecided, match="made no decision in the window") as raised:
        asyncio.run(contents(log, choose(journal[-1].at_us)))
    assert recording.utc(journal[0].at_us) in str(raised.value)


def test_error_names_records_removed_by_retention_and_the_earliest_complete_time(
    source: Path, log: SqliteLog, journal: list[Record]
) -> None:
    held = asyncio.run(contents(log, Window(journal[len(journal) // 2].at_us)))
    progress = next(extent.first for extent in held.extents if extent.topic == PROGRESS.name)
    with closing(Trimmed.open(source, readonly=True)) as trimmed:
        trimmed.begins = {PROGRESS.name: progress}
        with pytest.raises(LogError, match=f"progress before offset {progress}$") as raised:
            asyncio.run(slice_of(trimmed, MODEL, 0, Window(journal[0].at_us)))
        earliest = asyncio.run(slice_of(trimmed, MODEL, 0, Window())).group
        assert 0 < earliest.start == earliest.first <= held.groups[0].start
        at_us = journal[earliest.start].at_us
        assert recording.utc(at_us) in str(raised.value)
        assert asyncio.run(slice_of(trimmed, MODEL, 0, Window(at_us))).group == earliest
        trimmed.begins = {PROGRESS.name: 1_000}
        text = r"no part of this window can be recorded: .* no progress before offset 1000, nor"
        with pytest.raises(LogError, match=text):
            asyncio.run(slice_of(trimmed, MODEL, 0, Window()))


async def test_a_clock_that_steps_back_at_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second owner's clock is behind, a window by time selects a contiguous range of offsets."""
    with closing(SqliteLog.open(None)) as log:
        for at_us in (10, 20, 30, 40, 50, 35, 45, 55, 65):
            monkeypatch.setattr("time.time_ns", lambda at_us=at_us: at_us * 1000)
            await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, Advanced(seq=at_us, digest="0" * 16)))])
        found = [
            (await offset_at(log, 0, at_us), await offset_at(log, 0, at_us, before=True)) for at_us in (5, 40, 46, 99)
        ]
    assert found == [(0, 0), (3, 6), (4, 7), (9, 9)]


# Copies that are interrupted, and their writers


class Stopped(Exception):
    """Raised to stop a copy."""


def stop(*_: object) -> None:
    raise Stopped


def new_writer(log: SqliteLog, out: Path) -> RecordingWriter:
    return RecordingWriter.create(out, asyncio.run(contents(log)))


@pytest.mark.parametrize("pages", [0, 3, 8])
def test_a_second_command_replaces_an_interrupted_copy(
    log: SqliteLog, tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PAGE_RECORDS", PAGE)
    whole, out = tmp_path / "whole", tmp_path / "again"
    undisturbed = asyncio.run(written(log, new_writer(log, whole)))
    left = pages

    def stop_after_pages(*_: object) -> None:
        nonlocal left
        if not left:
            raise Stopped
        left -= 1

    with pytest.raises(Stopped):
        asyncio.run(written(log, new_writer(log, out), stop_after_pages))
    assert not out.exists()
    with pytest.raises(LogUnusable, match="was not finished; run the `forebay record` command again"):
        SqliteLog.open(part_of(out), readonly=True)
    assert asyncio.run(written(log, new_writer(log, out))) == undisturbed
    assert rows(out) == rows(whole)
    assert out.stat().st_size == whole.stat().st_size, "nothing of the first copy stays in the file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "whole"]
    verified(out)


@pytest.mark.parametrize("step", ["forebay.transport.sqlite.recording.seal", "pathlib.Path.rename"])
def test_a_complete_recording_without_its_name_is_not_replaced(log: SqliteLog, out: Path, step: str) -> None:
    """Another process may be sealing it at that time, without a lock."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(step, stop)
        asyncio.run(sliced(log, out))
    before = part_of(out).read_bytes()
    with pytest.raises(LogUnusable, match=r"out.part: another process may be renaming it"):
        new_writer(log, out)
    assert part_of(out).read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["out.part"]


def test_two_writers_cannot_write_one_recording(log: SqliteLog, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.sqlite.schema.BUSY_TIMEOUT_S", 0.01)
    writer = new_writer(log, out)
    with pytest.raises(LogUnusable, match="another process writes it"):
        new_writer(log, out)
    out.write_text("somebody else's")
    with pytest.raises(LogUnusable, match="out: exists already"):
        asyncio.run(written(log, writer))
    assert out.read_text() == "somebody else's"
    with pytest.raises(LogUnusable, match="out: exists already"):
        new_writer(log, out)


def test_other_files_at_the_output_path_are_rejected(log: SqliteLog, out: Path) -> None:
    part_of(out).write_text("what somebody else put here, and wants to keep " * 9)
    with pytest.raises(LogUnusable, match="remove it, then run the command again"):
        new_writer(log, out)
    part_of(out).unlink()
    SqliteLog.open(part_of(out)).close()
    with pytest.raises(LogUnusable, match="is a log, expected an unfinished recording"):
        new_writer(log, out)
    part_of(out).write_bytes(b"")  # killed before its first transaction
    new_writer(log, out).close()
    with pytest.raises(LogUnusable, match="there is no directory"):
        new_writer(log, out.parent / "deeper" / "out")
    with pytest.raises(LogUnusable, match="is a directory"):
        new_writer(log, out.parent)


def test_a_full_disk_is_an_error_with_a_remedy(log: SqliteLog, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "PAGE_RECORDS", PAGE)
    connect = schema.connect

    def connect_to_small_disk(path: Path | None, *, readonly: bool) -> sqlite3.Connection:
        db = connect(path, readonly=readonly)
        db.execute("PRAGMA max_page_count = 30")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(schema, "connect", connect_to_small_disk)
        writer = new_writer(log, out)
    with pytest.raises(LogError, match=r"out.part: cannot be written \(.*full.*\); free disk space, then run"):
        asyncio.run(written(log, writer))
    asyncio.run(written(log, new_writer(log, out)))
    verified(out)


def test_a_new_recording_can_be_read_at_once(log: SqliteLog, out: Path) -> None:
    with closing(new_writer(log, out)) as writer:
        extent = next(extent for extent in writer.contents.extents if extent.topic == "requests")
        assert writer.log.records("requests", 0, 0, 10) == []
        records = log.records("requests", 0, 0, 5)
        writer.write(records)
        assert writer.log.records("requests", 0, 0, 10) == records
        assert (writer.position(extent), asyncio.run(writer.log.end("requests", 0))) == (5, 5)
        with pytest.raises(LogError, match="the records at offsets 5 to 6 are missing"):
            writer.write(log.records("requests", 0, 7, 1))


async def test_chunks_of_an_abandoned_snapshot_are_not_a_missing_head(out: Path) -> None:
    drive = WrittenDriver().fleet("a")
    drive.ask("one")
    drive.seal()
    drive.take_over()
    drive.ask("two")
    drive.seal()
    drive.finish_snapshot()
    with closing(await log_with(drive)) as log:
        held = await sliced(log, out)
    assert (held.groups[0].start, held.groups[0].decisions) == (0, 2)
    with opened(out) as copy:
        report = await verify(copy)
    assert (report.start, report.verified, report.snapshots, report.divergence) == (0, 2, 1, None)
