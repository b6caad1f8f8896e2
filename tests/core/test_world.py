"""The world as a whole: what it decides, and that the recorded order leads to exactly that again."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from forebay.core import dispatch, rederive
from forebay.core.rederive import CLOCK_US_MAX, Rederivation
from forebay.core.restore import restore
from forebay.core.state.fleet import FleetWorker
from forebay.core.step import CLOCK, AnyDecision, InputEvent, advance, claim, open_run
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    ConsumedRun,
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RequestRouted,
    Sealed,
    SnapshotTaken,
)
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted
from forebay.events.requests import RequestCancelled
from forebay.events.versions import EVENTS_VERSION
from tests.core.worlds import PROMPTS, Driver, Recorded, joined, request


def only(decided: list[Any], kind: type) -> Any:
    (one,) = decided
    assert isinstance(one, kind)
    return one


def test_load_moves_the_next_request_elsewhere_and_leaves_with_the_request() -> None:
    drive = Driver().fleet("a", "b")
    first = drive.ask("r1")
    second = drive.ask("r2", PROMPTS[1])
    assert first.worker_id != second.worker_id
    assert {rank.prefill_tokens for rank in drive.world.load.ranks()} == {34}
    drive.emit(FirstTokenEmitted, first)
    assert drive.world.load.rank_load(first.worker_id, 0).prefill_tokens == 0
    for routed in (first, second):
        drive.finish(routed)
    ranks = drive.world.load.ranks()
    assert {(rank.prefill_tokens, rank.decode_blocks, rank.active_requests) for rank in ranks} == {(0, 0.0, 0)}
    assert not len(drive.world.requests)


def test_requests_that_cannot_be_served_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driver()
    assert drive.ask("r1").reason == "no_workers", "no pool is configured"
    drive.fleet()
    assert drive.ask("r1", model="other").reason == "wrong_model"
    assert drive.ask("r2").reason == "no_workers"
    drive("fleet", joined("a"))
    assert drive.ask("r2").attempt == 1, "a refused id may come again"
    monkeypatch.setattr(dispatch, "ACTIVE_REQUESTS_MAX", 1)
    assert drive.ask("r3").reason == "overloaded"


def test_a_repeated_id_is_ignored_or_refused_until_it_is_forgotten() -> None:
    drive = Driver().fleet("a")
    routed = drive.ask(nonce=1)
    for _ in range(2):
        assert drive("requests", request("r", PROMPTS[0], nonce=1)) == []
        assert drive.ask(nonce=2).reason == "duplicate_id"
        if len(drive.world.requests):
            drive.finish(routed)
    assert drive.world.counts["duplicate_request"] == 2
    drive.wait(121_000_000)
    assert drive.ask(nonce=2).attempt == 1


def test_a_deadline_and_a_cancellation_end_a_request_and_its_work() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("late", timeout_us=5_000))
    drive("requests", request("left"))
    assert drive.wait(100) == []
    late = only(drive.wait(10_000), RequestAborted)
    assert (late.request_id, late.reason, late.worker_id, late.reply_slot) == ("late", "deadline", "a", 1)
    assert late.consumed[-1].topic == CLOCK
    left = only(drive("requests", RequestCancelled(request_id="left", reason="gone")), RequestAborted)
    assert (left.reason, left.message) == ("cancelled", "gone")
    assert drive.cancel("left") == []
    assert drive.world.load.rank_load("a", 0).active_requests == 0


def test_requests_of_a_lost_worker_are_rerouted() -> None:
    drive = Driver().fleet("a")
    for name in ("r1", "r2"):
        drive("requests", request(name, PROMPTS[0]))
    first = drive.epoch("a")
    assert drive.lose("a") == []
    again = drive("fleet", joined("a"))
    assert [(one.request_id, one.attempt) for one in again if isinstance(one, RequestRouted)] == [("r1", 2), ("r2", 2)]
    assert drive.epoch("a") != first
    drive("fleet", joined("b", slot=1))
    moved = drive.lose("a")
    assert {(one.worker_id, one.attempt) for one in moved if isinstance(one, RequestRouted)} == {("b", 3)}
    ended = drive.lose("b")
    assert [only([one], RequestAborted).reason for one in ended] == ["attempts_exhausted"] * 2
    assert {one.worker_id for one in ended if isinstance(one, RequestAborted)} == {""}
    assert not len(drive.world.requests)


def test_on_loss_is_called_before_the_worker_is_removed() -> None:
    seen = []
    drive = Driver().fleet("a", "b")
    drive.stored("a", PROMPTS[0][:5])
    drive("requests", request("r", PROMPTS[0]))
    world = drive.world

    def look(event: WorkerLost, worker: FleetWorker) -> None:
        held = world.index.blocks_held("a", 0, "device"), world.load.rank_load("a", 0).active_requests
        on_it = [one.submitted.request_id for one in world.requests.of_worker("a", worker.worker_epoch)]
        seen.append((event.reason, worker.spec.worker_id, held, on_it))

    world.on_loss = look
    for reason in ("gone", "again"):
        drive.lose("a", reason=reason)
    assert seen == [("gone", "a", (5, 1), ["r"])], "a fact that is void is no loss"


def test_a_late_finish_of_a_lost_worker_ends_the_request() -> None:
    drive = Driver().fleet("a")
    routed = drive.ask()
    drive.lose("a")
    assert len(drive.world.requests.waiting()) == 1
    drive.finish(routed)
    assert not len(drive.world.requests)
    assert drive("fleet", joined("a")) == []


def test_the_clock_never_runs_backwards() -> None:
    drive = Driver()
    drive("control", PoolConfigured(pool="p", model="m", block_size=4))
    with pytest.raises(AssertionError, match="backwards"):
        drive.world.note("control", 1, drive.now_us - 1)


def test_on_applied_gets_every_event_with_its_decisions() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", timeout_us=5_000))
    drive("requests", None)
    drive.wait(10_000)
    seen: list[tuple[str, InputEvent | None, int]] = []
    decided: list[AnyDecision] = []
    followed = following()

    def look_on(topic: str, event: InputEvent | None, now_us: int, led_to: Sequence[AnyDecision]) -> None:
        seen.append((topic, event, now_us))
        decided.extend(led_to)
        assert followed.world.now_us <= now_us

    followed.on_applied = look_on
    recorded = Recorded(drive.applied)
    for offset, record in enumerate([*drive.decided, advance(drive.world)], 1):
        assert followed.apply(offset, record, recorded.events_of(record)) is None
    assert [one for one in seen if one[0] != CLOCK] == drive.applied
    opened = {now_us for topic, _, now_us in seen if topic == CLOCK}
    assert opened == {now_us for _, _, now_us in drive.applied} | {drive.now_us}
    assert decided == drive.decided


def snapshot_of(sealed: JournalRecord, seq: int, journal_offset: int, **changes: Any) -> SnapshotTaken:
    """Return the record of a snapshot of the state that a record sealed."""
    fields: dict[str, Any] = {"digest": getattr(sealed, "digest", ""), "first_offset": 0, "chunks": 1, **changes}
    return SnapshotTaken(core_version=1, owner_epoch=0, seq=seq, journal_offset=journal_offset, **fields)


def following(world: World | None = None) -> Rederivation:
    """Return the rederivation of a log whose first record is a claim."""
    followed = Rederivation(world or World())
    followed.apply(0, OwnerClaimed(owner_id="o", core_version=1, events_version=EVENTS_VERSION), {})
    return followed


def history_of_three() -> tuple[Driver, list[JournalRecord]]:
    drive = Driver().fleet("a", "b")
    for name in ("r1", "r2", "r3"):
        drive("requests", request(name, PROMPTS[0]))
    return drive, list(drive.decided)


def follow(drive: Driver, records: list[JournalRecord]) -> Any:
    followed = following()
    recorded = Recorded(drive.applied)
    for offset, record in enumerate(records, 1):
        divergence = followed.apply(offset, record, recorded.events_of(record))
        if divergence is not None:
            return divergence
    return None


def test_a_changed_field_another_kind_a_missing_and_an_invented_decision() -> None:
    drive, records = history_of_three()
    assert follow(drive, records) is None
    changed = msgspec.structs.replace(records[1], worker_id="z")
    found = follow(drive, [records[0], changed, records[2]])
    assert (found.offset, found.reason) == (2, "differs in worker_id")
    fields: dict[str, Any] = {"request_id": "r2", "reply_slot": 1, "reason": "no_workers", "message": ""}
    rejected = RequestRejected(owner_epoch=0, seq=1, consumed=records[1].consumed, **fields)
    found = follow(drive, [records[0], rejected])
    assert found.reason == "the events lead to another kind of decision"
    assert (found.recorded, found.derived) == (rejected, records[1])
    invented = msgspec.structs.replace(records[0], consumed=())
    found = follow(drive, [*records, invented])
    assert (found.offset, found.reason, found.derived) == (4, "the events lead to no decision here", None)
    sealed = advance(drive.world)
    skipped = msgspec.structs.replace(sealed, seq=2, consumed=records[2].consumed)
    found = follow(drive, [*records[:2], skipped])
    assert (found.reason, found.derived) == ("a decision is missing before this record", records[2])


def test_a_snapshot_record_belongs_to_the_state_sealed_before_it() -> None:
    drive, records = history_of_three()
    sealed = advance(drive.world)
    taken = snapshot_of(sealed, 4, len(records) + 2)
    assert follow(drive, [*records, sealed, taken]) is None
    other = msgspec.structs.replace(taken, digest=hex_digest(1))
    assert "does not match the seal" in follow(drive, [*records, sealed, other]).reason
    late = msgspec.structs.replace(taken, seq=9)
    assert follow(drive, [*records, sealed, late]).reason.startswith("the log lost 5 journal records")
    unsealed = msgspec.structs.replace(taken, seq=3)
    assert "does not match the seal" in follow(drive, [*records, unsealed]).reason


def test_an_owner_that_stopped_applied_nothing_after_its_last_seal() -> None:
    drive, _ = history_of_three()
    seal = advance(drive.world)
    drive("requests", request("r4", PROMPTS[1]))
    records = [*drive.decided[:3], seal]
    of: dict[str, Any] = {"digest": seal.digest, "checksum": "0" * 32, "first_offset": 0, "chunks": 1}
    sealed = Sealed(core_version=1, owner_epoch=0, seq=4, journal_offset=5, **of)
    assert follow(drive, [*records, sealed]) is None
    late = msgspec.structs.replace(sealed, seq=5)
    assert follow(drive, [*records, drive.decided[3], late]).reason == "differs in digest"


def test_decisions_and_seals_may_stand_between_a_seal_and_its_snapshot() -> None:
    drive, _ = history_of_three()
    sealed = advance(drive.world)
    drive("requests", request("r4", PROMPTS[1]))
    records = [*drive.decided[:3], sealed, drive.decided[3], advance(drive.world)]
    taken = snapshot_of(sealed, 6, 5)
    assert follow(drive, [*records, taken]) is None
    for lie in ({"digest": hex_digest(1)}, {"journal_offset": 6}, {"journal_offset": 7}):
        assert "does not match the seal" in follow(drive, [*records, msgspec.structs.replace(taken, **lie)]).reason


def test_a_snapshot_may_be_of_a_state_sealed_before_following_began() -> None:
    drive, _ = history_of_three()
    sealed = advance(drive.world)
    followed = Rederivation(restore(drive.world.snapshot()))
    drive("requests", request("r4", PROMPTS[1]))
    recorded = Recorded(drive.applied[-1:])
    assert followed.apply(5, drive.decided[3], recorded.events_of(drive.decided[3])) is None
    assert followed.apply(6, snapshot_of(sealed, 5, 5), {}) is None


def test_of_many_seals_the_newest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rederive, "SEALS_MAX", 2)
    drive, records = history_of_three()
    seals = [advance(drive.world) for _ in range(4)]
    known = snapshot_of(seals[-1], 7, 7, digest=hex_digest(1))
    assert "does not match the seal" in follow(drive, [*records, *seals, known]).reason
    assert follow(drive, [*records, *seals, msgspec.structs.replace(known, journal_offset=6)]) is None


def test_decisions_that_a_dead_owner_made_and_did_not_write_are_the_next_ones() -> None:
    drive = Driver().fleet("a")
    for name in ("r1", "r2", "r3"):
        drive("requests", request(name, PROMPTS[0]))
    drive.lose("a")
    moved = drive("fleet", joined("b"))
    assert len(moved) == 3
    written = drive.decided[:4]  # the first move is in the journal, the other two died with their owner
    followed = following()
    recorded = Recorded(drive.applied)
    for offset, record in enumerate(written, 1):
        assert followed.apply(offset, record, recorded.events_of(record)) is None
    assert list(followed.pending) == moved[1:]
    followed.apply(9, OwnerClaimed(owner_id="p", core_version=1), {})
    restamped = [msgspec.structs.replace(one, owner_epoch=9) for one in moved[1:]]
    assert list(followed.pending) == restamped
    for offset, record in enumerate(restamped, 10):
        assert followed.apply(offset, record, {}) is None


def test_runs_of_one_topic_at_one_time_are_one_run() -> None:
    world = World()
    claim(world, 3)
    for _ in range(3):
        world.note("requests", 1, 50)
    world.note("requests", 1, 60)
    assert world.take_consumed() == (
        ConsumedRun(topic="requests", count=3, now_us=50),
        ConsumedRun(topic="requests", count=1, now_us=60),
    )
    assert world.view == {"requests": 4}
    assert open_run(world, 100) == []


def test_the_number_of_the_next_record_is_known_before_it_is_applied() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[0]))
    drive.lose("a")
    drive("fleet", joined("b"))
    followed, recorded = Rederivation(World()), Recorded(drive.applied)
    claimed = OwnerClaimed(owner_id="o", core_version=1)
    for offset, record in enumerate([claimed, *drive.decided]):
        later = drive.decided[offset:]
        assert followed.missing_before(offset, record) is None
        assert record is claimed or all(followed.missing_before(offset, one) is not None for one in later)
        assert record is claimed or followed.next_seq == record.seq
        followed.apply(offset, record, recorded.events_of(record))


def test_a_clock_reading_that_is_none() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    [decided] = drive.decided
    *runs, last = decided.consumed
    late = msgspec.structs.replace(decided, consumed=(*runs, ConsumedRun(topic=last.topic, count=1, now_us=1 << 63)))
    found = Rederivation(World()).apply(1, late, Recorded(drive.applied).events_of(late))
    assert found is not None
    assert (found.reason, found.derived) == (f"the clock reading is above {CLOCK_US_MAX}", None)


def test_on_plan_is_called_before_booking() -> None:
    drive = Driver().fleet("a", "b")
    seen: list[tuple[str, str, int]] = []
    drive.world.on_plan = lambda plan: seen.append(
        (plan.request.request_id, hex_digest(plan.table.digest()), len(drive.world.requests))
    )
    for name in ("r1", "r2"):
        drive("requests", request(name, PROMPTS[0]))
    routed = [one for one in drive.decided if isinstance(one, RequestRouted)]
    assert seen == [(one.request_id, one.table_digest, at) for at, one in enumerate(routed)]
    assert len(routed) == 2
