"""A follower fills a catalog without gaps or repetitions, on growing, restarted, damaged and trimmed logs.

A catalog that does not fit its log is built anew. It has one writer, is bounded, and publishes the status of its group.
"""

import logging
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from forebay import runtime
from forebay.core.routing.policies import ONLY_BUILT_IN
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.topics import DECISIONS, REQUESTS, Topic
from forebay.journal.records import decode_journal
from forebay.replay.at import seek_record, seek_time
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog import store as store_module
from forebay.replay.catalog.live import LivePublisher, read_live
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.catalog.store import CatalogError, CatalogInUse, Store, path_beside, path_of_brokers
from forebay.replay.status import GroupStatus, read_status
from forebay.transport.base import Draft, Log
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import request
from tests.replay.catalog.scene import (
    RECORDINGS,
    LogView,
    Noted,
    busy,
    index,
    noted,
    noted_by,
    offsets,
    open_store,
    running,
    timed,
)
from tests.replay.recorder import Recorder, fleet


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


async def memory_log_of(drafts: list[Draft]) -> SqliteLog:
    log = SqliteLog.open(None)
    await log.append(drafts)
    return log


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
    drafts, follower = made.journal_drafts(), None
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
    assert follower.reader is not None
    assert follower.reader.world.digest() == made.world.digest()


@timed
async def test_an_empty_log_has_an_empty_catalog(tmp_path: Path) -> None:
    log = SqliteLog.open(None)
    follower = await index(log, tmp_path / "catalog")
    state = follower.state
    assert (state.begin_us, state.end_us, state.end_offset, state.is_complete, state.error) == (0, 0, 0, True, "")
    await log.append(busy(3).records())
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
        await follower.catch_up()
        assert noted(follower.store) == await expected(log, at)
        follower.store.close()


@timed
async def test_a_journal_of_other_rules_stops_the_catalog(tmp_path: Path) -> None:
    made = busy(30)
    made.journal[0] = msgspec.structs.replace(made.journal[0], core_version=CORE_VERSION + 1)
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    assert f"was decided by version {CORE_VERSION + 1} of the rules" in follower.error
    assert (follower.failed, follower.is_blocked, follower.state.end_offset) == (False, True, 1)
    assert noted(follower.store) == await expected(log, 1)


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
    path = tmp_path / "log.db"
    log = await busy(60).log(path)
    whole = await expected(log)
    log.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE \"{topic.name}\" SET value = '{{}}' WHERE id = 50")
    follower = await index(SqliteLog.open(path, readonly=True), tmp_path / "catalog")
    assert "damaged" in follower.error
    assert not follower.failed
    rows = noted(follower.store)
    assert rows == whole[: len(rows)]
    if topic is DECISIONS:
        assert follower.state.end_offset == 50


@timed
async def test_a_log_that_fails_for_a_while_is_followed_on(tmp_path: Path) -> None:
    made = busy(60)
    log = await memory_log_of(made.records()[: len(made.drafts) + 30])
    away = LogView(log)
    follower = await index(away, tmp_path / "catalog")
    assert follower.state.end_offset == 30
    await log.append(made.journal_drafts()[30:])
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
        made.ask(f"request-{number}", [number])
    made.snapshot()
    log = await made.log()
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
    assert (follower.error, follower.state.begin_offset > 20) == ("", True)


# The store


async def index_once(log: Log, path: Path) -> list[tuple[str, int]]:
    follower = await index(log, path)
    assert follower.error == ""
    rows = noted(follower.store)
    follower.store.close()
    return rows


@timed
async def test_a_catalog_of_another_log_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "catalog"
    with caplog.at_level(logging.WARNING):
        await index_once(await busy(30).log(), path)
        for other in (busy(29, "another"), busy(31, "another")):
            found = await index_once(await other.log(), path)
            assert [at for what, at in found if what == "record"] == [*range(len(other.journal))]
    text = f"{path}: it is the catalog of another log; it is deleted and built anew"
    assert [record.getMessage() for record in caplog.records] == [text] * 2


def zero(path: Path, begin: int, end: int | None = None) -> None:
    content = path.read_bytes()
    end = len(content) if end is None else end
    path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])


@pytest.mark.parametrize("harm", ["garbage", "version", "tables", "pages", "a page"])
@timed
async def test_a_catalog_that_cannot_be_used_is_built_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "catalog", await busy(30).log()
    rows = await index_once(log, path)
    if harm == "garbage":
        path.write_bytes(b"no database" * 1_000)
    elif harm == "version":
        monkeypatch.setattr(store_module, "VERSION", "0.0")
    elif harm == "tables":
        monkeypatch.setattr(Noted, "schema", Noted.schema + "CREATE TABLE more (one);")
    elif harm == "pages":
        zero(path, 200)
    else:  # which is found only while following
        with closing(sqlite3.connect(path)) as db:
            (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'checkpoints'").fetchone()
        zero(path, (root - 1) * store_module.PAGE_BYTES, root * store_module.PAGE_BYTES)
        follower = await index(log, path)
        await follower.catch_up()
        follower.store.close()
    assert await index_once(log, path) == rows


@timed
async def test_a_catalog_has_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    log = await busy(60).log()
    path = tmp_path / "catalog"
    with pytest.raises(CatalogError, match="cannot be read"):
        Store.read(path)
    follower = await index(log, path)
    with pytest.raises(CatalogInUse, match="another console writes this catalog"):
        await open_store(path, log)
    with closing(Store.read(path)) as reader:
        position = await seek_record(CatalogStates(reader, log, 0), follower.state.end_offset - 1)
        assert position.start == offsets(follower.store)[-1]
    follower.store.close()
    (await open_store(path, log)).close()


@timed
async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CatalogError, match=r"cannot be written \(.*\); name another folder with --cache-dir"):
        await open_store(tmp_path / "file" / "catalog", await busy(1).log())


@timed
async def test_a_catalog_above_its_maximum_size_loses_every_second_checkpoint(tmp_path: Path) -> None:
    log = await busy(200).log()
    whole = await index(log, tmp_path / "whole")
    small = await index(log, tmp_path / "small", size_max=1)
    assert 1 <= len(offsets(small.store)) < len(offsets(whole.store)) / 2
    assert int(small.store.meta("spacing") or 1) > 1
    middle = await log.end(DECISIONS.name, 0) // 2
    one, other = [await seek_record(CatalogStates(found.store, log, 0), middle) for found in (small, whole)]
    assert (await one.moment()).digest == (await other.moment()).digest


@timed
async def test_a_catalog_with_few_checkpoints_loses_its_oldest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "total_bytes", lambda connection: 0)
    follower = await index(await busy(200).log(), tmp_path / "catalog", size_max=1)
    removed = noted_by(follower).removed_before
    assert removed == sorted(removed)
    assert 0 < removed[0] < removed[-1] < follower.state.end_offset


def test_paths_differ_by_log_and_group() -> None:
    log = Path("/logs/events.db")
    assert path_beside(log, 0) == Path("/logs/events.db.console")
    assert path_beside(log, 3) == Path("/logs/events.db.3.console")
    folder = Path("/cache")
    paths = [path_beside(Path(f"/{name}/events.db"), at, folder) for name in "ab" for at in range(2)]
    paths += [path_of_brokers(brokers, "one", at, folder) for brokers in ("a:1", "b:1") for at in range(2)]
    assert len(set(paths)) == len(paths)
    assert path_of_brokers("b:1,a:1", "one", 0, folder) == path_of_brokers("a:1,b:1", "one", 0, folder)


# The published status, which has the events after the newest journal record


async def append(log: SqliteLog, made: Recorder, topic: str, event: InputEvent) -> list[JournalRecord]:
    decided = made(topic, event, journalled=False)
    await log.append([made.drafts[-1]])
    return decided


def finished(made: Recorder, name: str) -> InputEvent:
    event: InputEvent = made.of(name, RequestFinished, finish_reason="stop", output_tokens=1)
    return event


def status_of(store: Store) -> GroupStatus:
    found = read_live(store)
    assert found is not None
    return msgspec.json.decode(found[1], type=GroupStatus)


async def publish(publisher: LivePublisher) -> bool:
    """Publish after a second without a journal record."""
    for _ in range(100):
        runtime.monotonic_s()
    return await publisher.publish()


@timed
async def test_the_status_of_an_idle_group_has_the_later_events(tmp_path: Path) -> None:
    made = running("one", "three")
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    observer, publisher = noted_by(follower), LivePublisher(log, 0, "m", follower)
    reader = Store.read(tmp_path / "catalog")

    async def require_published() -> None:
        assert await publish(publisher)
        assert status_of(reader) == await read_status(log, 0, "m")

    await require_published()
    assert not await publish(publisher)

    await append(log, made, "progress", finished(made, "one"))
    await require_published()
    assert status_of(reader).requests.in_flight == 1
    assert observer.unrecorded == [("progress", 0)]
    assert not await publish(publisher)

    # This request leads to a decision, so the status must not have it.
    decided = await append(log, made, "requests", request("later", [7]))
    await append(log, made, "progress", finished(made, "three"))
    await require_published()
    assert not await publish(publisher)

    await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in decided])
    await follower.catch_up()
    assert follower.error == ""
    assert await publisher.publish()
    assert observer.unrecorded == []
    await require_published()
    assert observer.unrecorded == [("progress", 1)]
    assert status_of(reader).requests.by_phase == {"prefill": 1}


@timed
async def test_a_log_without_decisions_begins_at_its_later_events(tmp_path: Path) -> None:
    log = await fleet("a").log()
    follower = await index(log, tmp_path / "catalog")
    assert follower.state.begin_us == follower.state.end_us == 0, "a claim has no clock reading"
    publisher = LivePublisher(log, 0, "m", follower)
    assert await publish(publisher)
    assert publisher.state is not None
    at_us = publisher.state.begin_us
    assert at_us == publisher.state.end_us > 0
    position = await seek_time(CatalogStates(follower.store, log, 0), at_us)
    assert [one.worker_id for one in (await position.moment()).workers] == ["a"]
