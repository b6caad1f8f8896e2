"""The state at a moment equals the one sealed in the journal, from any starting point."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, OwnerClaimed, RequestHeld, RequestRouted
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.topics import DECISIONS, FLEET
from forebay.replay.at import JournalDiverged, NoSuchRecord, offset_at, seek
from forebay.replay.moment import Moment
from forebay.transport.base import Draft
from forebay.transport.history.reader import decode_journal
from forebay.transport.recording.manifest import utc
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.logs import invoke
from tests.depth import sampled
from tests.logs.own_policy import CUSTOM
from tests.replay import incident
from tests.replay.mutations import replace_record
from tests.replay.recorder import fleet

RECORDINGS = sorted((Path(__file__).parent.parent / "logs").glob("*.rec"))
T = TypeVar("T")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("at") / "incident.db"
    asyncio.run(incident.record(path))
    return path


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    log = SqliteLog.open(path, readonly=True)
    yield log
    log.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def journal(log: SqliteLog) -> list[Any]:
    return [decode(DECISIONS, record.value) for record in log.records(DECISIONS.name, 0, 0, 10_000)]


def first_of(log: SqliteLog, kind: type, after: int = 0) -> int:
    return next(at for at, record in enumerate(journal(log)) if at >= after and isinstance(record, kind))


def copy_of(path: Path, folder: Path) -> Path:
    copy = folder / "copy.db"
    copy.write_bytes(path.read_bytes())
    return copy


async def moment_at(log: SqliteLog, offset: int) -> Moment:
    return await (await seek(log, 0, offset)).moment()


def test_the_state_has_the_digest_sealed_in_the_journal(log: SqliteLog) -> None:
    seals = {at: record.digest for at, record in enumerate(journal(log)) if isinstance(record, Advanced)}
    assert len(seals) >= 4
    for offset, digest in seals.items():
        moment = run(moment_at(log, offset))
        assert moment.digest == digest
        encoded = msgspec.json.encode(moment)
        assert msgspec.json.encode(msgspec.json.decode(encoded, type=Moment)) == encoded


def test_states_from_the_beginning_and_from_a_snapshot_are_equal(log: SqliteLog) -> None:
    async def both() -> None:
        walked = await seek(log, 0, 0)
        starts = set()
        while True:
            there = await seek(log, 0, walked.offset)
            starts.add(there.start)
            one, other = await walked.moment(), await there.moment()
            assert (one.offset, one.digest, one.record) == (other.offset, other.digest, other.record)
            assert (one.workers, one.ranks, one.queues) == (other.workers, other.ranks, other.queues)
            assert (one.requests, one.view, one.pools, one.owner_id) == (
                other.requests,
                other.view,
                other.pools,
                other.owner_id,
            )
            if await walked.forward() is None:
                break
        assert walked.start == 0
        assert len(starts) > 2, "most were derived from snapshots"

    run(both())


def test_states_from_a_slice_and_from_the_log_are_equal(log: SqliteLog, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "slice.rec"
    last = max(at for at, record in enumerate(journal(log)) if isinstance(record, RequestRouted))
    (record,) = log.records(DECISIONS.name, 0, last, 1)
    result = invoke("record", path, out, "--from", utc(record.at_us))
    assert result.exit_code == 0, result.output
    cut = SqliteLog.open(out, readonly=True)
    begin = run(cut.begin(DECISIONS.name, 0))
    assert begin > 0
    for offset in sampled(range(begin, len(journal(log))), 12):
        one, other = run(moment_at(log, offset)), run(moment_at(cut, offset))
        assert (one.digest, one.record, one.ranks, one.now_us) == (
            other.digest,
            other.record,
            other.ranks,
            other.now_us,
        )
        assert run(offset_at(cut, 0, one.now_us)) == run(offset_at(log, 0, one.now_us))
    with pytest.raises(NoSuchRecord, match=f"no journal record {begin - 1}: the recording has records {begin} to"):
        run(seek(cut, 0, begin - 1))
    with pytest.raises(NoSuchRecord, match=r"the recording begins at .* after the requested time"):
        run(offset_at(cut, 0, 1))
    cut.close()


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_every_golden_recording_has_the_states_sealed_in_its_journal(recording: Path) -> None:
    golden = SqliteLog.open(recording, readonly=True)
    assert golden.recording is not None
    (group,) = golden.recording.groups
    records = golden.records(DECISIONS.name, group.partition, group.start, 10_000)
    for offset, sealed in {record.offset: decode_journal(record) for record in records}.items():
        if isinstance(sealed, Advanced):
            position = run(seek(golden, group.partition, offset, CUSTOM))
            if position.offset == offset:  # a stale record has the digest of another state
                assert run(position.moment()).digest == sealed.digest
    last = run(run(seek(golden, group.partition, custom=CUSTOM)).moment())
    assert msgspec.json.decode(msgspec.json.encode(last), type=Moment) == last
    golden.close()


def test_owners_are_listed_with_their_claims(log: SqliteLog) -> None:
    second = first_of(log, OwnerClaimed, after=1)
    before, after, last = (run(moment_at(log, offset)) for offset in (second - 1, second, len(journal(log)) - 1))
    assert (before.owner_id, before.owner_epoch) == ("first", 0)
    assert (after.owner_id, after.owner_epoch) == ("second", second)
    assert last.owner_id == "second"
    assert after.now_us == before.now_us, "a claim applies nothing"


def test_lost_worker_is_shown_before_and_after_its_loss(log: SqliteLog) -> None:
    stranded = first_of(log, RequestRouted, after=first_of(log, RequestHeld))
    facts = [decode(FLEET, record.value) for record in log.records(FLEET.name, 0, 0, 100)]
    (lost,) = [fact for fact in facts if isinstance(fact, WorkerLost) and fact.worker_id == incident.SLOW]

    async def find() -> tuple[Moment, Moment]:
        position = await seek(log, 0, stranded - 1)
        alive = await position.moment()
        while incident.SLOW in {worker.worker_id for worker in (await position.moment()).workers}:
            alive = await position.moment()
            assert await position.forward() is not None
        return alive, await position.moment()

    alive, dead = run(find())
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
    late = run(moment_at(log, len(journal(log)) - 1))
    assert late.start > dead.offset
    (entry,) = late.lost
    assert (entry.worker_id, entry.reason, entry.ranks) == (incident.SLOW, lost.reason, None)


def test_loss_reported_by_a_fenced_owner_is_ignored() -> None:
    made = fleet("a", "b")
    made("fleet", OwnershipAnnounced(owner_epoch=5))
    for name, owner_epoch in (("a", 4), ("b", 5)):
        made("fleet", WorkerLost(owner_epoch=owner_epoch, worker_id=name, worker_epoch=made.epoch(name)))
    made.snapshot()

    async def lost() -> list[str]:
        log = await made.log()
        moment = await (await seek(log, 0)).moment()
        log.close()
        assert moment.start > 0, "the state starts at the snapshot, so the losses come from the log"
        assert [worker.worker_id for worker in moment.workers] == ["a"]
        return [loss.worker_id for loss in moment.lost]

    assert run(lost()) == ["b"]


def test_queued_and_active_requests(log: SqliteLog) -> None:
    held = first_of(log, RequestHeld)
    moment = run(moment_at(log, held + 1))
    (kind,) = moment.queues
    record = journal(log)[held]
    assert kind.waiting[0].request_id == record.request_id
    assert kind.waiting[0].uncached_tokens == record.uncached_tokens
    assert [one.waited_us for one in kind.waiting] == sorted((one.waited_us for one in kind.waiting), reverse=True)
    by_id = {request.request_id: request for request in moment.requests}
    for one in kind.waiting:
        request = by_id[one.request_id]
        assert (request.phase, request.worker_id, request.attempt) == ("queued", "", 0)
        assert request.age_us == one.waited_us
        assert request.due_in_us == 60_000_000 - one.waited_us
    assert {request.phase for request in moment.requests} >= {"queued", "prefill"}
    assert sum(rank.active_requests for rank in moment.ranks) == len(moment.requests) - len(kind.waiting)


@pytest.mark.parametrize("page_records", [2, 512])
def test_a_time_selects_the_last_record_written_by_then(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, page_records: int
) -> None:
    monkeypatch.setattr("forebay.replay.at.PAGE_RECORDS", page_records)
    clocks: list[int] = []
    for record in journal(log):
        clocks.append(record.consumed[-1].now_us if record.consumed else (clocks[-1] if clocks else 0))
    for time_us in {clock + off for clock in clocks for off in (0, 1) if clock and clock + off <= clocks[-1]}:
        wanted = max(at for at, clock in enumerate(clocks) if clock <= time_us)
        assert run(offset_at(log, 0, time_us)) == wanted
    with pytest.raises(NoSuchRecord, match=r"the recording begins at .* after the requested time"):
        run(offset_at(log, 0, min(clock for clock in clocks if clock) - 1))
    assert run(offset_at(log, 0, clocks[-1] + 1)) == len(clocks) - 1


def test_offsets_and_times_outside_the_journal_are_rejected(log: SqliteLog, tmp_path: Path) -> None:
    end = len(journal(log))
    for offset in (end, end + 100):
        with pytest.raises(NoSuchRecord, match=f"no journal record {offset}: the recording has records 0 to {end - 1}"):
            run(seek(log, 0, offset))
    empty = SqliteLog.open(tmp_path / "empty.db")
    for question in (seek(empty, 0), offset_at(empty, 0, 1)):
        with pytest.raises(NoSuchRecord, match="is empty: no decision was recorded"):
            run(question)
    empty.close()


def test_no_state_is_shown_after_a_divergence(log: SqliteLog, path: Path, tmp_path: Path) -> None:
    copy = copy_of(path, tmp_path)
    wrong = first_of(log, RequestRouted, after=5)
    record = journal(log)[wrong]

    def lie(_: bytes) -> bytes:
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        return encode(DECISIONS, RequestRouted(**{**fields, "worker_id": "w9"}))

    replace_record(copy, DECISIONS, wrong, lie)
    changed = SqliteLog.open(copy, readonly=True)
    assert run(moment_at(changed, wrong - 1)).offset == wrong - 1
    with pytest.raises(JournalDiverged, match=f"journal record {wrong} does not follow from the events"):
        run(seek(changed, 0, wrong))
    changed.close()


def test_a_stale_record_shows_the_state_of_the_previous_valid_record(
    path: Path, tmp_path: Path, log: SqliteLog
) -> None:
    copy = copy_of(path, tmp_path)
    second = first_of(log, OwnerClaimed, after=1)
    changed = SqliteLog.open(copy)

    async def append_stale_record() -> tuple[int, int]:
        stale = journal(log)[second - 1]
        assert stale.owner_epoch == 0
        (offset,) = await changed.append([Draft(DECISIONS.name, 0, encode(DECISIONS, stale))])
        return offset, (await seek(changed, 0, offset)).offset

    offset, shown = run(append_stale_record())
    changed.close()
    assert shown == offset - 1
