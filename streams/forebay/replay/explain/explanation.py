"""The result of `forebay.replay.explain.explain` as plain data that JSON can hold.

Clock readings (`now_us`) are in microseconds on the owner's clock, as recorded. `after_us` counts from the submission.
Fields with `wall` in their names use the wall clock of the ingress or worker that wrote the event (`at_us`). Costs and
overlaps are in KV blocks. A time on the owner's clock is None if no owner has applied the event yet.
"""

from typing import Any, Literal

import msgspec

from forebay.core.ttft_parts import Part
from forebay.events.decisions import PrefillPlace
from forebay.events.kv import LowerTier
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.replay.verify.divergence import DivergenceReport

TokenSource = Literal["device", "host", "disk", "store", "transferred", "computed"]
SubmissionEvent = RequestSubmitted | RouteQueried
Kind = Literal["request", "query"]
State = Literal[
    "submitted",  # not applied by an owner yet
    "queued",
    "encode",
    "remote_prefill",
    "transfer",
    "prefill",
    "decode",
    "waiting",  # for another worker or the next stage
    "finished",
    "failed",
    "rejected",
    "repeated",  # not run, because an earlier request has the same idempotency key
    "aborted",
    "answered",  # a query
    "unknown",  # after a divergence
]
SelectionReason = Literal[
    "only_candidate",
    "lowest_cost",
    "tie_computed_tokens",
    "tie_seed",
    "drawn",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "pinned",
    "session",
    "policy",
]
ExclusionReason = Literal[
    "suspect",
    "draining",
    "not_pinned",
    "not_allowed",
    "missing_taint",
    "missing_adapter",
    "shared_cache",
    "busy",
    "full",
    "other_session",
    "rejected_it",
    "rejects",  # it is avoided for some seconds
    "had_it_last",  # an encode or prefill worker of the previous attempt
]


class ExplanationPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Submission(ExplanationPart, frozen=True, kw_only=True):
    """The request as it was submitted.

    Attributes:
        now_us: when the owner applied the event. None if the log no longer holds the event, or no owner applied it yet.
        wall_us: when the ingress wrote the event. 0 if the ingress did not record a time.
        full_blocks: number of KV blocks that the prompt fills completely. Only full blocks can be cached.
        tie_seed: the 64-bit seed that breaks ties, as 16 hex digits.
        anonymised: whether the recording omits the prompt's tokens.
        tenant: tenant that owns the API key of the request; empty for none.
        key_id: public id of this API key. Empty like `traceparent` if the log no longer holds the event.
        traceparent: trace context of the client, as in the header `traceparent` of W3C; empty for none.
        trace_id: id of the request's trace (`forebay spans`); empty if the log no longer holds the event.
    """

    offset: int
    now_us: int | None = None
    wall_us: int = 0
    model: str
    lora_name: str
    prompt_tokens: int
    full_blocks: int
    max_tokens: int | None = None
    timeout_us: int | None = None
    tie_seed: str
    hints: dict[str, Any]
    anonymised: bool = False
    tenant: str = ""
    key_id: str = ""
    traceparent: str = ""
    trace_id: str = ""


class RankState(ExplanationPart, frozen=True, kw_only=True):
    """Cache and load of one worker rank at the moment of a routing decision.

    Attributes:
        assumed_overlap: the part of `device_overlap` that no KV event confirmed. The router assumes that the rank has
            these blocks, because it routed a prompt with them to the rank.
        device_blocks: number of all blocks in device memory, according to KV events.
        waiting_tokens: uncached prompt tokens of requests on the rank that have no output token yet.
        computed_tokens: uncached prompt tokens of all requests that were routed to the rank so far.
    """

    worker_id: str
    rank: int
    device_overlap: int
    host_overlap: int
    disk_overlap: int
    assumed_overlap: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    kv_blocks_total: int
    waiting_tokens: int
    computed_tokens: int
    store_overlap: int = 0


class CandidateCost(ExplanationPart, frozen=True, kw_only=True):
    """A candidate (worker rank that could take the request) and its cost, as in `forebay.core.routing.cost`.

    `prefill_blocks` includes this prompt, cached or not.
    """

    seen: RankState
    cost: float
    prefill_blocks: float
    overlap_credit: float
    decode_blocks: float
    active_requests: int
    taint_factor: float
    probability: float | None
    eviction_cost: float = 0.0


class ExcludedRank(ExplanationPart, frozen=True, kw_only=True):
    seen: RankState
    reasons: tuple[ExclusionReason, ...]
    text: str


class SelectionChange(ExplanationPart, frozen=True, kw_only=True):
    """A change of one thing, and the rank that the router selects with the change in the otherwise recorded state.

    Attributes:
        setting: name of the changed setting, `mode` for another policy, or `worker/rank` if its cache or load changes.
        value: value of the setting right beyond the threshold, number of blocks or tokens, or name of the policy.
        selected: selected rank as `worker/rank`. It may be the recorded rank for another policy.
    """

    setting: str
    value: float | int | str
    text: str
    selected: str


class Routing(ExplanationPart, frozen=True, kw_only=True):
    """One routing decision, derived again from the events. It equals the recorded decision, including the cost table.

    Attributes:
        attempt: number of the attempt, starting at 1; 0 for a query.
        winner: index of the selected worker rank in `candidates`.
        runner_up: index of the cheapest other candidate; None if there is no other.
        would_wait: for a query: whether a request like it would be held in the queue.
        stage: part of the request that was routed. `encode`: only its images and videos. `prefill`: only its prompt.
            `decode`: fetching its KV and generating the response. `aggregated`: the whole request.
        prefill: where the prompt is computed, and why. None unless the pool is a decode pool.
        changes: changes that would have selected another rank, smallest changes of settings first, and the rank that
            each other policy selects. Unset unless they were requested.
        notes: kinds of changes that were not evaluated, and why, as sentences. Unset like `changes`.
    """

    offset: int
    now_us: int
    after_us: int
    attempt: int
    waited_us: int
    pool: str
    block_size: int
    mode: str
    config: dict[str, Any]
    overridden: tuple[str, ...]
    winner: int
    runner_up: int | None
    reason: SelectionReason
    why: str
    candidates: tuple[CandidateCost, ...]
    left_out: tuple[ExcludedRank, ...]
    table_digest: str
    would_wait: bool = False
    stage: str = "aggregated"
    prefill: PrefillPlace | None = None
    changes: list[SelectionChange] | msgspec.UnsetType = msgspec.UNSET
    notes: list[str] | msgspec.UnsetType = msgspec.UNSET


class FirstTokenTiming(ExplanationPart, frozen=True, kw_only=True):
    """The first token of an attempt and the time until it.

    Attributes:
        wall_ttft_us: time from the submission on the ingress's wall clock to the token on the worker's wall clock. None
            if ingress or worker did not record a time.
        cached_tokens: prompt tokens that the engine did not compute, because they were in its cache or were fetched.
        predicted_tokens: prompt tokens that the router expected in the device cache. None if unknown, or if the worker
            was to fetch the KV of the prompt.
        sources: prompt tokens per source: `device`, `host`, `disk` and `store` are tiers, `transferred` is from a
            prefill worker, `computed` by this worker. Sources without tokens are absent, and `computed` is absent if
            the log lacks the submission.
        loads_us: microseconds of the load from each tier; the loads run at the same time.
        saved_us: how many microseconds sooner these loads were done than computing their tokens, by the costs that the
            rank measured. Negative if computing would have been faster; None if unknown.
        parts_us: microseconds per part of the time to first token (`forebay.core.ttft_parts`), without parts of zero
            length. Their sum is `ttft_us`. If that is None, the last part ends when the worker emitted the token, on
            its clock. `parts_us` is None if the log lacks the beginning of the request.
    """

    attempt: int
    worker_id: str
    ttft_us: int | None
    wall_ttft_us: int | None
    cached_tokens: int
    predicted_tokens: int | None
    transferred_bytes: int = 0
    transfer_us: int = 0
    sources: dict[TokenSource, int] = {}
    loads_us: dict[LowerTier, int] = {}
    saved_us: int | None = None
    parts_us: dict[Part, int] | None = None


class Ending(ExplanationPart, frozen=True, kw_only=True):
    """The outcome of a request.

    Attributes:
        reason: reason of a finish, rejection or abort; empty otherwise.
        text: the message sent to the client, or the engine's error.
        left_out: for a rejection: the worker ranks of the pool, with the reasons why they were not eligible.
    """

    state: State
    reason: str
    text: str
    attempt: int
    output_tokens: int | None
    duration_us: int | None
    left_out: tuple[ExcludedRank, ...] = ()


class TimelineEntry(ExplanationPart, frozen=True, kw_only=True):
    """One entry of a timeline.

    Attributes:
        now_us: for `outage` and `owner_claimed`: wall time at which they began.
        written_us: when the event was written, if the owner read it late, because it was written before its claim.
        outage_us: for an `outage`, in which no router owned the group: its length.
        delayed: for an `outage`: number of requests that were active or submitted in it.
    """

    what: str
    text: str
    now_us: int | None
    after_us: int | None
    topic: str
    offset: int
    counted: bool = True
    written_us: int | None = None
    outage_us: int | None = None
    delayed: int | None = None


class Explanation(ExplanationPart, frozen=True, kw_only=True):
    """Timeline, routing decisions and outcome of one request.

    Attributes:
        earlier_uses: number of earlier requests with the same ID on the log. None if they were not searched for.
        others: IDs on the log of other requests with the ID that was looked up: requests for which a client chose it,
            or parts of a request. Newest first, at most 100. None if they were not searched for.
        unverified: records that the derivation skipped, counted by a name of `forebay.replay.verify.verify.UNVERIFIED`.
    """

    request_id: str
    kind: Kind
    state: State
    earlier_uses: int | None = None
    derived_from: int = 0
    derived_to: int = 0
    submitted: Submission | None
    routings: tuple[Routing, ...] = ()
    first_token: FirstTokenTiming | None = None
    output_tokens: int | None = None
    ending: Ending | None = None
    timeline: tuple[TimelineEntry, ...]
    others: tuple[str, ...] | None = None
    unverified: dict[str, int] = {}
    divergence: DivergenceReport | None = None
