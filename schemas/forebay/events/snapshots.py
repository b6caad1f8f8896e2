"""Topic `snapshots`: the complete state of an owner, in chunks of at most 1 MiB. Each chunk is a list of parts.

A snapshot is valid only if the journal has the matching `SnapshotTaken` or `Sealed`.
"""

from typing import Annotated, ClassVar

import msgspec

from forebay.events.base import U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import BusyThresholds, Command, DisaggConfig, LoraDigest, PoolConfigured
from forebay.events.decisions import CommandOutcome, ConsumedRun, Stage
from forebay.events.fleet import WorkerSpec
from forebay.events.keys import Weight as TenantWeight
from forebay.events.kv import AnyKvEvent, Tier
from forebay.events.media import Encoded
from forebay.events.metrics import TierCosts
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.events.privacy import (
    CONTENT,
    CONTENTS,
    HASHES,
    IDEMPOTENCY_KEY,
    IDEMPOTENCY_KEYS,
    INGRESS,
    KEPT,
    LEASE,
    LORA,
    MODEL,
    NONCE,
    OUTCOME,
    PATH,
    REQUEST_HASHES,
    REQUEST_ID,
    SESSION_KEYS,
    TENANT,
    SystemName,
)
from forebay.events.requests import Delivery, RoutingHints, Task
from forebay.events.transfer import Prefilled

CHUNK_HASHES_MAX = 131_072 - 64  # keeps the packed hashes of a chunk and their envelope below 1 MiB


class IndexBlocks(Part, tag_field="type", tag="index_blocks", frozen=True, kw_only=True):
    """Blocks that one (worker, rank) has cached in one tier.

    A reader ignores the blocks if the worker has another epoch in the `IndexCursor` of this snapshot.
    """

    worker_id: SystemName
    rank: Count
    tier: Tier
    sequence_hashes: Annotated[bytes, HASHES]
    worker_epoch: Count = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class IndexChanges(Part, tag_field="type", tag="index_changes", frozen=True, kw_only=True):
    """KV events that the owner applied while it copied the blocks of the prefix index.

    A reader applies `IndexChanges` and `StoreDropped` after all blocks, in order. The result is the index at the end of
    the snapshot.

    Attributes:
        events: the KV events, in order.
    """

    events: tuple[AnyKvEvent, ...]


class IndexCursor(Part, tag_field="type", tag="index_cursor", frozen=True, kw_only=True):
    """Position of the prefix index in the KV events of one (worker, rank).

    Attributes:
        last_seq: sequence number of the last applied event.
        resync: whether the owner has ordered the worker to re-announce its cache, and the worker has not begun yet.
    """

    worker_id: SystemName
    rank: Count
    last_seq: int
    worker_epoch: Count
    resync: bool = False


class StoreBlocks(Part, tag_field="type", tag="store_blocks", frozen=True, kw_only=True):
    """Blocks that one shared store has."""

    store: SystemName
    sequence_hashes: Annotated[bytes, HASHES]

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class StoreDropped(Part, tag_field="type", tag="store_dropped", frozen=True, kw_only=True):
    """Shared store that the owner removed from the prefix index while it copied the blocks, to make room for others."""

    store: SystemName


class RoutedBlocks(Part, tag_field="type", tag="routed_blocks", frozen=True, kw_only=True):
    """Blocks that the owner assumes to be cached, because a prompt with them was routed to this (worker, rank).

    Attributes:
        due_us: when the assumption ends, on the owner's clock in microseconds.
        predicted: whether KV events of the rank will confirm the blocks; false if the rank sends no KV events.
        computed: whether the rank has reported that it computed a prompt with these blocks.
    """

    worker_id: SystemName
    rank: Count
    due_us: int
    predicted: bool
    sequence_hashes: Annotated[bytes, HASHES]
    computed: bool = False

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class WorkerState(Part, tag_field="type", tag="worker_state", frozen=True, kw_only=True):
    """One worker of the fleet.

    Attributes:
        lease: incarnation of the worker, as in `WorkerJoined`.
        from_offset: first offset that the worker reads in its partition of the work topic.
        phase: state of its life cycle (`forebay.core.state.fleet.WorkerPhase`).
        lease_ttl_ms: duration of the lease in milliseconds; 0 if unknown.
        rejections: attempts that the worker has rejected since it last computed a prompt.
        avoided_until_us: time until which other workers are preferred, on the owner's clock in microseconds.
    """

    spec: WorkerSpec
    lease: Annotated[str, LEASE]
    slot: Count
    worker_epoch: Count
    from_offset: Count
    phase: Annotated[str, KEPT]
    lease_ttl_ms: Count = 0
    rejections: Count = 0
    avoided_until_us: int = 0


class IngressState(Part, tag_field="type", tag="ingress_state", frozen=True, kw_only=True):
    """One ingress with a lease.

    Attributes:
        lease_ttl_ms: duration of the lease in milliseconds; 0 if unknown.
    """

    ingress_id: Annotated[Name, INGRESS]
    incarnation: Annotated[Name, INGRESS]
    lease_ttl_ms: Count = 0


class RequestState(Part, tag_field="type", tag="request_state", frozen=True, kw_only=True):
    """One active request. Its prompt is in its `RequestSubmitted`.

    Attributes:
        phase: phase of the request (`forebay.core.phases`).
        content: hash of the content.
        due_us: deadline on the owner's clock, in microseconds.
        offset: offset of its `RequestSubmitted`.
        attempt: last attempt at the response, from 1; 0 before the first.
        worker_id: worker to which the request was last routed, at any stage; empty if none.
        worker_epoch: epoch of `worker_id`.
        rank: rank of `worker_id`.
        queue_class: queue class in which the request is or was queued; empty if it never was.
        uncached_tokens: prompt tokens that even the rank with the largest overlap had to compute when the request was
            queued.
        queued_at_us: when the request was queued, on the owner's clock in microseconds.
        media_tokens: placeholder tokens of its images and videos.
        stage: stage for which the request was last routed.
        encodings: last attempt to encode its images and videos, from 1; 0 if there was none.
        encoder_id: worker of that attempt.
        encoded: location of the embeddings; null if no worker keeps embeddings.
        prefills: last attempt to compute its prompt in a prefill pool, from 1; 0 if there was none.
        prefiller_id: worker of that attempt.
        prefilled: location of the KV of the prompt; null if no prefill worker keeps it.
        prefilled_due_us: when the lease of that KV expires, on the owner's clock in microseconds.
        begun: whether a worker has emitted output tokens; tracked for decode pools, and if failed requests move to
            faster pools.
        decoder_id: worker that was last sent to fetch the KV; empty if none.
        ingress: incarnation of the first ingress whose HTTP client waits; empty if there is none.
        is_salted: whether it has a cache namespace.
        queue_due_us: when it times out in the queue, on the owner's clock in microseconds; 0 if only its deadline
            applies.
        prefill_pool: pool that a grid or canary chose for its last remote prefill; empty if there was none.
        rejected_by: workers that have rejected an attempt at it, in order.
        tie_seed: seed for tie-breaking and sampling.
        idempotency_key: hash of the client's key; 0 for none.
        delivery: who brings the request to the server, as in `RequestSubmitted`.
        further_ingresses: incarnations of the other ingresses whose HTTP clients wait, in the order of their first
            `RequestResumed`.
        tenant: tenant that owns the API key; empty for none.
        weight: share of the tenant in the router's queue, relative to the weights of other tenants.
    """

    request_id: Annotated[Name, REQUEST_ID]
    phase: Annotated[str, KEPT]
    content: Annotated[U64, CONTENT]
    due_us: int
    offset: Count
    reply_slot: Count
    prompt_tokens: Count
    tie_seed: U64
    pool: SystemName
    attempt: Count
    worker_id: Annotated[str, KEPT]
    worker_epoch: Count
    rank: Count
    sequence_hashes: Annotated[bytes, HASHES]
    lora_name: Annotated[str, LORA] = ""
    routing: RoutingHints = RoutingHints()
    queue_class: Annotated[str, KEPT] = ""
    uncached_tokens: Count = 0
    queued_at_us: int = 0
    task: Task = "generate"
    media_tokens: Count = 0
    is_salted: bool = False
    stage: Stage = "aggregated"
    encodings: Count = 0
    encoder_id: Annotated[str, KEPT] = ""
    encoded: Encoded | None = None
    prefills: Count = 0
    prefiller_id: Annotated[str, KEPT] = ""
    prefilled: Prefilled | None = None
    prefilled_due_us: int = 0
    begun: bool = False
    decoder_id: Annotated[str, KEPT] = ""
    ingress: Annotated[str, INGRESS] = ""
    queue_due_us: int = 0
    prefill_pool: Annotated[str, KEPT] = ""
    rejected_by: Annotated[tuple[Name, ...], KEPT] = ()
    idempotency_key: Annotated[U64, IDEMPOTENCY_KEY] = 0
    delivery: Delivery = "worker"
    further_ingresses: Annotated[tuple[str, ...], INGRESS] = ()
    tenant: Annotated[str, TENANT] = ""
    weight: TenantWeight = 1

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class Remembered(Part, tag_field="type", tag="remembered", frozen=True, kw_only=True):
    """Ids of recently ended requests or commands, by which the owner recognizes a repeated id.

    The three lists have one number per id, in the same order.

    Attributes:
        ids: hashes of the ids, as packed u64.
        contents: hashes of the contents of requests, or nonces of commands, as packed u64.
        due_us: when the owner forgets each id, on its clock, as packed u64 in microseconds.
        commands: whether these are ids of commands.
    """

    ids: Annotated[bytes, REQUEST_HASHES]
    contents: Annotated[bytes, CONTENTS]
    due_us: Annotated[bytes, KEPT]
    commands: bool = False

    def __post_init__(self) -> None:
        require_packed("ids", self.ids, U64_BYTES)
        require_packed("contents", self.contents, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class FinishedKeys(Part, tag_field="type", tag="finished_keys", frozen=True, kw_only=True):
    """Idempotency keys of finished requests, by which the owner recognizes a repeated request.

    The three lists have one number per key, in the same order.

    Attributes:
        keys: the keys, as packed u64.
        offsets: offsets of the `RequestSubmitted` of the requests, as packed u64.
        due_us: when the owner forgets each key, on its clock, as packed u64 in microseconds.
    """

    keys: Annotated[bytes, IDEMPOTENCY_KEYS]
    offsets: Annotated[bytes, KEPT]
    due_us: Annotated[bytes, KEPT]

    def __post_init__(self) -> None:
        require_packed("keys", self.keys, U64_BYTES)
        require_packed("offsets", self.offsets, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class Booking(Part, tag_field="type", tag="booking", frozen=True, kw_only=True):
    """Load that one routed request puts on one (worker, rank).

    Attributes:
        prefill_tokens: uncached prompt tokens; 0 after the first output token.
        reuse: whether the request shares prompt blocks with other requests of the rank.
        expected_output_tokens: expected length of the response; 0 if unknown.
    """

    request_id: Annotated[Name, REQUEST_ID]
    worker_id: SystemName
    rank: Count
    prefill_tokens: Count
    sequence_hashes: Annotated[bytes, HASHES]
    prompt_tokens: Count = 0
    reuse: bool = True
    output_tokens: Count = 0
    expected_output_tokens: Count = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class Reported(Part, tag_field="type", tag="reported", frozen=True, kw_only=True):
    """The newest load report of one (worker, rank)."""

    worker_id: SystemName
    rank: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count


class MeasuredCosts(Part, tag_field="type", tag="measured_costs", frozen=True, kw_only=True):
    """The newest measured costs of one (worker, rank).

    Attributes:
        costs: measured durations of loading and computing blocks.
    """

    worker_id: SystemName
    rank: Count
    costs: TierCosts


class ComputedTokens(Part, tag_field="type", tag="computed_tokens", frozen=True, kw_only=True):
    """Total number of uncached prompt tokens sent to one (worker, rank).

    Among candidates of equal cost, the candidate with the lowest total is selected.
    A rank starts with the lowest total of any rank at the time when it joins.

    Attributes:
        tokens: the total, in prompt tokens.
        turnover_us: when the rank was sent each of the last five quarters of its cache to compute, or when it joined,
            on the owner's clock in microseconds, oldest first. 0 if the writer did not record it.
    """

    worker_id: SystemName
    rank: Count
    tokens: Count
    turnover_us: Annotated[tuple[int, ...], msgspec.Meta(max_length=5)] = (0,)


class PoolTurns(Part, frozen=True, kw_only=True):
    """Number of requests that a pool has routed. It determines the next candidate in round robin.

    Attributes:
        turns: number of requests routed so far.
    """

    pool: SystemName
    turns: Count


class TenantDeficit(Part, frozen=True, kw_only=True):
    """Deficit counter of one tenant in a queue class.

    Attributes:
        tenant: name of the tenant; empty for requests without a tenant.
        deficit: deficit counter, in tokens.
    """

    tenant: Annotated[str, TENANT]
    deficit: int


class ClassDeficit(Part, frozen=True, kw_only=True):
    """Deficit counter of one queue class. The class may send requests that cost up to this many tokens.

    Attributes:
        name: name of the queue class.
        uncached_tokens_min: minimum number of uncached prompt tokens of a request in the class.
        deficit: deficit counter, in tokens.
        tenants: tenants with requests in the class, in the order of their turns. It is empty if only one tenant has
            requests and its deficit is 0.
        continues: whether the first tenant was served last. It is served again while its deficit lasts.
    """

    ADDED: ClassVar = {"tenants": (), "continues": False}

    name: SystemName
    uncached_tokens_min: Count
    deficit: int
    tenants: tuple[TenantDeficit, ...] = ()
    continues: bool = False


class QueueTurns(Part, tag_field="type", tag="queue_turns", frozen=True, kw_only=True):
    """State of the deficit round robin between the queue classes of a pool, and between the tenants of each class.

    The queued requests themselves are in `RequestState`. A pool with many tenants has several parts, each with some of
    the tenants.

    Attributes:
        turn: position of the class that was served last, from 0.
        classes: deficit of each class, in configured order.
    """

    pool: SystemName
    turn: Count
    classes: tuple[ClassDeficit, ...]


class Sessions(Part, tag_field="type", tag="sessions", frozen=True, kw_only=True):
    """Sessions that one (worker, rank) serves, in order of expiry. `keys` and `due_us` have one number per session.

    Attributes:
        keys: hashes of pool and session id, as packed u64.
        due_us: when each session expires, on the owner's clock, as packed u64 in microseconds.
    """

    pool: SystemName
    worker_id: SystemName
    worker_epoch: Count
    rank: Count
    keys: Annotated[bytes, SESSION_KEYS]
    due_us: Annotated[bytes, KEPT]

    def __post_init__(self) -> None:
        require_packed("keys", self.keys, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class CommandState(Part, tag_field="type", tag="command_state", frozen=True, kw_only=True):
    """Operator's command that is pending at one or more workers.

    Attributes:
        nonce: distinguishes commands with the same id.
        offset: offset of the `WorkerCommanded` on `control`.
        outcomes: outcome at each worker so far.
    """

    command_id: Annotated[Name, REQUEST_ID]
    nonce: Annotated[Count, NONCE]
    offset: Count
    command: Command
    reply_slot: Count
    due_us: int
    outcomes: tuple[CommandOutcome, ...]


class PoolBusy(Part, frozen=True, kw_only=True):
    """Busy thresholds of a pool, if an operator has changed them since `PoolConfigured`.

    Attributes:
        thresholds: busy thresholds in effect.
    """

    pool: SystemName
    thresholds: BusyThresholds


class PoolDisagg(Part, frozen=True, kw_only=True):
    """Disaggregation settings of a pool, if an operator has changed them since `PoolConfigured`.

    Attributes:
        disagg: settings in effect.
    """

    pool: SystemName
    disagg: DisaggConfig


class PoolPolicy(Part, frozen=True, kw_only=True):
    """Pool whose router mode an operator has changed since `PoolConfigured`. `WorldState.pools` has the mode in effect.

    Attributes:
        configured: router mode that `PoolConfigured` set.
    """

    pool: SystemName
    configured: SystemName


class AdapterHolder(Part, frozen=True, kw_only=True):
    """Worker that has an adapter of the catalog. Times are on the owner's clock, in microseconds.

    Attributes:
        loaded_us: when the worker loaded the adapter.
        used_us: when the worker last got a request for the adapter.
    """

    worker_id: SystemName
    loaded_us: int
    used_us: int


class AdapterFailure(Part, frozen=True, kw_only=True):
    """Worker that could not load an adapter of the catalog.

    Attributes:
        until_us: when the owner tries the worker again, on its clock in microseconds.
    """

    worker_id: SystemName
    until_us: int
    reason: Annotated[str, OUTCOME] = ""


class AdapterState(Part, tag_field="type", tag="adapter_state", frozen=True, kw_only=True):
    """Adapter of the owner's catalog.

    Attributes:
        lora_path: URI or directory of the adapter.
        lora_digest: digest that the next load requires; empty for any.
        retry_us: when the owner tries again to place the adapter, because it found no worker; 0 if it may try now.
        holders: workers that have the adapter.
        failures: workers that could not load the adapter.
    """

    lora_name: Annotated[Name, LORA]
    model: Annotated[Name, MODEL]
    lora_path: Annotated[str, PATH]
    lora_digest: LoraDigest = ""
    retry_us: int = 0
    holders: tuple[AdapterHolder, ...] = ()
    failures: tuple[AdapterFailure, ...] = ()


class WorldState(Part, tag_field="type", tag="world_state", frozen=True, kw_only=True):
    """State of the owner that is in no other part of the snapshot.

    Attributes:
        now_us: the owner's clock in microseconds.
        view: per input topic, the next offset to apply, as `count`.
        pools: configuration of each pool.
        turns: number of routed requests per pool.
        fleet_epoch: highest owner epoch in the applied events of `fleet`.
        seq: sequence number of the next decision.
        busy: busy thresholds that an operator changed.
        disagg: disaggregation settings that an operator changed.
        owner_policies: custom policies that the owner's operator allowed.
        pool_routing: how pools are chosen, per model.
        canaries: canaries, per pool.
        drains: drained pools.
        policies: pools whose router mode an operator changed.
        owner_events: version of the event types that the owner can read.
        owner_nonce: `owner_nonce` of the owner's claim.
    """

    now_us: int
    view: tuple[ConsumedRun, ...]
    pools: tuple[PoolConfigured, ...]
    turns: tuple[PoolTurns, ...]
    owner_epoch: int
    fleet_epoch: int
    seq: Count
    busy: tuple[PoolBusy, ...] = ()
    disagg: tuple[PoolDisagg, ...] = ()
    owner_policies: Annotated[tuple[str, ...], KEPT] = ()
    pool_routing: tuple[PoolRoutingConfigured, ...] = ()
    canaries: tuple[PoolCanarySet, ...] = ()
    drains: tuple[PoolDrainSet, ...] = ()
    policies: tuple[PoolPolicy, ...] = ()
    owner_events: Count = 1
    owner_nonce: Annotated[str, KEPT] = ""


Chunk = (
    IndexBlocks
    | IndexChanges
    | IndexCursor
    | StoreBlocks
    | StoreDropped
    | RoutedBlocks
    | WorkerState
    | IngressState
    | RequestState
    | Remembered
    | FinishedKeys
    | Booking
    | Reported
    | MeasuredCosts
    | ComputedTokens
    | QueueTurns
    | Sessions
    | CommandState
    | AdapterState
    | WorldState
)


class SnapshotChunk(Event, tag="snapshot.chunk", frozen=True, kw_only=True):
    """Chunk of a snapshot.

    Attributes:
        number: number of the chunk in its snapshot, from 0.
        parts: parts of the world, for example blocks or sessions.
        snapshot_id: random text that all chunks of a snapshot have.
    """

    owner_epoch: int
    number: Count
    parts: tuple[Chunk, ...]
    snapshot_id: Annotated[str, KEPT] = ""


SnapshotEvent = SnapshotChunk
