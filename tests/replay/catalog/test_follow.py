"""A follower fills a catalog without gaps or repetitions, on growing, restarted, damaged and trimmed logs."""

import sqlite3
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from forebay.core.routing.policies import ONLY_BUILT_IN
from forebay.core.step import CLOCK
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS, REQUESTS, Topic
from forebay.transport.base import Draft
from forebay.transport.history.reader import decode_journal
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import request
from tests.replay.catalog.following import RECORDINGS, LogView, busy, index, noted, offsets, timed
from tests.replay.recorder import Recorder


async def expected(log: SqliteLog, end: int | None = None) -> list[tuple[str, int]]:
    """Return the rows that the observer must have written for the journal records before `end`."""
    rows: list[tuple[str, int]] = []
    view: Counter[str] = Counter()
    for record in await log.read(DECISIONS.name, 0, 0, 10_000):
        decision = decode_journal(record)
        if record.offset == end or decision is None:
            break
        for consumed in decision.consumed:
            for _ in range(consumed.count if consumed.topic != CLOCK else 0):
                rows.append((consumed.topic, view[consumed.topic]))
                view[consumed.topic] += 1
        rows.append(("record", record.offset))
    return rows


def journal_drafts(made: Recorder) -> list[Draft]:
    return [Draft(DECISIONS.name, 0, encode(DECISIONS, record)) for record in made.journal]


@timed
async def test_every_event_and_record_is_observed_once(tmp_path: Path) -> None:
    log = await busy(60).log()
    done: list[tuple[int, int]] = []
    follower = await index(log, tmp_path / "catalog", progress=lambda *one: done.append(one))
    assert noted(follower.store) == await expected(log)
    assert len(offsets(follower.store)) > 1
    state = follower.state
    assert state.end_offset == state.log_end_offset == await log.end(DECISIONS.name, 0)
    assert (state.is_complete, state.behind_s, state.error, state.begin_offset) == (True, 0.0, "", 0)
    assert 0 < state.begin_us < state.end_us
    assert done == sorted(done)
    assert done[-1] == (state.end_offset, state.end_offset)


@timed
async def test_a_growing_log_is_followed_also_after_a_restart(tmp_path: Path) -> None:
    made = busy(60)
    log = await memory_log_of(made.drafts)
    drafts, follower = journal_drafts(made), None
    for number, at in enumerate(range(0, len(drafts), 9)):
        await log.append(drafts[at : at + 9])
        if follower is None or number % 2:
            if follower is not None:
                follower.store.close()
            follower = await index(log, tmp_path / "catalog")
        else:
            await follower.catch_up()
        assert (follower.error, follower.state.begin_offset) == ("", 0)
    assert follower is not None
    assert noted(follower.store) == await expected(log)
    assert follower.walk is not None
    assert follower.walk.world.digest() == made.world.digest()


async def memory_log_of(drafts: list[Draft]) -> SqliteLog:
    log = SqliteLog.open(None)
    await log.append(drafts)
    return log


@timed
async def test_an_empty_log_has_an_empty_catalog(tmp_path: Path) -> None:
    log = SqliteLog.open(None)
    follower = await index(log, tmp_path / "catalog")
    state = follower.state
    assert (state.begin_us, state.end_us, state.end_offset, state.is_complete, state.error) == (0, 0, 0, True, "")
    await log.append([*(made := busy(3)).drafts, *journal_drafts(made)])
    await follower.catch_up()
    assert noted(follower.store) == await expected(log)


@timed
async def test_a_divergence_stops_the_catalog_right_before_it(tmp_path: Path) -> None:
    made = busy(60)
    at = next(at for at, one in enumerate(made.journal) if at > 40 and isinstance(one, RequestRouted))
    made.journal[at] = msgspec.structs.replace(made.journal[at], pool="another")
    log = await made.log()
    for _ in range(2):  # the second follower resumes the catalog
        follower = await index(log, tmp_path / "catalog")
        assert follower.error.startswith(f"journal record {at} does not follow from the events (differs in pool)")
        assert (follower.failed, follower.state.end_offset, follower.state.is_complete) == (True, at, False)
        assert noted(follower.store) == await expected(log, at)
        await follower.catch_up()
        assert noted(follower.store) == await expected(log, at)
        follower.store.close()


@timed
async def test_a_journal_of_other_rules_is_listed_as_recorded(tmp_path: Path) -> None:
    made = busy(30)
    made.journal[0] = msgspec.structs.replace(made.journal[0], core_version=CORE_VERSION + 1)
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    end = await log.end(DECISIONS.name, 0)
    assert f"is decided by version {CORE_VERSION + 1} of the rules" in follower.error
    assert (follower.failed, follower.state.end_offset) == (False, end)
    assert noted(follower.store) == [*await expected(log, 1), *(("recorded", offset) for offset in range(1, end))]


@timed
async def test_a_policy_that_is_not_allowed_stops_the_catalog(tmp_path: Path) -> None:
    (path,) = [path for path in RECORDINGS if path.stem == "own-policy"]
    log = SqliteLog.open(path, readonly=True)
    follower = await index(log, tmp_path / "catalog", custom=ONLY_BUILT_IN)
    assert "pass --allow-policy tests.logs.own_policy.CheapestTwo" in follower.error
    assert follower.failed
    assert noted(follower.store) == await expected(log, follower.state.end_offset)
    follower.store.close()
    follower = await index(log, tmp_path / "catalog")
    assert follower.error == ""
    assert noted(follower.store) == await expected(log)


@pytest.mark.parametrize("topic", [DECISIONS, REQUESTS], ids=lambda topic: topic.name)
@timed
async def test_a_damaged_log_keeps_its_readable_part(topic: Topic, tmp_path: Path) -> None:
    made = busy(60)
    path = tmp_path / "log.db"
    log = await made.log(path)
    whole = await expected(log)
    log.close()
    db = sqlite3.connect(path)
    db.execute(f"UPDATE \"{topic.name}\" SET value = '{{}}' WHERE id = 50")
    db.commit()
    db.close()
    log = SqliteLog.open(path, readonly=True)
    follower = await index(log, tmp_path / "catalog")
    assert "damaged" in follower.error
    assert not follower.failed
    rows = noted(follower.store)
    assert rows == whole[: len(rows)]
    if topic is DECISIONS:
        assert follower.state.end_offset == 50


@timed
async def test_a_log_that_fails_for_a_while_is_followed_on(tmp_path: Path) -> None:
    made = busy(60)
    log = await memory_log_of([*made.drafts, *journal_drafts(made)[:30]])
    away = LogView(log)
    follower = await index(away, tmp_path / "catalog")
    assert follower.state.end_offset == 30
    await log.append(journal_drafts(made)[30:])
    away.is_away = True
    await follower.catch_up()
    assert (follower.error, follower.failed, follower.state.end_offset) == ("the broker is away", False, 30)
    away.is_away = False
    await follower.catch_up()
    assert follower.error == ""
    assert noted(follower.store) == await expected(log)


@timed
async def test_records_that_retention_removed_while_following(tmp_path: Path) -> None:
    made = busy(20)
    made.snapshot()
    for number in range(20, 60):
        made("requests", request(f"request-{number}", [number]))
    made.snapshot()
    log = await memory_log_of([*made.drafts, *journal_drafts(made)])
    view = LogView(log, 10)
    follower = await index(view, tmp_path / "catalog")
    rows = await expected(log, 10)
    assert log.trim(DECISIONS.name, 0, 20, 20) == 20
    view.journal_end = None
    await follower.catch_up()
    assert "retention removed the records before 20" in follower.error
    assert noted(follower.store) == rows
    follower.store.close()
    follower = await index(log, tmp_path / "catalog")
    assert follower.error == ""
    assert follower.state.begin_offset > 20
