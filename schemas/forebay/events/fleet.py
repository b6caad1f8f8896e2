"""Topic `fleet`: who takes part. Written by the owner alone, from leases; see `forebay.transport`.

A worker's epoch is the offset of its `WorkerJoined`.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.control import Role
from forebay.events.requests import Task
from forebay.events.transfer import KvLayout

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # every rank is a candidate of every decision


class WorkerSpec(Part, frozen=True, kw_only=True):
    """What a worker offers. `block_size` is in tokens, `kv_blocks_total` is per rank.

    Its ranks are `dp_size` from `dp_start_rank` on. `taints` are labels that requests may ask for, `loras` the
    adapters it has loaded. Without `kv_events` it says nothing of its cache. `tasks` are what its model can do, `role`
    is its part in a request. `kv_layout` is how its KV blocks lie for those who fetch them, where it says.
    """

    worker_id: Name
    model: Name
    block_size: Positive
    kv_blocks_total: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    pool: Name = "default"
    dp_size: Ranks = 1
    engine: str = "mock"
    dp_start_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    taints: tuple[Name, ...] = ()
    loras: tuple[Name, ...] = ()
    kv_events: bool = True
    tasks: tuple[Task, ...] = ("generate",)
    role: Role = "aggregated"
    kv_layout: KvLayout | None = None

    @property
    def ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.dp_start_rank, self.dp_start_rank + self.dp_size)


class WorkerLease(Part, frozen=True, kw_only=True):
    """What a worker's lease holds, as msgpack: what it offers, and whether it wants to leave."""

    spec: WorkerSpec
    draining: bool = False


class FleetEvent(Event, frozen=True, kw_only=True):
    """A fact is void after a fleet `owner.claimed` of a higher epoch."""

    owner_epoch: Count
    at_us: int = 0


class WorkerJoined(FleetEvent, tag="fleet.worker_joined", frozen=True, kw_only=True):
    """A worker is admitted: it reads partition `slot` of its pool's work topic from `from_offset`."""

    spec: WorkerSpec
    lease: Name  # the incarnation: a new process of the same worker id has another
    slot: Count
    from_offset: Count
    lease_ttl_ms: Count = 0  # for a later owner that does not find the lease; 0 for unknown


class WorkerFact(FleetEvent, frozen=True, kw_only=True):
    """A fact about one epoch of one worker."""

    worker_id: Name
    worker_epoch: Count
    reason: str = ""


class WorkerSuspect(WorkerFact, tag="fleet.worker_suspect", frozen=True, kw_only=True):
    """Lease renewals were missed, or the lease vanished: the worker keeps its requests and gets no new ones for now."""


class WorkerRecovered(WorkerFact, tag="fleet.worker_recovered", frozen=True, kw_only=True):
    """A suspect worker renewed its lease, or the fault lies with the leases of the whole group."""


class WorkerDraining(WorkerFact, tag="fleet.worker_draining", frozen=True, kw_only=True):
    """The worker finishes what it has and takes nothing new."""


class WorkerLost(WorkerFact, tag="fleet.worker_lost", frozen=True, kw_only=True):
    """The lease was released, ran out or was not taken again: the worker's cache and requests are gone."""


class IngressFact(FleetEvent, frozen=True, kw_only=True):
    """A fact about one incarnation of an ingress: a new process of the same ingress id has another."""

    ingress_id: Name
    incarnation: Name


class IngressJoined(IngressFact, tag="fleet.ingress_joined", frozen=True, kw_only=True):
    """An ingress took a lease. Only then can it be lost."""

    lease_ttl_ms: Count = 0  # for a later owner that does not find the lease; 0 for unknown


class IngressLost(IngressFact, tag="fleet.ingress_lost", frozen=True, kw_only=True):
    """The lease of an ingress was released, ran out or was not taken again: its HTTP requests are aborted."""

    reason: str = ""


class OwnershipAnnounced(FleetEvent, tag="fleet.owner_claimed", frozen=True, kw_only=True):
    """The owner of `owner_epoch` speaks from here on; fleet facts of lower epochs are void."""


AnyFleetEvent = (
    WorkerJoined
    | WorkerSuspect
    | WorkerRecovered
    | WorkerDraining
    | WorkerLost
    | IngressJoined
    | IngressLost
    | OwnershipAnnounced
)
