"""From leases to facts: polls who is alive and writes what changed to the topic `fleet`.

Only the owner runs this; what an earlier owner still writes is void on `fleet`. A worker whose lease is late or
vanished is suspect, and lost when it does not come back (see `forebay.live.owner.lease_judgement`). It is lost
at once when it released its lease, when another incarnation takes its name, or when its pool was changed and would
refuse it now. A worker whose lease is marked as draining is draining from then on. A lease is forgotten only once the
owner has applied the event: a paused owner notices a takeover before it drops leases that were renewed meanwhile.

All groups of a namespace share the work topic of a pool. The owner of control partition p of n assigns only the slots
whose number leaves p when divided by n, so no two owners assign one slot, and none has to know the other's workers.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from forebay.core.state.fleet import Fleet, WorkerPhase
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import (
    FleetEvent,
    WorkerDraining,
    WorkerJoined,
    WorkerLease,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.names import NameInvalid, printable, require_adapter, require_name
from forebay.events.topics import CONTROL, FLEET, work_topic
from forebay.live.owner.kv_layouts import foreign_blocks
from forebay.live.owner.lease_judgement import DOUBTED, LeaseJudge, Standing, Verdict
from forebay.transport.base import Draft, Lease, Log, LogError

logger = logging.getLogger(__name__)

NOWHERE_S = 60.0  # a slot that cannot be looked at takes 10 s of everybody's polls, so it is asked for again only then
ANSWERING = {"aggregated", "decode"}  # one of them answers the requests of a model
APART = ("prefill", "decode")  # their KV blocks go from one to the other


@dataclass(frozen=True, slots=True)
class PoolsByLease:
    """A group without a pool in its settings: the first lease of each pool of `model` configures it."""

    model: str
    router: RouterConfig


@dataclass(slots=True)
class _Member:
    token: str
    worker_epoch: int
    slot: int
    spec: WorkerSpec
    suspect: bool = False
    draining: bool = False
    payload: bytes = b""  # of its lease, when that was last looked into


class Admission:
    """The members as they stand on `fleet`, applied or not.

    `groups` is the number of control partitions, which share the `slots_max` slots of every pool.
    `refused` counts leases that were turned away; the reason is logged once for each incarnation.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        owner_epoch: int,
        fleet: Fleet,
        *,
        slots_max: int,
        groups: int = 1,
        by_lease: PoolsByLease | None = None,
    ) -> None:
        assert partition < groups, "every control partition has its share of the slots"
        self._log = log
        self._partition = partition
        self._owner_epoch = owner_epoch
        self._slots = range(partition, slots_max, groups)
        self._by_lease = by_lease
        self._written_end = 0
        self._configured: set[str] = set()
        self._ended: dict[str, str] = {}
        self._members = {
            worker.spec.worker_id: _Member(
                worker.lease,
                worker.worker_epoch,
                worker.slot,
                worker.spec,
                suspect=worker.phase is WorkerPhase.SUSPECT,
                draining=worker.phase is WorkerPhase.DRAINING,
            )
            for worker in fleet.workers()
        }
        self._judge = LeaseJudge()
        for worker in fleet.workers():
            self._judge.add(worker.spec.worker_id, worker.lease, worker.lease_ttl_ms)
        self._refused: dict[str, str] = {}
        self._nowhere: dict[str, float] = {}
        self.refused: Counter[str] = Counter()

    @property
    def sensor_faults(self) -> int:
        """How often the leases failed together."""
        return self._judge.faults

    async def update(
        self, leases: list[Lease], pools: dict[str, PoolConfigured], applied: int, observed_ms: int = 0
    ) -> list[Lease]:
        """Write what changed since the last poll; the leases that ended and may be forgotten.

        `applied` is the offset up to which the owner applied `fleet` when the leases were read, `observed_ms` the time
        since the previous poll in which they could be read.
        """
        held = {lease.worker_id: lease for lease in leases}
        verdicts = self._verdicts(held, observed_ms)
        self._ended = {name: token for name, token in self._ended.items() if name in held}
        self._refused = {name: token for name, token in self._refused.items() if name in held}
        self._nowhere = {token: until_s for token, until_s in self._nowhere.items() if until_s > time.monotonic()}
        losses: dict[str, str] = {}
        for worker_id, member in self._members.items():
            lease, verdict = held.get(worker_id), verdicts[worker_id]
            if verdict.standing is Standing.LOST:
                if lease is not None and lease.token == member.token:
                    self._ended[worker_id] = lease.token
                losses[worker_id] = verdict.reason
            elif (problem := _misfit(member.spec, pools)) is not None:
                losses[worker_id] = problem
            else:
                await self._mark(worker_id, member, lease, verdict)
        await self._lose_all(losses)
        others = [lease for lease in leases if lease.worker_id not in self._members]
        ended = [lease for lease in others if self._has_ended(lease)]
        for lease in others:
            if not self._has_ended(lease):
                await self._admit(lease, pools)
        return ended if applied >= self._written_end else []

    def _verdicts(self, held: dict[str, Lease], observed_ms: int) -> dict[str, Verdict]:
        faults = self._judge.faults
        verdicts = self._judge.poll(held, observed_ms)
        if self._judge.faults > faults:
            logger.warning(
                "%d of %d leases failed together, which is a fault of Redis: their workers have one TTL more",
                sum(verdict.standing is not Standing.ALIVE for verdict in verdicts.values()),
                len(verdicts),
            )
        return verdicts

    def _has_ended(self, lease: Lease) -> bool:
        # A renewal after the fact does not bring it back: its holder must hear that it is gone.
        return lease.released or lease.expires_in_ms <= 0 or self._ended.get(lease.worker_id) == lease.token

    async def _mark(self, worker_id: str, member: _Member, lease: Lease | None, verdict: Verdict) -> None:
        if member.draining:
            return
        if lease is not None and lease.payload != member.payload:
            member.payload = lease.payload
            if _says_draining(lease):
                await self._drain(worker_id, member)
                return
        doubted = verdict.standing in DOUBTED
        if doubted == member.suspect:
            return
        if doubted:
            await self._suspect(worker_id, member, verdict.reason)
            return
        member.suspect = False
        await self._write(
            WorkerRecovered(
                owner_epoch=self._owner_epoch,
                at_us=_now_us(),
                worker_id=worker_id,
                worker_epoch=member.worker_epoch,
                reason=verdict.reason,
            )
        )

    async def _drain(self, worker_id: str, member: _Member) -> None:
        logger.info("worker %s is draining", worker_id)
        member.draining = True
        await self._write(
            WorkerDraining(
                owner_epoch=self._owner_epoch,
                at_us=_now_us(),
                worker_id=worker_id,
                worker_epoch=member.worker_epoch,
                reason="its lease says that it stops",
            )
        )

    async def _lose_all(self, losses: dict[str, str]) -> None:
        """Record lost workers, each with its reason.

        Several workers lost in one poll are all suspect first. Otherwise a request of the first would be routed to
        the second, which is lost as well, and so on until its attempts are exhausted.
        """
        if len(losses) > 1:
            for worker_id, reason in losses.items():
                member = self._members[worker_id]
                if not (member.draining or member.suspect):
                    await self._suspect(worker_id, member, reason)
        for worker_id, reason in losses.items():
            await self._lose(worker_id, reason)

    async def _suspect(self, worker_id: str, member: _Member, reason: str) -> None:
        member.suspect = True
        await self._write(
            WorkerSuspect(
                owner_epoch=self._owner_epoch,
                at_us=_now_us(),
                worker_id=worker_id,
                worker_epoch=member.worker_epoch,
                reason=reason,
            )
        )

    async def _lose(self, worker_id: str, reason: str) -> None:
        logger.warning("worker %s is lost: %s", worker_id, reason)
        member = self._members.pop(worker_id)
        self._judge.remove(worker_id)
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
        try:
            said = _said(lease)
            if said.draining:
                return
            spec = said.spec
            _require_names(spec)
            others = [one.spec for _, one in sorted(self._members.items()) if not one.draining]
            _require_alike(spec, others)
            if self._by_lease is not None and spec.pool not in pools:
                await self._configure(spec, self._by_lease)
                return
            problem = _misfit(spec, pools)
            if problem is not None:
                raise _Unfit(problem)
            # Its pool is there by then: it can join as soon as those of the other kind leave.
            _require_one_kind(spec, others)
        except _Unfit as unfit:
            self._refuse(lease, unfit.reason, str(unfit))
            return
        taken = {member.slot for member in self._members.values() if member.spec.pool == spec.pool}
        slot = next((slot for slot in self._slots if slot not in taken), None)
        if slot is None:
            self._refuse(lease, "slots", self._no_slot(spec.pool))
            return
        if lease.token in self._nowhere:
            return
        try:
            from_offset = await self._log.end(work_topic(spec.pool).name, slot)
        except LogError as error:
            # A lease can name what it likes; asking again at every poll would hold up everybody else's.
            self._nowhere[lease.token] = time.monotonic() + NOWHERE_S
            self._refuse(lease, "work_topic", f"slot {slot} of its pool cannot be used: {error}")
            return
        joined = WorkerJoined(
            owner_epoch=self._owner_epoch,
            at_us=_now_us(),
            spec=spec,
            lease=lease.token,
            slot=slot,
            from_offset=from_offset,
            lease_ttl_ms=lease.ttl_ms,
        )
        offset = await self._write(joined)
        self._members[lease.worker_id] = _Member(lease.token, offset, slot, spec, payload=lease.payload)
        self._judge.add(lease.worker_id, lease.token, lease.ttl_ms, lease)
        logger.info("worker %s joined the pool %s in slot %d", lease.worker_id, spec.pool, slot)

    async def _configure(self, spec: WorkerSpec, by_lease: PoolsByLease) -> None:
        """Put the pool on `control`, once; its workers are admitted when that is applied. Raises _Unfit."""
        if spec.model != by_lease.model:
            raise _Unfit(f"it serves {spec.model}, the group serves {by_lease.model}")
        if spec.pool in self._configured:
            return
        self._configured.add(spec.pool)
        pool = PoolConfigured(
            pool=spec.pool,
            model=spec.model,
            block_size=spec.block_size,
            router=by_lease.router,
            at_us=_now_us(),
            role=spec.role,
        )
        await self._log.append([Draft(CONTROL.name, self._partition, encode(CONTROL, pool))])
        logger.info(
            "the pool %s has blocks of %d tokens, as its worker %s says", pool.pool, pool.block_size, spec.worker_id
        )

    def _no_slot(self, pool: str) -> str:
        slots, topic = self._slots, work_topic(pool).name
        return (
            f"all {len(slots)} slots that its model has in the pool {pool} are taken: {slots.step} control partitions "
            f"share the {slots.stop} partitions of {topic}. Stop a worker, start this one in another pool, or add "
            f"partitions to {topic} and restart the routers"
        )

    def _refuse(self, lease: Lease, reason: str, problem: str) -> None:
        if self._refused.get(lease.worker_id) != lease.token:
            self._refused[lease.worker_id] = lease.token
            self.refused[reason] += 1
            logger.error("worker %s is refused: %s", printable(lease.worker_id), problem)

    async def _write(self, event: FleetEvent) -> int:
        (offset,) = await self._log.append([Draft(FLEET.name, self._partition, encode(FLEET, event))])
        self._written_end = offset + 1
        return offset


class _Unfit(Exception):
    """A lease that makes no member; the text says why, and `reason` counts it."""

    def __init__(self, text: str, reason: str = "spec") -> None:
        super().__init__(text)
        self.reason = reason


def _said(lease: Lease) -> WorkerLease:
    try:
        said = msgspec.msgpack.decode(lease.payload, type=WorkerLease)
    except msgspec.MsgspecError as error:
        raise _Unfit(f"its lease holds no worker description: {error}") from error
    if said.spec.worker_id != lease.worker_id:
        raise _Unfit(f"it describes itself as {printable(said.spec.worker_id)}")
    return said


def _require_names(spec: WorkerSpec) -> None:
    """A worker may call itself, its model, pool and adapters so. Raises _Unfit."""
    try:
        require_name("worker", spec.worker_id)
        require_name("model", spec.model)
        require_name("pool", spec.pool)
        for lora in spec.loras:
            require_adapter(lora, spec.model)
    except NameInvalid as error:
        raise _Unfit(str(error), "name") from error


def _says_draining(lease: Lease) -> bool:
    try:
        return _said(lease).draining
    except _Unfit as unfit:
        # It serves as it did: what it offers was fixed when it joined.
        logger.warning("the lease of the member %s changed and makes no sense: %s", lease.worker_id, unfit)
        return False


def _require_alike(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    """Prefill and decode workers of a model have KV blocks of one kind. Raises _Unfit."""
    for other in members if spec.role in APART else ():
        if other.model == spec.model and other.role in APART and (problem := foreign_blocks(spec, other)) is not None:
            raise _Unfit(problem, "kv_layout")


def _require_one_kind(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    """A model is answered by workers that do all of a request, or by decode workers. Raises _Unfit."""
    for other in members:
        if other.model == spec.model and {other.role, spec.role} == ANSWERING:
            raise _Unfit(
                f"its role is {spec.role}, but {spec.model} is answered by {other.role} workers, such as "
                f"{other.worker_id} in the pool {other.pool}: stop those first",
                "roles",
            )


def _misfit(spec: WorkerSpec, pools: dict[str, PoolConfigured]) -> str | None:
    """Why a worker has no place in its pool, as that is configured now; None if it has."""
    pool = pools.get(spec.pool)
    if pool is None:
        return f"there is no pool {spec.pool}"
    if spec.model != pool.model:
        return f"it serves {spec.model}, the pool {pool.pool} serves {pool.model}"
    if spec.block_size != pool.block_size:
        return f"its blocks hold {spec.block_size} tokens, those of the pool {pool.pool} hold {pool.block_size}"
    if spec.role != pool.role:
        return f"its role is {spec.role}, that of the pool {pool.pool} is {pool.role}: give it a pool of its own"
    return None


def _now_us() -> int:
    return time.time_ns() // 1000
