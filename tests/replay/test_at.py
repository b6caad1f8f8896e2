"""The state at a moment equals the one sealed in the journal, from any starting point.

`replay at --time` has every event that the log has by that time, and names the events that no owner recorded.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay import runtime
from forebay.core.step import InputEvent
from forebay.events.base import hex_digest
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, OwnerClaimed, RequestHeld, RequestRouted
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.topics import DECISIONS, FLEET, PROGRESS
from forebay.journal.records import decode_journal
from forebay.replay.at import JournalDiverged, NoSuchRecord, last_time, offset_at, seek, seek_record, seek_time
from forebay.replay.moment import LaterFacts, Moment
from forebay.replay.states import States
from forebay.runtime.system import SystemRuntime
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import utc
from tests.cli.logs import invoke
from tests.core.worlds import PROMPTS, histories, perform, request
from tests.depth import examples, sampled
from tests.logs.own_policy import CUSTOM
from tests.logs.recordings import ALL
from tests.replay import incident
from tests.replay.mutations import LogWithout, replace_record
from tests.replay.recorder import Recorder, fleet


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("at") / "incident.db"
    asyncio.run(incident.record(path))
    return path


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        yield log


def journal(log: SqliteLog) -> list[Any]:
    return [decode(DECISIONS, record.value) for record in log.records(DECISIONS.name, 0, 0, 10_000)]


def first_of(log: SqliteLog, kind: type, after: int = 0) -> int:
    return next(at for at, record in enumerate(journal(log)) if at >= after and isinstance(record, kind))


async def moment_at(log: SqliteLog, offset: int) -> Moment:
    return await (await seek(States(log, 0), offset)).moment()


async def test_states_from_the_beginning_and_from_a_snapshot_are_equal(log: SqliteLog) -> None:
    walked, starts = await seek(States(log, 0), 0), set()
    offsets = set(sampled(range(len(journal(log))), 60))
    while await walked.forward() is not None:
        if walked.offset not in offsets:
            continue
        there = await seek(States(log, 0), walked.offset)
        starts.add(there.start)
        one, other = await walked.moment(), await there.moment()
        for name in (
            "offset",
            "digest",
            "record",
            "workers",
            "ranks",
            "queues",
            "requests",
            "view",
            "pools",
            "owner_id",
        ):
            assert getattr(one, name) == getattr(other, name), name
    assert walked.start == 0
    assert len(starts) > 2, "most were derived from snapshots"


async def test_states_from_a_slice_and_from_the_log_are_equal(log: SqliteLog, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "slice.rec"
    last = max(at for at, record in enumerate(journal(log)) if isinstance(record, RequestRouted))
    (record,) = log.records(DECISIONS.name, 0, last, 1)
    result = await asyncio.to_thread(invoke, "record", path, out, "--from", utc(record.at_us))
    assert result.exit_code == 0, result.output
    with closing(SqliteLog.open(out, readonly=True)) as cut:
        begin = await cut.begin(DECISIONS.name, 0)
        assert begin > 0
        for offset in sampled(range(begin, len(journal(log))), 12):
            one, other = await moment_at(log, offset), await moment_at(cut, offset)
            assert (one.digest, one.record, one.now_us) == (other.digest, other.record, other.now_us)
            assert one.ranks == other.ranks
            assert await offset_at(States(cut, 0), one.now_us) == await offset_at(States(log, 0), one.now_us)
        with pytest.raises(NoSuchRecord, match=f"no journal record {begin - 1}: the recording has records {begin} to"):
            await seek(States(cut, 0), begin - 1)
        with pytest.raises(NoSuchRecord, match=r"the recording begins at .* after the requested time"):
            await offset_at(States(cut, 0), 1)


@pytest.mark.parametrize("recording", ALL, ids=lambda path: path.stem)
async def test_every_golden_recording_has_the_states_sealed_in_its_journal(recording: Path) -> None:
    with closing(SqliteLog.open(recording, readonly=True)) as golden:
        assert golden.recording is not None
        (group,) = golden.recording.groups
        records = golden.records(DECISIONS.name, group.partition, group.start, 10_000)
        for offset, sealed in {record.offset: decode_journal(record) for record in records}.items():
            if isinstance(sealed, Advanced):
                position = await seek(States(golden, group.partition, CUSTOM), offset)
                if position.offset == offset:  # a stale record has the digest of another state
                    assert (await position.moment()).digest == sealed.digest
        last = await (await seek(States(golden, group.partition, CUSTOM))).moment()
        assert msgspec.json.decode(msgspec.json.encode(last), type=Moment) == last


async def test_owners_are_listed_with_their_claims(log: SqliteLog) -> None:
    second = first_of(log, OwnerClaimed, after=1)
    before, after, last = [await moment_at(log, at) for at in (second - 1, second, len(journal(log)) - 1)]
    assert (before.owner_id, before.owner_epoch) == ("first", 0)
    assert (after.owner_id, after.owner_epoch) == ("second", second)
    assert last.owner_id == "second"
    assert after.now_us == before.now_us, "a claim applies nothing"


async def test_lost_worker_is_shown_before_and_after_its_loss(log: SqliteLog) -> None:
    stranded = first_of(log, RequestRouted, after=first_of(log, RequestHeld))
    facts = [decode(FLEET, record.value) for record in log.records(FLEET.name, 0, 0, 100)]
    (lost,) = [fact for fact in facts if isinstance(fact, WorkerLost) and fact.worker_id == incident.SLOW]
    position = await seek(States(log, 0), stranded - 1)
    alive = dead = await position.moment()
    while incident.SLOW in {worker.worker_id for worker in dead.workers}:
        alive = dead
        assert await position.forward() is not None
        dead = await position.moment()
    held = next(rank for rank in alive.ranks if rank.worker_id == incident.SLOW)
    assert held.active_requests > 0
    (loss,) = [one for one in dead.lost if one.worker_id == incident.SLOW]
    assert (loss.worker_epoch, loss.reason, loss.at_us) == (lost.worker_epoch, lost.reason, lost.at_us)
    assert loss.lost_us is not None
    assert alive.now_us <= loss.lost_us <= dead.now_us
    assert loss.requests
    assert loss.ranks is not None
    assert loss.ranks[0].active_requests == len(loss.requests)
    assert loss.ranks[0].predicted_blocks == held.predicted_blocks > 0
    late = await moment_at(log, len(journal(log)) - 1)
    assert late.start > dead.offset
    (entry,) = late.lost
    assert (entry.worker_id, entry.reason, entry.ranks) == (incident.SLOW, lost.reason, None)


async def test_loss_reported_by_a_fenced_owner_is_ignored() -> None:
    made = fleet("a", "b")
    made("fleet", OwnershipAnnounced(owner_epoch=5))
    for name, owner_epoch in (("a", 4), ("b", 5)):
        made("fleet", WorkerLost(owner_epoch=owner_epoch, worker_id=name, worker_epoch=made.epoch(name)))
    made.snapshot()
    with closing(await made.log()) as log:
        moment = await (await seek(States(log, 0))).moment()
    assert moment.start > 0, "the state starts at the snapshot, so the losses come from the log"
    assert [worker.worker_id for worker in moment.workers] == ["a"]
    assert [loss.worker_id for loss in moment.lost] == ["b"]


async def test_queued_and_active_requests(log: SqliteLog) -> None:
    held = first_of(log, RequestHeld)
    moment = await moment_at(log, held + 1)
    (kind,) = moment.queues
    record = journal(log)[held]
    assert (kind.waiting[0].request_id, kind.waiting[0].uncached_tokens) == (record.request_id, record.uncached_tokens)
    assert [one.waited_us for one in kind.waiting] == sorted((one.waited_us for one in kind.waiting), reverse=True)
    by_id = {request.request_id: request for request in moment.requests}
    for one in kind.waiting:
        found = by_id[one.request_id]
        assert (found.phase, found.worker_id, found.attempt) == ("queued", "", 0)
        assert (found.age_us, found.due_in_us) == (one.waited_us, 60_000_000 - one.waited_us)
    assert {request.phase for request in moment.requests} >= {"queued", "prefill"}
    assert sum(rank.active_requests for rank in moment.ranks) == len(moment.requests) - len(kind.waiting)


@pytest.mark.parametrize("page_records", [2, 512])
async def test_a_time_selects_the_last_record_written_by_then(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, page_records: int
) -> None:
    monkeypatch.setattr("forebay.replay.at.PAGE_RECORDS", page_records)
    clocks: list[int] = []
    for record in journal(log):
        last = clocks[-1] if clocks else 0
        claimed = last and record.at_us if isinstance(record, OwnerClaimed) else 0
        clocks.append(record.consumed[-1].now_us if record.consumed else max(last, claimed))
    times = sorted({clock + off for clock in clocks for off in (0, 1) if clock and clock + off <= clocks[-1]})
    for time_us in sampled(times, 100):
        assert await offset_at(States(log, 0), time_us) == max(
            at for at, clock in enumerate(clocks) if clock <= time_us
        )
    with pytest.raises(NoSuchRecord, match=r"the recording begins at .* after the requested time"):
        await offset_at(States(log, 0), min(clock for clock in clocks if clock) - 1)
    assert await offset_at(States(log, 0), clocks[-1] + 1) == len(clocks) - 1


async def test_offsets_and_times_outside_the_journal_are_rejected(log: SqliteLog) -> None:
    end = len(journal(log))
    for offset in (end, end + 100):
        with pytest.raises(NoSuchRecord, match=f"no journal record {offset}: the recording has records 0 to {end - 1}"):
            await seek(States(log, 0), offset)
    with closing(SqliteLog.open(None)) as empty:
        for question in (seek(States(empty, 0)), offset_at(States(empty, 0), 1)):
            with pytest.raises(NoSuchRecord, match="is empty: no decision was recorded"):
                await question


async def test_no_state_is_shown_after_a_divergence(log: SqliteLog, path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path))
    wrong = first_of(log, RequestRouted, after=5)
    lie = msgspec.structs.replace(journal(log)[wrong], worker_id="w9")
    replace_record(copy, DECISIONS, wrong, lambda _: encode(DECISIONS, lie))
    with closing(SqliteLog.open(copy, readonly=True)) as changed:
        assert (await moment_at(changed, wrong - 1)).offset == wrong - 1
        with pytest.raises(JournalDiverged, match=f"journal record {wrong} does not follow from the events"):
            await seek(States(changed, 0), wrong)


async def test_a_stale_record_shows_the_state_of_the_previous_valid_record(
    path: Path, tmp_path: Path, log: SqliteLog
) -> None:
    stale = journal(log)[first_of(log, OwnerClaimed, after=1) - 1]
    assert stale.owner_epoch == 0
    with closing(SqliteLog.open(Path(shutil.copy(path, tmp_path)))) as changed:
        (offset,) = await changed.append([Draft(DECISIONS.name, 0, encode(DECISIONS, stale))])
        assert (await seek(States(changed, 0), offset)).offset == offset - 1


# Times

START_US = 10_000  # append times of later events; the owner's clock of the journal is before
EVERY_US = 100


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
async def test_the_state_between_two_journal_records_is_that_of_the_owner(history: list[Any]) -> None:
    made = DigestRecorder()
    made.fleet("a", "b")
    made.ask("first", PROMPTS[0][:2])
    first_us = made.now_us
    for number, action in enumerate(history):
        perform(made, number, action)
    made.seal()
    with closing(await made.log()) as log:
        for time_us in sampled([one for one in made.digests if one >= first_us], 10):
            moment = await (await seek_time(States(log, 0), time_us)).moment()
            assert (moment.digest, moment.now_us) == (made.digests[time_us], time_us)
            assert (moment.later.requested_us, moment.later.unrecorded, moment.later.not_applied) == (time_us, {}, {})


async def test_events_before_the_next_record_are_counted() -> None:
    made = fleet("a")
    made.ask("one", [1])
    made.progress("one", FirstTokenEmitted, cached_tokens=0)
    made.progress("one", RequestFinished, finish_reason="stop", output_tokens=1)
    finished_us = made.now_us
    made.ask("two", [2])
    with closing(await made.log()) as log:
        before, after = [await (await seek_time(States(log, 0), finished_us + off)).moment() for off in (-1, 5)]
    assert ([one.phase for one in before.requests], after.requests) == (["decode"], [])
    assert before.later == LaterFacts(requested_us=finished_us - 1, applied={"progress": 1})
    assert after.later == LaterFacts(requested_us=finished_us + 5, applied={"progress": 2})
    assert before.offset == after.offset


class SteppedWall(SystemRuntime):
    """Runtime whose wall clock advances with each append."""

    def __init__(self) -> None:
        self.now_us = 0

    def wall_ns(self) -> int:
        return self.now_us * 1_000


async def idle_log(made: Recorder, *later: tuple[str, InputEvent | None], start_us: int = START_US) -> SqliteLog:
    """Return the recorder's log, and after it one event at each of `start_us`, `start_us + EVERY_US`, …."""
    made.seal()
    clock = SteppedWall()
    with runtime.use(clock):
        log = await made.log()
        for number, (topic, event) in enumerate(later):
            clock.now_us = start_us + number * EVERY_US
            made(topic, event, journalled=False)
            await log.append([made.drafts[-1]])
    return log


def running(*names: str) -> Recorder:
    made = fleet("a")
    for name in names:
        assert isinstance(made.ask(name, [len(name)]), RequestRouted)
    return made


def ended(made: Recorder, name: str) -> tuple[str, InputEvent]:
    return "progress", made.of(name, RequestFinished, finish_reason="stop", output_tokens=1)


async def test_ends_of_requests_after_the_last_record_are_applied_and_named() -> None:
    made = running("one", "two")
    last_us = START_US + EVERY_US
    with closing(await idle_log(made, ended(made, "one"), ended(made, "two"))) as log:
        assert await last_time(log, 0) == last_us
        positions = [await seek_time(States(log, 0), time_us) for time_us in (START_US - 1, START_US, last_us)]
        positions += [await seek_record(States(log, 0)), await seek_record(States(log, 0), 1)]
        with pytest.raises(NoSuchRecord, match=r"the recording ends at .*, before the requested time"):
            await seek_time(States(log, 0), last_us + 1)
        early, between, late, default, first = [await position.moment() for position in positions]
    assert [len(one.requests) for one in (early, between, late, default)] == [2, 1, 0, 2]
    assert early.later == LaterFacts(requested_us=START_US - 1)
    assert between.later == LaterFacts(requested_us=START_US, unrecorded={"progress": 1})
    assert late.later == LaterFacts(requested_us=last_us, unrecorded={"progress": 2})
    assert late.now_us == last_us
    assert default.later == LaterFacts(not_applied={"progress": 2})
    assert first.later == LaterFacts(), "later events of the journal are no surprise"


async def test_events_from_the_first_decision_without_a_record_on_are_not_applied() -> None:
    made = running("one", "two")
    later = [ended(made, "one"), ("requests", request("new", [9])), ended(made, "two"), ("progress", None)]
    last_us = START_US + 3 * EVERY_US
    with closing(await idle_log(made, *later)) as log:
        found = await (await seek_time(States(log, 0), last_us)).moment()
    assert ([one.request_id for one in found.requests], found.now_us) == (["two"], START_US)
    not_applied = {"requests": 1, "progress": 2}
    assert found.later == LaterFacts(requested_us=last_us, unrecorded={"progress": 1}, not_applied=not_applied)


async def test_a_deadline_after_the_last_record_is_a_decision() -> None:
    made = running("one")
    due_us = 60_000_000
    with closing(await idle_log(made, ended(made, "one"), start_us=10 * due_us)) as log:
        found = await (await seek_time(States(log, 0), 10 * due_us)).moment()
    assert [one.request_id for one in found.requests] == ["one"]
    assert found.later.not_applied == {"progress": 1}
    assert found.now_us < due_us


async def test_a_missing_record_after_the_journal_is_an_error() -> None:
    made = running("one")
    with (
        closing(await idle_log(made, ended(made, "one"), ("progress", None))) as log,
        pytest.raises(LogError, match="progress/0: the records from 0 to 0 are missing"),
    ):
        await seek_time(States(LogWithout(log, PROGRESS, 0), 0), START_US + EVERY_US)
