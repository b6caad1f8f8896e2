"""Topic `decisions`: the journal of a group's owner. One writer, dense `seq`, no prompts.

Each record says what the owner applied since its last one (`consumed`), so that replay applies the
same events in the same order at the same clock readings, and must reach the same decisions.
"""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Digest, Event, Name, Part
from forebay.events.control import Action


class ConsumedRun(Part, frozen=True, kw_only=True):
    """`count` records of one topic, applied one by one at the clock reading `now_us`."""

    topic: Name
    count: Count
    now_us: int


class Decision(Event, frozen=True, kw_only=True):
    """What every journal record carries. A record of a lower `owner_epoch` after a claim is void."""

    owner_epoch: int = -1  # the offset of the claim; the claim itself cannot know it
    seq: Count = 0
    consumed: tuple[ConsumedRun, ...] = ()


class OwnerClaimed(Decision, tag="owner.claimed", frozen=True, kw_only=True):
    """From here on this owner decides. `core_version` names the rules it decides by."""

    owner_id: Name
    core_version: Count
    at_us: int = 0


class CostTerms(Part, frozen=True, kw_only=True):
    """One candidate's cost in KV blocks, lowest wins; overlaps are blocks found in its cache.

    `taint_factor` is what preferred taints multiply the cost by.
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
    """A worker rank that could have taken the request."""

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
    """Who computes the prompt of a request that a decode pool answers, and why: its prefill pool, or who answers it.

    Attributes:
        remote: by the prefill pool.
        reason: `always` and `never` are the policy's; a prompt is long or short by the policy's limits, or short but
            too large a share of it is not cached (`uncached_prompt`); `prefill_idle` and `decode_busy` send it away,
            `prefill_busy` keeps it where it is answered; there is no prefill worker; what was tried before `failed`,
            and the last attempt depends on nobody else; or the answer has begun, and only goes on.
        uncached_tokens: of the prompt, those that the decode worker in question would compute itself.
        prefill_waiting: requests at the prefill pool's workers beyond one each.
        prefill_busy: whether the prefill worker in question is above the limit; None where nobody asked.
        decode_busy: the same of the decode worker.
    """

    remote: bool
    reason: PrefillReason
    uncached_tokens: Count | None = None
    prefill_waiting: Count | None = None
    prefill_busy: bool | None = None
    decode_busy: bool | None = None


class RequestRouted(Decision, tag="request.routed", frozen=True, kw_only=True):
    """A request goes to one worker rank; `table_digest` seals the cost table, see `forebay.core.routing.cost`.

    Attempts are counted for each stage (`aggregated` and `decode` are one, the answer), `earlier_attempts` are those of
    the others; an encoding has no lower number than an answer before it. In the stage `encode` only its images and
    videos are computed, in `pool`; in the stage `prefill` only its KV; in the stage `decode` that is fetched from there
    and the answer generated. `prefill` says why the prompt is computed where it is, of a decode pool's requests.
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
    waited_us: Count = 0  # in the router's queue
    earlier_attempts: Count = 0
    prefill: PrefillPlace | None = None


class RequestHeld(Decision, tag="request.held", frozen=True, kw_only=True):
    """A request waits in the router: every eligible rank has too much to prefill."""

    request_id: Name
    pool: Name
    queue_class: Name
    uncached_tokens: Count
    ahead: Count  # requests in its class before it came


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
    """Where a request would go now, and what every candidate would cost; or why nowhere. Nothing is booked.

    `stage` and `prefill` are those of its first routing, as in `RequestRouted`.
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
    would_wait: bool = False  # in the router's queue
    stage: Stage = "aggregated"
    prefill: PrefillPlace | None = None


class CacheResyncRequested(Decision, tag="cache.resync_requested", frozen=True, kw_only=True):
    """KV events of a rank are missing: its worker is asked to say anew what it has cached."""

    pool: Name
    worker_id: Name
    worker_epoch: Count
    slot: Count
    rank: Count
    expected_seq: Count
    found_seq: Count


class RequestRejected(Decision, tag="request.rejected", frozen=True, kw_only=True):
    """A request is refused before any worker had it."""

    request_id: Name
    reply_slot: Count
    reason: RejectReason
    message: str


class CommandTarget(Part, frozen=True, kw_only=True):
    """A worker that is to obey a command."""

    worker_id: Name
    worker_epoch: Count
    pool: Name
    slot: Count


class RequestAborted(Decision, tag="request.aborted", frozen=True, kw_only=True):
    """The owner gives up a request that it had accepted.

    `status` and `code` are a prefill worker's, where that refused it (`prefill_refused`); `holder` is who keeps its KV
    for a decode worker that will not come.
    """

    request_id: Name
    reply_slot: Count
    reason: AbortReason
    message: str
    attempt: Count
    pool: Name
    worker_id: str = ""  # whose work is to be cancelled; empty when no worker has it
    worker_epoch: Count = 0
    slot: Count = 0
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    code: Annotated[str, msgspec.Meta(max_length=256)] = ""
    holder: CommandTarget | None = None


KvReleaseReason = Literal[
    "worker_lost", "not_fetched", "not_needed", "request_ended", "lease_over", "foreign_descriptor"
]


class KvReleased(Decision, tag="request.kv_released", frozen=True, kw_only=True):
    """Nobody will fetch the KV that `holder` keeps for a request since its `attempt` to compute the prompt: it is told.

    Attributes:
        reason: the worker that was to fetch it was lost; could not; went on with what earlier attempts had said, and
            needed none; ended the request without it; or nobody could be sent in time. Or what was told of it is of
            another worker, epoch or model (`foreign_descriptor`), so nobody could be sent at all.
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
    """A command goes to these workers; or it is refused as a whole, for this reason, and goes nowhere."""

    command_id: Name
    reply_slot: Count
    action: Action
    targets: tuple[CommandTarget, ...] = ()
    reason: CommandRefusal | None = None
    message: str = ""


class CommandOutcome(Part, frozen=True, kw_only=True):
    """What became of a command at one worker.

    Refused by its engine, given up because the worker left or the time was over: `message` says why. `loras` are the
    adapters that it had loaded afterwards.
    """

    worker_id: Name
    worker_epoch: Count
    pool: Name
    status: Literal["pending", "done", "refused", "left", "timed_out"] = "pending"
    loras: tuple[Name, ...] = ()
    message: str = ""


class CommandEnded(Decision, tag="command.ended", frozen=True, kw_only=True):
    """Every worker that a command went to has an outcome."""

    command_id: Name
    reply_slot: Count
    action: Action
    outcomes: tuple[CommandOutcome, ...]


class SnapshotTaken(Decision, tag="snapshot.taken", frozen=True, kw_only=True):
    """A state is in `snapshots`, `chunks` records from `first_offset` on.

    Its digest was journalled by an `Advanced` right before `journal_offset`.
    """

    first_offset: Count
    chunks: Count
    digest: Digest
    journal_offset: Count  # the state includes the journal records before this offset
    core_version: Count = 0  # of the rules that made it, as in the claim; 0 where its owner did not say


class Advanced(Decision, tag="advanced", frozen=True, kw_only=True):
    """No request was decided: bounds the length of `consumed`, and seals the state after it."""

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
