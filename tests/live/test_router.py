"""A router owns its assigned partitions and follows the others.

It owns a lost group again when it is reassigned, or if the group has no owner.
"""

from collections.abc import Sequence

import pytest

from forebay.events.codec import decode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import DECISIONS, HEARTBEATS
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.live.routings import routing
from tests.live.shared import SharedLog, proven
from tests.system import System, settings, submitted, until, until_ended

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


async def test_a_group_moves_with_its_assignment_and_the_next_owner_starts_warm(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, routing(system, "a") as a, routing(system, "b") as b:
        a.assign({0})
        await until(lambda: 0 in a.owners and len(a.owners[0].world.fleet) == 2)
        system.send(submitted("first", PREFIX))
        await until_ended(system, "first")
        a.assign(set())
        b.assign({0})
        await until(lambda: 0 in b.owners and 0 not in a.owners)
        system.send(submitted("second", PREFIX))
        await until_ended(system, "second")
    assert (await proven(log)).claims == 2


async def test_a_lost_group_is_not_owned_again_until_it_is_reassigned(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        async with system.owned(heartbeats=True):
            await until(lambda: 0 not in router.owners)
            system.send(submitted("meanwhile", PREFIX))
            await until_ended(system, "meanwhile")
            assert 0 not in router.owners
        router.assign({0})
        await until(lambda: 0 in router.owners)
        system.send(submitted("again", PREFIX))
        await until_ended(system, "again")
    assert (await proven(log)).claims == 3


async def test_a_lost_group_without_an_owner_is_owned_again(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.router.router.OWNERLESS_S", 0.2)
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        first = router.owners[0]
        await Owner(log, system.leases, settings()).start()  # an owner that dies before its first heartbeat
        await until(lambda: router.owners.get(0) not in (None, first))
        system.send(submitted("again", PREFIX))
        await until_ended(system, "again")
    assert (await proven(log)).claims == 3


async def test_an_assignment_before_the_loss_is_noticed_takes_effect(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, routing(system, "a") as router:
        router.assign({0})
        await until(lambda: 0 in router.owners and len(router.owners[0].world.fleet) == 1)
        first = router.owners[0]
        other = Owner(log, system.leases, settings())
        await other.start()
        router.assign(set())
        router.assign({0})
        await until(lambda: router.owners.get(0) not in (None, first))
        other.drop()
        system.send(submitted("again", PREFIX))
        await until_ended(system, "again")
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
        system.send(submitted("first", PREFIX))
        await until_ended(system, "first")
        await until(lambda: failing.refused > 2)
        failing.is_away = False
        await until(lambda: any(beat.position for beat in standbys(log)))
        assert router.owners == {}


def standbys(log: SqliteLog) -> list[RouterHeartbeat]:
    """Return the heartbeats of standbys."""
    found = [decode(HEARTBEATS, record.value) for record in log.records(HEARTBEATS.name, 0, 0, 10_000)]
    return [beat for beat in found if beat.role == "standby"]
