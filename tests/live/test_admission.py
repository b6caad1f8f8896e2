"""What leases become on the topic `fleet`, poll by poll."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from forebay.core.fleet import Fleet
from forebay.events.codec import decode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import (
    AnyFleetEvent,
    WorkerDraining,
    WorkerJoined,
    WorkerLease,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.topics import CONTROL, FLEET, work_topic
from forebay.live import admission as admission_module
from forebay.live.admission import Admission, PoolsByLease
from forebay.transport.base import Lease, LogError
from forebay.transport.sqlite_log import SqliteLog

POOLS = {"default": PoolConfigured(pool="default", model="m", block_size=64)}
SPEC = WorkerSpec(worker_id="w", model="m", block_size=64, kv_blocks_total=8, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()


def lease(
    left_ms: int = 30_000, token: str = "t1", spec: WorkerSpec = SPEC, name: str = "w", *, draining: bool = False
) -> Lease:
    payload = msgspec.msgpack.encode(WorkerLease(spec=spec, draining=draining))
    return Lease(worker_id=name, token=token, payload=payload, expires_in_ms=left_ms, ttl_ms=30_000)


def facts(log: SqliteLog) -> list[AnyFleetEvent]:
    return [decode(FLEET, record.value) for record in log.records(FLEET.name, 0, 0, 100)]


def admission(log: SqliteLog, slots_max: int = 16, by_lease: PoolsByLease | None = None) -> Admission:
    return Admission(log, 0, 7, Fleet(), slots_max=slots_max, by_lease=by_lease)


async def poll(
    polled: Admission, log: SqliteLog, leases: list[Lease], pools: dict[str, PoolConfigured] = POOLS
) -> list[Lease]:
    """One look at the leases by an owner that applied all of `fleet`."""
    return await polled.update(leases, pools, log.next_offset(FLEET.name, 0))


async def test_a_lease_joins_becomes_suspect_recovers_and_is_lost(log: SqliteLog) -> None:
    polled = admission(log)
    for left_ms in (30_000, 21_000, 14_000, 13_000, 29_000):
        assert await poll(polled, log, [lease(left_ms)]) == []
    assert await poll(polled, log, [lease(0)]) == []
    assert await poll(polled, log, [lease(0)]) == [lease(0)]
    assert await poll(polled, log, []) == []
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerSuspect, WorkerRecovered, WorkerLost]
    assert {fact.owner_epoch for fact in facts(log)} == {7}
    joined, *later = facts(log)
    assert isinstance(joined, WorkerJoined)
    assert (joined.spec, joined.lease, joined.slot) == (SPEC, "t1", 0)
    assert {msgspec.to_builtins(fact).get("worker_epoch", 0) for fact in later} == {0}


async def test_a_worker_that_its_pool_no_longer_fits_is_lost_and_refused_by_name(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log)
    other = {"default": PoolConfigured(pool="default", model="m", block_size=16)}
    await poll(polled, log, [lease()])
    for _ in range(2):
        await poll(polled, log, [lease()], other)
    _, lost = facts(log)
    assert isinstance(lost, WorkerLost)
    assert lost.reason == "its blocks hold 64 tokens, those of the pool default hold 16"
    assert polled.refused == {"spec": 1}
    assert f"worker w is refused: {lost.reason}" in caplog.text


async def test_a_given_up_lease_and_another_incarnation_lose_the_old_epoch(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(token="t2")])
    await poll(polled, log, [])
    kinds = [type(fact) for fact in facts(log)]
    assert kinds == [WorkerJoined, WorkerLost, WorkerJoined, WorkerLost]
    epochs = [fact.worker_epoch for fact in facts(log) if isinstance(fact, WorkerLost)]
    assert epochs == [0, 2]


async def test_a_lease_that_says_so_is_draining_once_and_until_it_is_lost(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    for left_ms in (13_000, 29_000, 13_000):  # suspect or not: nothing is sent there anyway
        await poll(polled, log, [lease(left_ms, draining=True)])
    await poll(polled, log, [])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerDraining, WorkerLost]
    draining = facts(log)[1]
    assert isinstance(draining, WorkerDraining)
    assert (draining.worker_id, draining.worker_epoch, draining.owner_epoch) == ("w", 0, 7)


async def test_a_suspect_worker_may_drain(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(13_000)])
    await poll(polled, log, [lease(draining=True)])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerSuspect, WorkerDraining]


async def test_a_new_owner_goes_on_where_the_last_one_stood(log: SqliteLog) -> None:
    first = admission(log)
    await poll(first, log, [lease(), other := lease(name="v", spec=msgspec.structs.replace(SPEC, worker_id="v"))])
    fleet = Fleet()
    for offset, fact in enumerate(facts(log)):
        fleet.apply(fact, offset)
    second = Admission(log, 0, 8, fleet, slots_max=16)
    await poll(second, log, [lease(draining=True), other])
    fact = facts(log)[-1]
    assert (type(fact), fact.owner_epoch) == (WorkerDraining, 8)
    fleet.apply(fact, 2)
    third = Admission(log, 0, 9, fleet, slots_max=16)
    await poll(third, log, [lease(draining=True), other])
    assert len(facts(log)) == 3


async def test_who_stops_already_is_not_admitted(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease(draining=True)])
    assert facts(log) == []
    assert polled.refused == {}


async def test_a_member_whose_lease_makes_no_sense_any_more_stays(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    for _ in range(2):
        await poll(polled, log, [msgspec.structs.replace(lease(), payload=b"\xc1")])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined]
    assert caplog.text.count("the lease of the member w changed and makes no sense") == 1


async def test_slots_are_the_lowest_free_ones(log: SqliteLog) -> None:
    polled = admission(log)

    def leases(*names: str) -> list[Lease]:
        return [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in names]

    await poll(polled, log, leases("a", "b", "c"))
    await poll(polled, log, leases("b", "c"))
    await poll(polled, log, leases("b", "c", "d", "e"))
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
        await poll(polled, log, [lease(spec=refused)])
    assert facts(log) == []
    assert polled.refused == {"spec": 1}
    assert why in caplog.text


@pytest.mark.parametrize(("pause_s", "asked"), [(3_600.0, 1), (0.0, 3)])
async def test_a_slot_that_cannot_be_looked_at_is_asked_for_again_after_a_while(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, pause_s: float, asked: int
) -> None:
    monkeypatch.setattr(admission_module, "NOWHERE_S", pause_s)
    polled, asks, end = admission(log), [], log.end

    async def failing_twice(topic: str, partition: int) -> int:
        asks.append(topic)
        if len(asks) < 3:
            raise LogError("no answer")
        return await end(topic, partition)

    monkeypatch.setattr(log, "end", failing_twice)
    for _ in range(3):
        await poll(polled, log, [lease()])
    assert asks == [work_topic("default").name] * asked
    assert [type(fact) for fact in facts(log)] == [WorkerJoined] * (asked == 3)
    assert polled.refused == {"work_topic": 1}


async def test_a_lease_that_holds_no_description_is_refused(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [msgspec.structs.replace(lease(), payload=b"\xc1")])
    assert facts(log) == []
    assert polled.refused == {"spec": 1}


async def test_a_lost_lease_that_is_renewed_late_is_forgotten_all_the_same(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    assert await poll(polled, log, [lease(0)]) == []
    renewed = lease(30_000)
    assert await poll(polled, log, [renewed]) == [renewed]
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerLost]
    await poll(polled, log, [lease(token="t2")])
    assert isinstance(facts(log)[-1], WorkerJoined)


async def test_a_lease_is_not_forgotten_before_the_owner_applied_its_fact(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(0)])
    applied_before_the_loss = 1
    assert await polled.update([lease(0)], POOLS, applied_before_the_loss) == []
    assert await polled.update([lease(0)], POOLS, 2) == [lease(0)]


async def test_without_a_free_slot_a_worker_waits(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = admission(log, slots_max=2)
    three = [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in "abc"]
    for _ in range(3):
        await poll(polled, log, three)
    assert polled.refused == {"slots": 1}
    assert caplog.text.count("all 2 slots that its model has in the pool default are taken") == 1
    await poll(polled, log, three[1:])
    slots = {fact.spec.worker_id: fact.slot for fact in facts(log) if isinstance(fact, WorkerJoined)}
    assert slots == {"a": 0, "b": 1, "c": 0}


async def test_owners_of_several_groups_assign_disjoint_slots_of_one_pool(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    groups, slots_max = 3, 8
    names = "abcd"  # one more than any group has slots
    assigned: dict[int, list[int]] = {}
    for partition in range(groups):
        polled = Admission(log, partition, 7, Fleet(), slots_max=slots_max, groups=groups)
        leases = [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in names]
        await polled.update(leases, POOLS, log.next_offset(FLEET.name, partition))
        found = [decode(FLEET, record.value) for record in log.records(FLEET.name, partition, 0, 100)]
        assigned[partition] = [fact.slot for fact in found if isinstance(fact, WorkerJoined)]
        assert polled.refused == {"slots": len(names) - len(assigned[partition])}
    assert assigned == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}
    assert "worker c is refused: all 2 slots that its model has in the pool default are taken" in caplog.text
    assert "3 control partitions share the 8 partitions of work.default" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "a\nb"},
        {"worker_id": "a b"},
        {"model": "../m"},
        {"pool": "a/b"},
        {"pool": "a\0b"},
        {"pool": "p" * 250},
        {"loras": ("sql", "m")},
        {"loras": ("../x",)},
    ],
)
async def test_a_lease_with_a_name_that_cannot_be_used_is_refused(
    log: SqliteLog, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    spec = msgspec.structs.replace(SPEC, **changes)
    polled = admission(log, by_lease=PoolsByLease("m", RouterConfig()))
    for _ in range(2):
        await poll(polled, log, [lease(name=spec.worker_id, spec=spec)], {})
    assert (facts(log), log.records(CONTROL.name, 0, 0, 10)) == ([], [])
    assert polled.refused == {"name": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be used: " in line
    assert line.isprintable()


async def test_the_first_lease_of_a_pool_configures_it(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    router = RouterConfig(mode="round-robin")
    polled = admission(log, by_lease=PoolsByLease("m", router))
    other_size = lease(name="v", spec=msgspec.structs.replace(SPEC, worker_id="v", block_size=16))
    other_model = lease(name="x", spec=msgspec.structs.replace(SPEC, worker_id="x", model="other", pool="p"))
    for _ in range(2):
        await poll(polled, log, [lease(), other_size, other_model], {})
    (record,) = log.records(CONTROL.name, 0, 0, 10)
    pool = decode(CONTROL, record.value)
    assert pool == PoolConfigured(pool="default", model="m", block_size=64, router=router, at_us=pool.at_us)
    assert facts(log) == []
    await poll(polled, log, [lease(), other_size, other_model], {"default": pool})
    (joined,) = facts(log)
    assert isinstance(joined, WorkerJoined)
    assert joined.spec == SPEC
    assert polled.refused == {"spec": 2}
    assert "it serves other, the group serves m" in caplog.text
    assert "blocks hold 16 tokens" in caplog.text
