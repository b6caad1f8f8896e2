"""Turn the leases of workers into events on the topic `fleet`.

Only the owner does this. Readers of `fleet` ignore events of earlier owners. `forebay.live.owner.lease_judgement` says
when a worker is suspect or lost. It is lost immediately if it released its lease, if another incarnation takes its
name, or if a changed pool would reject it. The owner deletes a lease only after it has applied the event. A paused
owner therefore notices a takeover before it deletes leases that were renewed meanwhile.

Each poll compares the fleet with the members of this owner, because others may write to `fleet`, for example a copy of
an old record. Workers that the owner has not admitted are lost, and so are members whose state others have changed.

The owner of control partition p of n assigns only work slots whose number is p modulo n, because all groups share the
work topic of a pool. Two owners therefore never assign the same work slot, and need not know each other's workers.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from forebay import runtime
from forebay.core.state.fleet import Fleet, FleetWorker, WorkerPhase
from forebay.events.codec import MALFORMED, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import (
    FleetEvent,
    WorkerDraining,
    WorkerFact,
    WorkerJoined,
    WorkerLease,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.heartbeats import RejectedWorker
from forebay.events.names import NAME_CHARS_MAX, NameInvalid, printable, require_adapter, require_name
from forebay.events.topics import CONTROL, FLEET, work_topic
from forebay.events.transfer import KvLayout
from forebay.events.versions import EVENTS_VERSION
from forebay.live.owner.lease_judgement import DOUBTED, LeaseJudge, Standing, Verdict
from forebay.transport.base import Draft, Lease, Log, LogError

logger = logging.getLogger(__name__)

RequireSlot = Callable[[str, int], Awaitable[None]]  # takes a pool and a slot; raises LogError
SLOTS_MAX = 1_024  # of a group per pool
SLOT_RETRY_S = 60.0  # reading the end of an unusable slot blocks the polls of all workers for 10 s, so retry rarely
REJECTED_MAX = 8  # in a heartbeat, of which there are four per second
REASON_CHARS_MAX = 500
NAMES_MAX = 16  # in one line of the log
FOREIGN = "a record of fleet that this router did not write changed it"
RESPONDING = {"aggregated", "decode"}  # roles that stream responses; a model has workers of only one of these roles
DISAGGREGATED = ("prefill", "decode")  # roles that exchange KV blocks


@dataclass(frozen=True, slots=True)
class PoolsByLease:
    """Settings for pools that nobody has configured: those of the first worker that takes a lease in the pool."""

    model: str
    router: RouterConfig


class Slots(NamedTuple):
    """The slots of each pool that an owner may assign. `require` adds a missing one; None if all exist."""

    numbers: range
    require: RequireSlot | None = None


@dataclass(slots=True)
class _Member:
    token: str
    worker_epoch: int
    work_slot: int
    spec: WorkerSpec
    suspect: bool = False
    draining: bool = False
    left: bool = False  # released its lease after a drain
    payload: bytes = b""  # of the lease when it was last decoded


class WorkerAdmission:
    """Admits workers of one group to the fleet, and removes them, as their leases require.

    The members are the workers that joined according to the events on `fleet`, including events that the owner has not
    applied yet. The loss of a `busy` worker, which had requests in flight when this owner started, is logged as a
    warning, even if it ended before. `refused` counts rejected leases, and workers that foreign records changed, by
    reason; the message about a lease is logged once per incarnation.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        owner_epoch: int,
        fleet: Fleet,
        *,
        slots: Slots,
        by_lease: PoolsByLease | None = None,
        busy: Collection[str] = (),
    ) -> None:
        assert slots.numbers.start == partition < slots.numbers.step, "control partitions share the slots of a pool"
        self._log = log
        self._partition = partition
        self._owner_epoch = owner_epoch
        self._slots = slots
        self._by_lease = by_lease
        self._written_end = 0
        self._configured: dict[str, WorkerSpec] = {}  # worker that configured each pool
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
        self._unseen = set(self._members)  # members of an earlier owner, until this owner has seen their leases
        self._busy = busy
        self._judge = LeaseJudge()
        for worker in fleet.workers():
            self._judge.add(worker.spec.worker_id, worker.lease, worker.lease_ttl_ms)
        self._refused: dict[str, tuple[str, str]] = {}  # token of the lease and the reason, by worker
        self._unusable_slots: dict[str, float] = {}
        self.refused: Counter[str] = Counter()

    @property
    def rejected(self) -> tuple[RejectedWorker, ...]:
        """Workers that are not admitted; at most `REJECTED_MAX`. Their names are from Redis, and may be invalid."""
        waiting = [(name, why) for name, (_, why) in self._refused.items() if name and name not in self._members]
        return tuple(
            RejectedWorker(worker_id=name[:NAME_CHARS_MAX], reason=why[:REASON_CHARS_MAX])
            for name, why in waiting[:REJECTED_MAX]
        )

    @property
    def sensor_faults(self) -> int:
        return self._judge.faults

    async def update(
        self, leases: list[Lease], pools: dict[str, PoolConfigured], fleet: Fleet, applied: int, observed_ms: int = 0
    ) -> list[Lease]:
        """Append the changes since the last poll to `fleet`, and return the ended leases that may be deleted.

        `applied` is the offset up to which the owner had applied `fleet` when the leases were read. `observed_ms` is
        the time since the previous successful poll, 0 if the previous poll failed.
        """
        held = {lease.worker_id: lease for lease in leases}
        unknown, changed = self._compare(fleet, held) if applied >= self._written_end else ([], [])
        # All are suspect before the first is lost, so that no request moves from one to another.
        for worker in unknown:
            self.refused["foreign_record"] += 1
            await self._write_fact(WorkerSuspect, worker.spec.worker_id, worker.worker_epoch, FOREIGN)
        for worker in unknown:
            await self._write_fact(WorkerLost, worker.spec.worker_id, worker.worker_epoch, FOREIGN)
        for worker_id in changed:
            self.refused["foreign_record"] += 1
            self._ended[worker_id] = self._members[worker_id].token
        await self._lose_all(dict.fromkeys(changed, FOREIGN))
        verdicts = self._verdicts(held, observed_ms)
        self._ended = {name: token for name, token in self._ended.items() if name in held}
        self._refused = {name: one for name, one in self._refused.items() if name in held}
        self._unusable_slots = {
            token: until_s for token, until_s in self._unusable_slots.items() if until_s > runtime.monotonic_s()
        }
        losses: dict[str, str] = {}
        for worker_id, member in self._members.items():
            lease, verdict = held.get(worker_id), verdicts[worker_id]
            if lease is not None and lease.token == member.token and not lease.released:
                self._unseen.discard(worker_id)
            if verdict.standing is Standing.LOST:
                if lease is not None and lease.token == member.token:
                    self._ended[worker_id] = lease.token
                    member.left = lease.released and (member.draining or _is_marked_draining(lease))
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

    def _compare(self, fleet: Fleet, held: dict[str, Lease]) -> tuple[list[FleetWorker], list[str]]:
        """Return the workers of the fleet that are not members, and the members that another process has changed.

        A foreign `WorkerSuspect` or `WorkerRecovered` is undone by the verdict on the lease.
        """
        unknown, changed = [], []
        for worker in fleet.workers():
            member = self._members.get(worker.spec.worker_id)
            if member is None or member.worker_epoch != worker.worker_epoch:
                logger.error("worker %s has no lease: %s", printable(worker.spec.worker_id), FOREIGN)
                unknown.append(worker)
        for worker_id, member in self._members.items():
            found, lease = fleet.get(worker_id), held.get(worker_id)
            if found is None or found.worker_epoch != member.worker_epoch:
                changed.append(worker_id)
            elif found.phase is not WorkerPhase.DRAINING:
                member.suspect = found.phase is WorkerPhase.SUSPECT
            elif lease is not None and lease.token == member.token and not _is_marked_draining(lease):
                changed.append(worker_id)
        return unknown, changed

    def _verdicts(self, held: dict[str, Lease], observed_ms: int) -> dict[str, Verdict]:
        faults = self._judge.faults
        verdicts = self._judge.poll(held, observed_ms)
        if self._judge.faults > faults:
            failed = {name for name, verdict in verdicts.items() if verdict.standing is not Standing.ALIVE}
            logger.log(
                logging.INFO if failed <= self._unseen else logging.WARNING,
                "%d of %d leases failed at once, which indicates a fault of Redis: their workers get one more TTL",
                len(failed),
                len(verdicts),
            )
        return verdicts

    def _has_ended(self, lease: Lease) -> bool:
        # A renewal after the loss does not revive the lease: its worker must learn that it was lost, and rejoin.
        return lease.released or lease.expires_in_ms <= 0 or self._ended.get(lease.worker_id) == lease.token

    async def _mark(self, worker_id: str, member: _Member, lease: Lease | None, verdict: Verdict) -> None:
        if member.draining:
            return
        if lease is not None and lease.payload != member.payload:
            member.payload = lease.payload
            if _is_marked_draining(lease):
                logger.info("worker %s is draining", worker_id)
                member.draining = True
                await self._write_fact(
                    WorkerDraining, worker_id, member.worker_epoch, "its lease is marked as draining"
                )
                return
        doubted = verdict.standing in DOUBTED
        if doubted == member.suspect:
            return
        if doubted:
            await self._suspect(worker_id, member, verdict.reason)
            return
        member.suspect = False
        await self._write_fact(WorkerRecovered, worker_id, member.worker_epoch, verdict.reason)

    async def _lose_all(self, losses: dict[str, str]) -> None:
        """Suspect all workers lost in one poll before the first is lost.

        Otherwise a request of the first would be routed to the second, which is lost as well, and so on until its
        attempts are exhausted.
        """
        if len(losses) > 1:
            for worker_id, reason in losses.items():
                member = self._members[worker_id]
                if not (member.draining or member.suspect):
                    await self._suspect(worker_id, member, reason)
        lines: dict[tuple[int, str, str], list[str]] = {}
        for worker_id, reason in losses.items():
            lines.setdefault((*self._outcome(worker_id), reason), []).append(worker_id)
            await self._lose(worker_id, reason)
        for (level, outcome, reason), names in lines.items():
            who, listed = f"worker {names[0]} {outcome}", ""
            if len(names) > 1:
                who, listed = (
                    f"{len(names)} workers {outcome.replace('is ', 'are ')}",
                    f" ({', '.join(names[:NAMES_MAX])})",
                )
            logger.log(level, "%s: %s%s", who, reason, listed)

    def _outcome(self, worker_id: str) -> tuple[int, str]:
        """Return the log level of the loss of a worker, and what has happened to it."""
        if worker_id in self._unseen and worker_id not in self._busy:
            return logging.INFO, "ended while no router was running"
        return (logging.INFO, "left") if self._members[worker_id].left else (logging.WARNING, "is lost")

    async def _suspect(self, worker_id: str, member: _Member, reason: str) -> None:
        member.suspect = True
        await self._write_fact(WorkerSuspect, worker_id, member.worker_epoch, reason)

    async def _lose(self, worker_id: str, reason: str) -> None:
        member = self._members.pop(worker_id)
        self._unseen.discard(worker_id)
        self._judge.remove(worker_id)
        await self._write_fact(WorkerLost, worker_id, member.worker_epoch, reason)

    async def _admit(self, lease: Lease, pools: dict[str, PoolConfigured]) -> None:
        try:
            description = _decode_lease(lease)
            if description.draining:
                return
            spec = description.spec
            _require_names(spec)
            others = [member.spec for _, member in sorted(self._members.items()) if not member.draining]
            pending = [first for pool, first in self._configured.items() if pool not in pools]
            _require_same_block_size(spec, [*others, *pending])
            _require_same_layout(spec, others)
            _require_same_card(spec, others)
            known = pools.get(spec.pool)
            # The partition may have belonged to another model, which an operator has removed.
            if self._by_lease is not None and (known is None or known.model != self._by_lease.model):
                await self._configure(spec, self._by_lease)
                return
            problem = _misfit(spec, pools)
            if problem is not None:
                raise _Unfit(problem)
            # The pool is configured at this point, so the worker can join once the workers of the other role left.
            _require_one_role(spec, others)
        except _Unfit as unfit:
            self._refuse(lease, unfit.reason, str(unfit))
            return
        taken = {member.work_slot for member in self._members.values() if member.spec.pool == spec.pool}
        work_slot = next((one for one in self._slots.numbers if one not in taken), None)
        if work_slot is None:
            self._refuse(lease, "slots", self._no_work_slot(spec.pool))
            return
        if lease.token in self._unusable_slots:
            return
        try:
            if self._slots.require is not None:
                await self._slots.require(spec.pool, work_slot)
            from_offset = await self._log.end(work_topic(spec.pool).name, work_slot)
        except LogError as error:
            # A lease may name any pool. Retrying at every poll would delay the leases of all other workers.
            self._unusable_slots[lease.token] = runtime.monotonic_s() + SLOT_RETRY_S
            self._refuse(lease, "work_topic", f"slot {work_slot} of its pool {spec.pool} cannot be used: {error}")
            return
        joined = WorkerJoined(
            owner_epoch=self._owner_epoch,
            at_us=runtime.wall_us(),
            spec=spec,
            lease=lease.token,
            slot=work_slot,
            from_offset=from_offset,
            lease_ttl_ms=lease.ttl_ms,
            events_version=EVENTS_VERSION,
        )
        offset = await self._write(joined)
        self._members[lease.worker_id] = _Member(lease.token, offset, work_slot, spec, payload=lease.payload)
        self._judge.add(lease.worker_id, lease.token, lease.ttl_ms, lease)
        logger.info("worker %s joined the pool %s in slot %d", lease.worker_id, spec.pool, work_slot)

    async def _configure(self, spec: WorkerSpec, by_lease: PoolsByLease) -> None:
        """Append the pool to `control` once; its workers are admitted once the owner has applied it."""
        if spec.model != by_lease.model:
            raise _Unfit(f"it serves the model {spec.model}, but its group serves {by_lease.model}")
        if spec.pool in self._configured:
            return
        self._configured[spec.pool] = spec
        pool = PoolConfigured(
            pool=spec.pool,
            model=spec.model,
            block_size=spec.block_size,
            router=by_lease.router,
            at_us=runtime.wall_us(),
            role=spec.role,
        )
        await self._log.append([Draft(CONTROL.name, self._partition, encode(CONTROL, pool))])
        logger.info(
            "configured the pool %s with %d tokens per block, as reported by its worker %s",
            pool.pool,
            pool.block_size,
            spec.worker_id,
        )

    def _no_work_slot(self, pool: str) -> str:
        slots, topic = self._slots.numbers, work_topic(pool).name
        return (
            f"all {len(slots)} slots of its model in the pool {pool} are in use: {slots.step} control partitions share "
            f"the {slots.stop} partitions of {topic}. Stop a worker, start this worker in another pool, or add "
            f"partitions to {topic} and restart the routers"
        )

    def _refuse(self, lease: Lease, reason: str, problem: str) -> None:
        if self._refused.get(lease.worker_id, ("",))[0] != lease.token:
            self._refused[lease.worker_id] = lease.token, problem
            self.refused[reason] += 1
            logger.error("worker %s was rejected: %s", printable(lease.worker_id), problem)

    async def _write_fact(self, kind: type[WorkerFact], worker_id: str, worker_epoch: int, reason: str) -> None:
        await self._write(
            kind(
                owner_epoch=self._owner_epoch,
                at_us=runtime.wall_us(),
                worker_id=worker_id,
                worker_epoch=worker_epoch,
                reason=reason,
            )
        )

    async def _write(self, event: FleetEvent) -> int:
        (offset,) = await self._log.append([Draft(FLEET.name, self._partition, encode(FLEET, event))])
        self._written_end = offset + 1
        return offset


class _Unfit(Exception):
    """A lease was rejected. `reason` is the label of the counter."""

    def __init__(self, text: str, reason: str = "spec") -> None:
        super().__init__(text)
        self.reason = reason


def _decode_lease(lease: Lease) -> WorkerLease:
    try:
        description = msgspec.msgpack.decode(lease.payload, type=WorkerLease)
    except MALFORMED as error:
        raise _Unfit(f"the payload of its lease does not decode as WorkerLease: {error}") from error
    if description.spec.worker_id != lease.worker_id:
        raise _Unfit(f"the payload of its lease names another worker, {printable(description.spec.worker_id)}")
    return description


def _require_names(spec: WorkerSpec) -> None:
    try:
        require_name("worker", spec.worker_id)
        require_name("model", spec.model)
        require_name("pool", spec.pool)
        for lora in spec.loras:
            require_adapter(lora, spec.model)
    except NameInvalid as error:
        raise _Unfit(str(error), "name") from error


def _is_marked_draining(lease: Lease) -> bool:
    try:
        return _decode_lease(lease).draining
    except _Unfit as unfit:
        # The worker stays a member: its description was fixed when it joined.
        logger.warning("ignored the changed lease of the member %s: %s", lease.worker_id, unfit)
        return False


def _require_same_layout(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    for other in members if spec.role in DISAGGREGATED else ():
        if (
            other.model == spec.model
            and other.role in DISAGGREGATED
            and (problem := find_layout_mismatch(spec, other)) is not None
        ):
            raise _Unfit(problem, "kv_layout")


def _require_same_card(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    """Check the model card: workers of a model have the same or none, because an ingress tokenizes for all of them."""
    for other in members if spec.card else ():
        if other.model == spec.model and other.card not in ("", spec.card):
            raise _Unfit(
                f"its model card is {spec.card}, but the card of {other.worker_id} in the pool {other.pool} is"
                f" {other.card}: start it with the same tokenizer, chat template and configuration of {spec.model},"
                " give its model another name, or stop the other workers first",
                "card",
            )


def _require_same_block_size(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    """Check that the pools of a model have one block size, because the ingress hashes a prompt for one size.

    Encode workers may have any size, because they cache no prompts.
    """
    for other in members if spec.role != "encode" else ():
        if other.pool == spec.pool or other.model != spec.model or other.role == "encode":
            continue
        if other.block_size != spec.block_size:
            raise _Unfit(
                f"blocks of its pool {spec.pool} hold {spec.block_size} tokens, but blocks of the pool {other.pool} of"
                f" {spec.model} hold {other.block_size}: start it with the same block size, or stop the workers of"
                f" {other.pool} first",
                "block_size",
            )


def _require_one_role(spec: WorkerSpec, members: list[WorkerSpec]) -> None:
    for other in members:
        if other.model == spec.model and {other.role, spec.role} == RESPONDING:
            raise _Unfit(
                f"its role is {spec.role}, but {spec.model} is served by {other.role} workers, for example "
                f"{other.worker_id} in the pool {other.pool}: stop the {other.role} workers first",
                "roles",
            )


def _misfit(spec: WorkerSpec, pools: dict[str, PoolConfigured]) -> str | None:
    """Return why a worker does not match the current settings of its pool; None if it does."""
    pool = pools.get(spec.pool)
    if pool is None:
        return f"there is no pool {spec.pool}"
    if spec.model != pool.model:
        return f"it serves the model {spec.model}, but the pool {pool.pool} serves {pool.model}"
    if spec.block_size != pool.block_size:
        return f"its blocks hold {spec.block_size} tokens, blocks of the pool {pool.pool} hold {pool.block_size}"
    if spec.role != pool.role:
        return (
            f"its role is {spec.role}, but the pool {pool.pool} has the role {pool.role}: start the worker in another"
            " pool"
        )
    return None


def find_layout_mismatch(spec: WorkerSpec, other: WorkerSpec) -> str | None:
    """Return why two workers with blocks of the same size cannot exchange KV blocks, or None if they can.

    Without a reported layout, workers of the same engine are compatible, because the engine checks the layout itself.
    """
    peer = f"{other.worker_id} in the pool {other.pool}"
    if spec.kv_layout is None or other.kv_layout is None:
        if spec.engine == other.engine:
            return None
    elif spec.kv_layout == other.kv_layout:
        return None
    return f"its KV block layout is {_describe_blocks(spec)}, but the layout of {peer} is {_describe_blocks(other)}"


def _describe_blocks(spec: WorkerSpec) -> str:
    layout = spec.kv_layout
    return f"not reported by {spec.engine}" if layout is None else _describe_layout(layout)


def _describe_layout(layout: KvLayout) -> str:
    layers = f", {layout.layers} layer{'s' if layout.layers > 1 else ''}" if layout.layers else ""
    return f"{layout.dtype}, {layout.block_bytes} bytes{layers}, {layout.connector} connector"
