"""A router owns a group that it claimed last, follows the other groups, and claims those whose owners are silent."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import DECISIONS, HEARTBEATS
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.live.routings import routing
from tests.live.shared import SharedLog, proven
from tests.system import MODEL, System, settings, submitted, until, until_ended

PREFIX = list(range(12))


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
    """A log whose appends wait while it is paused, as those of a paused process do."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, self._wait)
        self._running = asyncio.Event()
        self._running.set()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def _wait(self, _: Draft | None) -> None:
        await self._running.wait()


async def test_a_group_moves_with_its_assignment_and_the_next_owner_starts_warm(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, routing(system, "a") as a, routing(system, "b") as b:
        a.assign({0})
        await until(lambda: 0 in a.owners and len(a.owners[0].world.fleet) == 2)
        await system.serve("first", PREFIX)
        a.assign(set())
        b.assign({0})
        await until(lambda: 0 in b.owners and 0 not in a.owners)
        await system.serve("second", PREFIX)
        assert (await proven(log)).claims == 2


async def test_a_standby_without_an_assignment_takes_over_from_a_silent_owner(log: SqliteLog) -> None:
    paused = PausedLog(log)
    async with (
        System(log).started(workers=1) as system,
        routing(system, "a", paused) as silent,
        routing(system, "b") as standby,
    ):
        silent.assign({0})
        await until(lambda: 0 in silent.owners and len(silent.owners[0].world.fleet) == 1)
        await until(lambda: owners(log) and standbys(log))
        paused.pause()
        await until(lambda: 0 in standby.owners)
        await system.serve("meanwhile", PREFIX)
        paused.resume()
        await until(lambda: 0 not in silent.owners)
        await system.serve("afterwards", PREFIX)
        silent.assign({0})  # the consumer group prefers the fenced router, but the other one owns the group
        beats = len(owners(log))
        await until(lambda: len(owners(log)) > beats + 2)
        assert 0 in standby.owners
        assert (await proven(log)).claims == 2


async def test_one_router_owns_the_group_while_others_claim_join_and_leave(log: SqliteLog) -> None:
    """The consumer group assigns `a`, `b` claims, `c` joins and is assigned, and `a` comes back."""
    paused = PausedLog(log)
    async with (
        System(log).started(workers=1) as system,
        routing(system, "a", paused) as a,
        routing(system, "b") as b,
        routing(system, "c") as c,
    ):
        a.assign({0})
        await until(lambda: 0 in a.owners and len(a.owners[0].world.fleet) == 1)
        await until(lambda: owners(log) and standbys(log))
        c.assign(set())
        paused.pause()
        await until(lambda: 0 in b.owners or 0 in c.owners)
        first, other = (b, c) if 0 in b.owners else (c, b)
        first.assign(set())
        other.assign({0})
        await until(lambda: 0 in other.owners and 0 not in first.owners)
        paused.resume()
        await until(lambda: 0 not in a.owners)
        await system.serve("one", PREFIX)
        assert [0 in router.owners for router in (a, first, other)] == [False, False, True]
        assert (await proven(log)).claims == 3


async def test_an_owner_keeps_its_group_if_the_assigned_router_does_not_follow_it(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        router.assign(set())
        beats = len(owners(log))
        await until(lambda: len(owners(log)) > beats + 2)
        await system.serve("one", PREFIX)
        assert 0 in router.owners
        assert (await proven(log)).claims == 1


async def test_an_owner_hands_over_only_to_a_router_with_its_rules(log: SqliteLog) -> None:
    async def beat(version: int) -> None:
        position = router.owners[0].journal.end
        named = {"group": MODEL, "router_id": "b", "role": "standby", "preferred": True, "position": position}
        event = msgspec.convert({"type": "router.heartbeat", "core_version": version, **named}, RouterHeartbeat)
        await log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, event))])

    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        router.assign(set())
        beats = len(owners(log))
        await beat(CORE_VERSION + 1)
        await until(lambda: len(owners(log)) > beats + 2)
        assert 0 in router.owners
        await beat(CORE_VERSION)
        await until(lambda: 0 not in router.owners)
        await until(lambda: 0 in router.owners)  # there is no router b that claims


@pytest.mark.slow
async def test_a_group_whose_new_owner_dies_after_its_claim_is_owned_again(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        first = router.owners[0]
        await Owner(log, system.leases, settings()).start()  # an owner that dies before its first heartbeat
        await until(lambda: router.owners.get(0) not in (None, first))
        await system.serve("again", PREFIX)
        assert (await proven(log)).claims == 3


async def test_an_owner_recovers_from_a_log_error_without_a_new_assignment(log: SqliteLog) -> None:
    failing = FailingLog(log)
    async with System(log).started(workers=1) as system, routing(system, "a", failing) as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
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
        routing(system, "a") as owner,
        routing(system, "b", failing) as router,
    ):
        owner.assign({0})
        await system.serve("first", PREFIX)
        await until(lambda: failing.refused > 2)
        failing.is_away = False
        await until(lambda: any(beat.position for beat in standbys(log)))
        assert router.owners == {}


def owners(log: SqliteLog) -> list[RouterHeartbeat]:
    return of_role(log, "owner")


def standbys(log: SqliteLog) -> list[RouterHeartbeat]:
    return of_role(log, "standby")


def of_role(log: SqliteLog, role: str) -> list[RouterHeartbeat]:
    found = [decode(HEARTBEATS, record.value) for record in log.records(HEARTBEATS.name, 0, 0, 10_000)]
    return [beat for beat in found if beat.role == role]
