"""Fleet membership: a fold over the topic `fleet`, and over the adapters that workers report.

The table below lists every transition of a worker. An event that the table does not list raises and changes nothing.
The epoch of a worker is the offset of its `WorkerJoined`. Events about another epoch are stale, and so are events of an
owner before the newest announced one.

    ready --suspect--> suspect --recovered--> ready        any --draining--> draining        any --lost--> (gone)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import msgspec

from forebay.core.state_machine import IllegalTransition, digest_of, plain
from forebay.events.base import U64_MASK
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


class WorkerPhase(StrEnum):
    """State of a worker; only a ready worker gets new requests."""

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
        spec: what the worker offers.
        lease: incarnation: a new process with the same worker id has another one.
        slot: partition of the pool's work topic that the worker reads.
        worker_epoch: offset of its `WorkerJoined`.
        from_offset: first offset it reads on that partition.
        phase: current state.
        lease_ttl_ms: lease duration, used by a new owner that does not find the lease; 0 if unknown.
    """

    spec: WorkerSpec
    lease: str
    slot: int
    worker_epoch: int
    from_offset: int
    phase: WorkerPhase = WorkerPhase.READY
    lease_ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class FleetIngress:
    """Ingress with a lease, in one incarnation."""

    ingress_id: str
    incarnation: str
    lease_ttl_ms: int = 0


class Fleet:
    """Workers by id, and the ingresses that hold leases."""

    def __init__(self) -> None:
        self._workers: dict[str, FleetWorker] = {}
        self._ingresses: dict[str, FleetIngress] = {}
        self._owner_epoch = -1
        self._sum = 0

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> FleetWorker | None:
        """Return the worker with this id if it is in the fleet."""
        return self._workers.get(worker_id)

    def workers(self) -> list[FleetWorker]:
        """Return all workers in order of worker id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def ingresses(self) -> list[FleetIngress]:
        """Return the ingresses that have leases, in order of ingress id."""
        return [self._ingresses[ingress_id] for ingress_id in sorted(self._ingresses)]

    def apply(self, event: AnyFleetEvent, offset: int) -> FleetWorker | None:
        """Apply the event at `offset` of the topic, and return the worker it is about, if any.

        Raises:
            IllegalTransition: the event is stale, is about another epoch, or is not in the transition table.
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
        """Set the adapters a worker has loaded, and return whether they changed.

        Raises:
            IllegalTransition: the worker is not in the fleet in this epoch.
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

    def digest(self) -> int:
        """Return a 64-bit digest over all members and the newest owner epoch."""
        return (self._sum + self._owner_epoch) & U64_MASK

    def snapshot(self) -> Iterator[WorkerState | IngressState]:
        """Yield one fact per worker, then one per ingress."""
        for worker in self.workers():
            yield WorkerState(
                spec=worker.spec,
                lease=worker.lease,
                slot=worker.slot,
                worker_epoch=worker.worker_epoch,
                from_offset=worker.from_offset,
                phase=worker.phase,
                lease_ttl_ms=worker.lease_ttl_ms,
            )
        for one in self.ingresses():
            yield IngressState(ingress_id=one.ingress_id, incarnation=one.incarnation, lease_ttl_ms=one.lease_ttl_ms)

    def restore(self, chunk: WorkerState) -> FleetWorker:
        """Add one worker of a snapshot."""
        worker = FleetWorker(
            chunk.spec,
            chunk.lease,
            chunk.slot,
            chunk.worker_epoch,
            chunk.from_offset,
            WorkerPhase(chunk.phase),
            chunk.lease_ttl_ms,
        )
        self._workers[chunk.spec.worker_id] = worker
        self._sum += _term(worker)
        return worker

    def restore_ingress(self, chunk: IngressState) -> None:
        """Add one ingress of a snapshot."""
        self._add_ingress(FleetIngress(chunk.ingress_id, chunk.incarnation, chunk.lease_ttl_ms))

    def restore_owner(self, owner_epoch: int) -> None:
        """Set the newest owner epoch from a snapshot."""
        self._owner_epoch = owner_epoch

    @property
    def owner_epoch(self) -> int:
        """Newest owner epoch that was announced; -1 before the first."""
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
        else:
            self._sum += _term(worker)
        return worker


def _term(worker: FleetWorker) -> int:
    place = worker.lease, worker.slot, worker.worker_epoch, worker.from_offset
    return digest_of(*place, worker.phase, worker.lease_ttl_ms, plain(worker.spec))


def _ingress_term(ingress: FleetIngress) -> int:
    return digest_of("ingress", ingress.ingress_id, ingress.incarnation, ingress.lease_ttl_ms)
