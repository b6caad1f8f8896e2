"""Routers own, follow and claim groups, write heartbeats, and report whether they can take over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forebay import runtime
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.decisions import OwnerClaimed, Sealed
from forebay.events.groups import GroupPlaced
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import DECISIONS, GROUPS, HEARTBEATS
from forebay.live.owner.owner import Owner
from forebay.live.router import succession
from forebay.live.router.router import Router, readiness_metrics, ready
from forebay.live.router.succession import BACKOFF_S, STEADY_S, Backoff, Succession
from forebay.live.standby import Standby
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.heartbeats import OWNER_SILENT_S, STANDBY_SILENT_S, RouterHeartbeats, heartbeat_metrics
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import OTHER, PREFIX, Program, SharedLog, background, journal_end, proven, routing
from tests.system import MODEL, System, settings, submitted, until, until_ended

READ_MAX = 10_000
PATIENCE_S = 20.0


def heartbeats(log: SqliteLog, role: str = "") -> list[RouterHeartbeat]:
    """Return the heartbeats of the log, of one role if given."""
    found = [decode(HEARTBEATS, record.value) for record in log.records(HEARTBEATS.name, 0, 0, READ_MAX)]
    return [beat for beat in found if role in ("", beat.role)]


async def beat(log: SqliteLog, **fields: Any) -> int:
    """Append a heartbeat, by default of an owner, and return its offset."""
    event = RouterHeartbeat(**{"group": MODEL, "router_id": "a", "role": "owner", **fields})
    (offset,) = await log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, event))])
    return offset


async def until_owned(router: Router, workers: int = 1) -> Owner:
    """Wait until the router owns the group and has admitted the workers."""
    await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == workers)
    return router.owners[0]


async def until_more_beats(log: SqliteLog) -> None:
    beats = len(heartbeats(log, "owner"))
    await until(lambda: len(heartbeats(log, "owner")) > beats + 2)


# A router owns a group that it claimed last, follows the other groups, and claims those whose owners are silent


class FailingLog(SharedLog):
    """A log whose journal reads and appends fail while `is_away`, as when a broker is down."""

    is_away = False
    refused = 0

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        self._require(drafts[0].topic)
        return await super().append(drafts)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        self._require(topic)
        return await super().read(topic, partition, offset, limit)

    async def end(self, topic: str, partition: int) -> int:
        self._require(topic)
        return await super().end(topic, partition)

    def _require(self, topic: str) -> None:
        if self.is_away and topic == DECISIONS.name:
            self.refused += 1
            raise LogError("the broker is away")


class PausedLog(SharedLog):
    """A log whose appends wait while `running` is not set, as those of a paused process do."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, self._wait)
        self.running = asyncio.Event()
        self.running.set()

    async def _wait(self, _: Draft | None) -> None:
        await self.running.wait()


async def test_a_group_moves_to_the_preferred_router_which_starts_warm(log: SqliteLog) -> None:
    """The first router by name is preferred for partition 0."""
    async with System(log).started(workers=2) as system, routing(system, "b") as b:
        await until_owned(b, workers=2)
        await system.serve("first", PREFIX)
        async with routing(system, "a") as a:
            await until(lambda: 0 in a.owners and 0 not in b.owners)
            await system.serve("second", PREFIX)
            assert (await proven(log)).claims == 2
            (sealed,), (_, claim) = system.decisions(Sealed), system.decisions(OwnerClaimed)
            assert 0 < sealed.at_us <= claim.previous_seen_us <= claim.at_us


async def test_a_removed_group_leaves_its_partition_to_another(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        await until_owned(router)
        await system.serve("first", PREFIX)
        await system.stop_worker("w0")
        await until(lambda: not len(router.owners[0].world.fleet))
        await log.append([Draft(GROUPS.name, 0, b"", MODEL.encode())])
        await until(lambda: not router.members)
        assert router.owners == {}
        await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group="another", partition=0)), b"another")])
        system.join("w1", model="another")  # in the pool that the removed model has configured
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        assert [member.group for member in router.members.values()] == ["another"]
        assert (await proven(log)).claims == 2


async def test_a_standby_takes_over_from_a_silent_owner_which_is_not_preferred_when_it_returns(log: SqliteLog) -> None:
    paused = PausedLog(log)
    async with (
        System(log).started(workers=1) as system,
        routing(system, "a", paused) as silent,
        routing(system, "b") as standby,
    ):
        await until_owned(silent)
        await until(lambda: heartbeats(log, "owner") and heartbeats(log, "standby"))
        paused.running.clear()
        await until(lambda: 0 in standby.owners)
        claim, seen_us = system.decisions(OwnerClaimed)[-1], [b.at_us for b in heartbeats(log) if b.router_id == "a"]
        assert seen_us[-1] <= claim.previous_seen_us <= claim.at_us
        await system.serve("meanwhile", PREFIX)
        paused.running.set()
        await until(lambda: 0 not in silent.owners)
        await system.serve("afterwards", PREFIX)
        await until_more_beats(log)
        assert 0 in standby.owners
        assert (await proven(log)).claims == 2


async def test_an_owner_hands_over_only_to_a_router_with_its_rules(log: SqliteLog) -> None:
    async def follow(version: int, epochs_ago: int = 0) -> None:
        owner = router.owners[0]
        standby = {"router_id": "a", "role": "standby", "preferred": True, "position": owner.journal.end}
        await beat(log, core_version=version, owner_epoch=owner.world.owner_epoch - epochs_ago, **standby)

    async with System(log).started(workers=1) as system, routing(system, "b") as router:
        await until_owned(router)
        await follow(CORE_VERSION + 1)
        await follow(CORE_VERSION, epochs_ago=1)  # it has not read the claim of this owner yet
        await until_more_beats(log)
        assert 0 in router.owners
        await follow(CORE_VERSION)
        await until(lambda: 0 not in router.owners)
        await until(lambda: 0 in router.owners)  # there is no router a that claims


@pytest.mark.slow
async def test_a_group_whose_new_owner_dies_after_its_claim_is_owned_again(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        first = await until_owned(router)
        await Owner(log, system.leases, settings()).start()  # an owner that dies before its first heartbeat
        await until(lambda: router.owners.get(0) not in (None, first))
        await system.serve("again", PREFIX)
        assert (await proven(log)).claims == 3


async def test_an_owner_recovers_from_a_log_error(log: SqliteLog) -> None:
    failing = FailingLog(log)
    async with System(log).started(workers=1) as system, routing(system, "a", failing) as router:
        await until_owned(router)
        failing.is_away = True
        system.send(submitted("first", PREFIX))
        await until(lambda: 0 not in router.owners)
        failing.is_away = False
        await until_ended(system, "first")
        assert 0 in router.owners
        assert (await proven(log)).claims == 2


async def test_a_standby_follows_again_after_a_log_error(log: SqliteLog) -> None:
    failing = FailingLog(log)
    failing.is_away = True
    async with (
        System(log).started(workers=1) as system,
        routing(system, "a"),
        routing(system, "b", failing) as router,
    ):
        await system.serve("first", PREFIX)
        await until(lambda: failing.refused > 2)
        failing.is_away = False
        await until(lambda: any(beat.position for beat in heartbeats(log, "standby")))
        assert router.owners == {}


# A router waits for the seal of an owner with other rules, and reports that it cannot take over until then

BLOCKED = (
    f"group {MODEL}: the owner test runs version {OTHER} of the rules, this program has version {CORE_VERSION}: it"
    " takes over at the next planned stop of the owner"
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, OTHER)


async def test_a_router_takes_over_from_an_owner_with_other_rules_that_sealed(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)
        async with routing(system, "new") as router:
            await until_owned(router)
            await system.serve("b", PREFIX)
            assert ready(router) == (True, "ready")
        assert [claim.core_version for claim in system.decisions(OwnerClaimed)] == [OTHER, CORE_VERSION]


async def test_a_router_does_not_claim_an_unsealed_journal_of_other_rules(log: SqliteLog, other: Program) -> None:
    """The router is not ready while the group has no owner at all."""
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
        async with routing(system, "new") as router:
            registry = CollectorRegistry()
            registry.register(readiness_metrics(router))

            def is_blocked() -> float | None:
                return registry.get_sample_value("forebay_router_blocked", {"group": MODEL})

            end = log.next_offset(HEARTBEATS.name, 0)
            await until(is_blocked)
            assert ready(router) == (False, BLOCKED)
            await until(lambda: log.next_offset(HEARTBEATS.name, 0) >= end + 2)
            await beat(log, router_id="test", owner_epoch=0)
            await until(lambda: ready(router) == (True, BLOCKED))
            assert journal_end(log) == len(system.decisions())
        assert [claim.core_version for claim in system.decisions(OwnerClaimed)] == [OTHER]


# Owners and standbys write heartbeats, from which readers learn which routers are alive


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def following(log: SqliteLog, clock: Clock) -> AsyncIterator[RouterHeartbeats]:
    """Follow the heartbeats of the test's group."""
    heartbeats = RouterHeartbeats(log, MODEL, clock)
    async with background(heartbeats.follow(0)):
        await asyncio.sleep(0)
        yield heartbeats


async def test_owner_and_standby_write_heartbeats(log: SqliteLog) -> None:
    card = "c" * 64
    async with System(log).started(workers=2, card=card) as system, routing(system, "a"), routing(system, "b"):
        await until(lambda: any((one.ready_aggregated, one.card) == (2, card) for one in heartbeats(log, "owner")))
        await until(lambda: any(one.position for one in heartbeats(log, "standby")))
    claims = [(offset, one) for offset, one in enumerate(system.decisions()) if isinstance(one, OwnerClaimed)]
    assert [event.owner_id for _, event in claims] == ["a"]
    assert {(one.router_id, one.owner_epoch) for one in heartbeats(log, "owner")} == {("a", claims[0][0])}
    assert {one.group for one in heartbeats(log)} == {MODEL}
    assert {one.router_id for one in heartbeats(log, "standby") if one.position} == {"b"}
    last = heartbeats(log, "owner")[-1]
    assert (last.released, last.card) == (True, ""), "without a ready worker there is no card"


async def test_an_embedded_owner_writes_none(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1):
        pass
    assert not settings().heartbeats
    assert heartbeats(log) == []


async def test_an_owner_with_a_stuck_loop_writes_no_heartbeats_and_is_replaced(log: SqliteLog) -> None:
    is_stuck, go_on = asyncio.Event(), asyncio.Event()

    async def hook(draft: Draft | None) -> None:
        if draft is not None and draft.topic == DECISIONS.name and draft.value.startswith(b'{"type":"request.routed"'):
            is_stuck.set()
            await go_on.wait()

    async with (
        System(log).started(workers=1) as system,
        routing(system, "a", SharedLog(log, hook)) as stuck,
        routing(system, "b") as other,
    ):
        await until(lambda: any(one.ready_aggregated for one in heartbeats(log, "owner")))
        system.send(submitted("one", [1, 2, 3, 4]))
        await is_stuck.wait()
        await until(lambda: 0 in other.owners)
        await until_ended(system, "one")
        go_on.set()
        await until(lambda: 0 not in stuck.owners)
        assert 0 in other.owners


async def test_the_newest_owner_counts_until_its_heartbeats_stop(log: SqliteLog) -> None:
    clock = Clock()
    await beat(log, owner_epoch=3)
    async with following(log, clock) as heartbeats:
        await beat(log, group="another", owner_epoch=50)
        await beat(log, owner_epoch=7)
        await until(lambda: heartbeats.has_owner)
        assert heartbeats.owner is not None
        clock.now_s += OWNER_SILENT_S
        assert not heartbeats.has_owner
        await beat(log, router_id="old", owner_epoch=6)
        await beat(log, router_id="s", role="standby")
        await until(heartbeats.standbys)
        assert not heartbeats.has_owner
        assert heartbeats.owner.router_id == "a"
        await beat(log, router_id="new", owner_epoch=9)
        await until(lambda: heartbeats.has_owner)
        assert heartbeats.owner.owner_epoch == 9


async def test_earlier_heartbeats_and_foreign_records_are_ignored(log: SqliteLog) -> None:
    await beat(log, owner_epoch=99)
    async with following(log, Clock()) as heartbeats:
        await log.append([Draft(HEARTBEATS.name, 0, b"{"), Draft(HEARTBEATS.name, 0, b"")])
        await until(lambda: heartbeats.undecodable == 2)
        assert not heartbeats.has_owner
        assert heartbeats.owner_age_s is None


async def test_standbys_are_counted_while_they_send_heartbeats(log: SqliteLog) -> None:
    clock, registry = Clock(), CollectorRegistry()
    async with following(log, clock) as heartbeats:
        registry.register(heartbeat_metrics(lambda: [heartbeats]))
        for name in ("b", "c", "b"):
            await beat(log, router_id=name, role="standby", position=5)
        await beat(log, owner_epoch=7)
        await until(lambda: heartbeats.has_owner)
        assert [one.router_id for one in heartbeats.standbys()] == ["b", "c"]
        text = generate_latest(registry).decode()
        assert f'forebay_group_standbys{{group="{MODEL}"}} 2.0' in text
        assert f'forebay_owner_heartbeat_age_seconds{{group="{MODEL}"}} 0.0' in text
        clock.now_s += STANDBY_SILENT_S + 1
        assert heartbeats.standbys() == []
        await beat(log, router_id="c", role="standby")
        await until(heartbeats.standbys)
        await beat(log, router_id="c", owner_epoch=8)
        await until(lambda: heartbeats.owner is not None and heartbeats.owner.owner_epoch == 8)
        assert heartbeats.standbys() == []


# A standby claims a silent or released group, and only if the missing heartbeats prove that the owner is silent


class Watch:
    """A standby of a group that had an owner, and the parts that its succession depends on."""

    def __init__(self, log: SqliteLog) -> None:
        self.log = log
        self.standby = Standby(log, 0)
        self.heartbeats = RouterHeartbeats(log, MODEL)
        self.is_preferred = True
        self.probes = 0
        self.probe: Callable[[], Awaitable[int | None]] = self.beat

    async def beat(self, **fields: Any) -> int:
        """Append a heartbeat, by default of this standby, and return its offset."""
        return await beat(self.log, **{"router_id": "b", "role": "standby", **fields})

    async def owner_beat(self, epochs_ago: int = 0, **fields: Any) -> int:
        """Append a heartbeat of the owner of the newest claim, or of an earlier one."""
        return await beat(self.log, owner_epoch=self.standby.world.owner_epoch - epochs_ago, **fields)

    async def heard_owner(self, **fields: Any) -> None:
        """Append a heartbeat of the owner, and wait until it is read."""
        await self.heartbeats.reach(await self.owner_beat(**fields) + 1)

    async def heard_other(self) -> None:
        """Let the standby check again, as each heartbeat does."""
        for _ in range(20):
            await self.heartbeats.reach(await self.beat(router_id="c") + 1)

    def begin(self) -> "asyncio.Task[None]":
        """Start to wait until the standby should claim."""

        async def probe() -> int | None:
            self.probes += 1
            return await self.probe()

        watch = Succession(self.standby, self.heartbeats, "b", lambda: self.is_preferred, probe, Backoff())
        return asyncio.create_task(watch.until_due())


@pytest.fixture
async def watch(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    monkeypatch.setattr(succession, "SILENT_S", 0.02)
    monkeypatch.setattr(succession, "STAGGER_S", 0.01)
    owner = Owner(log, embedded_leases(), settings())
    await owner.start()
    owner.drop()  # it does not seal the journal
    watch = Watch(log)
    async with background(watch.standby.run()), background(watch.heartbeats.follow(0)):
        await watch.standby.caught_up.wait()
        yield watch


async def require_due(due: "asyncio.Task[None]") -> None:
    await asyncio.wait_for(due, PATIENCE_S)


async def test_a_silent_owner_is_replaced_after_one_probe(watch: Watch) -> None:
    await watch.heard_owner()
    await require_due(watch.begin())
    assert watch.probes == 1


async def test_a_standby_whose_heartbeats_do_not_arrive_does_not_claim(watch: Watch) -> None:
    async def refused() -> None:
        return None

    await watch.heard_owner()
    watch.probe = refused
    due = watch.begin()
    await until(lambda: watch.probes >= 5)
    assert not due.done()
    watch.probe = watch.beat
    await require_due(due)


async def test_a_heartbeat_before_the_probe_shows_that_the_owner_is_alive(watch: Watch) -> None:
    async def late() -> int:
        await watch.owner_beat()
        return await watch.beat()

    await watch.heard_owner()
    watch.probe = late
    due = watch.begin()
    await until(lambda: watch.probes >= 5)
    assert not due.done()
    due.cancel()


async def test_a_heartbeat_of_a_replaced_owner_does_not_count(watch: Watch) -> None:
    async def stale() -> int:
        await watch.owner_beat(epochs_ago=1)
        return await watch.beat()

    watch.probe = stale
    await require_due(watch.begin())


async def test_a_released_group_is_claimed_at_once(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENT_S", 1_000.0)
    due = watch.begin()
    await watch.heard_owner(released=True)
    await require_due(due)
    assert watch.probes == 0


async def test_routers_that_start_together_wait_for_the_heartbeats_of_each_other(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "START_S", 1_000.0)
    monkeypatch.setattr(succession, "SILENT_S", 0.0)
    monkeypatch.setattr(succession, "STAGGER_S", 0.0)
    monkeypatch.setattr(Standby, "seal", 0)  # the last owner stopped as planned
    due = watch.begin()
    await watch.heard_other()
    assert not due.done()
    monkeypatch.setattr(succession, "START_S", 0.0)
    watch.heartbeats.changed.set()
    await require_due(due)


async def test_a_router_that_starts_after_the_owner_died_waits_for_silence_only(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "START_S", 1_000.0)
    watch.is_preferred = False
    await require_due(watch.begin())
    assert watch.probes == 1


async def test_a_blocked_standby_does_not_claim(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENT_S", 0.0)
    monkeypatch.setattr(succession, "STAGGER_S", 0.0)
    monkeypatch.setattr(Standby, "blocked", "the owner has other rules")
    due = watch.begin()
    await watch.heard_other()
    assert not due.done()
    monkeypatch.setattr(Standby, "blocked", None)
    watch.heartbeats.changed.set()
    await require_due(due)


async def test_the_preferred_standby_claims_first(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "STAGGER_S", 1_000.0)
    watch.is_preferred = False
    await watch.heard_owner()
    await watch.beat(router_id="c", preferred=True)
    await until(watch.heartbeats.standbys)
    due = watch.begin()
    await watch.heard_owner(released=True)
    assert not due.done()
    watch.is_preferred = True  # this router is preferred, too, and its name comes first
    watch.heartbeats.changed.set()
    await require_due(due)


@pytest.mark.parametrize(("own", "others", "claims"), [(0, 1, True), (1, 0, False), (1, 1, False), (1, None, True)])
async def test_a_standby_with_the_rules_of_the_owner_claims_before_those_with_other_rules(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, own: int, others: int | None, claims: bool
) -> None:
    """`own` and `others` are added to the owner's version of the rules; None for no other standby."""
    monkeypatch.setattr(succession, "STAGGER_S", 1_000.0)
    monkeypatch.setattr(succession, "LIVE_S", 1_000.0)
    monkeypatch.setattr(succession, "CORE_VERSION", CORE_VERSION + own)
    watch.is_preferred = False
    await watch.heard_owner()
    if others is not None:
        await watch.beat(router_id="a-standby", preferred=True, core_version=CORE_VERSION + others)
        await until(watch.heartbeats.standbys)
    due = watch.begin()
    await watch.heard_owner(released=True)
    if claims:
        await require_due(due)
        return
    for _ in range(20):  # each heartbeat makes the standby check again
        await watch.heard_owner(released=True)
    assert not due.done()
    due.cancel()


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
