"""A standby has the state of a cold recovery, takes over warm, and stops at a journal that it cannot follow."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from forebay.core.rederive import Rederivation
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from forebay.live.owner.owner import Owner
from forebay.live.router import standby as standby_module
from forebay.live.router.standby import RecoveryDiverged, Standby
from forebay.transport.base import Log, LogError
from forebay.transport.history import reader as recorded
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import Altered, SharedLog, followed, journal_end
from tests.live.standbys import altered, serve, serve_unsealed
from tests.system import System, settings, until

SEED = 20_240


def state(followed_by: Rederivation) -> tuple[int, list[object], int, int]:
    world = followed_by.world
    return world.digest(), list(followed_by.pending), world.seq, world.owner_epoch


async def ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def unconfirmed(standby: Standby) -> list[str]:
    return [getattr(answer, "request_id", "") for answer in standby.unconfirmed]


async def test_a_standby_takes_over_warm_with_the_state_of_a_cold_recovery(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        standby = Standby(SharedLog(log), 0)
        following = asyncio.create_task(standby.run())
        async with system.owned(snapshot_every=4) as owner:
            await serve(system, owner, "a", "b", "c")
            await until(lambda: standby.position == journal_end(log))
            assert state(standby.followed) == state((await followed(log, standby.position)).followed)
            assert unconfirmed(standby) == ["a-refused", "b-refused", "c-refused"]
        await until(lambda: standby.position == journal_end(log))
        await ended(following)
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
    monkeypatch.setattr(standby_module, "PAGE_RECORDS", 4)
    monkeypatch.setattr(recorded, "PAGE_RECORDS", 4)
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, *(f"r{number}" for number in range(20)))
    end = journal_end(log)
    standby = Standby(SharedLog(log), 0)
    stops = 0
    while standby.position < end:
        following = asyncio.create_task(standby.run() if chance.random() < 0.5 else standby.catch_up(end))
        for _ in range(chance.randrange(5, 20)):
            await asyncio.sleep(0)
        await ended(following)
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


@pytest.mark.parametrize("kind", [altered, torn])
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
        owner = Owner(altered(log), system.leases, settings())
        with pytest.raises(RecoveryDiverged, match="verify"):
            await owner.start()
        owner.drop()
