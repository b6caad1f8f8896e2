"""Topic `fleet`: which workers and ingresses belong to the group. Only the owner writes it.

The owner derives the events from leases (`forebay.transport`). The epoch of a worker is the offset of its
`WorkerJoined`.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.control import Role
from forebay.events.models import CardDigest
from forebay.events.privacy import DROPPED, INGRESS, KEPT, LEASE, LORA, SystemName
from forebay.events.requests import Task
from forebay.events.transfer import KvLayout

Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
CALLS_MAX = 64  # endpoints of one worker that execute calls; every heartbeat of the owner lists them
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # bounded, because every rank is a candidate of every decision


class WorkerSpec(Part, frozen=True, kw_only=True):
    """Capabilities and limits of a worker, as the worker announces them.

    Attributes:
        kv_blocks_total: KV blocks per rank.
        max_num_seqs: maximum number of running sequences per rank.
        max_num_batched_tokens: token budget of one engine step.
        pool: pool that the worker belongs to.
        dp_size: number of data-parallel ranks.
        dp_start_rank: number of the worker's first rank.
        taints: labels that requests may require, prefer or avoid.
        loras: adapters that are loaded.
        kv_events: whether the worker sends KV events.
        tasks: tasks that the model supports.
        role: stage of requests that the worker computes.
        kv_layout: memory layout of the worker's KV blocks, for workers that fetch them; null if unknown.
        card: digest of the worker's model card on the topic `models`; empty if it stored none.
        salts_cache: whether requests with different cache namespaces share no cached blocks on the worker.
        kv_store: name of the shared store from which the worker loads blocks; empty if it uses none.
        endpoints: endpoints that execute calls, as `namespace.component.endpoint`.
        endpoint: IP address and port of the server that the worker represents, where gateways reach it; empty if only
            the worker can run requests.
        max_loras: maximum number of loaded adapters; 0 if unknown. The owner then places no adapters on the worker.
    """

    worker_id: SystemName
    model: SystemName
    block_size: Positive
    kv_blocks_total: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    pool: SystemName = "default"
    dp_size: Ranks = 1
    engine: Annotated[str, KEPT] = "mock"
    dp_start_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    taints: Annotated[tuple[Name, ...], KEPT] = ()
    loras: Annotated[tuple[Name, ...], LORA] = ()
    kv_events: bool = True
    tasks: tuple[Task, ...] = ("generate",)
    role: Role = "aggregated"
    kv_layout: KvLayout | None = None
    card: CardDigest = ""
    salts_cache: bool = True
    kv_store: Annotated[str, msgspec.Meta(max_length=256), KEPT] = ""
    endpoints: Annotated[tuple[Name, ...], msgspec.Meta(max_length=CALLS_MAX), KEPT] = ()
    endpoint: Annotated[str, msgspec.Meta(max_length=256), KEPT] = ""
    max_loras: Annotated[int, msgspec.Meta(ge=0, le=1_024)] = 0

    @property
    def ranks(self) -> range:
        """Numbers of the worker's ranks: `dp_size` numbers from `dp_start_rank` on."""
        return range(self.dp_start_rank, self.dp_start_rank + self.dp_size)


class WorkerLease(Part, frozen=True, kw_only=True):
    """Content of a worker's lease, encoded as msgpack.

    Attributes:
        draining: whether the worker is draining.
    """

    spec: WorkerSpec
    draining: bool = False


class FleetEvent(Event, frozen=True, kw_only=True):
    """Base class of all events on `fleet`.

    After an `OwnershipAnnounced` with a higher epoch, readers ignore fleet events with a lower `owner_epoch`.
    """

    owner_epoch: Count
    at_us: int = 0


class WorkerJoined(FleetEvent, tag="fleet.worker_joined", frozen=True, kw_only=True):
    """A worker joined the fleet.

    Attributes:
        owner_epoch: epoch of the owner that wrote the event.
        lease: incarnation; a new process with the same worker id has another incarnation.
        from_offset: first offset that the worker reads in that partition.
        lease_ttl_ms: duration of the lease in milliseconds, for a later owner that does not find the lease; 0 if
            unknown.
        events_version: version of the event types that the owner can read, for a worker that starts after its claim.
    """

    spec: WorkerSpec
    lease: Annotated[Name, LEASE]
    slot: Count
    from_offset: Count
    lease_ttl_ms: Count = 0
    events_version: Count = 1


class WorkerFact(FleetEvent, frozen=True, kw_only=True):
    """Base class of events about one epoch of one worker."""

    worker_id: SystemName
    worker_epoch: Count
    reason: Annotated[str, DROPPED] = ""


class WorkerSuspect(WorkerFact, tag="fleet.worker_suspect", frozen=True, kw_only=True):
    """A worker did not renew its lease in time, or the lease vanished.

    The worker keeps its requests. It gets no new requests until it recovers.
    """


class WorkerRecovered(WorkerFact, tag="fleet.worker_recovered", frozen=True, kw_only=True):
    """A suspect worker is ready again.

    It renewed its lease. Or the leases of most workers failed at once, which indicates a fault of Redis instead.
    """


class WorkerDraining(WorkerFact, tag="fleet.worker_draining", frozen=True, kw_only=True):
    """A worker finishes its requests, gets no new requests, and then stops."""


class WorkerLost(WorkerFact, tag="fleet.worker_lost", frozen=True, kw_only=True):
    """The owner declares a worker dead, because its lease was released, expired or was not renewed.

    The worker's cache leaves the prefix index, and its requests move to other workers.
    """


class IngressFact(FleetEvent, frozen=True, kw_only=True):
    """Base class of events about one incarnation of an ingress.

    A new process with the same ingress id has another incarnation.
    """

    ingress_id: Annotated[Name, INGRESS]
    incarnation: Annotated[Name, INGRESS]


class IngressJoined(IngressFact, tag="fleet.ingress_joined", frozen=True, kw_only=True):
    """An ingress took a lease. The owner can only notice the death of ingresses with leases.

    Attributes:
        lease_ttl_ms: duration of the lease in milliseconds, for a later owner that does not find the lease; 0 if
            unknown.
    """

    lease_ttl_ms: Count = 0  # for a later owner that does not find the lease; 0 if unknown


class IngressLost(IngressFact, tag="fleet.ingress_lost", frozen=True, kw_only=True):
    """The lease of an ingress was released, expired or was not renewed. The owner aborts its HTTP requests."""

    reason: Annotated[str, DROPPED] = ""


class OwnershipAnnounced(FleetEvent, tag="fleet.owner_claimed", frozen=True, kw_only=True):
    """A new owner with the epoch `owner_epoch` writes the fleet events from now on.

    Readers ignore later fleet events of lower epochs.

    Attributes:
        events_version: version of the event types that the owner can read.
    """

    events_version: Count = 1


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
