"""Admission of workers: the fleet events that each poll of the leases produces, and the reasons of rejections."""

import logging
from collections.abc import Collection
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
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import CONTROL, FLEET, HEARTBEATS, work_topic
from forebay.events.transfer import KvLayout
from forebay.live.owner import admission as admission_module
from forebay.live.owner.admission import PoolsByLease, RequireSlot, Slots, WorkerAdmission
from forebay.transport.base import Draft, Lease, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import applied_fleet, lease_of

TTL_MS = 30_000
HALF_MS = TTL_MS // 2  # a loss takes two polls, each of which counts for at most half a TTL
POOLS = {"default": PoolConfigured(pool="default", model="m", block_size=64)}
SPEC = WorkerSpec(worker_id="w", model="m", block_size=64, kv_blocks_total=8, max_num_seqs=4, max_num_batched_tokens=64)
LAYOUT = KvLayout(connector="nixl", dtype="uint8", block_bytes=16_384)
WIDE = msgspec.structs.replace(LAYOUT, dtype="bfloat16", block_bytes=32_768, layers=24)


def lease(
    name: str = "w",
    *,
    token: str = "t1",
    left_ms: int = TTL_MS,
    renewed: int = 0,
    released: bool = False,
    draining: bool = False,
    **changes: Any,
) -> Lease:
    """Return the lease of a worker, renewed `renewed` times, whose specification has these changes."""
    spec = msgspec.structs.replace(SPEC, **{"worker_id": name, **changes})
    payload = msgspec.msgpack.encode(WorkerLease(spec=spec, draining=draining))
    return lease_of(name, token, TTL_MS, left_ms=left_ms, renewed=renewed, released=released, payload=payload)


def of_role(name: str, part: str, **changes: Any) -> Lease:
    return lease(name, **{"pool": part, "role": part, "kv_layout": LAYOUT, **changes})


def others(*names: str, **changes: Any) -> list[Lease]:
    """Return healthy leases, so that one missing lease does not count as a failure of the store."""
    return [lease(name, **changes) for name in names]


class PolledAdmission:
    """The admission of an owner that has applied all of `fleet` at each poll.

    `router` lets leases configure pools; the pools on `control` apply at once.
    """

    def __init__(
        self,
        log: SqliteLog,
        *,
        epoch: int = 7,
        fleet: Fleet | None = None,
        router: RouterConfig | None = None,
        slots_max: int = 16,
        require_slot: RequireSlot | None = None,
        busy: Collection[str] = (),
    ) -> None:
        self.log = log
        by_lease = None if router is None else PoolsByLease("m", router)
        self._pools = POOLS if router is None else {}
        self.admission = WorkerAdmission(
            log, 0, epoch, fleet or Fleet(), slots=Slots(range(slots_max), require_slot), by_lease=by_lease, busy=busy
        )
        self.refused = self.admission.refused

    def configured(self) -> list[PoolConfigured]:
        return [decode(CONTROL, record.value) for record in self.log.records(CONTROL.name, 0, 0, 99)]

    async def poll(
        self, *leases: Lease, observed_ms: int = 0, pools: dict[str, PoolConfigured] | None = None
    ) -> list[Lease]:
        if pools is None:
            pools = self._pools | {pool.pool: pool for pool in self.configured()}
        end = self.log.next_offset(FLEET.name, 0)
        return await self.admission.update(list(leases), pools, applied_fleet(self.log), end, observed_ms)

    def facts(self, since: int = 0) -> list[AnyFleetEvent]:
        return [decode(FLEET, record.value) for record in self.log.records(FLEET.name, 0, since, 100)]

    def kinds(self, since: int = 0) -> list[type]:
        return [type(fact) for fact in self.facts(since)]

    def slots(self) -> dict[str, int]:
        """Return the slot of each worker that ever joined, in the order of joining."""
        return {fact.spec.worker_id: fact.slot for fact in self.facts() if isinstance(fact, WorkerJoined)}

    def joined(self) -> list[str]:
        return list(self.slots())


@pytest.fixture
def polled(log: SqliteLog) -> PolledAdmission:
    return PolledAdmission(log)


@pytest.fixture
def by_lease(log: SqliteLog) -> PolledAdmission:
    """Return an admission whose pools are configured by leases."""
    return PolledAdmission(log, router=RouterConfig())


async def test_a_lease_joins_becomes_suspect_recovers_and_is_lost(polled: PolledAdmission) -> None:
    for left_ms, renewed, observed_ms in (
        (30_000, 0, 9_000),
        (21_000, 0, 9_000),
        (14_000, 0, 7_000),
        (29_000, 1, 9_000),
        (14_000, 1, HALF_MS),
        (0, 1, HALF_MS),
    ):
        assert await polled.poll(lease(left_ms=left_ms, renewed=renewed), observed_ms=observed_ms) == []
    ended = lease(left_ms=0, renewed=1)
    assert await polled.poll(ended) == [ended]
    assert await polled.poll() == []
    assert polled.kinds() == [WorkerJoined, WorkerSuspect, WorkerRecovered, WorkerSuspect, WorkerLost]
    assert {fact.owner_epoch for fact in polled.facts()} == {7}
    joined, *later = polled.facts()
    assert isinstance(joined, WorkerJoined)
    assert (joined.spec, joined.lease, joined.slot, joined.lease_ttl_ms) == (SPEC, "t1", 0, TTL_MS)
    assert {msgspec.to_builtins(fact).get("worker_epoch", 0) for fact in later} == {0}


async def test_a_worker_with_a_vanished_lease_is_suspect_until_it_reacquires(polled: PolledAdmission) -> None:
    rest = others("x", "y")
    await polled.poll(lease(), *rest)
    for _ in range(2):
        await polled.poll(*rest, observed_ms=500)
    await polled.poll(lease(renewed=1), *rest, observed_ms=500)
    assert polled.kinds(3) == [WorkerSuspect, WorkerRecovered]


async def test_leases_that_vanish_together_change_nothing(
    polled: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    await polled.poll(*others("w", "x", "y"))
    await polled.poll(observed_ms=500)
    await polled.poll(*others("w", "x", "y", renewed=1), observed_ms=500)
    assert polled.kinds() == [WorkerJoined] * 3
    assert polled.admission.sensor_faults == 1
    assert caplog.text.count("3 of 3 leases failed at once") == 1


async def test_a_new_owner_after_a_flush_suspects_but_does_not_lose_returning_workers(
    log: SqliteLog, polled: PolledAdmission
) -> None:
    await polled.poll(*others("w", "x"))
    second = PolledAdmission(log, epoch=8, fleet=applied_fleet(log))
    await second.poll()
    await second.poll(observed_ms=HALF_MS)
    await second.poll(*others("w", "x", renewed=1), observed_ms=500)
    assert second.kinds(2) == [WorkerSuspect] * 2 + [WorkerRecovered] * 2


async def test_a_clock_jump_that_expires_a_lease_does_not_lose_its_worker(polled: PolledAdmission) -> None:
    await polled.poll(lease())
    for jumped in (lease(left_ms=-3_600_000), lease(renewed=1)):
        assert await polled.poll(jumped, observed_ms=500) == []
    assert polled.kinds() == [WorkerJoined]


async def test_a_worker_that_no_longer_fits_its_pool_is_lost_and_rejected_by_name(
    polled: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"default": PoolConfigured(pool="default", model="m", block_size=16)}
    await polled.poll(lease())
    for _ in range(2):
        await polled.poll(lease(), pools=other)
    _, lost = polled.facts()
    assert isinstance(lost, WorkerLost)
    assert lost.reason == "its blocks hold 64 tokens, blocks of the pool default hold 16"
    assert polled.refused == {"spec": 1}
    assert f"worker w was rejected: {lost.reason}" in caplog.text


async def test_a_released_lease_and_a_new_incarnation_lose_the_old_epoch(polled: PolledAdmission) -> None:
    await polled.poll(lease())
    await polled.poll(lease(token="t2"))
    released = lease(left_ms=0, token="t2", released=True)
    assert await polled.poll(released) == []
    assert await polled.poll(released) == [released]
    assert polled.kinds() == [WorkerJoined, WorkerLost, WorkerJoined, WorkerLost]
    assert [fact.worker_epoch for fact in polled.facts() if isinstance(fact, WorkerLost)] == [0, 2]


async def test_workers_lost_in_one_poll_are_all_suspect_before_the_first_is_lost(polled: PolledAdmission) -> None:
    names = ("x", "y", "z")
    await polled.poll(*others(*names))
    await polled.poll(*others(*names, token="t2"))
    losses = [fact for fact in polled.facts() if isinstance(fact, WorkerSuspect | WorkerLost)]
    assert [(type(fact), fact.worker_id) for fact in losses] == [
        (kind, name) for kind in (WorkerSuspect, WorkerLost) for name in names
    ]


@pytest.mark.parametrize("suspect", [False, True])
async def test_a_draining_lease_emits_one_draining_event_until_it_is_lost(
    polled: PolledAdmission, *, suspect: bool
) -> None:
    await polled.poll(lease())
    if suspect:
        await polled.poll(lease(left_ms=13_000), observed_ms=HALF_MS)
    for renewed in (1, 1, 2, 2):  # whether suspect or not, a draining worker receives no work
        await polled.poll(lease(draining=True, renewed=renewed), observed_ms=HALF_MS)
    await polled.poll(lease(left_ms=0, draining=True, released=True))
    assert polled.kinds() == [WorkerJoined, *[WorkerSuspect] * suspect, WorkerDraining, WorkerLost]
    assert polled.refused == {}
    draining = polled.facts()[-2]
    assert isinstance(draining, WorkerDraining)
    assert (draining.worker_id, draining.worker_epoch, draining.owner_epoch) == ("w", 0, 7)


async def test_a_new_owner_continues_from_the_fleet_of_its_predecessor(log: SqliteLog, polled: PolledAdmission) -> None:
    await polled.poll(*others("w", "v"))
    for epoch in (8, 9):  # the third owner does not write again what the second one did
        await PolledAdmission(log, epoch=epoch, fleet=applied_fleet(log)).poll(lease(draining=True), lease("v"))
        fact = polled.facts()[-1]
        assert (type(fact), fact.owner_epoch, len(polled.facts())) == (WorkerDraining, 8, 3)


async def test_a_draining_worker_is_not_admitted(polled: PolledAdmission) -> None:
    await polled.poll(lease(draining=True))
    assert (polled.facts(), polled.refused) == ([], {})


async def test_a_member_whose_lease_becomes_undecodable_stays(
    polled: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    await polled.poll(lease())
    for _ in range(2):
        await polled.poll(msgspec.structs.replace(lease(), payload=b"\xc1"))
    assert polled.kinds() == [WorkerJoined]
    assert caplog.text.count("ignored the changed lease of the member w") == 1


def foreign_join(token: str, name: str = "w") -> WorkerJoined:
    """Return an event that another process writes."""
    spec = msgspec.structs.replace(SPEC, worker_id=name)
    return WorkerJoined(owner_epoch=7, spec=spec, lease=token, slot=3, from_offset=0)


async def write(log: SqliteLog, *events: AnyFleetEvent) -> None:
    await log.append([Draft(FLEET.name, 0, encode(FLEET, event)) for event in events])


@pytest.mark.parametrize("token", ["t1", "forged"])
async def test_a_worker_that_a_foreign_record_admitted_first_joins_again(
    log: SqliteLog, polled: PolledAdmission, token: str
) -> None:
    await write(log, foreign_join(token), foreign_join("ghost", "x"))
    assert await polled.admission.update([lease()], POOLS, Fleet(), 0) == []  # neither record is applied yet
    await polled.poll(lease())
    await polled.poll(lease())  # the lost incarnation does not join again
    for renewed in range(2):
        await polled.poll(lease(token="t2", renewed=renewed))
    assert [(worker.lease, worker.spec.worker_id) for worker in applied_fleet(log).workers()] == [("t2", "w")]
    lost = [(one.worker_id, one.worker_epoch) for one in polled.facts() if isinstance(one, WorkerLost)]
    assert sorted(lost) == [("w", 0), ("w", 2), ("x", 1)]
    assert polled.refused == {"foreign_record": 3}


async def test_a_member_that_a_foreign_record_drains_joins_again(log: SqliteLog, polled: PolledAdmission) -> None:
    await polled.poll(*others("w", "x"))
    await write(log, WorkerDraining(owner_epoch=7, worker_id="w", worker_epoch=0))
    await polled.poll(*others("w", "x"))
    lost = polled.facts()[-1]
    assert isinstance(lost, WorkerLost)
    assert (lost.worker_id, lost.worker_epoch, lost.reason) == ("w", 0, admission_module.FOREIGN)
    await polled.poll(lease(token="t2"), lease("x"))
    assert {worker.phase for worker in applied_fleet(log).workers()} == {WorkerPhase.READY}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block_size": 16}, "blocks hold 16 tokens, blocks of the pool default hold 64"),
        ({"model": "other"}, "serves the model other, but the pool default serves m"),
        ({"pool": "nowhere"}, "no pool nowhere"),
        ({"worker_id": "else"}, "names another worker, else"),
        ({"role": "encode"}, "its role is encode, but the pool default has the role aggregated: start the worker in"),
    ],
)
async def test_a_worker_that_does_not_fit_is_rejected_once_and_by_name(
    polled: PolledAdmission, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    for _ in range(3):
        await polled.poll(lease(**changes))
    assert (polled.facts(), polled.refused) == ([], {"spec": 1})
    assert why in caplog.text


@pytest.mark.parametrize(("pause_s", "attempts"), [(3_600.0, 1), (0.0, 3)])
async def test_a_slot_whose_partition_cannot_be_read_is_retried_after_a_pause(
    log: SqliteLog, polled: PolledAdmission, monkeypatch: pytest.MonkeyPatch, pause_s: float, attempts: int
) -> None:
    monkeypatch.setattr(admission_module, "SLOT_RETRY_S", pause_s)
    reads, end = [], log.end

    async def failing_twice(topic: str, partition: int) -> int:
        reads.append(topic)
        if len(reads) < 3:
            raise LogError("no answer")
        return await end(topic, partition)

    monkeypatch.setattr(log, "end", failing_twice)
    for _ in range(3):
        await polled.poll(lease())
    assert reads == [work_topic("default").name] * attempts
    assert polled.kinds() == [WorkerJoined] * (attempts == 3)
    assert polled.refused == {"work_topic": 1}


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x81\xa4spec\x81\xa9worker_id\xa1\xff", b"\x91" * 100_000], ids=["type", "utf-8", "depth"]
)
async def test_a_lease_without_a_decodable_payload_is_rejected(polled: PolledAdmission, payload: bytes) -> None:
    await polled.poll(msgspec.structs.replace(lease(), payload=payload))
    assert (polled.facts(), polled.refused) == ([], {"spec": 1})


async def test_a_lost_lease_is_forgotten_even_if_it_is_renewed_late(polled: PolledAdmission) -> None:
    await polled.poll(lease())
    for left_ms in (14_000, 0):
        assert await polled.poll(lease(left_ms=left_ms), observed_ms=HALF_MS) == []
    renewed = lease(renewed=1)
    assert await polled.poll(renewed) == [renewed]
    assert polled.kinds() == [WorkerJoined, WorkerSuspect, WorkerLost]
    await polled.poll(lease(token="t2"))
    assert polled.kinds(3) == [WorkerJoined]


async def test_a_lease_is_not_forgotten_before_the_owner_applied_its_event(
    log: SqliteLog, polled: PolledAdmission
) -> None:
    await polled.poll(lease())
    await polled.poll(released := lease(left_ms=0, released=True))
    assert await polled.admission.update([released], POOLS, Fleet(), 1, 0) == [], "the loss at offset 1 is not applied"
    assert await polled.poll(released) == [released]


async def test_workers_get_the_lowest_free_slots(polled: PolledAdmission) -> None:
    await polled.poll(*others("a", "b", "c"))
    await polled.poll(lease("a", left_ms=0, released=True), *others("b", "c"))
    await polled.poll(*others("b", "c", "d", "e"))
    assert polled.slots() == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 3}


async def test_without_a_free_slot_a_worker_waits(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    polled = PolledAdmission(log, slots_max=2)
    for _ in range(3):
        await polled.poll(*others("a", "b", "c"))
    assert polled.refused == {"slots": 1}
    assert caplog.text.count("all 2 slots of its model in the pool default are in use") == 1
    await polled.poll(lease("a", left_ms=0, released=True), *others("b", "c"))
    assert polled.slots() == {"a": 0, "b": 1, "c": 0}


async def test_a_slot_is_required_before_a_worker_gets_it(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    required: list[tuple[str, int]] = []

    async def require_slot(pool: str, slot: int) -> None:
        required.append((pool, slot))
        if slot == 1:
            raise LogError("the broker has too many partitions")

    polled = PolledAdmission(log, require_slot=require_slot)
    for _ in range(2):
        await polled.poll(*others("a", "b"))
    assert (polled.slots(), polled.refused) == ({"a": 0}, {"work_topic": 1})
    assert required == [("default", 0), ("default", 1)], "a slot that failed is not tried again at once"
    assert "worker b was rejected: slot 1 of its pool default cannot be used: the broker has too many" in caplog.text


async def test_owners_of_several_groups_assign_disjoint_slots_of_one_pool(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    names = "abcd"  # one more than any group has slots
    assigned: dict[int, list[int]] = {}
    for partition in range(3):
        polled = WorkerAdmission(log, partition, 7, Fleet(), slots=Slots(range(partition, 8, 3)))
        fleet, end = applied_fleet(log, partition), log.next_offset(FLEET.name, partition)
        await polled.update(others(*names), POOLS, fleet, end)
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
    by_lease: PolledAdmission, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    for _ in range(2):
        await by_lease.poll(lease(changes.get("worker_id", "w"), **changes))
    assert (by_lease.facts(), by_lease.configured(), by_lease.refused) == ([], [], {"name": 1})
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be used: " in line
    assert line.isprintable()


async def test_the_first_lease_of_a_pool_configures_it(log: SqliteLog, caplog: pytest.LogCaptureFixture) -> None:
    router = RouterConfig(mode="round-robin")
    polled = PolledAdmission(log, router=router)
    leases = (
        lease(),
        lease("v", block_size=16),
        lease("x", model="other", pool="p"),
        lease("e", role="encode", pool="e"),
    )
    for _ in range(2):
        await polled.poll(*leases, pools={})
    pool, encoders = polled.configured()
    assert pool == PoolConfigured(pool="default", model="m", block_size=64, router=router, at_us=pool.at_us)
    assert (encoders.pool, encoders.role) == ("e", "encode")
    assert polled.facts() == []
    await polled.poll(*leases)
    assert polled.joined() == ["w", "e"]
    assert polled.refused == {"spec": 2}
    assert "it serves the model other, but its group serves m" in caplog.text
    assert "blocks hold 16 tokens" in caplog.text


async def test_a_pool_of_another_block_size_is_refused_by_name(
    by_lease: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    big = lease("v", pool="big", block_size=16)
    for _ in range(3):
        await by_lease.poll(lease(), big, lease(""), lease("x" * 300))
    assert by_lease.joined() == ["w"]
    assert [pool.pool for pool in by_lease.configured()] == ["default"]
    assert by_lease.refused == {"block_size": 1, "spec": 2}
    text = "blocks of its pool big hold 16 tokens, but blocks of the pool default of m hold 64: start it with the same"
    assert text in caplog.text
    beat = RouterHeartbeat(group="m", router_id="r", role="owner", rejected=by_lease.admission.rejected)
    rejected, _ = decode(HEARTBEATS, encode(HEARTBEATS, beat)).rejected
    assert (rejected.worker_id, rejected.reason.startswith(text)) == ("v", True)
    await by_lease.poll(lease(released=True), big)
    pools = [(pool.pool, pool.block_size) for pool in by_lease.configured()]
    assert pools == [("default", 64), ("big", 16)], "once no worker is left"
    await by_lease.poll(big)
    assert (by_lease.joined(), by_lease.admission.rejected) == (["w", "v"], ())


@pytest.mark.parametrize("changes", [{"role": "encode"}, {"block_size": 64}, {"pool": "default"}])
async def test_other_workers_than_those_of_another_block_size_are_admitted(
    polled: PolledAdmission, changes: dict[str, Any]
) -> None:
    second: dict[str, Any] = {"pool": "other", "block_size": 16} | changes
    other = PoolConfigured(
        pool="other", model="m", block_size=second["block_size"], role=second.get("role", "aggregated")
    )
    await polled.poll(lease(), lease("v", **second), pools=POOLS | {"other": other})
    assert polled.joined() == (["w"] if second["pool"] == "default" else ["w", "v"])


async def test_a_worker_that_left_or_ended_while_no_router_ran_is_logged_without_a_warning(
    log: SqliteLog, polled: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    """After a clean restart nothing is lost, so a router must not alarm anybody."""
    caplog.set_level(logging.INFO, "forebay")
    rest = others("idle", "busy", "also", "renamed")
    for draining, released in ((False, False), (True, False), (True, True)):
        await polled.poll(lease(draining=draining, released=released), *rest)
    second = PolledAdmission(log, epoch=8, fleet=applied_fleet(log), busy={"busy", "also"})
    for number in range(4):
        await second.poll(lease("renamed", token="successor", renewed=number), observed_ms=HALF_MS)
    outcomes = {(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records}
    assert outcomes >= {
        ("INFO", "worker w left"),
        ("INFO", "worker idle ended while no router was running"),
        ("INFO", "worker renamed ended while no router was running"),
    }
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line.startswith("2 workers are lost: "), "and no fault of Redis"
    assert line.endswith(" (also, busy)")


async def test_a_draining_worker_that_dies_is_lost(polled: PolledAdmission, caplog: pytest.LogCaptureFixture) -> None:
    await polled.poll(lease())
    await polled.poll(lease(draining=True))
    while WorkerLost not in polled.kinds():
        await polled.poll(observed_ms=HALF_MS)
    assert "worker w is lost" in caplog.text


# Prefill and decode workers


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"kv_layout": WIDE},
            "worker decode-0 was rejected: its KV block layout is bfloat16, 32768 bytes, 24 layers, nixl "
            "connector, but the layout of prefill-0 in the pool prefill is uint8, 16384 bytes, nixl connector",
        ),
        (
            {"kv_layout": msgspec.structs.replace(LAYOUT, connector="tcp")},
            "is uint8, 16384 bytes, tcp connector, but the layout of prefill-0 in the pool prefill is uint8,",
        ),
        (
            {"kv_layout": None, "engine": "vllm"},
            "its KV block layout is not reported by vllm, but the layout of prefill-0 in the pool prefill is",
        ),
        ({"role": "prefill", "pool": "prefill", "kv_layout": WIDE}, "the layout of prefill-0 in the pool prefill is"),
    ],
)
async def test_disagg_a_kv_layout_mismatch_is_rejected_naming_both_workers(
    by_lease: PolledAdmission, caplog: pytest.LogCaptureFixture, other: dict[str, Any], message: str
) -> None:
    held = of_role("prefill-0", "prefill"), of_role("decode-0", "decode", **other)
    for _ in range(4):  # pools are configured before their workers join
        await by_lease.poll(*held)
    assert message in caplog.text
    assert by_lease.joined() == ["prefill-0"]
    assert by_lease.refused == {"kv_layout": 1}, "once for each incarnation"
    for _ in range(2):
        await by_lease.poll(msgspec.structs.replace(held[0], released=True), held[1])
    assert by_lease.joined() == ["prefill-0", "decode-0"], "it fits once the conflicting worker is gone"


async def test_disagg_unreported_kv_layouts_are_treated_as_equal(by_lease: PolledAdmission) -> None:
    silent = {"kv_layout": None, "engine": "vllm"}
    for _ in range(2):
        await by_lease.poll(of_role("p", "prefill", **silent), of_role("d", "decode", **silent))
    assert by_lease.joined() == ["p", "d"]
    assert {pool.pool: pool.role for pool in by_lease.configured()} == {"prefill": "prefill", "decode": "decode"}


async def test_disagg_decode_workers_wait_until_aggregated_workers_leave(
    by_lease: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    whole = of_role("mock-0", "aggregated", kv_layout=None)
    apart = of_role("p", "prefill"), of_role("d", "decode")
    for leases in ((whole,), (whole, *apart)):
        for _ in range(2):
            await by_lease.poll(*leases)
    assert by_lease.joined() == ["mock-0", "p"]
    assert (
        "worker d was rejected: its role is decode, but m is served by aggregated workers, for example mock-0 in the "
        "pool aggregated: stop the aggregated workers first"
    ) in caplog.text
    assert by_lease.refused == {"roles": 1}
    await by_lease.poll(of_role("mock-0", "aggregated", kv_layout=None, draining=True), *apart)
    assert by_lease.joined() == ["mock-0", "p", "d"], "in the same poll that finds the aggregated worker draining"
    await by_lease.poll(of_role("mock-1", "aggregated"), *apart)
    assert by_lease.refused == {"roles": 2}, "an aggregated worker is rejected beside disaggregated ones too"


# Model cards


async def test_a_worker_with_another_model_card_is_rejected_naming_both(
    polled: PolledAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = "a" * 64, "b" * 64
    pools = POOLS | {"other": PoolConfigured(pool="other", model="n", block_size=64)}
    rest = lease("b", card=second), lease("c"), lease("n", card=second, model="n", pool="other")
    await polled.poll(lease("a", card=first), *rest, lease("d", card=first), pools=pools)
    assert polled.joined() == ["a", "c", "n", "d"], "a worker without a card, or of another model, fits all others"
    assert polled.refused == {"card": 1}
    assert f"its model card is {second}, but the card of a in the pool default is {first}" in caplog.text
    ended = [lease(name, card=first, released=True) for name in "ad"]
    for _ in range(2):
        await polled.poll(*ended, *rest, pools=pools)
    assert polled.joined() == ["a", "c", "n", "d", "b"], "another card is accepted once no worker has the first one"


def test_the_card_does_not_change_the_digest_of_the_state() -> None:
    """Decisions do not depend on it, and journals of versions without cards must be derived with equal digests."""
    digests = set()
    for card in ("", "a" * 64):
        fleet = Fleet()
        spec = msgspec.structs.replace(SPEC, card=card)
        fleet.apply(WorkerJoined(owner_epoch=0, spec=spec, lease="t", slot=0, from_offset=0), 1)
        digests.add(fleet.digest())
    assert len(digests) == 1
