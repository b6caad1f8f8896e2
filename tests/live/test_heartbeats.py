"""Owners and standbys write heartbeats, from which readers learn which routers are alive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from forebay.events.codec import decode, encode
from forebay.events.decisions import OwnerClaimed
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import DECISIONS, HEARTBEATS
from forebay.transport.base import Draft
from forebay.transport.heartbeats import OWNER_SILENT_S, STANDBY_SILENT_S, HeartbeatMetrics, RouterHeartbeats
from forebay.transport.sqlite.log import SqliteLog
from tests.live.routings import routing
from tests.live.shared import SharedLog
from tests.system import MODEL, System, settings, submitted, until, until_ended

READ_MAX = 10_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def heartbeats(log: SqliteLog) -> list[RouterHeartbeat]:
    return [decode(HEARTBEATS, record.value) for record in log.records(HEARTBEATS.name, 0, 0, READ_MAX)]


def of_role(log: SqliteLog, role: str) -> list[RouterHeartbeat]:
    return [beat for beat in heartbeats(log) if beat.role == role]


@asynccontextmanager
async def following(log: SqliteLog, clock: Clock) -> AsyncIterator[RouterHeartbeats]:
    """Follow the heartbeats of the test's group."""
    heartbeats = RouterHeartbeats(log, MODEL, clock)
    task = asyncio.create_task(heartbeats.follow(0))
    await asyncio.sleep(0)
    try:
        yield heartbeats
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def beat(log: SqliteLog, **fields: Any) -> None:
    event = RouterHeartbeat(**{"group": MODEL, "router_id": "a", "role": "owner", "owner_epoch": 7, **fields})
    await log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, event))])


async def test_owner_and_standby_write_heartbeats(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, routing(system, "a") as owner, routing(system, "b"):
        owner.assign({0})
        await until(lambda: any(one.ready_aggregated == 2 for one in of_role(log, "owner")))
        await until(lambda: any(one.position for one in of_role(log, "standby")))
    claims = [
        (record.offset, event)
        for record in log.records(DECISIONS.name, 0, 0, READ_MAX)
        if isinstance(event := decode(DECISIONS, record.value), OwnerClaimed)
    ]
    assert [event.owner_id for _, event in claims] == ["a"]
    assert {(one.router_id, one.owner_epoch) for one in of_role(log, "owner")} == {("a", claims[0][0])}
    assert {one.group for one in heartbeats(log)} == {MODEL}
    assert {one.router_id for one in of_role(log, "standby") if one.position} == {"b"}


async def test_an_owner_reports_the_model_card_of_its_workers(log: SqliteLog) -> None:
    async with System(log).started(workers=2, card="c" * 64) as system, routing(system, "a") as owner:
        owner.assign({0})
        await until(lambda: any(one.card == "c" * 64 for one in of_role(log, "owner")))
    assert of_role(log, "owner")[-1].released
    assert of_role(log, "owner")[-1].card == "", "without a ready worker there is no card"


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
        stuck.assign({0})
        await until(lambda: any(one.ready_aggregated for one in of_role(log, "owner")))
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
        registry.register(HeartbeatMetrics(lambda: [heartbeats]))
        for name in ("b", "c", "b"):
            await beat(log, router_id=name, role="standby", position=5)
        await beat(log)
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
