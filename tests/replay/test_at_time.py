"""`replay at --time` has every event that the log has by that time, and names the events that no owner recorded."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given

from forebay import runtime
from forebay.core.step import InputEvent
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.topics import PROGRESS
from forebay.replay.at import NoSuchRecord
from forebay.replay.at_time import last_time, seek_record, seek_time
from forebay.replay.moment import LaterFacts, Moment
from forebay.runtime.system import SystemRuntime
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, histories, perform, request
from tests.depth import examples, sampled
from tests.replay.mutations import LogWithout
from tests.replay.recorder import Recorder, fleet

T = TypeVar("T")
START_US = 10_000  # append times of later events; the owner's clock of the journal is before
EVERY_US = 100


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class DigestRecorder(Recorder):
    """Recorder that keeps the digest of the state at every clock reading."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[int, str] = {}

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10, **changes: Any) -> list[Any]:
        decided = super().__call__(topic, event, after_us, **changes)
        self.digests[self.now_us] = hex_digest(self.world.digest())
        return decided


@given(histories)
@examples(0.2)
def test_the_state_between_two_journal_records_is_that_of_the_owner(history: list[Any]) -> None:
    made = DigestRecorder()
    made.fleet("a", "b")
    made("requests", request("first", PROMPTS[0][:2]))
    first_us = made.now_us
    for number, action in enumerate(history):
        perform(made, number, action)
    made.seal()
    run(check_states(made, first_us))


async def check_states(made: DigestRecorder, first_us: int) -> None:
    log = await made.log()
    for time_us in sampled([one for one in made.digests if one >= first_us], 10):
        position = await seek_time(log, 0, time_us)
        moment = await position.moment()
        assert (moment.digest, moment.now_us) == (made.digests[time_us], time_us)
        assert (moment.later.requested_us, moment.later.unrecorded, moment.later.not_applied) == (time_us, {}, {})
    log.close()


def test_events_before_the_next_record_are_counted() -> None:
    made = fleet("a")
    made("requests", request("one", [1]))
    made.progress("one", FirstTokenEmitted, cached_tokens=0)
    made.progress("one", RequestFinished, finish_reason="stop", output_tokens=1)
    finished_us = made.now_us
    made("requests", request("two", [2]))

    async def moments() -> tuple[Moment, Moment]:
        log = await made.log()
        found = [await (await seek_time(log, 0, finished_us + off)).moment() for off in (-1, 5)]
        log.close()
        return found[0], found[1]

    before, after = run(moments())
    assert [one.phase for one in before.requests] == ["decode"]
    assert before.later == LaterFacts(requested_us=finished_us - 1, applied={"progress": 1})
    assert after.requests == []
    assert after.later == LaterFacts(requested_us=finished_us + 5, applied={"progress": 2})
    assert before.offset == after.offset


class SteppedWall(SystemRuntime):
    """Runtime whose wall clock advances with each append."""

    def __init__(self) -> None:
        self.now_us = 0

    def wall_ns(self) -> int:
        return self.now_us * 1_000


async def idle_log(made: Recorder, *later: tuple[str, InputEvent | None]) -> SqliteLog:
    """Return the recorder's log, and after it one event at each of `START_US`, `START_US + EVERY_US`, …."""
    made.seal()
    clock = SteppedWall()
    with runtime.use(clock):
        log = await made.log()
        for number, (topic, event) in enumerate(later):
            clock.now_us = START_US + number * EVERY_US
            made(topic, event, journalled=False)
            await log.append([made.drafts[-1]])
    return log


def running(*names: str) -> Recorder:
    made = fleet("a")
    for name in names:
        assert any(isinstance(one, RequestRouted) for one in made("requests", request(name, [len(name)])))
    return made


def ended(made: Recorder, name: str) -> tuple[str, InputEvent]:
    event: InputEvent = made.of(name, RequestFinished, finish_reason="stop", output_tokens=1)
    return "progress", event


def test_ends_of_requests_after_the_last_record_are_applied_and_named() -> None:
    made = running("one", "two")
    last_us = START_US + EVERY_US

    async def moments() -> list[Moment]:
        log = await idle_log(made, ended(made, "one"), ended(made, "two"))
        assert await last_time(log, 0) == last_us
        found = [await (await seek_time(log, 0, time_us)).moment() for time_us in (START_US - 1, START_US, last_us)]
        found.append(await (await seek_record(log, 0)).moment())
        found.append(await (await seek_record(log, 0, 1)).moment())
        with pytest.raises(NoSuchRecord, match=r"the recording ends at .*, before the requested time"):
            await seek_time(log, 0, last_us + 1)
        log.close()
        return found

    early, between, late, default, first = run(moments())
    assert [len(one.requests) for one in (early, between, late, default)] == [2, 1, 0, 2]
    assert early.later == LaterFacts(requested_us=START_US - 1)
    assert between.later == LaterFacts(requested_us=START_US, unrecorded={"progress": 1})
    assert late.later == LaterFacts(requested_us=last_us, unrecorded={"progress": 2})
    assert late.now_us == last_us
    assert default.later == LaterFacts(not_applied={"progress": 2})
    assert first.later == LaterFacts(), "later events of the journal are no surprise"


def test_events_from_the_first_decision_without_a_record_on_are_not_applied() -> None:
    made = running("one", "two")

    async def moment() -> Moment:
        later = [ended(made, "one"), ("requests", request("new", [9])), ended(made, "two"), ("progress", None)]
        log = await idle_log(made, *later)
        found = await (await seek_time(log, 0, START_US + 3 * EVERY_US)).moment()
        log.close()
        return found

    found = run(moment())
    assert [one.request_id for one in found.requests] == ["two"]
    assert found.later == LaterFacts(
        requested_us=START_US + 3 * EVERY_US,
        unrecorded={"progress": 1},
        not_applied={"requests": 1, "progress": 2},
    )
    assert found.now_us == START_US


def test_a_deadline_after_the_last_record_is_a_decision() -> None:
    made = running("one")
    due_us = 60_000_000
    later = ended(made, "one")

    async def moment() -> Moment:
        made.seal()
        clock = SteppedWall()
        with runtime.use(clock):
            log = await made.log()
            clock.now_us = 10 * due_us
            await log.append([Draft(PROGRESS.name, 0, encode(PROGRESS, later[1]))])
        found = await (await seek_time(log, 0, clock.now_us)).moment()
        log.close()
        return found

    found = run(moment())
    assert [one.request_id for one in found.requests] == ["one"]
    assert found.later.not_applied == {"progress": 1}
    assert found.now_us < due_us


def test_a_missing_record_after_the_journal_is_an_error() -> None:
    made = running("one")

    async def attempt() -> None:
        log = await idle_log(made, ended(made, "one"), ("progress", None))
        with pytest.raises(LogError, match="progress/0: the records from 0 to 0 are missing"):
            await seek_time(LogWithout(log, PROGRESS, 0), 0, START_US + EVERY_US)
        log.close()

    run(attempt())
