"""What leases become on the topic `fleet`, poll by poll."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from forebay.core.fleet import Fleet
from forebay.events.codec import decode
from forebay.events.control import PoolConfigured
from forebay.events.fleet import (
    FleetEvent,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.topics import FLEET
from forebay.live.admission import Admission
from forebay.transport.base import Lease
from forebay.transport.sqlite_log import SqliteLog

POOLS = {"default": PoolConfigured(pool="default", model="m", block_size=64)}
SPEC = WorkerSpec(worker_id="w", model="m", block_size=64, kv_blocks_total=8, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()


def lease(left_ms: int = 30_000, token: str = "t1", spec: WorkerSpec = SPEC, name: str = "w") -> Lease:
    payload = msgspec.msgpack.encode(spec)
    return Lease(worker_id=name, token=token, payload=payload, expires_in_ms=left_ms, ttl_ms=30_000)


def facts(log: SqliteLog) -> list[FleetEvent]:
    return [decode(FLEET, record.value) for record in log.records(FLEET.name, 0, 0, 100)]


def admission(log: SqliteLog) -> Admission:
    return Admission(log, 0, 7, Fleet())


async def test_a_lease_joins_becomes_suspect_recovers_and_is_lost(log: SqliteLog) -> None:
    polled = admission(log)
    for left_ms in (30_000, 21_000, 14_000, 13_000, 29_000):
        assert await polled.update([lease(left_ms)], POOLS) == []
    assert await polled.update([lease(0)], POOLS) == [lease(0)]
    assert await polled.update([], POOLS) == []
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerSuspect, WorkerRecovered, WorkerLost]
    assert {fact.owner_epoch for fact in facts(log)} == {7}
    joined, *later = facts(log)
    assert isinstance(joined, WorkerJoined)
    assert (joined.spec, joined.lease, joined.slot) == (SPEC, "t1", 0)
    assert {msgspec.to_builtins(fact).get("worker_epoch", 0) for fact in later} == {0}


async def test_a_given_up_lease_and_another_incarnation_lose_the_old_epoch(log: SqliteLog) -> None:
    polled = admission(log)
    await polled.update([lease()], POOLS)
    await polled.update([lease(token="t2")], POOLS)
    await polled.update([], POOLS)
    kinds = [type(fact) for fact in facts(log)]
    assert kinds == [WorkerJoined, WorkerLost, WorkerJoined, WorkerLost]
    epochs = [fact.worker_epoch for fact in facts(log) if isinstance(fact, WorkerLost)]
    assert epochs == [0, 2]


async def test_slots_are_the_lowest_free_ones(log: SqliteLog) -> None:
    polled = admission(log)

    def leases(*names: str) -> list[Lease]:
        return [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in names]

    await polled.update(leases("a", "b", "c"), POOLS)
    await polled.update(leases("b", "c"), POOLS)
    await polled.update(leases("b", "c", "d", "e"), POOLS)
    slots = {fact.spec.worker_id: fact.slot for fact in facts(log) if isinstance(fact, WorkerJoined)}
    assert slots == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 3}


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (
            msgspec.structs.replace(SPEC, block_size=16),
            "blocks hold 16 tokens, those of the pool default hold 64",
        ),
        (msgspec.structs.replace(SPEC, model="other"), "serves other, the pool default serves m"),
        (msgspec.structs.replace(SPEC, pool="nowhere"), "no pool nowhere"),
        (msgspec.structs.replace(SPEC, worker_id="else"), "describes itself as else"),
    ],
)
async def test_who_does_not_fit_is_refused_once_and_by_name(
    log: SqliteLog, refused: WorkerSpec, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log)
    for _ in range(3):
        await polled.update([lease(spec=refused)], POOLS)
    assert facts(log) == []
    assert polled.refused == {"spec": 1}
    assert why in caplog.text


async def test_a_lease_that_holds_no_description_is_refused(log: SqliteLog) -> None:
    polled = admission(log)
    await polled.update([msgspec.structs.replace(lease(), payload=b"\xc1")], POOLS)
    assert facts(log) == []
    assert polled.refused == {"spec": 1}
