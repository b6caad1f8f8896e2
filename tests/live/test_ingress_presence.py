"""Ingress leases become events on `fleet`, and an owner cancels the requests of a lost ingress."""

import logging
from collections.abc import Collection

import pytest

from forebay.core.state.fleet import Fleet
from forebay.events.codec import decode
from forebay.events.decisions import RequestAborted
from forebay.events.fleet import AnyFleetEvent, IngressJoined, IngressLost
from forebay.events.topics import FLEET, work_topic
from forebay.events.work import WorkCancelled
from forebay.live.owner.ingress_presence import IngressPresence
from forebay.transport.base import Lease
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import applied_fleet
from tests.system import MODEL, System, submitted, until, until_ended

TTL_MS = 3_000
HALF_MS = TTL_MS // 2


def lease(
    name: str = "i1", token: str = "t", *, renewed: int = 0, left_ms: int = TTL_MS, released: bool = False
) -> Lease:
    return Lease(
        worker_id=name,
        token=token,
        payload=b"",
        expires_in_ms=left_ms,
        ttl_ms=TTL_MS,
        deadline_ms=TTL_MS + renewed,
        released=released,
    )


class PolledIngresses:
    """The ingress leases as polled by an owner that has applied all of `fleet`."""

    def __init__(self, log: SqliteLog, fleet: Fleet | None = None, busy: Collection[str] = ()) -> None:
        self.log = log
        self.presence = IngressPresence(log, 0, 7, Fleet() if fleet is None else fleet, busy=busy)

    async def poll(self, *leases: Lease, observed_ms: int = 500) -> list[Lease]:
        return await self.presence.update(
            list(leases), applied_fleet(self.log), self.log.next_offset(FLEET.name, 0), observed_ms
        )

    def facts(self) -> list[AnyFleetEvent]:
        return [decode(FLEET, record.value) for record in self.log.records(FLEET.name, 0, 0, 100)]

    def kinds(self) -> list[tuple[type, str, str]]:
        return [
            (type(fact), fact.ingress_id, fact.incarnation)
            for fact in self.facts()
            if isinstance(fact, IngressJoined | IngressLost)
        ]


async def test_an_ingress_joins_by_its_lease_and_is_lost_when_it_expires(log: SqliteLog) -> None:
    polled = PolledIngresses(log)
    await polled.poll(lease())
    await polled.poll(lease(renewed=1))
    await polled.poll(lease(renewed=1), observed_ms=HALF_MS)
    dead = lease(renewed=1, left_ms=-1)
    await polled.poll(dead, observed_ms=HALF_MS)
    assert await polled.poll(dead) == [dead]
    assert polled.kinds() == [(IngressJoined, "i1", "t"), (IngressLost, "i1", "t")]


async def test_a_restarted_or_released_ingress_is_lost_at_once(log: SqliteLog) -> None:
    polled = PolledIngresses(log)
    await polled.poll(lease())
    await polled.poll(lease(token="t2"))
    await polled.poll(lease(token="t2", released=True))
    assert polled.kinds() == [
        (IngressJoined, "i1", "t"),
        (IngressLost, "i1", "t"),
        (IngressJoined, "i1", "t2"),
        (IngressLost, "i1", "t2"),
    ]


async def test_an_ingress_that_released_its_lease_left_and_a_replaced_one_is_lost(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    polled = PolledIngresses(log)
    await polled.poll(lease(), lease("i2"), lease("i3"), lease("i4"))
    await polled.poll(lease(released=True), lease("i2", token="t2"), lease("i3"), lease("i4", token="t4"))
    fleet = Fleet()
    for offset, fact in enumerate(polled.facts()):
        fleet.apply(fact, offset)
    await PolledIngresses(log, fleet, busy={"t4"}).poll(lease("i2", token="t3"), lease("i4", token="t5"))
    outcomes = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert [one for one in outcomes if "joined" not in one[1]] == [
        ("INFO", "ingress i1 left"),
        ("WARNING", "ingress i2 is lost"),
        ("WARNING", "ingress i4 is lost"),
        ("INFO", "ingress i2 ended while no router was running"),
        ("WARNING", "ingress i4 is lost"),
    ]


async def test_a_flushed_store_loses_no_ingress_even_for_a_new_owner(log: SqliteLog) -> None:
    polled = PolledIngresses(log)
    await polled.poll(lease(), lease("i2"))
    for renewed in range(1, 10):
        await polled.poll()
        await polled.poll(lease(renewed=renewed), lease("i2", renewed=renewed))
    fleet = Fleet()
    for offset, fact in enumerate(polled.facts()):
        fleet.apply(fact, offset)
    successor = PolledIngresses(log, fleet)
    await successor.poll()
    await successor.poll(lease(renewed=11), lease("i2", renewed=11))
    assert [kind for kind, *_ in successor.kinds()] == [IngressJoined] * 2


async def test_invalid_ingress_names_are_rejected_once(log: SqliteLog) -> None:
    polled = PolledIngresses(log)
    for _ in range(3):
        await polled.poll(lease("x" * 257))
    assert polled.kinds() == []
    assert polled.presence.refused == {"name": 1}


async def test_an_owner_cancels_the_requests_of_a_killed_ingress(log: SqliteLog) -> None:
    leases = embedded_leases()
    async with System(log).started(workers=0) as system, system.owned(ingress_leases=leases) as owner:
        system.start_worker("w0", speedup=3.0)
        leases.acquire(MODEL, "i1", "mine", b"", 60_000)
        await until(lambda: owner.world.fleet.ingresses() and len(owner.world.fleet))
        for name, incarnation in (("http", "mine"), ("other", "another"), ("kafka", "")):
            system.send(submitted(name, [1, 2, 3], max_tokens=150, ingress_incarnation=incarnation))
        await until(lambda: len(owner.world.requests) == 3)
        leases.acquire(MODEL, "i1", "after a restart", b"", 60_000)
        for name in ("http", "other", "kafka"):
            await until_ended(system, name)
        await until(lambda: not len(owner.world.requests))
    aborted = [(one.request_id, one.reason, one.message) for one in system.decisions(RequestAborted)]
    assert aborted == [
        ("http", "ingress_lost", "the ingress i1 of the request was lost: another incarnation took over its lease")
    ]
    cancelled = system.events(work_topic("default"), WorkCancelled)
    assert [one.request_id for one in cancelled] == ["http"]
