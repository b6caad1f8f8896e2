"""Members of the fleet: workers and ingresses, built from the topic `fleet` and from the adapters that workers report.

The table below lists every transition of a worker. `Fleet.apply` raises for an event that the table does not list, and
changes nothing. The epoch of a worker is the offset of its `WorkerJoined`. An event is stale if it is about another
epoch of its worker, or if a later owner has been announced than the one that wrote it.

    ready --suspect--> suspect --recovered--> ready        any --draining--> draining        any --lost--> (gone)

A worker may be alive and yet reject what it gets, for example because the server behind it is overloaded. A worker that
rejects repeatedly, or asks for a pause, is avoided for some seconds: requests go to other workers if there are any.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import msgspec

from forebay.core.state_machine import IllegalTransition, digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.decisions import CommandTarget
from forebay.events.fleet import (
    AnyFleetEvent,
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerFact,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.snapshots import IngressState, WorkerState

# A single rejection is often a matter of one request. From the second one in a row on, a worker is avoided for 1 s,
# 2 s, 4 s and so on, up to the limit, which also applies to a pause that a server asks for. A longer pause would cost
# capacity for as long after the server has recovered.
TOLERATED_REJECTIONS = 1
AVOIDED_S_MAX = 30
US_PER_S = 1_000_000


class WorkerPhase(StrEnum):
    """State of a worker's life cycle. Only a ready worker gets new requests."""

    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


TRANSITIONS: dict[WorkerPhase, dict[type[WorkerFact], WorkerPhase]] = {
    WorkerPhase.READY: {
        WorkerSuspect: WorkerPhase.SUSPECT,
        WorkerDraining: WorkerPhase.DRAINING,
        WorkerLost: WorkerPhase.LOST,
    },
    WorkerPhase.SUSPECT: {
        WorkerRecovered: WorkerPhase.READY,
        WorkerDraining: WorkerPhase.DRAINING,
        WorkerLost: WorkerPhase.LOST,
    },
    WorkerPhase.DRAINING: {WorkerLost: WorkerPhase.LOST},
    WorkerPhase.LOST: {},
}


@dataclass(slots=True)
class FleetWorker:
    """Worker in the fleet.

    Attributes:
        lease: incarnation; a new process with the same worker id has another incarnation.
        slot: partition of the pool's work topic that the worker reads.
        worker_epoch: offset of its `WorkerJoined`.
        from_offset: first offset that the worker reads in that partition.
        lease_ttl_ms: duration of the lease in milliseconds, for a new owner that does not find the lease; 0 if unknown.
        rejections: attempts that it has rejected since it last computed a prompt.
        avoided_until_us: time until which other workers are preferred, on the owner's clock; 0 if it is not avoided.
    """

    spec: WorkerSpec
    lease: str
    slot: int
    worker_epoch: int
    from_offset: int
    phase: WorkerPhase = WorkerPhase.READY
    lease_ttl_ms: int = 0
    rejections: int = 0
    avoided_until_us: int = 0

    @property
    def target(self) -> CommandTarget:
        spec = self.spec
        return CommandTarget(worker_id=spec.worker_id, worker_epoch=self.worker_epoch, pool=spec.pool, slot=self.slot)


@dataclass(frozen=True, slots=True)
class FleetIngress:
    """Ingress with a lease, in one incarnation. `lease_ttl_ms` is 0 if unknown."""

    ingress_id: str
    incarnation: str
    lease_ttl_ms: int = 0


class Fleet:
    """Workers by id, those avoided for their rejections, ingresses with leases, and the newest announced owner."""

    def __init__(self) -> None:
        self.avoided: set[str] = set()
        self._workers: dict[str, FleetWorker] = {}
        self._ingresses: dict[str, FleetIngress] = {}
        self._owner_epoch = -1
        self._sum = 0

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> FleetWorker | None:
        return self._workers.get(worker_id)

    def workers(self) -> list[FleetWorker]:
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def ingresses(self) -> list[FleetIngress]:
        return [self._ingresses[ingress_id] for ingress_id in sorted(self._ingresses)]

    def apply(self, event: AnyFleetEvent, offset: int) -> FleetWorker | None:
        """Apply the event at `offset` of the topic `fleet`. Return its worker; None for an ingress or the owner.

        Raises IllegalTransition if the event is stale, is about an unknown worker or ingress, or is not in the table.
        """
        if event.owner_epoch < self._owner_epoch:
            raise IllegalTransition(f"stale event: owner epoch {event.owner_epoch} was replaced by {self._owner_epoch}")
        match event:
            case OwnershipAnnounced():
                self._owner_epoch = event.owner_epoch
                return None
            case WorkerJoined():
                return self._join(event, offset)
            case WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost():
                return self._move(event)
            case IngressJoined():
                self._join_ingress(event)
                return None
            case IngressLost():
                self._lose_ingress(event)
                return None
            case _:
                assert_never(event)

    def set_loras(self, worker_id: str, worker_epoch: int, loras: tuple[str, ...]) -> bool:
        """Set a worker's adapters, and return whether they changed.

        Raises IllegalTransition if the worker is not in the fleet in this epoch.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.worker_epoch != worker_epoch:
            raise IllegalTransition(f"worker {worker_id} is not in the fleet in epoch {worker_epoch}")
        if worker.spec.loras == loras:
            return False
        self._sum -= _term(worker)
        worker.spec = msgspec.structs.replace(worker.spec, loras=loras)
        self._sum += _term(worker)
        return True

    def reject(self, worker_id: str, now_us: int, retry_after_s: int) -> None:
        """Count a rejection by a worker of the fleet, and avoid the worker if it is not the first one in a row.

        The worker asked to get no requests for `retry_after_s`; 0 if it did not ask.
        """
        worker = self._workers[worker_id]
        self._sum -= _term(worker)
        worker.rejections += 1
        repeated = worker.rejections - TOLERATED_REJECTIONS
        pause_s = max(retry_after_s, 1 << min(repeated - 1, 5) if repeated > 0 else 0)
        if pause_s:
            until_us = now_us + min(pause_s, AVOIDED_S_MAX) * US_PER_S
            worker.avoided_until_us = max(worker.avoided_until_us, until_us)
            self.avoided.add(worker_id)
        self._sum += _term(worker)

    def accept(self, worker_id: str) -> None:
        """Note that a worker of the fleet has computed a prompt. A pause that has begun goes on."""
        worker = self._workers[worker_id]
        if worker.rejections:
            self._sum -= _term(worker)
            worker.rejections = 0
            self._sum += _term(worker)

    def next_due_us(self) -> int | None:
        """Return when the next worker is no longer avoided, in microseconds on the owner's clock, or None."""
        return min((self._workers[worker_id].avoided_until_us for worker_id in self.avoided), default=None)

    def expire(self, now_us: int) -> None:
        for worker_id in sorted(self.avoided):
            worker = self._workers[worker_id]
            if worker.avoided_until_us <= now_us:
                self._sum -= _term(worker)
                worker.avoided_until_us = 0
                self._sum += _term(worker)
                self.avoided.remove(worker_id)

    def digest(self) -> int:
        return (self._sum + self._owner_epoch) & U64_MASK

    def snapshot(self) -> Iterator[WorkerState | IngressState]:
        for worker in self.workers():
            yield msgspec.convert(worker, WorkerState, from_attributes=True)
        for one in self.ingresses():
            yield msgspec.convert(one, IngressState, from_attributes=True)

    def restore(self, chunk: WorkerState) -> FleetWorker:
        worker = msgspec.convert(chunk, FleetWorker, from_attributes=True)
        self._workers[chunk.spec.worker_id] = worker
        if worker.avoided_until_us:
            self.avoided.add(chunk.spec.worker_id)
        self._sum += _term(worker)
        return worker

    def restore_ingress(self, chunk: IngressState) -> None:
        self._add_ingress(msgspec.convert(chunk, FleetIngress, from_attributes=True))

    def restore_owner(self, owner_epoch: int) -> None:
        """Set the highest announced owner epoch, from a snapshot."""
        self._owner_epoch = owner_epoch

    @property
    def owner_epoch(self) -> int:
        """Highest owner epoch that was announced on `fleet`; -1 before the first."""
        return self._owner_epoch

    def _join(self, event: WorkerJoined, offset: int) -> FleetWorker:
        worker_id = event.spec.worker_id
        if worker_id in self._workers:
            raise IllegalTransition(f"worker {worker_id} is already in the fleet")
        worker = FleetWorker(
            event.spec, event.lease, event.slot, offset, event.from_offset, lease_ttl_ms=event.lease_ttl_ms
        )
        self._workers[worker_id] = worker
        self._sum += _term(worker)
        return worker

    def _join_ingress(self, event: IngressJoined) -> None:
        if event.ingress_id in self._ingresses:
            raise IllegalTransition(f"ingress {event.ingress_id} is already in the fleet")
        self._add_ingress(FleetIngress(event.ingress_id, event.incarnation, event.lease_ttl_ms))

    def _add_ingress(self, ingress: FleetIngress) -> None:
        self._ingresses[ingress.ingress_id] = ingress
        self._sum += _ingress_term(ingress)

    def _lose_ingress(self, event: IngressLost) -> None:
        ingress = self._ingresses.get(event.ingress_id)
        if ingress is None or ingress.incarnation != event.incarnation:
            raise IllegalTransition(
                f"ingress {event.ingress_id} is not in the fleet with incarnation {event.incarnation}"
            )
        del self._ingresses[event.ingress_id]
        self._sum -= _ingress_term(ingress)

    def _move(self, event: WorkerSuspect | WorkerRecovered | WorkerDraining | WorkerLost) -> FleetWorker:
        worker = self._workers.get(event.worker_id)
        if worker is None or worker.worker_epoch != event.worker_epoch:
            raise IllegalTransition(f"worker {event.worker_id} is not in the fleet in epoch {event.worker_epoch}")
        phase = TRANSITIONS[worker.phase].get(type(event))
        if phase is None:
            raise IllegalTransition(
                f"worker {event.worker_id} is {worker.phase}: {type(event).__name__} does not apply"
            )
        self._sum -= _term(worker)
        worker.phase = phase
        if phase is WorkerPhase.LOST:
            del self._workers[event.worker_id]
            self.avoided.discard(event.worker_id)
        else:
            self._sum += _term(worker)
        return worker


# No decision depends on the card. The digest has fields that were added later only if they have a value, as older logs.
_LATER = ("card", "endpoint", "max_loras", "endpoints")
_DIGESTED = [name for name in WorkerSpec.__struct_fields__ if name not in _LATER]


def _term(worker: FleetWorker) -> int:
    place = worker.lease, worker.slot, worker.worker_epoch, worker.from_offset
    spec = tuple([plain(getattr(worker.spec, name)) for name in _DIGESTED])
    rejections = worker.rejections, worker.avoided_until_us
    endpoint = (worker.spec.endpoint,) if worker.spec.endpoint else ()
    slots = (("max_loras", worker.spec.max_loras),) if worker.spec.max_loras else ()
    endpoints = ("endpoints", *worker.spec.endpoints) if worker.spec.endpoints else ()
    return digest_of(*place, worker.phase, worker.lease_ttl_ms, spec, *rejections, *endpoint, *slots, *endpoints)


def _ingress_term(ingress: FleetIngress) -> int:
    return digest_of("ingress", ingress.ingress_id, ingress.incarnation, ingress.lease_ttl_ms)
