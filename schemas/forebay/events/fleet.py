"""Topic `fleet`: membership of workers and ingresses. Only the owner writes it, from leases; see `forebay.transport`.

The epoch of a worker is the offset of its `WorkerJoined`.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.control import Role
from forebay.events.privacy import DROPPED, INGRESS, KEPT
from forebay.events.requests import Task
from forebay.events.transfer import KvLayout

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # bounded, because every rank is a candidate of every decision


class WorkerSpec(Part, frozen=True, kw_only=True):
    """What a worker offers.

    Attributes:
        worker_id: id of the worker.
        model: model that the worker serves.
        block_size: tokens per KV block.
        kv_blocks_total: KV blocks per rank.
        max_num_seqs: maximum number of running sequences per rank.
        max_num_batched_tokens: token budget of one engine step.
        pool: pool that the worker belongs to.
        dp_size: number of data-parallel ranks.
        engine: name of the engine.
        dp_start_rank: number of its first rank.
        taints: labels that requests may require, prefer or avoid.
        loras: adapters that are loaded.
        kv_events: whether the worker sends KV events.
        tasks: what its model can do.
        role: stage of requests that the worker computes.
        kv_layout: memory layout of its KV blocks for workers that fetch them; null if unknown.
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
        """Numbers of its ranks."""
        return range(self.dp_start_rank, self.dp_start_rank + self.dp_size)


class WorkerLease(Part, frozen=True, kw_only=True):
    """Content of a worker's lease, encoded as msgpack: what it offers, and whether it is draining."""

    spec: WorkerSpec
    draining: bool = False


class FleetEvent(Event, frozen=True, kw_only=True):
    """Fleet event. It is stale after a fleet `owner.claimed` of a higher epoch."""

    owner_epoch: Count
    at_us: int = 0


class WorkerJoined(FleetEvent, tag="fleet.worker_joined", frozen=True, kw_only=True):
    """A worker joined the fleet.

    Attributes:
        owner_epoch: epoch of the owner that wrote the event.
        at_us: wall clock in microseconds.
        spec: what the worker offers.
        lease: incarnation; a new process with the same worker id has another one.
        slot: partition of the pool's work topic that the worker reads.
        from_offset: first offset that the worker reads there.
        lease_ttl_ms: lease duration, for a later owner that does not find the lease; 0 if unknown.
    """

    spec: WorkerSpec
    lease: Name
    slot: Count
    from_offset: Count
    lease_ttl_ms: Count = 0


class WorkerFact(FleetEvent, frozen=True, kw_only=True):
    """Event about one epoch of one worker."""

    worker_id: Annotated[Name, KEPT]
    worker_epoch: Count
    reason: Annotated[str, DROPPED] = ""


class WorkerSuspect(WorkerFact, tag="fleet.worker_suspect", frozen=True, kw_only=True):
    """A worker missed lease renewals, or its lease vanished. It keeps its requests and gets no new ones for now."""


class WorkerRecovered(WorkerFact, tag="fleet.worker_recovered", frozen=True, kw_only=True):
    """A suspect worker renewed its lease, or the leases of the whole group are at fault."""


class WorkerDraining(WorkerFact, tag="fleet.worker_draining", frozen=True, kw_only=True):
    """A worker finishes its requests and gets no new ones."""


class WorkerLost(WorkerFact, tag="fleet.worker_lost", frozen=True, kw_only=True):
    """A worker's lease was released, expired or was not renewed; its cache and its requests are lost."""


class IngressFact(FleetEvent, frozen=True, kw_only=True):
    """Event about one incarnation of an ingress; a new process with the same ingress id has another one."""

    ingress_id: Annotated[Name, INGRESS]
    incarnation: Annotated[Name, INGRESS]


class IngressJoined(IngressFact, tag="fleet.ingress_joined", frozen=True, kw_only=True):
    """An ingress took a lease. Only an ingress with a lease can be lost.

    Attributes:
        lease_ttl_ms: time to live of the lease in milliseconds; 0 if unknown.
    """

    lease_ttl_ms: Count = 0  # for a later owner that does not find the lease; 0 if unknown


class IngressLost(IngressFact, tag="fleet.ingress_lost", frozen=True, kw_only=True):
    """The lease of an ingress was released, expired or was not renewed; its HTTP requests are aborted."""

    reason: Annotated[str, DROPPED] = ""


class OwnershipAnnounced(FleetEvent, tag="fleet.owner_claimed", frozen=True, kw_only=True):
    """The owner of `owner_epoch` writes from here on; fleet events of lower epochs are stale."""


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
