"""An actuator executes each valid decision once and records the result."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from forebay.events.scaling import PoolSizeSet, ReachedSize, ScalingApplied, ScalingRefused
from forebay.live.planner.actuator import Actuator, ActuatorService, Reached
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL, claimed, decided, observed
from tests.live.planner.topic import RecordingActuator, append, records, until

pytestmark = pytest.mark.asyncio

KEY, OTHER = (GROUP, POOL), (GROUP, "other")


@asynccontextmanager
async def serving(log: SqliteLog, actuator: Actuator) -> AsyncIterator[None]:
    task = asyncio.create_task(ActuatorService(log, actuator).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_decision_is_executed_once_also_after_a_restart(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with serving(log, actuator):
        (reply,) = await until(log, ScalingApplied, 1)
        assert (reply.decision, reply.actuator, reply.message) == (2, "recording", "")
        assert reply.pools == (ReachedSize(group=GROUP, pool=POOL, size=6),)
        await append(log, decided(0, 3, 6, 4))
        await until(log, ScalingApplied, 2)
    async with serving(log, actuator):
        await append(log, decided(0, 5, 4, 5))
        await until(log, ScalingApplied, 3)
    assert actuator.calls == [{KEY: 6}, {KEY: 4}, {KEY: 5}]


async def test_a_stale_decision_is_refused_and_not_executed(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    await append(log, claimed(), observed(0, 2))
    async with serving(log, actuator):
        await append(log, decided(0, 1, 2, 3))
        await until(log, ScalingApplied, 1)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=9), decided(0, 3, 3, 6))
        (refused,) = await until(log, ScalingRefused, 1)
    assert (refused.decision, refused.reason) == (5, "stale")
    assert actuator.calls == [{KEY: 3}]


async def test_old_stale_decisions_are_not_refused_again(log: SqliteLog) -> None:
    await append(log, claimed(), decided(0, 0, 2, 6), claimed("p2"), decided(0, 1, 2, 9), decided(2, 2, 6, 7))
    async with serving(log, RecordingActuator()):
        await until(log, ScalingApplied, 1)
    assert records(log, ScalingRefused) == []


async def test_actuators_of_one_decision_reply_for_their_own_pools(log: SqliteLog) -> None:
    mine, other = RecordingActuator(), RecordingActuator(pools=frozenset({OTHER}))
    other.fails = "no space left"
    first = decided(0, 1, 2, 6)
    second = msgspec.structs.replace(first.pools[0], pool=OTHER[1])
    both = msgspec.structs.replace(first, pools=(*first.pools, second))
    await append(log, claimed(), observed(0, 2))
    async with serving(log, mine), serving(log, other):
        await append(log, both)
        (reply,) = await until(log, ScalingApplied, 1)
        (refused,) = await until(log, ScalingRefused, 1)
        await append(log, msgspec.structs.replace(both, planner_epoch=9))
        stale = (await until(log, ScalingRefused, 3))[1:]
    assert (mine.calls, other.calls) == ([{KEY: 6}], [{OTHER: 6}])
    assert [one.pool for one in reply.pools] == [POOL]
    assert ([one.pool for one in refused.pools], refused.reason) == ([OTHER[1]], "failed")
    assert {(one.reason, one.pools[0].pool) for one in stale} == {("stale", POOL), ("stale", OTHER[1])}


async def test_an_actuator_without_a_pool_of_a_decision_does_not_reply(log: SqliteLog) -> None:
    other = RecordingActuator(pools=frozenset({OTHER}))
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with serving(log, other), serving(log, RecordingActuator()):
        await until(log, ScalingApplied, 1)
        await append(log, decided(9, 1, 2, 6))
        await until(log, ScalingRefused, 1)
        second = decided(0, 9, 1, 3)
        await append(
            log, msgspec.structs.replace(second, pools=(msgspec.structs.replace(second.pools[0], pool="other"),))
        )
        await until(log, ScalingApplied, 2)
    assert other.calls == [{OTHER: 3}]
    assert len(records(log, ScalingRefused)) == 1


async def test_a_decision_that_cannot_be_executed_is_refused(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    actuator.fails = "no space left"
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with serving(log, actuator):
        (refused,) = await until(log, ScalingRefused, 1)
    assert (refused.decision, refused.reason, refused.message) == (2, "failed", "no space left")


async def test_a_partial_success_names_the_reached_size_and_the_cause(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    actuator.reaches = Reached({KEY: 4}, "2 workers do not start")
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with serving(log, actuator):
        (reply,) = await until(log, ScalingApplied, 1)
    assert (reply.pools[0].size, reply.message) == (4, "2 workers do not start")


async def test_advisory_decisions_and_undecodable_records_have_no_effect(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    advisory = msgspec.structs.replace(decided(0, 1, 2, 6), advisory=True)
    await append(log, claimed(), observed(0, 2), advisory)
    async with serving(log, actuator):
        await log.append([Draft("scaling", 0, b"{")])
        await append(log, decided(0, 2, 2, 3))
        await until(log, ScalingApplied, 1)
    assert actuator.calls == [{KEY: 3}]
