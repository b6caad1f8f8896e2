"""Comparison of a time span: equal from any earlier state, and equal to a recording that begins there."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.restore import restore
from forebay.core.world import World
from forebay.events.codec import decode, encode
from forebay.events.decisions import RequestRouted, SnapshotTaken
from forebay.events.topics import DECISIONS
from forebay.journal.records import decode_journal
from forebay.journal.start import Start, oldest
from forebay.replay.at import seek
from forebay.replay.diff.diff import EmptySpan, diff, span_of
from forebay.replay.diff.report import DiffReport
from forebay.replay.record.slice import Window
from forebay.replay.states import States
from forebay.transport.base import LogError
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import utc
from tests.cli.logs import invoke
from tests.core.worlds import PROMPTS, request
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.logs.record import FOLDER
from tests.replay.mutations import replace_record
from tests.replay.recorder import altered, fleet
from tests.replay.slices import sliced

RECORDINGS = [path.stem for path in recordings.representative()]


OTHER = altered(mode="random")


def opened(name: str) -> "closing[SqliteLog]":
    return closing(SqliteLog.open(FOLDER / f"{name}.rec", readonly=True))


def journal(log: SqliteLog) -> list[tuple[int, int, Any]]:
    """Return offset, owner's clock and record of the whole journal."""
    found, clock_us = [], 0
    for one in log.records(DECISIONS.name, 0, asyncio.run(extent(log))[0], 10_000):
        record = decode_journal(one)
        if record is not None and record.consumed:
            clock_us = record.consumed[-1].now_us
        found.append((one.offset, clock_us, record))
    return found


async def extent(log: SqliteLog) -> tuple[int, int]:
    return await log.begin(DECISIONS.name, 0), await log.end(DECISIONS.name, 0)


def middle_of(log: SqliteLog) -> tuple[int, int]:
    """Return a time span that begins and ends at routing decisions in the middle of the journal."""
    times = [clock_us for _, clock_us, record in journal(log) if isinstance(record, RequestRouted)]
    first = len(times) // 4
    return times[first], next((clock_us for clock_us in times[-first:] if clock_us > times[first]), times[-1] + 1)


async def compared(
    log: SqliteLog, from_us: int | None, to_us: int | None = None, start: Start | None = None
) -> DiffReport:
    span = await span_of(log, 0, from_us, to_us, CUSTOM)
    return await diff(log, 0, OTHER, span=span if start is None else span._replace(start=start))


async def state_at(log: SqliteLog, offset: int) -> Start:
    """Return a state as a checkpoint of the catalog holds it: right after a journal record."""
    position = await seek(States(log, 0, CUSTOM), offset)
    return Start(restore(position.world.snapshot(), CUSTOM), position.offset + 1)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_result_does_not_depend_on_where_the_derivation_begins(name: str) -> None:
    async def reports(log: SqliteLog, from_us: int, to_us: int) -> list[DiffReport]:
        begin, _ = await extent(log)
        first = (await span_of(log, 0, from_us, to_us, CUSTOM)).first
        starts = [None, await oldest(log, 0, CUSTOM)]
        if first > begin:
            starts.append(await state_at(log, first - 1))
        return [await compared(log, from_us, to_us, start) for start in starts]

    with opened(name) as log:
        from_us, to_us = middle_of(log)
        first, *others = asyncio.run(reports(log, from_us, to_us))
        inside = [offset for offset, clock_us, _ in journal(log) if from_us <= clock_us < to_us]
    assert others == [first] * len(others)
    assert first.divergence is None
    assert first.start == inside[0]
    assert 0 < first.records <= len(inside)
    assert first.history.decisions > 0


def test_a_span_over_everything_is_the_whole_log() -> None:
    for name in ("kv", "queue", "disaggregation", "take-over"):
        with opened(name) as log:
            times = [clock_us for _, clock_us, _ in journal(log)]
            whole = asyncio.run(compared(log, None))
            assert whole.history == asyncio.run(diff(log, 0, OTHER)).history
            assert asyncio.run(compared(log, None, times[-1] + 1)) == whole
            assert asyncio.run(compared(log, 1_000_000)).history == whole.history


def test_a_span_counts_exactly_its_decisions() -> None:
    with opened("kv") as log:
        from_us, to_us = middle_of(log)
        expected = [
            record
            for _, clock_us, record in journal(log)
            if isinstance(record, RequestRouted) and from_us <= clock_us < to_us
        ]
        report = asyncio.run(compared(log, from_us, to_us))
    assert report.history.routed == len(expected) > 3
    assert report.requests == len({record.request_id for record in expected})


def test_a_span_from_a_snapshot_equals_the_comparison_of_a_recording_from_there(tmp_path: Path) -> None:
    with opened("snapshots") as log:
        seals = [record.journal_offset for *_, record in journal(log) if isinstance(record, SnapshotTaken)]
        first = seals[0]
        from_us = next(clock_us for offset, clock_us, record in journal(log) if offset >= first and record.consumed)
        (record,) = log.records(DECISIONS.name, 0, first, 1)
        span = asyncio.run(compared(log, from_us))
        asyncio.run(sliced(log, tmp_path / "slice.rec", Window(record.at_us, None)))
    with closing(SqliteLog.open(tmp_path / "slice.rec", readonly=True)) as cut:
        recorded = asyncio.run(diff(cut, 0, OTHER))
    assert span.start >= recorded.start == first
    assert (span.history, span.other, span.moved, span.fork, span.requests) == (
        recorded.history,
        recorded.other,
        recorded.moved,
        recorded.fork,
        recorded.requests,
    )


def test_the_command_has_the_result_of_the_function() -> None:
    with opened("queue") as log:
        from_us, to_us = middle_of(log)
        span = asyncio.run(span_of(log, 0, from_us, to_us))
        report = asyncio.run(diff(log, 0, altered(temperature=3.0), span=span))
    path = str(FOLDER / "queue.rec")
    command = ["replay", "diff", path, "--set", "temperature=3.0", "--json"]
    result = invoke(*command, "--from", str(from_us), "--to", utc(to_us))
    assert result.exit_code == 0, result.stderr
    report.alternative = "--set temperature=3.0"
    assert json.loads(result.stdout) == json.loads(msgspec.json.encode(report))
    whole = invoke(*command)
    assert json.loads(whole.stdout)["history"] != json.loads(result.stdout)["history"]
    wrong = invoke(*command, "--from", utc(to_us), "--to", str(from_us))
    assert wrong.exit_code == 2
    assert f"--from {utc(to_us)} is not before --to {from_us}" in wrong.stderr


@pytest.mark.parametrize(
    ("from_us", "to_us"),
    [(1_750_086_400_000_000, None), (None, 1_000_000), (1_000_000, 2_000_000)],
)
def test_a_span_without_decisions_is_an_error(from_us: int | None, to_us: int | None) -> None:
    text = r"no decision was made in the time span; the journal ends at 2025-06-15T15:06:40\.\d+"
    with opened("kv") as log, pytest.raises(EmptySpan, match=text):
        asyncio.run(span_of(log, 0, from_us, to_us))


def test_a_span_before_the_oldest_state_is_an_error() -> None:
    with opened("from-snapshot") as log:
        begin, _ = asyncio.run(extent(log))
        assert begin > 0
        oldest_us = asyncio.run(oldest(log, 0)).world.now_us
        with pytest.raises(LogError, match=f"begins too early: decisions can be compared from {utc(oldest_us)[:20]}"):
            asyncio.run(span_of(log, 0, oldest_us - 1))
        assert asyncio.run(span_of(log, 0, oldest_us)).first > begin


def test_a_divergence_before_the_span_ends_the_comparison(tmp_path: Path) -> None:
    def moved(value: bytes) -> bytes:
        record = decode(DECISIONS, value)
        assert isinstance(record, RequestRouted)
        return encode(DECISIONS, msgspec.structs.replace(record, rank=7))

    source = tmp_path / "kv.db"
    asyncio.run(incident_log(source))
    with closing(SqliteLog.open(source, readonly=True)) as log:
        from_us, to_us = middle_of(log)
        at = next(offset for offset, _, record in journal(log) if isinstance(record, RequestRouted))
    replace_record(source, DECISIONS, at, moved)
    with closing(SqliteLog.open(source, readonly=True)) as log:
        report = asyncio.run(compared(log, from_us, to_us, Start(World(), 0)))
    assert report.divergence is not None
    assert report.divergence.offset == at
    assert report.history.decisions == 0


async def incident_log(path: Path) -> None:
    """Write a log of some routed requests."""
    made = fleet()
    for number in range(9):
        made("requests", request(f"r{number}", PROMPTS[number % 3]))
    (await made.log(path)).close()
