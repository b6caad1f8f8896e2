"""Topic `decisions`: the journal of a group's owner. One writer, consecutive `seq`, no prompts.

Each record carries what the owner applied since its previous record (`consumed`). Replay applies the same events in the
same order at the same clock readings, and must reach the same decisions.
"""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Digest, Event, Name, Part
from forebay.events.control import Action


class ConsumedRun(Part, frozen=True, kw_only=True):
    """Consecutive records of one topic, applied one by one at one clock reading.

    Attributes:
        topic: name of the topic.
        count: number of records.
        now_us: clock reading in microseconds.
    """

    topic: Name
    count: Count
    now_us: int


class Decision(Event, frozen=True, kw_only=True):
    """Fields of every journal record. Records of a lower `owner_epoch` after a claim are stale."""

    owner_epoch: int = -1  # offset of the claim; the claim itself cannot know its offset
    seq: Count = 0
    consumed: tuple[ConsumedRun, ...] = ()


class OwnerClaimed(Decision, tag="owner.claimed", frozen=True, kw_only=True):
    """An owner claimed the group and decides from here on.

    Attributes:
        owner_id: id of the owner.
        core_version: version of the decision rules.
        at_us: wall clock in microseconds.
        policies: custom policies that the owner's operator allowed; it rejects requests of pools that name another one.
    """

    owner_id: Name
    core_version: Count
    at_us: int = 0
    policies: tuple[str, ...] = ()


class CostTerms(Part, frozen=True, kw_only=True):
    """Cost of one candidate in KV blocks, term by term; the lowest cost wins.

    Attributes:
        cost: total cost.
        prefill_blocks: prompt blocks to compute, including those already queued at the rank.
        overlap_credit: credit for cached blocks.
        decode_blocks: active blocks of the rank plus those of this request.
        active_requests: requests in flight on the rank.
        device_overlap: leading prompt blocks cached on the device.
        host_overlap: prompt blocks after these that are cached in host memory.
        disk_overlap: prompt blocks after these that are cached on disk.
        taint_factor: factor from preferred taints.
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


class ScoredCandidate(Part, frozen=True, kw_only=True):
    """Worker rank that could have taken the request.

    Attributes:
        terms: cost of the rank, term by term.
    """

    worker_id: Name
    rank: Count
    terms: CostTerms


Stage = Literal["aggregated", "encode", "prefill", "decode"]

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
        reason: `always` and `never`: set by the policy. `long_prompt`, `short_prompt`: by the policy's limits.
            `uncached_prompt`: short, but too large a share is not cached. `prefill_idle`, `decode_busy`: load sends the
            prompt to the prefill pool. `prefill_busy`: load keeps it local. `no_prefill_worker`: no worker is
            available. `failed`: earlier attempts failed, and the last one depends on no other worker. `begun`: the
            response has output tokens and is only continued.
        uncached_tokens: prompt tokens that the decode worker in question would compute.
        prefill_waiting: requests at the prefill pool's workers beyond one per worker.
        prefill_busy: whether the prefill worker in question is above its limit; null if it was not checked.
        decode_busy: whether the decode worker in question is above its limit; null if it was not checked.
    """

    remote: bool
    reason: PrefillReason
    uncached_tokens: Count | None = None
    prefill_waiting: Count | None = None
    prefill_busy: bool | None = None
    decode_busy: bool | None = None


class RequestRouted(Decision, tag="request.routed", frozen=True, kw_only=True):
    """A request is routed to one worker rank.

    In the stage `encode` only its images and videos are computed, in `pool`. In the stage `prefill` only its KV is
    computed. In the stage `decode` the KV is fetched and the response generated.

    Attributes:
        request_id: id of the request.
        attempt: attempt at this stage; `aggregated` and `decode` share one count. An encoding never has a lower number
            than an earlier attempt at the response.
        pool: pool of the worker.
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        slot: partition of the pool's work topic that the worker reads.
        rank: rank of the worker.
        mode: router mode or policy class that selected the rank.
        candidates: number of candidates.
        table_digest: digest of the cost table, see `forebay.core.routing.cost`.
        terms: cost of the selected rank.
        ties: number of candidates with the lowest cost.
        runner_up: cheapest other candidate.
        stage: stage to compute.
        waited_us: time in the router's queue, in microseconds.
        earlier_attempts: attempts at other stages.
        prefill: where the prompt of a decode pool's request is computed, and why.
    """

    request_id: Name
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    pool: Name
    worker_id: Name
    worker_epoch: Count
    slot: Count
    rank: Count
    mode: str
    candidates: Count
    table_digest: Digest
    terms: CostTerms
    ties: Count = 1
    runner_up: ScoredCandidate | None = None
    stage: Stage = "aggregated"
    waited_us: Count = 0
    earlier_attempts: Count = 0
    prefill: PrefillPlace | None = None


class RequestHeld(Decision, tag="request.held", frozen=True, kw_only=True):
    """A request is queued in the router, because every eligible rank has no room or too much to prefill.

    Attributes:
        request_id: id of the request.
        pool: pool that serves the request.
        queue_class: class in which it is queued.
        uncached_tokens: prompt tokens that the best rank has not cached.
        ahead: requests in the class before it.
    """

    request_id: Name
    pool: Name
    queue_class: Name
    uncached_tokens: Count
    ahead: Count


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
    "pinned_worker_lost",
    "ingress_lost",
]


class RouteAnswered(Decision, tag="route.answered", frozen=True, kw_only=True):
    """Response to a route query: where a request would be routed now, or why nowhere. Nothing is booked.

    Attributes:
        request_id: id of the query.
        reply_slot: partition of the topic `tokens` for the response.
        reason: why no rank may take it; null if one may.
        message: explanation of the reason.
        pool: pool of the selected rank.
        mode: router mode or policy class that selected the rank.
        choice: selected rank.
        candidates: all candidates with their costs.
        table_digest: digest of the cost table.
        ties: number of candidates with the lowest cost.
        would_wait: whether the request would be queued in the router.
        stage: first stage, as in `RequestRouted`.
        prefill: where the prompt would be computed, as in `RequestRouted`.
    """

    request_id: Name
    reply_slot: Count
    reason: RejectReason | None = None
    message: str = ""
    pool: str = ""
    mode: str = ""
    choice: ScoredCandidate | None = None
    candidates: tuple[ScoredCandidate, ...] = ()
    table_digest: Digest | None = None
    ties: Count = 0
    would_wait: bool = False
    stage: Stage = "aggregated"
    prefill: PrefillPlace | None = None


class CacheResyncRequested(Decision, tag="cache.resync_requested", frozen=True, kw_only=True):
    """KV events of a rank are missing, so its worker must re-announce its cache.

    Attributes:
        pool: pool of the worker.
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        slot: partition of the pool's work topic that the worker reads.
        rank: rank whose events are missing.
        expected_seq: sequence number that was next.
        found_seq: sequence number that arrived.
    """

    pool: Name
    worker_id: Name
    worker_epoch: Count
    slot: Count
    rank: Count
    expected_seq: Count
    found_seq: Count


class RequestRejected(Decision, tag="request.rejected", frozen=True, kw_only=True):
    """A request is rejected before it was sent to a worker."""

    request_id: Name
    reply_slot: Count
    reason: RejectReason
    message: str


class CommandTarget(Part, frozen=True, kw_only=True):
    """Worker that a command or a release is addressed to."""

    worker_id: Name
    worker_epoch: Count
    pool: Name
    slot: Count


class RequestAborted(Decision, tag="request.aborted", frozen=True, kw_only=True):
    """The owner aborts a request that it had accepted.

    Attributes:
        request_id: id of the request.
        reply_slot: partition of the topic `tokens` for the error.
        reason: why the request is aborted.
        message: explanation of the reason.
        attempt: highest attempt so far, of any stage.
        pool: pool of the request or of the worker that has it.
        worker_id: worker whose work is cancelled; empty if no worker has the request.
        worker_epoch: epoch of that worker.
        slot: partition of the pool's work topic that the worker reads.
        status: HTTP status of a prefill worker that rejected the request (`prefill_refused`).
        code: error code of that worker.
        holder: prefill worker that keeps KV for this request and must release it.
    """

    request_id: Name
    reply_slot: Count
    reason: AbortReason
    message: str
    attempt: Count
    pool: Name
    worker_id: str = ""
    worker_epoch: Count = 0
    slot: Count = 0
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    code: Annotated[str, msgspec.Meta(max_length=256)] = ""
    holder: CommandTarget | None = None


KvReleaseReason = Literal[
    "worker_lost", "not_fetched", "not_needed", "request_ended", "lease_over", "foreign_descriptor"
]


class KvReleased(Decision, tag="request.kv_released", frozen=True, kw_only=True):
    """KV that no worker will fetch is released; the owner orders its prefill worker to do so.

    Attributes:
        request_id: id of the request.
        attempt: attempt to compute the prompt since which the KV is kept.
        holder: worker that keeps the KV.
        reason: `worker_lost`, `not_fetched`: the worker that was to fetch it was lost, or could not. `not_needed`: that
            worker continued from earlier output and needed no KV. `request_ended`: the request ended without it.
            `lease_over`: no worker could be sent in time. `foreign_descriptor`: its descriptor is of another worker,
            epoch or model.
    """

    request_id: Name
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
]


class CommandSent(Decision, tag="command.sent", frozen=True, kw_only=True):
    """A command is sent to its workers, or rejected as a whole.

    Attributes:
        command_id: id of the command.
        reply_slot: partition of the topic `tokens` for the outcomes.
        action: what the workers do.
        targets: workers that get the command; empty if it is rejected.
        reason: why it is rejected; null if it is sent.
        message: explanation of the reason.
    """

    command_id: Name
    reply_slot: Count
    action: Action
    targets: tuple[CommandTarget, ...] = ()
    reason: CommandRefusal | None = None
    message: str = ""


class CommandOutcome(Part, frozen=True, kw_only=True):
    """Outcome of a command at one worker.

    Attributes:
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        pool: pool of the worker.
        status: `done`; `refused` by the engine; `left`: the worker was lost; `timed_out`: the command's time was over.
        loras: adapters loaded afterwards.
        message: why the command was not executed.
    """

    worker_id: Name
    worker_epoch: Count
    pool: Name
    status: Literal["pending", "done", "refused", "left", "timed_out"] = "pending"
    loras: tuple[Name, ...] = ()
    message: str = ""


class CommandEnded(Decision, tag="command.ended", frozen=True, kw_only=True):
    """A command has an outcome at every worker it was sent to.

    Attributes:
        action: what the workers were to do.
        outcomes: outcome at each worker.
    """

    command_id: Name
    reply_slot: Count
    action: Action
    outcomes: tuple[CommandOutcome, ...]


class SnapshotTaken(Decision, tag="snapshot.taken", frozen=True, kw_only=True):
    """A snapshot is complete. Its digest was journaled by the `Advanced` right before `journal_offset`.

    Attributes:
        first_offset: offset of its first chunk on the topic `snapshots`.
        chunks: number of chunks.
        digest: digest of the state.
        journal_offset: the state includes the journal records before this offset.
        core_version: version of the decision rules; 0 if the writer did not record it.
    """

    first_offset: Count
    chunks: Count
    digest: Digest
    journal_offset: Count
    core_version: Count = 0


class Advanced(Decision, tag="advanced", frozen=True, kw_only=True):
    """Journal record without a decision.

    It bounds the length of `consumed`, and seals the state after it by a digest.

    Attributes:
        digest: digest of the state after the consumed events.
    """

    digest: Digest


JournalRecord = (
    OwnerClaimed
    | RequestRouted
    | RequestHeld
    | RequestRejected
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded
    | SnapshotTaken
    | Advanced
)
