"""Slices of logs are self-contained, and interrupted copies give the same recording."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.core.step import AnyDecision
from forebay.core.world import World
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, SnapshotRecord
from forebay.events.topics import DECISIONS, PROGRESS
from forebay.replay.record import slice as record
from forebay.replay.record.slice import NothingDecided, Window, offset_at, slice_of
from forebay.replay.verify.verify import verify
from forebay.replay.walk import Start, Walk
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.history.groups import groups_of, pools_of
from forebay.transport.history.snapshots import newest_snapshot, snapshots_taken
from forebay.transport.recording import manifest as recording
from forebay.transport.recording.writer import RecordingWriter, part_of
from forebay.transport.sqlite import schema
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.depth import sampled
from tests.replay.owner_histories import WrittenDriver, log_with
from tests.replay.slices import (
    OPTIONS,
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


async def state_at(log: Log, end: int) -> str:
    """Return the digest of the state right before a journal offset, replayed from the beginning of the log."""
    walk = Walk(log, 0, Start(World(), 0), end)
    async for step in walk:
        assert step.divergence is None
    return f"{walk.world.digest():016x}"


def test_every_window_verifies_and_reaches_the_state_of_the_whole_log(source: Path, tmp_path: Path) -> None:
    """Windows can start and end anywhere: between a seal and its snapshot, or within the records of one event."""
    rng = random.Random(SEED)
    journal = journal_of(source)
    from_snapshot = 0
    for number in CUTS:
        first, last = sorted(rng.sample(range(len(journal)), 2))
        window = Window(journal[first].at_us, journal[last].at_us)
        out = tmp_path / f"{number}.rec"
        with opened(source) as log:
            try:
                held = asyncio.run(sliced(log, out, window))
            except NothingDecided:
                continue
            state = asyncio.run(state_at(log, held.groups[0].end))
        report, group = report_of(out), held.groups[0]
        assert (report.divergence, report.state, report.start) == (None, state, group.start)
        assert report.verified == report.decisions >= group.decisions > 0
        inside = [one for one in journal if window.from_us <= one.at_us < window.to_us]  # type: ignore[operator]
        assert (group.first, group.end) == (inside[0].offset, inside[-1].offset + 1)
        assert (held.from_us, held.to_us) == (inside[0].at_us, inside[-1].at_us)
        decided = [isinstance(decode(DECISIONS, one.value), AnyDecision) for one in inside]
        assert group.decisions == sum(decided)
        from_snapshot += group.start > 0
    assert from_snapshot > len(CUTS) // 6


def test_a_slice_contains_only_the_records_it_needs(source: Path, tmp_path: Path) -> None:
    journal = journal_of(source)
    with opened(source) as log:
        held = asyncio.run(sliced(log, tmp_path / "rec", Window(journal[-6].at_us)))
        ends = {(topic, partition): end for topic, partition, end in log.topics()}
    extents = {extent.topic: extent for extent in held.extents}
    assert set(extents) == {
        "groups", "requests", "kv-events", "metrics", "progress", "fleet", "control", "decisions", "snapshots",
    }  # fmt: skip
    assert extents["requests"].first > 0 < extents["snapshots"].first
    assert (extents["control"].first, extents["control"].count) == (1, 0)
    for extent in extents.values():
        assert extent.end <= ends.get((extent.topic, extent.partition), 0)
    with opened(tmp_path / "rec") as log:
        assert asyncio.run(log.begin("requests", 0)) == extents["requests"].first
        assert asyncio.run(log.end("requests", 0)) == extents["requests"].end
        assert ("control", 0, 1) not in log.topics()
        with pytest.raises(LogError, match=r"begins at offset \d+; 0 was not recorded"):
            log.records("requests", 0, 0, 1)
        with pytest.raises(LogError, match="tokens/3 was not recorded"):
            log.records("tokens", 3, 0, 1)
        assert [pool.pool for pool in asyncio.run(pools_of(log, 0))] == ["default"]


def test_a_slice_can_be_sliced_again(source: Path, tmp_path: Path) -> None:
    journal = spread(source, tmp_path / "spread.db")
    with opened(tmp_path / "spread.db") as log:
        (early, seal), (late, _), *_ = asyncio.run(seals_of(log, len(journal)))
        held = asyncio.run(sliced(log, tmp_path / "outer.rec", Window(journal[early].at_us, journal[-2].at_us)))
    group = held.groups[0]
    assert group.start == seal.journal_offset
    with opened(tmp_path / "outer.rec") as log:
        inner = asyncio.run(sliced(log, tmp_path / "inner.rec", Window(journal[late].at_us)))
        whole = asyncio.run(sliced(log, tmp_path / "whole.rec"))
        assert whole.extents == held.extents
        taken = asyncio.run(newest_snapshot(log, 0, early + 1))
        assert taken == seal
    for name in ("outer", "inner", "whole"):
        report = report_of(tmp_path / f"{name}.rec")
        assert report.divergence is None
        assert report.verified == report.decisions > 0
    assert report_of(tmp_path / "whole.rec").digest == report_of(tmp_path / "outer.rec").digest
    assert inner.groups[0].end == group.end
    with (
        opened(tmp_path / "inner.rec") as log,
        pytest.raises(LogError, match="the window begins too early") as raised,
    ):
        asyncio.run(contents(log, Window(journal[early].at_us)))
    assert recording.utc(journal[inner.groups[0].start].at_us) in str(raised.value)
    assert "requests before offset" in str(raised.value)


def test_a_window_that_ends_before_its_snapshot_was_written(source: Path, tmp_path: Path) -> None:
    """A slice of only the decisions between a seal and its `SnapshotTaken` would have no snapshot."""
    journal = spread(source, tmp_path / "spread.db")
    with opened(tmp_path / "spread.db") as log:
        taken, seal = asyncio.run(seals_of(log, len(journal)))[1]
        held = asyncio.run(sliced(log, tmp_path / "rec", Window(journal[taken].at_us)))
        assert held.groups[0].start == seal.journal_offset <= taken == held.groups[0].first
    with opened(tmp_path / "rec") as log, pytest.raises(LogError, match="no part of this window can be recorded"):
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


def test_an_embedded_log_names_its_group_by_its_model(source: Path, tmp_path: Path) -> None:
    with opened(source) as log:
        assert asyncio.run(groups_of(log)) == {MODEL: 0}
    SqliteLog.open(tmp_path / "empty.db").close()
    with opened(tmp_path / "empty.db") as log:
        assert asyncio.run(groups_of(log)) == {"": 0}
        with pytest.raises(NothingDecided, match="journal of group 0 is empty"):
            asyncio.run(contents(log))


@pytest.mark.parametrize("choose", [lambda at: Window(at + 1), lambda at: Window(None, 1), lambda _: Window(1, 2)])
def test_a_window_without_decisions_is_rejected(source: Path, choose: Callable[[int], Window]) -> None:
    journal = journal_of(source)
    with opened(source) as log, pytest.raises(NothingDecided, match="made no decision in the window") as raised:
        asyncio.run(contents(log, choose(journal[-1].at_us)))
    assert recording.utc(journal[0].at_us) in str(raised.value)


class Trimmed:
    """Log from which retention removed the beginning of some topics."""

    def __init__(self, log: SqliteLog, begins: dict[str, int]) -> None:
        self._log = log
        self._begins = begins

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def begin(self, topic: str, partition: int) -> int:
        return self._begins.get(topic, await self._log.begin(topic, partition))

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        if offset < await self.begin(topic, partition):
            raise LogError(f"{topic}/{partition} no longer holds offset {offset}")
        return await self._log.read(topic, partition, offset, limit)


def test_error_names_records_removed_by_retention_and_the_earliest_complete_time(source: Path) -> None:
    journal = journal_of(source)
    with opened(source) as log:
        held = asyncio.run(contents(log, Window(journal[len(journal) // 2].at_us)))
        start = held.groups[0].start
        progress = next(extent.first for extent in held.extents if extent.topic == PROGRESS.name)
        trimmed: Log = Trimmed(log, {PROGRESS.name: progress})  # type: ignore[assignment]
        with pytest.raises(LogError, match=f"progress before offset {progress}$") as raised:
            asyncio.run(slice_of(trimmed, MODEL, 0, Window(journal[0].at_us)))
        earliest = asyncio.run(slice_of(trimmed, MODEL, 0, Window())).group
        assert 0 < earliest.start == earliest.first <= start
        assert recording.utc(journal[earliest.start].at_us) in str(raised.value)
        assert asyncio.run(slice_of(trimmed, MODEL, 0, Window(journal[earliest.start].at_us))).group == earliest
        nothing: Log = Trimmed(log, {PROGRESS.name: 1_000})  # type: ignore[assignment]
        with pytest.raises(
            LogError, match=r"no part of this window can be recorded: .* no progress before offset 1000, nor"
        ):
            asyncio.run(slice_of(nothing, MODEL, 0, Window()))


def test_a_clock_that_steps_back_at_a_takeover(tmp_path: Path) -> None:
    """If the second owner's clock is behind, a window by time selects a contiguous range of offsets."""
    times = [10, 20, 30, 40, 50, 35, 45, 55, 65]
    path = tmp_path / "log.db"

    async def scenario() -> list[tuple[int, int]]:
        log = SqliteLog.open(path)
        for at_us in times:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("time.time_ns", lambda at_us=at_us: at_us * 1000)
                await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, Advanced(seq=at_us, digest="0" * 16)))])
        found = [
            (await offset_at(log, 0, at_us), await offset_at(log, 0, at_us, before=True)) for at_us in (5, 40, 46, 99)
        ]
        log.close()
        return found

    assert asyncio.run(scenario()) == [(0, 0), (3, 6), (4, 7), (9, 9)]


class Stopped(Exception):
    """Raised to stop a copy."""


def test_an_interrupted_copy_resumes_to_the_same_recording(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PAGE_RECORDS", PAGE)
    pages = 0

    def count(done: int, total: int) -> None:
        nonlocal pages
        pages += 1

    with opened(source) as log:
        undisturbed = asyncio.run(
            written(log, RecordingWriter.create(tmp_path / "whole", asyncio.run(contents(log))), count)
        )
        assert pages > 8
        out = tmp_path / "resumed"
        for stops in range(pages + 1):
            writer = RecordingWriter.resume(out, OPTIONS)
            assert (writer is None) == (stops == 0)
            writer = writer or RecordingWriter.create(out, asyncio.run(contents(log)))
            assert writer.done == min(stops * PAGE, writer.done)

            def stop(done: int, total: int) -> None:
                raise Stopped

            if stops < pages:
                with pytest.raises(Stopped):
                    asyncio.run(written(log, writer, stop))
                assert not out.exists()
                with pytest.raises(LogUnusable, match="was not finished; run the `forebay record` command"):
                    SqliteLog.open(part_of(out), readonly=True)
            else:
                resumed = asyncio.run(written(log, writer))
    assert resumed == undisturbed
    assert rows(out) == rows(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]
    assert report_of(out).divergence is None


@pytest.mark.parametrize("step", ["forebay.transport.recording.manifest.seal", "pathlib.Path.rename"])
def test_a_writer_that_stops_before_renaming_its_recording(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def stop(*_: object) -> None:
        raise Stopped

    out = tmp_path / "out"
    with opened(source) as log:
        with monkeypatch.context() as patch:
            patch.setattr(step, stop)
            with pytest.raises(Stopped):
                asyncio.run(sliced(log, out))
        assert [path.name for path in tmp_path.iterdir()] == ["out.part"]
        resumed = RecordingWriter.resume(out, OPTIONS)
        assert resumed is not None
        held = asyncio.run(written(log, resumed))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert held.content
    assert report_of(out).divergence is None


def test_another_command_does_not_resume_the_recording(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(source) as log:
        RecordingWriter.create(out, asyncio.run(contents(log))).close()
    with pytest.raises(LogUnusable, match=r"out.part: was begun by another command \(last not given, now 5m\)"):
        RecordingWriter.resume(out, {**OPTIONS, "last": "5m"})
    with pytest.raises(LogUnusable, match=r"\(source test, now another\)"):
        RecordingWriter.resume(out, {"source": "another"})
    with opened(source) as log, pytest.raises(LogUnusable, match=r"out.part: exists already"):
        RecordingWriter.create(out, asyncio.run(contents(log)))


def test_two_writers_cannot_write_one_recording(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.sqlite.schema.BUSY_TIMEOUT_S", 0.01)
    out = tmp_path / "out"
    with opened(source) as log:
        writer = RecordingWriter.create(out, asyncio.run(contents(log)))
        with pytest.raises(LogUnusable, match="another process writes it"):
            RecordingWriter.resume(out, OPTIONS)
        writer.close()
        resumed = RecordingWriter.resume(out, OPTIONS)  # without writing anything yet
        assert resumed is not None
        with pytest.raises(LogUnusable, match="another process writes it"):
            RecordingWriter.resume(out, OPTIONS)
        out.write_text("somebody else's")
        with pytest.raises(LogUnusable, match="out: exists already"):
            asyncio.run(written(log, resumed))
        assert out.read_text() == "somebody else's"
        out.unlink()
        again = RecordingWriter.resume(out, OPTIONS)
        assert again is not None
        asyncio.run(written(log, again))
        before = out.read_bytes()
        with pytest.raises(LogUnusable, match="out: exists already"):
            RecordingWriter.resume(out, OPTIONS)
        with pytest.raises(LogUnusable, match="out: exists already"):
            RecordingWriter.create(out, writer.contents)
    assert out.read_bytes() == before


def test_a_second_writer_does_not_change_a_recording_that_lacks_only_its_seal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writer may be sealing the recording at that time, without a lock."""
    out, part = tmp_path / "out", part_of(tmp_path / "out")
    kept: list[bytes] = []

    def write_concurrently(path: Path) -> None:
        kept.append(path.read_bytes())
        another = RecordingWriter.resume(out, OPTIONS)
        assert another is not None
        monkeypatch.setattr(recording, "seal", lambda path: kept.append(path.read_bytes()))
        monkeypatch.setattr(Path, "rename", lambda *_: None)
        another.finish()
        monkeypatch.undo()
        recording.seal(path)

    monkeypatch.setattr(recording, "seal", write_concurrently)
    with opened(source) as log:
        asyncio.run(written(log, RecordingWriter.create(out, asyncio.run(contents(log)))))
    assert kept[0] == kept[1]
    assert not part.exists()
    assert report_of(out).divergence is None


def test_other_files_at_the_output_path_are_rejected(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part_of(out).write_text("what somebody else put here, and wants to keep " * 9)
    with pytest.raises(LogUnusable, match="remove it, then run the command again"):
        RecordingWriter.resume(out, OPTIONS)
    part_of(out).unlink()
    SqliteLog.open(part_of(out)).close()
    with pytest.raises(LogUnusable, match="is a log, expected an unfinished recording"):
        RecordingWriter.resume(out, OPTIONS)
    part_of(out).write_bytes(b"")  # killed before its first transaction
    assert RecordingWriter.resume(out, OPTIONS) is None
    with pytest.raises(LogUnusable, match="there is no directory"):
        RecordingWriter.resume(tmp_path / "deeper" / "out", OPTIONS)
    with pytest.raises(LogUnusable, match="is a directory"):
        RecordingWriter.resume(tmp_path, OPTIONS)


def test_a_copy_resumes_after_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "PAGE_RECORDS", PAGE)
    out = tmp_path / "out"
    connect = schema.connect

    def connect_to_small_disk(path: Path | None, *, readonly: bool) -> sqlite3.Connection:
        db = connect(path, readonly=readonly)
        db.execute("PRAGMA max_page_count = 30")
        return db

    with opened(source) as log:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "connect", connect_to_small_disk)
            writer = RecordingWriter.create(out, asyncio.run(contents(log)))
        with pytest.raises(LogError, match=r"out.part: cannot be written \(.*full.*\); free disk space, then run"):
            asyncio.run(written(log, writer))
        resumed = RecordingWriter.resume(out, OPTIONS)
        assert resumed is not None
        assert 0 < resumed.done < resumed.total
        asyncio.run(written(log, resumed))
    assert report_of(out).divergence is None


def test_a_new_recording_can_be_read_at_once(source: Path, tmp_path: Path) -> None:
    with opened(source) as log:
        held = asyncio.run(contents(log))
        writer = RecordingWriter.create(tmp_path / "out", held)
        extent = next(extent for extent in held.extents if extent.topic == "requests")
        assert writer.log.records("requests", 0, 0, 10) == []
        records = log.records("requests", 0, 0, 5)
        writer.write(records)
        assert writer.log.records("requests", 0, 0, 10) == records
        assert (writer.position(extent), asyncio.run(writer.log.end("requests", 0))) == (5, 5)
        with pytest.raises(LogError, match="the records at offsets 5 to 6 are missing"):
            writer.write(log.records("requests", 0, 7, 1))
        writer.close()


async def test_chunks_of_an_abandoned_snapshot_are_not_a_missing_head(tmp_path: Path) -> None:
    drive = WrittenDriver().fleet("a")
    drive("requests", request("one", PROMPTS[0]))
    drive.seal()
    drive.take_over()
    drive("requests", request("two", PROMPTS[0]))
    drive.seal()
    drive.finish_snapshot()
    log = await log_with(drive)
    held = await sliced(log, tmp_path / "out")
    log.close()
    assert (held.groups[0].start, held.groups[0].decisions) == (0, 2)
    with opened(tmp_path / "out") as copy:
        report = await verify(copy)
    assert (report.start, report.verified, report.snapshots, report.divergence) == (0, 2, 1, None)
