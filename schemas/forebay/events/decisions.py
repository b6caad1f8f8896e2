"""Topic `decisions`: the journal of a group's owner. Only the owner writes it. It contains no prompts.

The field `consumed` of each record lists the input events that the owner applied since its previous record. A replay
applies the same events in the same order at the same clock readings, and must reach the same decisions.
"""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Checksum, Count, Digest, Event, Name, Part
from forebay.events.control import Action
from forebay.events.pools import PoolChoice
from forebay.events.privacy import (
    CHUNKS,
    DROPPED,
    KEPT,
    LORA,
    NONCE,
    OUTCOME,
    OWNER,
    REQUEST_ID,
    STATE_DIGEST,
    SystemName,
)


class ConsumedRun(Part, frozen=True, kw_only=True):
    """Consecutive records of one input topic that the owner applied at the same clock reading.

    Attributes:
        topic: name of the topic.
        count: number of records.
        now_us: clock reading of the owner, in microseconds.
    """

    topic: SystemName
    count: Count
    now_us: int


class Decision(Event, frozen=True, kw_only=True):
    """Base class of all journal records.

    `owner_epoch` is the offset of the owner's claim, and `owner_nonce` is the random text in it. `seq` is consecutive.
    Readers skip a record that does not name the newest valid claim, or whose `seq` is not above all earlier ones.
    """

    owner_epoch: int = -1  # offset of the claim; the claim itself cannot know its offset
    seq: Count = 0
    consumed: tuple[ConsumedRun, ...] = ()
    owner_nonce: Annotated[str, KEPT] = ""


class OwnerClaimed(Decision, tag="owner.claimed", frozen=True, kw_only=True):
    """A router claims the group: from this record on it is the owner and decides.

    Readers ignore a claim that does not name the previous owner's nonce, because its router did not know the newest
    owner. Readers also ignore a claim with another `core_version` than that of the current owner, unless `seal` is the
    offset of the last valid record, or `snapshot` is set. Its router could not derive the journal.

    Attributes:
        owner_epoch: always -1; the offset of this record is the new owner epoch.
        owner_nonce: random text. All records of the owner repeat it.
        previous_nonce: `owner_nonce` of the previous owner; empty if there is none.
        owner_id: id of the owner.
        policies: custom policies that the owner's operator allowed. The owner rejects requests of a pool that uses
            another custom policy.
        seal: offset of the previous owner's `sealed` record, if it was the last valid record; otherwise -1.
        snapshot: offset of the `snapshot.taken` or `sealed` record from which an operator let this owner continue, or 0
            for the empty state. The records in between are not part of the owner's history. Otherwise -1.
        events_version: version of the event types that the owner can read. Events of later types have no effect.
        release: version of the owner's forebay package; empty if unknown. Messages name it next to `core_version`.
        previous_seen_us: newest wall time at which the previous owner is known to have run, from its journal and its
            heartbeats, and on an embedded log from any input event; 0 if unknown. An outage begins at this time.
    """

    owner_id: Annotated[Name, OWNER]
    core_version: Count
    at_us: int = 0
    policies: Annotated[tuple[str, ...], KEPT] = ()
    seal: Annotated[int, msgspec.Meta(ge=-1)] = -1
    snapshot: Annotated[int, msgspec.Meta(ge=-1)] = -1
    events_version: Count = 1
    release: Annotated[str, KEPT] = ""
    previous_nonce: Annotated[str, KEPT] = ""
    previous_seen_us: int = 0


class CostTerms(Part, frozen=True, kw_only=True):
    """Cost of one candidate in KV blocks, term by term.

    The policy `kv` selects the lowest cost. The formula is in `forebay.core.routing.cost`.

    Attributes:
        cost: total cost.
        prefill_blocks: prompt blocks to compute for this request and for requests already sent to the rank.
        overlap_credit: reduction of the cost for blocks that the rank has cached.
        decode_blocks: blocks of the rank's requests in flight plus those of this request.
        active_requests: requests in flight on the rank.
        device_overlap: leading prompt blocks cached on the device.
        host_overlap: prompt blocks after the device overlap that are cached in host memory.
        disk_overlap: prompt blocks after the host overlap that are cached on disk.
        taint_factor: factor of the cost from the request's preferred taints; 1 if it has none.
        store_overlap: prompt blocks after the disk overlap that the shared store of the worker has.
        eviction_cost: increase of the cost for cached blocks that the rank must evict; 0 while it has free blocks.
    """

    cost: float
    prefill_blocks: float
    overlap_credit: float
    decode_blocks: float
    active_requests: int
    device_overlap: int
    host_overlap: int = 0
    disk_overlap: int = 0
    taint_factor: float = 1.0
    store_overlap: int = 0
    eviction_cost: float = 0.0


class ScoredCandidate(Part, frozen=True, kw_only=True):
    """Candidate and its cost, term by term."""

    worker_id: SystemName
    rank: Count
    terms: CostTerms


PrefillReason = Literal[
    "always",
    "never",
    "long_prompt",
    "short_prompt",
    "uncached_prompt",
    "prefill_idle",
    "prefill_busy",
    "decode_busy",
    "no_prefill_worker",
    "failed",
    "begun",
]


class PrefillPlace(Part, frozen=True, kw_only=True):
    """Where the prompt of a decode pool's request is computed, and why.

    Attributes:
        remote: whether the prefill pool computes the prompt; otherwise the decode worker does.
        reason: `always` and `never`: the policy has this name. `long_prompt`, `short_prompt`: by the policy's limits of
            length. `uncached_prompt`: the prompt is short, but the decode worker has cached too small a share of it.
            `prefill_idle`, `decode_busy`: load sends the prompt to the prefill pool. `prefill_busy`: the prefill pool
            is too busy, so the decode worker computes the prompt. `no_prefill_worker`: no prefill worker is available.
            `failed`: earlier attempts failed, so the last attempt uses no other worker. `begun`: earlier attempts have
            emitted tokens, and the decode worker only continues the response.
        uncached_tokens: prompt tokens that the selected decode worker would compute; null if not checked.
        prefill_waiting: requests that wait at the prefill pool's workers. Of the requests of each worker, one counts as
            running and all others count as waiting. Null if not checked.
        prefill_busy: whether the selected prefill worker is above `prefill_busy_threshold`; null if not checked.
        decode_busy: whether the selected decode worker is above `decode_busy_threshold`; null if not checked.
    """

    remote: bool
    reason: PrefillReason
    uncached_tokens: Count | None = None
    prefill_waiting: Count | None = None
    prefill_busy: bool | None = None
    decode_busy: bool | None = None


Stage = Literal["aggregated", "encode", "prefill", "decode"]


class RequestRouted(Decision, tag="request.routed", frozen=True, kw_only=True):
    """The owner routes one stage of a request to a worker rank.

    In the stage `encode` the worker only encodes the images and videos. In the stage `prefill` it only computes the KV
    of the prompt. In the stage `decode` it fetches the KV and generates the response. In the stage `aggregated` it
    computes the prompt and generates the response.

    Attributes:
        attempt: attempt at this stage, from 1. `aggregated` and `decode` share one count. The attempt of an encoding is
            never lower than an earlier attempt at the response.
        candidates: number of candidates.
        table_digest: digest of the cost table, see `forebay.core.routing.cost`.
        terms: cost of the selected rank.
        ties: number of candidates with the lowest cost.
        runner_up: candidate with the lowest cost apart from the selected one; null if there is no other candidate.
        waited_us: time in the router's queue, in microseconds.
        earlier_attempts: number of attempts at other stages.
        prefill: where the prompt of a decode pool's request is computed, and why; null in other pools.
        pools: pools that the owner chose with this decision, and why. Empty for pools that an earlier decision chose,
            and without rules for the choice of pools (`PoolRoutingConfigured`, `PoolCanarySet`, `PoolDrainSet`).
    """

    request_id: Annotated[Name, REQUEST_ID]
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    pool: SystemName
    worker_id: SystemName
    worker_epoch: Count
    slot: Count
    rank: Count
    mode: Annotated[str, KEPT]
    candidates: Count
    table_digest: Annotated[Digest, KEPT]
    terms: CostTerms
    ties: Count = 1
    runner_up: ScoredCandidate | None = None
    stage: Stage = "aggregated"
    waited_us: Count = 0
    earlier_attempts: Count = 0
    prefill: PrefillPlace | None = None
    pools: tuple[PoolChoice, ...] = ()


class RequestHeld(Decision, tag="request.held", frozen=True, kw_only=True):
    """The owner queues a request, because every eligible rank has no room or too many prompt tokens to compute.

    Attributes:
        pool: pool that serves the request.
        queue_class: queue class in which the request waits.
        uncached_tokens: prompt tokens that even the rank with the largest overlap must compute.
        ahead: requests already queued in the class.
        pools: as in `RequestRouted`.
    """

    request_id: Annotated[Name, REQUEST_ID]
    pool: SystemName
    queue_class: SystemName
    uncached_tokens: Count
    ahead: Count
    pools: tuple[PoolChoice, ...] = ()


RejectReason = Literal[
    "no_workers",
    "wrong_model",
    "duplicate_id",
    "overloaded",
    "busy",
    "queue_full",
    "pool_full",
    "unknown_worker",
    "contradictory_routing",
    "no_eligible_worker",
    "policy_failed",
]
AbortReason = Literal[
    "cancelled",
    "deadline",
    "queue_deadline",
    "queue_timeout",
    "attempts_exhausted",
    "encode_failed",
    "prefill_failed",
    "prefill_refused",
    "worker_refused",
    "pinned_worker_lost",
    "ingress_lost",
    "adapter_failed",
]


class RouteAnswered(Decision, tag="route.answered", frozen=True, kw_only=True):
    """The owner answers a route query: where it would route a request now, or why it cannot. It books nothing.

    Attributes:
        request_id: id of the query.
        reason: why no rank may take the request; null if one may.
        pool: pool of the selected rank.
        choice: selected rank; null if no rank may take the request.
        candidates: all candidates with their costs.
        table_digest: digest of the cost table; null if no rank may take the request.
        ties: number of candidates with the lowest cost.
        would_wait: whether the owner would queue the request.
        stage: first stage, as in `RequestRouted`.
        prefill: where the prompt would be computed, as in `RequestRouted`.
        pools: as in `RequestRouted`.
    """

    request_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    reason: RejectReason | None = None
    message: Annotated[str, DROPPED] = ""
    pool: Annotated[str, KEPT] = ""
    mode: Annotated[str, KEPT] = ""
    choice: ScoredCandidate | None = None
    candidates: tuple[ScoredCandidate, ...] = ()
    table_digest: Annotated[Digest | None, KEPT] = None
    ties: Count = 0
    would_wait: bool = False
    stage: Stage = "aggregated"
    prefill: PrefillPlace | None = None
    pools: tuple[PoolChoice, ...] = ()
    reply_key: Count = 0


class CacheResyncRequested(Decision, tag="cache.resync_requested", frozen=True, kw_only=True):
    """The owner has missed KV events of a rank, so it orders the worker to re-announce the rank's cache.

    Attributes:
        rank: rank whose events are missing.
        expected_seq: sequence number of the first missing event.
        found_seq: sequence number of the event that arrived instead.
    """

    pool: SystemName
    worker_id: SystemName
    worker_epoch: Count
    slot: Count
    rank: Count
    expected_seq: Count
    found_seq: Count


class RequestRejected(Decision, tag="request.rejected", frozen=True, kw_only=True):
    """The owner rejects a request before it sends the request to any worker.

    Attributes:
        reason: why no worker may take the request.
        pools: as in `RequestRouted`.
    """

    request_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    reason: RejectReason
    message: Annotated[str, DROPPED]
    pools: tuple[PoolChoice, ...] = ()
    reply_key: Count = 0


class RequestRepeated(Decision, tag="request.repeated", frozen=True, kw_only=True):
    """The owner does not run a request, because it knows the idempotency key from an earlier request.

    Attributes:
        request_id: id of the repetition.
        reply_slot: reply slot of the repetition.
        reply_key: reply key of the repetition.
        offset: offset of the earlier request on the same partition of the topic `requests`.
    """

    request_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    offset: Count
    reply_key: Count = 0


class CommandTarget(Part, frozen=True, kw_only=True):
    """Worker to which the owner sends a command or a `ReleaseKv`."""

    worker_id: SystemName
    worker_epoch: Count
    pool: SystemName
    slot: Count


class RequestAborted(Decision, tag="request.aborted", frozen=True, kw_only=True):
    """The owner aborts a request that it had accepted.

    Attributes:
        reason: why the owner aborts the request.
        attempt: highest attempt so far, of any stage.
        pool: pool of `worker_id`, or of the request if no worker has it.
        worker_id: worker that must stop its work for the request; empty if no worker has the request.
        status: HTTP status of the worker that rejected the request (`prefill_refused`, `worker_refused`); otherwise 0.
        code: error code from that worker; otherwise empty.
        retry_after_s: seconds after which that worker takes requests again; 0 if it did not say.
        holder: prefill worker that keeps KV for this request and must free it; null if there is none.
    """

    request_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    reason: AbortReason
    message: Annotated[str, DROPPED]
    attempt: Count
    pool: SystemName
    worker_id: Annotated[str, KEPT] = ""
    worker_epoch: Count = 0
    slot: Count = 0
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    code: Annotated[str, msgspec.Meta(max_length=256), DROPPED] = ""
    holder: CommandTarget | None = None
    reply_key: Count = 0
    retry_after_s: Count = 0


KvReleaseReason = Literal[
    "worker_lost", "not_fetched", "not_needed", "request_ended", "lease_over", "foreign_descriptor"
]


class KvReleased(Decision, tag="request.kv_released", frozen=True, kw_only=True):
    """The owner orders a prefill worker to free the KV of a prompt, because no worker will fetch it.

    Attributes:
        attempt: attempt in which the prefill worker computed the KV.
        holder: worker that keeps the KV.
        reason: `worker_lost`: the worker that was to fetch the KV was lost. `not_fetched`: that worker could not fetch
            it. `not_needed`: that worker computed the prompt itself, to continue earlier output. `request_ended`: the
            request ended without the KV. `lease_over`: the lease ended before a worker was sent to fetch the KV.
            `foreign_descriptor`: the descriptor names another worker, epoch or model than the one that reported it.
    """

    request_id: Annotated[Name, REQUEST_ID]
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    holder: CommandTarget
    reason: KvReleaseReason


CommandRefusal = Literal[
    "unknown_model",
    "unknown_pool",
    "unknown_worker",
    "no_workers",
    "worker_not_ready",
    "too_many_commands",
    "duplicate_id",
    "adapter_exists",
    "too_many_adapters",
]


class CommandSent(Decision, tag="command.sent", frozen=True, kw_only=True):
    """The owner sends an operator's command to workers, or rejects it for all workers.

    Attributes:
        targets: workers that get the command; empty if the owner rejects it.
        reason: why the owner rejects the command; null if it sends the command.
    """

    command_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    action: Action
    targets: tuple[CommandTarget, ...] = ()
    reason: CommandRefusal | None = None
    message: Annotated[str, DROPPED] = ""
    reply_key: Annotated[Count, NONCE] = 0


class CommandOutcome(Part, frozen=True, kw_only=True):
    """Outcome of an operator's command at one worker.

    Attributes:
        status: `pending`: the worker has not responded yet. `done`: the engine executed the command. `refused`: the
            engine refused it. `left`: the worker was lost. `timed_out`: the worker did not respond in time.
        loras: adapters that the worker has loaded after the command.
        message: why the engine did not execute the command, or that a drained worker was the last of its pool.
    """

    worker_id: SystemName
    worker_epoch: Count
    pool: SystemName
    status: Literal["pending", "done", "refused", "left", "timed_out"] = "pending"
    loras: Annotated[tuple[Name, ...], LORA] = ()
    message: Annotated[str, OUTCOME] = ""


class CommandEnded(Decision, tag="command.ended", frozen=True, kw_only=True):
    """An operator's command has an outcome at every worker that got it.

    Attributes:
        outcomes: outcome at each worker.
        placed: adapters of the owner's catalog, if the command lists adapters.
    """

    command_id: Annotated[Name, REQUEST_ID]
    reply_slot: Count
    action: Action
    outcomes: tuple[CommandOutcome, ...]
    reply_key: Annotated[Count, NONCE] = 0
    placed: Annotated[tuple[Name, ...], LORA] = ()


class AdapterPlaced(Decision, tag="adapter.placed", frozen=True, kw_only=True):
    """The owner loads an adapter of its catalog on a worker, because requests wait for it.

    Attributes:
        command_id: id of the command that loads the adapter.
        target: worker that loads the adapter.
        reason: `missing`: no ready worker has the adapter. `waiting`: too many requests wait for the workers that have
            it.
        waiting: requests that wait for the adapter.
        unloaded: adapter that the worker unloads first, because all its slots are taken; empty for none.
        candidates: number of ranks that could load the adapter.
        terms: cost of the first waiting request on the selected rank.
    """

    command_id: Annotated[Name, KEPT]
    lora_name: Annotated[Name, LORA]
    target: CommandTarget
    reason: Literal["missing", "waiting"]
    waiting: Count
    terms: CostTerms
    unloaded: Annotated[str, msgspec.Meta(max_length=256), LORA] = ""
    candidates: Count = 0


class _Snapshot(Decision, frozen=True, kw_only=True):
    """Base class of journal records that name a complete snapshot on the topic `snapshots`."""

    first_offset: Count
    chunks: Count
    digest: Annotated[Digest, STATE_DIGEST]
    journal_offset: Count
    core_version: Count
    snapshot_id: Annotated[str, KEPT] = ""


class SnapshotTaken(_Snapshot, tag="snapshot.taken", frozen=True, kw_only=True):
    """A snapshot is complete on the topic `snapshots`.

    The `Advanced` record right before `journal_offset` has the digest of the same state. It seals the snapshot.

    Attributes:
        digest: digest of the state.
        checksum: as in `Sealed`; null if the writer did not record it.
    """

    checksum: Annotated[Checksum | None, CHUNKS] = None


class Sealed(_Snapshot, tag="sealed", frozen=True, kw_only=True):
    """The owner stopped as planned, and its state is in a snapshot on the topic `snapshots`.

    The owner applied no event after the `Advanced` record right before `journal_offset`, so the snapshot has the state
    at this record. Every effect of the owner's decisions was durable before this record. The next owner may therefore
    continue from the snapshot alone, also with other decision rules.

    Attributes:
        digest: digest of the state under the rules of `core_version`.
        checksum: XXH3 128-bit hash, as 32 hex digits, of the values of the chunk records in order. A program with other
            decision rules checks the snapshot by it.
    """

    checksum: Annotated[Checksum, CHUNKS]
    at_us: int = 0


SnapshotRecord = SnapshotTaken | Sealed


class Advanced(Decision, tag="advanced", frozen=True, kw_only=True):
    """Journal record without a decision. It records consumed events and a digest of the state.

    The owner writes it if `consumed` would otherwise become too long, to seal a snapshot, and in a distributed system
    for readers of the journal if it makes no decision for a second or 1,000 events.

    Attributes:
        digest: digest of the state after the consumed events.
    """

    digest: Annotated[Digest, STATE_DIGEST]


JournalRecord = (
    OwnerClaimed
    | RequestRouted
    | RequestHeld
    | RequestRejected
    | RequestRepeated
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded
    | AdapterPlaced
    | SnapshotTaken
    | Sealed
    | Advanced
)
