"""The published status has the events after the newest journal record, as `read_status` has."""

from pathlib import Path

import msgspec

from forebay import runtime
from forebay.core.step import InputEvent
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.topics import DECISIONS
from forebay.replay.catalog.live import LivePublisher, read_live
from forebay.replay.catalog.seek import catalog_position
from forebay.replay.catalog.store import Store
from forebay.replay.status import GroupStatus, read_status
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import request
from tests.replay.catalog.following import Noted, index, timed
from tests.replay.recorder import Recorder, fleet

MODEL = "m"


def running(*names: str) -> Recorder:
    made = fleet("a")
    for name in names:
        assert any(isinstance(one, RequestRouted) for one in made("requests", request(name, [len(name)])))
    return made


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


@timed
async def test_the_status_of_an_idle_group_has_the_later_events(tmp_path: Path) -> None:
    made = running("one", "three")
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    observer = follower.observers[0]
    assert isinstance(observer, Noted)
    publisher = LivePublisher(log, 0, MODEL, follower)
    reader = Store.read(tmp_path / "catalog")
    assert await publish(publisher)
    assert status_of(reader) == await read_status(log, 0, MODEL)
    assert not await publish(publisher)

    await append(log, made, "progress", finished(made, "one"))
    assert await publish(publisher)
    assert status_of(reader).requests.in_flight == 1
    assert status_of(reader) == await read_status(log, 0, MODEL)
    assert observer.unrecorded == [("progress", 0)]
    assert not await publish(publisher)

    # This request leads to a decision, so the status must not have it.
    decided = await append(log, made, "requests", request("later", [7]))
    await append(log, made, "progress", finished(made, "three"))
    assert await publish(publisher)
    assert status_of(reader) == await read_status(log, 0, MODEL)
    assert not await publish(publisher)

    await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in decided])
    await follower.catch_up()
    assert follower.error == ""
    assert await publisher.publish()
    assert observer.unrecorded == []
    assert await publish(publisher)
    assert observer.unrecorded == [("progress", 1)]
    assert status_of(reader) == await read_status(log, 0, MODEL)
    assert status_of(reader).requests.by_phase == {"prefill": 1}


@timed
async def test_a_log_without_decisions_begins_at_its_later_events(tmp_path: Path) -> None:
    made = fleet("a")
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    assert follower.state.begin_us == follower.state.end_us == 0, "a claim has no clock reading"
    publisher = LivePublisher(log, 0, MODEL, follower)
    assert await publish(publisher)
    assert publisher.state is not None
    at_us = publisher.state.begin_us
    assert at_us == publisher.state.end_us > 0
    position = await catalog_position(log, 0, follower.store, time_us=at_us)
    assert [one.worker_id for one in (await position.moment()).workers] == ["a"]


async def publish(publisher: LivePublisher) -> bool:
    """Publish after a second without a journal record."""
    for _ in range(100):
        runtime.monotonic_s()
    return await publisher.publish()
