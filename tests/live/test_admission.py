"""Admission of workers: the fleet events that each poll of the leases produces."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from forebay.core.state.fleet import Fleet, WorkerPhase
from forebay.events.codec import decode, encode
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
from forebay.live.owner import admission as admission_module
from forebay.live.owner.admission import PoolsByLease, WorkerAdmission
from forebay.transport.base import Draft, Lease, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import applied_fleet

TTL_MS = 30_000
HALF_MS = TTL_MS // 2  # a loss takes two polls, each of which counts for at most half a TTL
POOLS = {"default": PoolConfigured(pool="default", model="m", block_size=64)}
SPEC = WorkerSpec(worker_id="w", model="m", block_size=64, kv_blocks_total=8, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()


def lease(
    left_ms: int = 30_000,
    token: str = "t1",
    spec: WorkerSpec = SPEC,
    name: str = "w",
    *,
    draining: bool = False,
    renewed: int = 0,
    released: bool = False,
) -> Lease:
    """Return a lease that was renewed `renewed` times."""
    payload = msgspec.msgpack.encode(WorkerLease(spec=spec, draining=draining))
    return Lease(
        worker_id=name,
        token=token,
        payload=payload,
        expires_in_ms=left_ms,
        ttl_ms=TTL_MS,
        deadline_ms=TTL_MS + renewed,
        released=released,
    )


def others(*names: str, renewed: int = 0) -> list[Lease]:
    """Return healthy leases, so that one missing lease does not count as a failure of the store."""
    return [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name), renewed=renewed) for name in names]


def facts(log: SqliteLog) -> list[AnyFleetEvent]:
    return [decode(FLEET, record.value) for record in log.records(FLEET.name, 0, 0, 100)]


def admission(log: SqliteLog, slots_max: int = 16, by_lease: PoolsByLease | None = None) -> WorkerAdmission:
    return WorkerAdmission(log, 0, 7, Fleet(), slots_max=slots_max, by_lease=by_lease)


async def poll(
    polled: WorkerAdmission,
    log: SqliteLog,
    leases: list[Lease],
    pools: dict[str, PoolConfigured] = POOLS,
    *,
    observed_ms: int = 0,
) -> list[Lease]:
    """Poll the leases once, as an owner that has applied all of `fleet`."""
    return await polled.update(leases, pools, applied_fleet(log), log.next_offset(FLEET.name, 0), observed_ms)


async def test_a_lease_joins_becomes_suspect_recovers_and_is_lost(log: SqliteLog) -> None:
    polled = admission(log)
    for left_ms in (30_000, 21_000):
        assert await poll(polled, log, [lease(left_ms)], observed_ms=9_000) == []
    assert await poll(polled, log, [lease(14_000)], observed_ms=7_000) == []
    assert await poll(polled, log, [lease(29_000, renewed=1)], observed_ms=9_000) == []
    assert await poll(polled, log, [lease(14_000, renewed=1)], observed_ms=HALF_MS) == []
    assert await poll(polled, log, [lease(0, renewed=1)], observed_ms=HALF_MS) == []
    assert await poll(polled, log, [lease(0, renewed=1)]) == [lease(0, renewed=1)]
    assert await poll(polled, log, []) == []
    kinds = [WorkerJoined, WorkerSuspect, WorkerRecovered, WorkerSuspect, WorkerLost]
    assert [type(fact) for fact in facts(log)] == kinds
    assert {fact.owner_epoch for fact in facts(log)} == {7}
    joined, *later = facts(log)
    assert isinstance(joined, WorkerJoined)
    assert (joined.spec, joined.lease, joined.slot, joined.lease_ttl_ms) == (SPEC, "t1", 0, TTL_MS)
    assert {msgspec.to_builtins(fact).get("worker_epoch", 0) for fact in later} == {0}


async def test_a_worker_with_a_vanished_lease_is_suspect_until_it_reacquires(log: SqliteLog) -> None:
    polled, rest = admission(log), others("x", "y")
    await poll(polled, log, [lease(), *rest])
    await poll(polled, log, rest, observed_ms=500)
    await poll(polled, log, rest, observed_ms=500)
    await poll(polled, log, [lease(renewed=1), *rest], observed_ms=500)
    assert [type(fact) for fact in facts(log)][3:] == [WorkerSuspect, WorkerRecovered]


async def test_leases_that_vanish_together_change_nothing(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = admission(log)
    await poll(polled, log, [lease(), *others("x", "y")])
    await poll(polled, log, [], observed_ms=500)
    await poll(polled, log, [lease(renewed=1), *others("x", "y", renewed=1)], observed_ms=500)
    assert [type(fact) for fact in facts(log)] == [WorkerJoined] * 3
    assert polled.sensor_faults == 1
    assert caplog.text.count("3 of 3 leases failed at once") == 1


async def test_a_new_owner_after_a_flush_suspects_but_does_not_lose_returning_workers(log: SqliteLog) -> None:
    await poll(admission(log), log, [lease(), *others("x")])
    fleet = Fleet()
    for offset, fact in enumerate(facts(log)):
        fleet.apply(fact, offset)
    second = WorkerAdmission(log, 0, 8, fleet, slots_max=16)
    await poll(second, log, [])
    await poll(second, log, [], observed_ms=HALF_MS)
    await poll(second, log, [lease(renewed=1), *others("x", renewed=1)], observed_ms=500)
    assert [type(fact) for fact in facts(log)][2:] == [WorkerSuspect] * 2 + [WorkerRecovered] * 2


async def test_a_clock_jump_that_expires_a_lease_does_not_lose_its_worker(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    assert await poll(polled, log, [lease(-3_600_000)], observed_ms=500) == []
    assert await poll(polled, log, [lease(renewed=1)], observed_ms=500) == []
    assert [type(fact) for fact in facts(log)] == [WorkerJoined]


async def test_a_worker_that_no_longer_fits_its_pool_is_lost_and_rejected_by_name(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log)
    other = {"default": PoolConfigured(pool="default", model="m", block_size=16)}
    await poll(polled, log, [lease()])
    for _ in range(2):
        await poll(polled, log, [lease()], other)
    _, lost = facts(log)
    assert isinstance(lost, WorkerLost)
    assert lost.reason == "its blocks hold 64 tokens, blocks of the pool default hold 16"
    assert polled.refused == {"spec": 1}
    assert f"worker w was rejected: {lost.reason}" in caplog.text


async def test_a_released_lease_and_a_new_incarnation_lose_the_old_epoch(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(token="t2")])
    released = lease(0, token="t2", released=True)
    assert await poll(polled, log, [released]) == []
    assert await poll(polled, log, [released]) == [released]
    kinds = [type(fact) for fact in facts(log)]
    assert kinds == [WorkerJoined, WorkerLost, WorkerJoined, WorkerLost]
    epochs = [fact.worker_epoch for fact in facts(log) if isinstance(fact, WorkerLost)]
    assert epochs == [0, 2]


async def test_workers_lost_in_one_poll_are_all_suspect_before_the_first_is_lost(log: SqliteLog) -> None:
    polled, names = admission(log), ("x", "y", "z")
    await poll(polled, log, others(*names))
    joined = len(facts(log))
    restarted = [msgspec.structs.replace(one, token="t2") for one in others(*names)]
    await poll(polled, log, restarted)
    losses = [fact for fact in facts(log)[joined:] if isinstance(fact, WorkerSuspect | WorkerLost)]
    assert [(type(fact), fact.worker_id) for fact in losses] == [
        (kind, name) for kind in (WorkerSuspect, WorkerLost) for name in names
    ]


async def test_a_draining_lease_emits_one_draining_event_until_it_is_lost(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    for renewed in (1, 1, 2, 2):  # whether suspect or not, a draining worker receives no work
        await poll(polled, log, [lease(draining=True, renewed=renewed)], observed_ms=HALF_MS)
    await poll(polled, log, [lease(0, released=True)])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerDraining, WorkerLost]
    draining = facts(log)[1]
    assert isinstance(draining, WorkerDraining)
    assert (draining.worker_id, draining.worker_epoch, draining.owner_epoch) == ("w", 0, 7)


async def test_a_suspect_worker_may_drain(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(13_000)], observed_ms=HALF_MS)
    await poll(polled, log, [lease(draining=True, renewed=1)])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerSuspect, WorkerDraining]


async def test_a_new_owner_continues_from_the_fleet_of_its_predecessor(log: SqliteLog) -> None:
    first = admission(log)
    await poll(first, log, [lease(), other := lease(name="v", spec=msgspec.structs.replace(SPEC, worker_id="v"))])
    fleet = Fleet()
    for offset, fact in enumerate(facts(log)):
        fleet.apply(fact, offset)
    second = WorkerAdmission(log, 0, 8, fleet, slots_max=16)
    await poll(second, log, [lease(draining=True), other])
    fact = facts(log)[-1]
    assert (type(fact), fact.owner_epoch) == (WorkerDraining, 8)
    fleet.apply(fact, 2)
    third = WorkerAdmission(log, 0, 9, fleet, slots_max=16)
    await poll(third, log, [lease(draining=True), other])
    assert len(facts(log)) == 3


async def test_a_draining_worker_is_not_admitted(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease(draining=True)])
    assert facts(log) == []
    assert polled.refused == {}


async def test_a_member_whose_lease_becomes_undecodable_stays(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    for _ in range(2):
        await poll(polled, log, [msgspec.structs.replace(lease(), payload=b"\xc1")])
    assert [type(fact) for fact in facts(log)] == [WorkerJoined]
    assert caplog.text.count("ignored the changed lease of the member w") == 1


def joined(token: str, name: str = "w") -> WorkerJoined:
    """Return an event that another process writes."""
    return WorkerJoined(
        owner_epoch=7, spec=msgspec.structs.replace(SPEC, worker_id=name), lease=token, slot=3, from_offset=0
    )


async def write(log: SqliteLog, *events: AnyFleetEvent) -> None:
    await log.append([Draft(FLEET.name, 0, encode(FLEET, event)) for event in events])


@pytest.mark.parametrize("token", ["t1", "forged"])
async def test_a_worker_that_a_foreign_record_admitted_first_joins_again(log: SqliteLog, token: str) -> None:
    polled = admission(log)
    await write(log, joined(token), joined("ghost", "x"))
    assert await polled.update([lease()], POOLS, Fleet(), 0) == []  # neither record is applied yet
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease()])  # the lost incarnation does not join again
    await poll(polled, log, [lease(token="t2")])
    await poll(polled, log, [lease(token="t2", renewed=1)])
    fleet = applied_fleet(log)
    assert [(worker.lease, worker.spec.worker_id) for worker in fleet.workers()] == [("t2", "w")]
    lost = [(one.worker_id, one.worker_epoch) for one in facts(log) if isinstance(one, WorkerLost)]
    assert sorted(lost) == [("w", 0), ("w", 2), ("x", 1)]
    assert polled.refused == {"foreign_record": 3}


async def test_a_member_that_a_foreign_record_drains_joins_again(log: SqliteLog) -> None:
    polled, rest = admission(log), others("x")
    await poll(polled, log, [lease(), *rest])
    await write(log, WorkerDraining(owner_epoch=7, worker_id="w", worker_epoch=0))
    await poll(polled, log, [lease(), *rest])
    assert facts(log)[-1] == WorkerLost(
        owner_epoch=7, at_us=facts(log)[-1].at_us, worker_id="w", worker_epoch=0, reason=admission_module.FOREIGN
    )
    await poll(polled, log, [lease(token="t2"), *rest])
    assert {worker.phase for worker in applied_fleet(log).workers()} == {WorkerPhase.READY}


async def test_workers_get_the_lowest_free_slots(log: SqliteLog) -> None:
    polled = admission(log)

    def leases(*names: str) -> list[Lease]:
        return [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in names]

    await poll(polled, log, leases("a", "b", "c"))
    released = lease(0, name="a", spec=msgspec.structs.replace(SPEC, worker_id="a"), released=True)
    await poll(polled, log, [released, *leases("b", "c")])
    await poll(polled, log, leases("b", "c", "d", "e"))
    slots = {fact.spec.worker_id: fact.slot for fact in facts(log) if isinstance(fact, WorkerJoined)}
    assert slots == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 3}


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (
            msgspec.structs.replace(SPEC, block_size=16),
            "blocks hold 16 tokens, blocks of the pool default hold 64",
        ),
        (msgspec.structs.replace(SPEC, model="other"), "serves the model other, but the pool default serves m"),
        (msgspec.structs.replace(SPEC, pool="nowhere"), "no pool nowhere"),
        (msgspec.structs.replace(SPEC, worker_id="else"), "names another worker, else"),
    ],
)
async def test_a_worker_that_does_not_fit_is_rejected_once_and_by_name(
    log: SqliteLog, refused: WorkerSpec, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log)
    for _ in range(3):
        await poll(polled, log, [lease(spec=refused)])
    assert facts(log) == []
    assert polled.refused == {"spec": 1}
    assert why in caplog.text


@pytest.mark.parametrize(("pause_s", "attempts"), [(3_600.0, 1), (0.0, 3)])
async def test_a_slot_whose_partition_cannot_be_read_is_retried_after_a_pause(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, pause_s: float, attempts: int
) -> None:
    monkeypatch.setattr(admission_module, "SLOT_RETRY_S", pause_s)
    polled, reads, end = admission(log), [], log.end

    async def failing_twice(topic: str, partition: int) -> int:
        reads.append(topic)
        if len(reads) < 3:
            raise LogError("no answer")
        return await end(topic, partition)

    monkeypatch.setattr(log, "end", failing_twice)
    for _ in range(3):
        await poll(polled, log, [lease()])
    assert reads == [work_topic("default").name] * attempts
    assert [type(fact) for fact in facts(log)] == [WorkerJoined] * (attempts == 3)
    assert polled.refused == {"work_topic": 1}


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x81\xa4spec\x81\xa9worker_id\xa1\xff", b"\x91" * 100_000], ids=["type", "utf-8", "depth"]
)
async def test_a_lease_without_a_decodable_payload_is_rejected(log: SqliteLog, payload: bytes) -> None:
    polled = admission(log)
    await poll(polled, log, [msgspec.structs.replace(lease(), payload=payload)])
    assert facts(log) == []
    assert polled.refused == {"spec": 1}


async def test_a_lost_lease_is_forgotten_even_if_it_is_renewed_late(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(14_000)], observed_ms=HALF_MS)
    assert await poll(polled, log, [lease(0)], observed_ms=HALF_MS) == []
    renewed = lease(30_000, renewed=1)
    assert await poll(polled, log, [renewed]) == [renewed]
    assert [type(fact) for fact in facts(log)] == [WorkerJoined, WorkerSuspect, WorkerLost]
    await poll(polled, log, [lease(token="t2")])
    assert isinstance(facts(log)[-1], WorkerJoined)


async def test_a_lease_is_not_forgotten_before_the_owner_applied_its_event(log: SqliteLog) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [released := lease(0, released=True)])
    applied_before_the_loss = 1
    assert await polled.update([released], POOLS, Fleet(), applied_before_the_loss, 0) == []
    assert await polled.update([released], POOLS, applied_fleet(log), 2, 0) == [released]


async def test_without_a_free_slot_a_worker_waits(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = admission(log, slots_max=2)
    three = [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in "abc"]
    for _ in range(3):
        await poll(polled, log, three)
    assert polled.refused == {"slots": 1}
    assert caplog.text.count("all 2 slots of its model in the pool default are in use") == 1
    first = lease(0, name="a", spec=msgspec.structs.replace(SPEC, worker_id="a"), released=True)
    await poll(polled, log, [first, *three[1:]])
    slots = {fact.spec.worker_id: fact.slot for fact in facts(log) if isinstance(fact, WorkerJoined)}
    assert slots == {"a": 0, "b": 1, "c": 0}


async def test_owners_of_several_groups_assign_disjoint_slots_of_one_pool(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    groups, slots_max = 3, 8
    names = "abcd"  # one more than any group has slots
    assigned: dict[int, list[int]] = {}
    for partition in range(groups):
        polled = WorkerAdmission(log, partition, 7, Fleet(), slots_max=slots_max, groups=groups)
        leases = [lease(name=name, spec=msgspec.structs.replace(SPEC, worker_id=name)) for name in names]
        await polled.update(leases, POOLS, applied_fleet(log, partition), log.next_offset(FLEET.name, partition))
        found = [decode(FLEET, record.value) for record in log.records(FLEET.name, partition, 0, 100)]
        assigned[partition] = [fact.slot for fact in found if isinstance(fact, WorkerJoined)]
        assert polled.refused == {"slots": len(names) - len(assigned[partition])}
    assert assigned == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}
    assert "worker c was rejected: all 2 slots of its model in the pool default are in use" in caplog.text
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
async def test_a_lease_with_an_invalid_name_is_rejected(
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
    assert "it serves the model other, but its group serves m" in caplog.text
    assert "blocks hold 16 tokens" in caplog.text


async def test_a_pool_of_another_block_size_is_refused_by_name(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = admission(log, by_lease=PoolsByLease("m", RouterConfig()))
    other = msgspec.structs.replace(SPEC, worker_id="v", pool="big", block_size=16)
    held = [lease(), lease(name="v", spec=other)]
    await poll(polled, log, held, {})
    await poll(polled, log, held, POOLS)
    await poll(polled, log, held, POOLS)
    assert [fact.spec.worker_id for fact in facts(log) if isinstance(fact, WorkerJoined)] == ["w"]
    assert [decode(CONTROL, record.value).pool for record in log.records(CONTROL.name, 0, 0, 10)] == ["default"]
    assert polled.refused == {"block_size": 1}
    text = "blocks of its pool big hold 16 tokens, but blocks of the pool default of m hold 64: start it with the same"
    assert text in caplog.text

    await poll(polled, log, [lease(released=True), held[1]], POOLS)
    pools = [decode(CONTROL, record.value) for record in log.records(CONTROL.name, 0, 0, 10)]
    assert [(pool.pool, pool.block_size) for pool in pools] == [("default", 64), ("big", 16)], "once no worker is left"


@pytest.mark.parametrize("changes", [{"role": "encode"}, {"block_size": 64}, {"pool": "default", "worker_id": "v"}])
async def test_other_workers_than_those_of_another_block_size_are_admitted(
    log: SqliteLog, changes: dict[str, Any]
) -> None:
    spec = msgspec.structs.replace(SPEC, **{"worker_id": "v", "pool": "other", "block_size": 16} | changes)
    role = spec.role
    pools = POOLS | {"other": PoolConfigured(pool="other", model="m", block_size=spec.block_size, role=role)}
    polled = admission(log)
    await poll(polled, log, [lease(), lease(name="v", spec=spec)], pools)
    joined = [fact.spec.worker_id for fact in facts(log) if isinstance(fact, WorkerJoined)]
    assert joined == (["w"] if spec.pool == "default" else ["w", "v"])


async def test_a_worker_that_left_or_ended_while_no_router_ran_is_logged_without_a_warning(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    """After a clean restart nothing is lost, so a router must not alarm anybody."""
    caplog.set_level(logging.INFO)
    first = admission(log)
    await poll(first, log, [lease(), *others("idle", "busy", "renamed")])
    await poll(first, log, [lease(draining=True), *others("idle", "busy", "renamed")])
    await poll(first, log, [lease(draining=True, released=True), *others("idle", "busy", "renamed")])
    fleet = Fleet()
    for offset, fact in enumerate(facts(log)):
        fleet.apply(fact, offset)
    second = WorkerAdmission(log, 0, 8, fleet, slots_max=16, busy={"busy"})
    spec = msgspec.structs.replace(SPEC, worker_id="renamed")
    for number in range(4):
        successor = lease(token="successor", name="renamed", spec=spec, renewed=number)
        await poll(second, log, [successor], observed_ms=HALF_MS)
    outcomes = {(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records}
    assert outcomes >= {
        ("INFO", "worker w left"),
        ("INFO", "worker idle ended while no router was running"),
        ("INFO", "worker renamed ended while no router was running"),
        ("WARNING", "worker busy is lost"),
    }
    assert {text for level, text in outcomes if level == "WARNING" and "worker" in text} == {"worker busy is lost"}


async def test_a_draining_worker_that_dies_is_lost(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = admission(log)
    await poll(polled, log, [lease()])
    await poll(polled, log, [lease(draining=True)])
    while WorkerLost not in map(type, facts(log)):
        await poll(polled, log, [], observed_ms=HALF_MS)
    assert "worker w is lost" in caplog.text
