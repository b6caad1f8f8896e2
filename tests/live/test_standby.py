"""A standby has the state of a cold recovery, takes over warm, and continues a journal of other rules from its seal."""

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.core.rederive import Rederivation
from forebay.core.step import CLOCK
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import OwnerClaimed, RequestRouted, Sealed
from forebay.events.topics import DECISIONS, SNAPSHOTS
from forebay.journal import records as recorded
from forebay.journal.records import OtherRules, Validity, journal
from forebay.journal.snapshots import OtherState
from forebay.journal.spans import OtherSpan
from forebay.journal.start import recorded_view
from forebay.live.owner.owner import Owner, OwnershipLost
from forebay.live.standby import AbandonedTail, RecoveryDiverged, Standby
from forebay.replay.verify.verify import verify
from forebay.transport.base import Draft, Log, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.live.shared import (
    OTHER,
    OTHER_RELEASE,
    PREFIX,
    Altered,
    Program,
    SharedLog,
    background,
    dearer,
    followed,
    journal_end,
    serve,
    serve_unsealed,
)
from tests.system import System, settings, until

SEED = 20_240


def state(followed_by: Rederivation) -> tuple[int, list[object], int, int]:
    world = followed_by.world
    return world.digest(), list(followed_by.pending), world.seq, world.owner_epoch


def unconfirmed(standby: Standby) -> list[str]:
    return [getattr(answer, "request_id", "") for answer in standby.unconfirmed]


async def test_a_standby_takes_over_warm_with_the_state_of_a_cold_recovery(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        standby = Standby(SharedLog(log), 0)
        async with background(standby.run()):
            async with system.owned(snapshot_every=4) as owner:
                await serve(system, owner, "a", "b", "c")
                await until(lambda: standby.position == journal_end(log))
                assert state(standby.followed) == state((await followed(log, standby.position)).followed)
                assert unconfirmed(standby) == ["a-refused", "b-refused", "c-refused"]
            await until(lambda: standby.position == journal_end(log))
        world = standby.world
        async with system.owned(standby=standby) as successor:
            assert successor.world is world
            await serve(system, successor, "d")
        (first, *_, last) = system.decisions(RequestRouted)
        assert (last.worker_id, last.terms.device_overlap) == (first.worker_id, 4)


async def test_a_standby_resumes_after_a_cancellation_at_any_point(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at random points, the standby ends with the same state. Short pages make more such points."""
    monkeypatch.setattr("forebay.transport.base.PAGE_RECORDS", 4)
    monkeypatch.setattr(recorded, "PAGE_RECORDS", 4)
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, *(f"r{number}" for number in range(20)))
    end = journal_end(log)
    standby = Standby(SharedLog(log), 0)
    stops = 0
    while standby.position < end:
        async with background(standby.run() if chance.random() < 0.5 else standby.catch_up(end)):
            for _ in range(chance.randrange(5, 20)):
                await asyncio.sleep(0)
        stops += 1
    assert stops > 3
    assert standby.failed is None
    assert state(standby.followed) == state((await followed(log, end)).followed)


async def test_a_standby_begins_at_the_newest_snapshot(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    async with System(log).started(workers=2) as system:
        async with system.owned() as owner:
            await serve(system, owner, "a")
        sealed = journal_end(log)
        async with system.owned() as owner:
            await serve(system, owner, "b")
            standby = Standby(log, 0)
            with caplog.at_level("INFO"):
                await standby.catch_up(journal_end(log))
    # The rejection before the snapshot is read again, because its effect may be missing even so.
    assert unconfirmed(standby) == ["a-refused", "b-refused"]
    assert standby.position > sealed


def torn(log: Log) -> Altered:
    """Return a log with an undecodable journal record."""
    return Altered(log, DECISIONS.name, lambda _: b"?", at=1)


@pytest.mark.parametrize("kind", [dearer, torn])
async def test_a_standby_that_cannot_follow_logs_it_and_the_owner_starts_cold(
    log: SqliteLog, kind: Callable[[Log], Log], caplog: pytest.LogCaptureFixture
) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        standby = Standby(kind(log), 0)
        await standby.run()
        assert standby.failed is not None
        assert "cannot be derived again" in standby.failed
        assert "the standby of partition 0 stopped" in caplog.text
        with pytest.raises(LogError, match="cannot be derived again"):
            await standby.catch_up(journal_end(log))
        async with system.owned(standby=standby) as successor:
            assert successor.world is not standby.world


async def test_an_owner_whose_rules_decide_differently_does_not_start(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        owner = Owner(dearer(log), system.leases, settings())
        with pytest.raises(RecoveryDiverged, match="verify"):
            await owner.start()
        owner.drop()


REFUSAL = (
    f"decided by version {OTHER} of the rules (forebay {OTHER_RELEASE}), this program has version {CORE_VERSION}:"
    " use the program"
)
BLOCKED = f"the owner test runs version {OTHER} of the rules, this program has version {CORE_VERSION}: it takes over"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, OTHER)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, CORE_VERSION)


def claims(system: System) -> list[tuple[int, int]]:
    return [(claim.core_version, claim.seal) for claim in system.decisions(OwnerClaimed)]


def seals(system: System) -> list[int]:
    return [offset for offset, record in enumerate(system.decisions()) if isinstance(record, Sealed)]


async def test_an_owner_does_not_claim_an_unsealed_journal_of_other_rules(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
        for _ in range(2):
            owner = Owner(log, system.leases, settings())
            with pytest.raises(OtherRules, match=re.escape(REFUSAL)):
                await owner.start()
            owner.drop()
        assert claims(system) == [(OTHER, -1)]
        await other.serve(system, "b", seals=False)


async def test_versions_continue_from_each_others_seals(log: SqliteLog, ours: Program, other: Program) -> None:
    """An upgrade, its rollback and a second upgrade. Each owner knows the prefix that the first one has cached."""
    async with System(log).started(workers=1) as system:
        for program, name in ((ours, "a"), (other, "b"), (ours, "c"), (other, "d")):
            await program.serve(system, name, seals=True)
        versions = [CORE_VERSION, OTHER, CORE_VERSION, OTHER]
        assert claims(system) == list(zip(versions, [-1, *seals(system)[:3]], strict=True))
        overlaps = [record.terms.device_overlap for record in system.decisions() if hasattr(record, "terms")]
        assert overlaps == [0, 3, 3, 3]
        assert system.decisions()[-1].seq == len(system.decisions()) - len(versions) - 1


async def test_a_standby_waits_for_the_seal_of_an_owner_with_other_rules(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
        standby = Standby(log, 0, waits_for_seal=True)
        async with background(standby.run()):  # this process can be only one program at a time
            await until(lambda: standby.position == journal_end(log))
        assert (standby.failed, standby.released) == (None, False)
        assert (standby.blocked or "").startswith(BLOCKED)
        with pytest.raises(OtherRules, match=re.escape(REFUSAL)):
            await standby.prepare_claim()
        for name in ("b", "c"):
            await other.serve(system, name, seals=True)
            await standby.catch_up(journal_end(log))
            assert (standby.blocked, standby.seal) == (None, journal_end(log) - 1)
            assert len(standby.world.fleet) == 1
        async with system.owned(standby=standby) as owner:
            pass
        assert claims(system)[-1] == (CORE_VERSION, seals(system)[-2])
        cold = await followed(log)
        assert cold.world.digest() == owner.world.digest()


@pytest.mark.parametrize("skipped", ["", "b"])
async def test_a_standby_follows_again_once_its_own_version_owns_the_group(
    log: SqliteLog, ours: Program, other: Program, skipped: str
) -> None:
    """The standby may read the seal of the other version before or after its own version has claimed."""
    async with System(log).started(workers=1) as system:
        standby = Standby(log, 0, waits_for_seal=True)
        for program, name, seals_it in ((ours, "a", True), (other, "b", True), (ours, "c", False)):
            await program.serve(system, name, seals=seals_it)
            if name != skipped:
                await standby.catch_up(journal_end(log))
                assert standby.blocked is None
                assert standby.released == seals_it
        cold = Standby(log, 0, waits_for_seal=True)
        await cold.catch_up(journal_end(log))
        assert standby.world.digest() == cold.world.digest()
        assert standby.world.seq == cold.world.seq == system.decisions()[-1].seq + 1


async def test_the_second_claim_after_a_seal_is_void_if_its_rules_differ(
    log: SqliteLog, ours: Program, other: Program
) -> None:
    """Both routers have read the seal. The claim of the other program comes first, so the group belongs to it."""
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        sealed = journal_end(log)

        async def claim_first(draft: Draft | None) -> None:
            if draft is not None and draft.topic == DECISIONS.name and journal_end(log) == sealed:
                await other.serve(system, "b", seals=False)

        owner = Owner(SharedLog(log, claim_first), system.leases, settings())
        with pytest.raises(OwnershipLost, match="is void"):
            await owner.start()
        owner.drop()
        assert [version for version, _ in claims(system)] == [CORE_VERSION, OTHER, CORE_VERSION]
        await other.serve(system, "c", seals=True)
        await ours.serve(system, "d", seals=True)
        assert claims(system)[-1] == (CORE_VERSION, seals(system)[-2])


async def test_a_damaged_snapshot_of_other_rules_is_not_continued(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)

        def alter(value: bytes) -> bytes:
            return msgspec.msgpack.encode({**msgspec.msgpack.decode(value), "added": 1})

        with pytest.raises(OtherState, match="has checksum"):
            await Standby(Altered(log, SNAPSHOTS.name, alter), 0, waits_for_seal=True).catch_up(journal_end(log))


async def test_the_state_digest_of_other_rules_does_not_matter(log: SqliteLog, other: Program) -> None:
    """Another version may compute the digest of the same state in another way."""
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)
        digest = system.decisions(Sealed)[-1].digest.encode()
        altered = Altered(log, DECISIONS.name, lambda value: value.replace(digest, b"0" * 16))
        standby = Standby(altered, 0, waits_for_seal=True)
        await standby.catch_up(journal_end(log))
        assert standby.released


async def test_unknown_records_of_another_version_are_skipped_until_the_seal(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
        standby = Standby(log, 0, waits_for_seal=True)
        await standby.catch_up(journal_end(log))
        await log.append([Draft(DECISIONS.name, 0, b'{"type":"request.postponed","owner_epoch":0,"seq":9}')])
        await other.serve(system, "b", seals=True)
        await standby.catch_up(journal_end(log))
        assert standby.released


async def test_searches_do_not_warn_of_each_foreign_record(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    for seq in range(3):
        await log.append([Draft(DECISIONS.name, 0, b'{"type":"request.postponed","owner_epoch":0,"seq":%d}' % seq)])
    validity = Validity()
    assert [found async for found in journal(log, 0, 0, journal_end(log), validity)] == []
    assert (validity.foreign, caplog.messages) == (3, [])


async def test_a_standby_that_does_not_wait_fails_at_other_rules(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
    standby = Standby(log, 0)
    await standby.run()
    assert standby.failed is not None
    assert REFUSAL in standby.failed
    with pytest.raises(OtherRules, match="version"):
        await Standby(log, 0).catch_up(journal_end(log))


async def test_verify_names_the_spans_of_other_versions(log: SqliteLog, ours: Program, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        for program, name in ((ours, "a"), (other, "b"), (ours, "c"), (other, "d")):
            await program.serve(system, name, seals=True)
    report = await verify(log)
    assert report.divergence is None
    assert (report.verified, report.claims, report.snapshots, report.unverified) == (2, 2, 2, {})
    first, second, third = seals(system)[:3]
    assert report.others == [
        OtherSpan(rules=OTHER, first=first + 1, end=second + 1, release=OTHER_RELEASE),
        OtherSpan(rules=OTHER, first=third + 1, end=journal_end(log), release=OTHER_RELEASE),
    ]


async def test_a_lie_in_a_later_span_is_found(log: SqliteLog, ours: Program, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        for program, name in ((ours, "a"), (other, "b"), (ours, "c")):
            await program.serve(system, name, seals=True)
        routed = [offset for offset, record in enumerate(system.decisions()) if isinstance(record, RequestRouted)]

        def alter(value: bytes) -> bytes:
            return value.replace(b'"request_id":"c","attempt":1', b'"request_id":"c","attempt":2')

        report = await verify(Altered(log, DECISIONS.name, alter))
        assert report.divergence is not None
        assert report.divergence.offset == routed[2]


async def test_verify_exits_with_3_if_it_verified_nothing(tmp_path: Path, other: Program) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)
    log.close()
    run = await asyncio.to_thread(forebay, "verify", str(path))
    assert run.returncode == 3
    assert f"the journal was decided by version {OTHER}" in run.stderr
    assert f"journal offsets 0 to 3: verified only by a forebay with version {OTHER} of the rules" in run.stdout
    assert f"(forebay {OTHER_RELEASE})" in run.stdout


async def test_an_operator_lets_a_router_continue_from_the_last_snapshot(
    log: SqliteLog, ours: Program, other: Program
) -> None:
    """The owner of the other version died without a seal. The loss is reported before the claim."""
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)
        sealed = seals(system)[-1]
        await other.serve(system, "b", "c", seals=False)
        end = journal_end(log)
        losses: list[AbandonedTail] = []

        def on_loss(tail: AbandonedTail) -> None:
            assert journal_end(log) == end, "the loss is reported before the claim"
            losses.append(tail)

        standby = Standby(log, 0, waits_for_seal=True, on_loss=on_loss)
        await standby.catch_up(end)
        assert (standby.blocked, standby.released, standby.world.owner_epoch) == (None, False, sealed + 1)
        async with system.owned(standby=standby):
            await system.serve("d", PREFIX)
        assert losses == [AbandonedTail(0, sealed, end - sealed - 1, 2, 2)]
        (claim,) = [one for one in system.decisions(OwnerClaimed) if one.snapshot >= 0]
        assert (claim.core_version, claim.seal, claim.snapshot) == (CORE_VERSION, -1, sealed)
    report = await verify(log)
    assert report.divergence is None
    assert (report.claims, len(report.others)) == (1, 1)
    cold = await followed(log)
    assert await recorded_view(log, 0) == {topic: at for topic, at in cold.world.view.items() if topic != CLOCK}


@pytest.mark.parametrize(("before", "seals_it"), [("ours", False), ("other", False), ("other", True)])
async def test_a_standby_goes_back_to_the_snapshot_that_a_claim_names(
    log: SqliteLog, ours: Program, other: Program, before: str, seals_it: bool
) -> None:
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        standby = Standby(log, 0, waits_for_seal=True)
        await standby.catch_up(journal_end(log))
        state = standby.world.digest()
        await (ours if before == "ours" else other).serve(system, "b", seals=seals_it)
        await standby.catch_up(journal_end(log))
        assert standby.world.digest() != state
        nonce = system.decisions()[-1].owner_nonce
        claim = OwnerClaimed(owner_id="o", core_version=CORE_VERSION, snapshot=seals(system)[0], previous_nonce=nonce)
        (epoch,) = await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, claim))])
        await standby.catch_up(journal_end(log))
        assert (standby.world.digest(), standby.world.owner_epoch) == (state, epoch)
        assert (await verify(log)).divergence is None


async def test_a_standby_that_waits_does_not_load_a_snapshot_for_other_rules(log: SqliteLog, ours: Program) -> None:
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=False)
        nonce = system.decisions()[-1].owner_nonce
    lost = OwnerClaimed(owner_id="o", core_version=OTHER, snapshot=1, previous_nonce=nonce)
    await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, lost))])
    standby = Standby(log, 0, waits_for_seal=True)
    await standby.catch_up(journal_end(log))
    assert standby.blocked is not None
