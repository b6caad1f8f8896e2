"""A standby claims a silent or released group, and only if the missing heartbeats prove that the owner is silent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay import runtime
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import HEARTBEATS
from forebay.live.owner.owner import Owner
from forebay.live.router import succession
from forebay.live.router.standby import Standby
from forebay.live.router.succession import BACKOFF_S, STEADY_S, Backoff, Succession
from forebay.transport.base import Draft
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.system import MODEL, settings, until


class Watch:
    """A standby of a group that had an owner, and the parts that its succession depends on."""

    def __init__(self, log: SqliteLog) -> None:
        self.log = log
        self.standby = Standby(log, 0)
        self.heartbeats = RouterHeartbeats(log, MODEL)
        self.is_assigned = True
        self.probes = 0
        self.probe: Callable[[], Awaitable[int | None]] = self.beat

    async def beat(self, **fields: Any) -> int:
        """Append a heartbeat, by default of this standby, and return its offset."""
        named: dict[str, Any] = {"group": MODEL, "router_id": "b", "role": "standby", **fields}
        event = RouterHeartbeat(**named)
        (offset,) = await self.log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, event))])
        return offset

    async def owner_beat(self, **fields: Any) -> None:
        """Append a heartbeat of the owner of the newest claim, and wait until it is read."""
        epoch = self.standby.world.owner_epoch
        offset = await self.beat(role="owner", router_id="a", owner_epoch=epoch, **fields)
        await self.heartbeats.reach(offset + 1)

    def begin(self) -> "asyncio.Task[None]":
        """Start to wait until the standby should claim."""

        async def probe() -> int | None:
            self.probes += 1
            return await self.probe()

        watch = Succession(self.standby, self.heartbeats, "b", lambda: self.is_assigned, probe, Backoff())
        return asyncio.create_task(watch.until_due())


@asynccontextmanager
async def watching(log: SqliteLog) -> AsyncIterator[Watch]:
    owner = Owner(log, embedded_leases(), settings())
    await owner.start()
    owner.drop()  # it does not seal the journal
    watch = Watch(log)
    tasks = [asyncio.create_task(watch.standby.run()), asyncio.create_task(watch.heartbeats.follow(0))]
    try:
        await watch.standby.caught_up.wait()
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENT_S", 0.02)
    monkeypatch.setattr(succession, "STAGGER_S", 0.01)


async def test_a_silent_owner_is_replaced_after_one_probe(log: SqliteLog) -> None:
    async with watching(log) as watch:
        await watch.owner_beat()
        await asyncio.wait_for(watch.begin(), 20)
        assert watch.probes == 1


async def test_a_standby_whose_heartbeats_do_not_arrive_does_not_claim(log: SqliteLog) -> None:
    async def refused() -> None:
        return None

    async with watching(log) as watch:
        await watch.owner_beat()
        watch.probe = refused
        due = watch.begin()
        await until(lambda: watch.probes >= 5)
        assert not due.done()
        watch.probe = watch.beat
        await asyncio.wait_for(due, 20)


async def test_a_heartbeat_before_the_probe_shows_that_the_owner_is_alive(log: SqliteLog) -> None:
    async def late() -> int:
        await watch.beat(role="owner", router_id="a", owner_epoch=watch.standby.world.owner_epoch)
        return await watch.beat()

    async with watching(log) as watch:
        await watch.owner_beat()
        watch.probe = late
        due = watch.begin()
        await until(lambda: watch.probes >= 5)
        assert not due.done()
        due.cancel()


async def test_a_heartbeat_of_a_replaced_owner_does_not_count(log: SqliteLog) -> None:
    async def stale() -> int:
        await watch.beat(role="owner", router_id="a", owner_epoch=watch.standby.world.owner_epoch - 1)
        return await watch.beat()

    async with watching(log) as watch:
        watch.probe = stale
        await asyncio.wait_for(watch.begin(), 20)


async def test_a_released_group_is_claimed_at_once(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENT_S", 1_000.0)
    async with watching(log) as watch:
        due = watch.begin()
        await watch.owner_beat(released=True)
        await asyncio.wait_for(due, 20)
        assert watch.probes == 0


async def test_only_the_assigned_router_claims_at_the_start(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "START_S", 1_000.0)
    monkeypatch.setattr(succession, "SILENT_S", 0.0)
    monkeypatch.setattr(succession, "STAGGER_S", 0.0)
    async with watching(log) as watch:
        watch.is_assigned = False
        watch.standby.seal = 0  # the last owner stopped as planned
        due = watch.begin()
        for _ in range(20):  # each heartbeat makes the standby check again
            await watch.heartbeats.reach(await watch.beat(router_id="c") + 1)
        assert not due.done()
        watch.is_assigned = True
        watch.heartbeats.changed.set()
        await asyncio.wait_for(due, 20)


async def test_a_router_that_starts_after_the_owner_died_does_not_wait_for_the_consumer_group(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "START_S", 1_000.0)
    async with watching(log) as watch:
        watch.is_assigned = False
        await asyncio.wait_for(watch.begin(), 20)
        assert watch.probes == 1


async def test_a_blocked_standby_does_not_claim(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENT_S", 0.0)
    monkeypatch.setattr(succession, "STAGGER_S", 0.0)
    async with watching(log) as watch:
        watch.standby.blocked = "the owner has other rules"
        due = watch.begin()
        for _ in range(20):  # each heartbeat makes the standby check again
            await watch.heartbeats.reach(await watch.beat(router_id="c") + 1)
        assert not due.done()
        watch.standby.blocked = None
        watch.heartbeats.changed.set()
        await asyncio.wait_for(due, 20)


async def test_the_preferred_standby_claims_first(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "STAGGER_S", 1_000.0)
    async with watching(log) as watch:
        watch.is_assigned = False
        await watch.owner_beat()
        await watch.beat(router_id="c", preferred=True)
        await until(watch.heartbeats.standbys)
        due = watch.begin()
        await watch.owner_beat(released=True)
        assert not due.done()
        watch.is_assigned = True  # this router is preferred, too, and its name comes first
        watch.heartbeats.changed.set()
        await asyncio.wait_for(due, 20)


@pytest.mark.parametrize(("own", "others", "claims"), [(0, 1, True), (1, 0, False), (1, 1, False), (1, None, True)])
async def test_a_standby_with_the_rules_of_the_owner_claims_before_those_with_other_rules(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, own: int, others: int | None, claims: bool
) -> None:
    """`own` and `others` are added to the owner's version of the rules; None for no other standby."""
    monkeypatch.setattr(succession, "STAGGER_S", 1_000.0)
    monkeypatch.setattr(succession, "LIVE_S", 1_000.0)
    monkeypatch.setattr(succession, "CORE_VERSION", CORE_VERSION + own)
    async with watching(log) as watch:
        watch.is_assigned = False
        await watch.owner_beat()
        if others is not None:
            await watch.beat(router_id="a-standby", preferred=True, core_version=CORE_VERSION + others)
            await until(watch.heartbeats.standbys)
        due = watch.begin()
        await watch.owner_beat(released=True)
        if claims:
            await asyncio.wait_for(due, 20)
        else:
            for _ in range(20):  # each heartbeat makes the standby check again
                await watch.owner_beat(released=True)
            assert not due.done()


def test_a_router_that_loses_a_group_repeatedly_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(runtime, "monotonic_s", lambda: now_s)
    backoff = Backoff()
    assert backoff.delay_s == 0
    for losses in range(5):
        backoff.lost()
        assert BACKOFF_S * 2**losses <= backoff.delay_s <= 2 * BACKOFF_S * 2**losses
    now_s = STEADY_S + 1_000
    assert backoff.delay_s == 0
    backoff.lost()
    assert backoff.delay_s <= 2 * BACKOFF_S
