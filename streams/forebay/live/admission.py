"""From leases to facts: polls who is alive and writes what changed to the topic `fleet`.

Only the owner runs this, so `fleet` has one writer. A lease that was not renewed in time makes its worker
suspect; one that ran out or vanished makes it lost; another incarnation under the same name loses the old
one first.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from forebay.core.fleet import Fleet, WorkerPhase
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.fleet import (
    FleetEvent,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.topics import FLEET, work_topic
from forebay.transport.base import Draft, Lease, Log

logger = logging.getLogger(__name__)

SUSPECT_BELOW = 0.5  # of the TTL left: leases are renewed each third of it, so one renewal was missed


@dataclass(slots=True)
class _Member:
    token: str
    worker_epoch: int
    slot: int
    pool: str
    suspect: bool


class Admission:
    """The members as they stand on `fleet`, applied or not.

    `refused` counts leases that were turned away; the reason is logged once for each incarnation.
    """

    def __init__(self, log: Log, partition: int, owner_epoch: int, fleet: Fleet) -> None:
        self._log = log
        self._partition = partition
        self._owner_epoch = owner_epoch
        self._members = {
            worker.spec.worker_id: _Member(
                worker.lease,
                worker.worker_epoch,
                worker.slot,
                worker.spec.pool,
                worker.phase is WorkerPhase.SUSPECT,
            )
            for worker in fleet.workers()
        }
        self._refused: dict[str, str] = {}
        self.refused: Counter[str] = Counter()

    async def update(self, leases: list[Lease], pools: dict[str, PoolConfigured]) -> list[Lease]:
        """Write what changed since the last poll; the leases that ran out and may be forgotten."""
        held = {lease.worker_id: lease for lease in leases}
        for worker_id, member in list(self._members.items()):
            lease = held.get(worker_id)
            if lease is None:
                await self._lose(worker_id, member, "its lease is gone")
            elif lease.token != member.token:
                await self._lose(worker_id, member, "another incarnation took its name")
            elif lease.expires_in_ms <= 0:
                await self._lose(worker_id, member, f"its lease of {lease.ttl_ms} ms ran out")
            else:
                await self._judge(worker_id, member, lease)
        for lease in leases:
            if lease.worker_id not in self._members and lease.expires_in_ms > 0:
                await self._admit(lease, pools)
        return [lease for lease in leases if lease.expires_in_ms <= 0]

    async def _judge(self, worker_id: str, member: _Member, lease: Lease) -> None:
        late = lease.expires_in_ms < SUSPECT_BELOW * lease.ttl_ms
        if late == member.suspect:
            return
        member.suspect = late
        kind = WorkerSuspect if late else WorkerRecovered
        reason = f"{lease.expires_in_ms} ms of {lease.ttl_ms} ms are left of its lease"
        await self._write(
            kind(
                owner_epoch=self._owner_epoch,
                at_us=_now_us(),
                worker_id=worker_id,
                worker_epoch=member.worker_epoch,
                reason=reason,
            )
        )

    async def _lose(self, worker_id: str, member: _Member, reason: str) -> None:
        logger.warning("worker %s is lost: %s", worker_id, reason)
        del self._members[worker_id]
        await self._write(
            WorkerLost(
                owner_epoch=self._owner_epoch,
                at_us=_now_us(),
                worker_id=worker_id,
                worker_epoch=member.worker_epoch,
                reason=reason,
            )
        )

    async def _admit(self, lease: Lease, pools: dict[str, PoolConfigured]) -> None:
        spec, problem = _spec_of(lease, pools)
        if spec is None:
            if self._refused.get(lease.worker_id) != lease.token:
                self._refused[lease.worker_id] = lease.token
                self.refused["spec"] += 1
                logger.error("worker %s is refused: %s", lease.worker_id, problem)
            return
        taken = {member.slot for member in self._members.values() if member.pool == spec.pool}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        joined = WorkerJoined(
            owner_epoch=self._owner_epoch,
            at_us=_now_us(),
            spec=spec,
            lease=lease.token,
            slot=slot,
            from_offset=await self._log.end(work_topic(spec.pool).name, slot),
        )
        offset = await self._write(joined)
        self._members[lease.worker_id] = _Member(lease.token, offset, slot, spec.pool, suspect=False)
        logger.info("worker %s joined the pool %s in slot %d", lease.worker_id, spec.pool, slot)

    async def _write(self, event: FleetEvent) -> int:
        offsets = await self._log.append([Draft(FLEET.name, self._partition, encode(FLEET, event))])
        return offsets[0]


def _spec_of(lease: Lease, pools: dict[str, PoolConfigured]) -> tuple[WorkerSpec | None, str]:
    try:
        spec = msgspec.msgpack.decode(lease.payload, type=WorkerSpec)
    except msgspec.MsgspecError as error:
        return None, f"its lease holds no worker description: {error}"
    if spec.worker_id != lease.worker_id:
        return None, f"it describes itself as {spec.worker_id}"
    pool = pools.get(spec.pool)
    if pool is None:
        return None, f"there is no pool {spec.pool}"
    if spec.model != pool.model:
        return None, f"it serves {spec.model}, the pool {pool.pool} serves {pool.model}"
    if spec.block_size != pool.block_size:
        return (
            None,
            f"its blocks hold {spec.block_size} tokens, those of the pool {pool.pool} hold {pool.block_size}",
        )
    return spec, ""


def _now_us() -> int:
    return time.time_ns() // 1000
