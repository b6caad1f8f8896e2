"""What `forebay.replay.explain.explain` tells of one request, as plain data that JSON can hold.

Clocks (`now_us`) are the owner's, in microseconds, as recorded; `after_us` counts from where the request's life begins.
What is only known by the clocks of those who said it (`at_us`) is named `wall`. Costs and overlaps are in KV blocks.
Times by the owner's clock are None where the journal does not say when, because it does not go so far yet.
"""

from typing import Any, Literal

import msgspec

from forebay.core.ttft_parts import Part
from forebay.events.decisions import PrefillPlace
from forebay.replay.verify.divergence import Told as Divergent

Kind = Literal["request", "query"]
State = Literal[
    "submitted",  # and not applied by an owner yet
    "queued",
    "encode",
    "remote_prefill",
    "transfer",
    "prefill",
    "decode",
    "waiting",  # for another worker, or the next stage
    "finished",
    "failed",
    "rejected",
    "aborted",
    "answered",  # of a query
    "unknown",  # the journal diverges
]
Reason = Literal[
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
Absence = Literal[
    "suspect",
    "draining",
    "not_pinned",
    "not_allowed",
    "missing_taint",
    "missing_adapter",
    "busy",
    "full",
    "other_session",
    "had_it_last",  # of an encode or prefill worker
]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an explanation."""


class Submission(Told, frozen=True, kw_only=True):
    """What was asked for.

    Attributes:
        offset: of the event in the topic `requests`.
        now_us: when the owner applied it; None when that is before the log's oldest state, or yet to come.
        wall_us: when its ingress wrote it; 0 where it did not say.
        model: that was asked for.
        lora_name: the adapter, empty for none.
        prompt_tokens: the length of the prompt.
        full_blocks: KV blocks that the prompt fills, which is what can be cached.
        max_tokens: the longest answer; None for a query, and where the log no longer holds the submission.
        timeout_us: from `now_us` on; None for a query, and where the log no longer holds the submission.
        due_us: its deadline by the owner's clock.
        tie_seed: 64 bits as 16 hex digits, which decide between equals.
        hints: the routing hints that it gave, as in `RoutingHints`, without those that ask for nothing.
        anonymised: whether the recording left its tokens out.
    """

    offset: int
    now_us: int | None
    wall_us: int
    model: str
    lora_name: str
    prompt_tokens: int
    full_blocks: int
    max_tokens: int | None
    timeout_us: int | None
    due_us: int | None
    tie_seed: str
    hints: dict[str, Any]
    anonymised: bool


class Waiting(Told, frozen=True, kw_only=True):
    """It was held in the router's queue.

    Attributes:
        offset: of the `RequestHeld` in the journal.
        now_us: when it was held.
        pool: whose queue it is in.
        queue_class: its class there.
        ahead: requests of that class before it.
        uncached_tokens: prompt tokens that even the rank with the most of them cached has to compute.
        threshold: requests wait while every rank that may take them has more than so many engine steps to prefill; None
            if the ranks were full.
        least: the rank that was nearest to taking it.
        least_prefill_tokens: what that rank had to prefill.
        least_limit_tokens: above so many it takes no more.
        suspects: The suspect workers that it waits for, if no other worker may take it; then the last four are empty.
        least_requests: the requests that rank had.
    """

    offset: int
    now_us: int
    pool: str
    queue_class: str
    ahead: int
    uncached_tokens: int
    threshold: float | None
    least: str
    least_prefill_tokens: int
    least_limit_tokens: float
    suspects: tuple[str, ...] = ()
    least_requests: int = 0


class Seen(Told, frozen=True, kw_only=True):
    """What the index and the load held of one worker rank when a choice was made.

    Attributes:
        worker_id: of the worker.
        rank: of its engine.
        device_overlap: leading blocks of this prompt on its device, then in its host memory, then on its disk.
        host_overlap: of the blocks after those.
        disk_overlap: of the blocks after those.
        assumed_overlap: of `device_overlap`, blocks that no KV event said: they were routed there.
        device_blocks: blocks cached in all, by tier, as KV events said.
        host_blocks: in host memory.
        disk_blocks: on disk.
        kv_blocks_total: KV blocks of the rank's device.
        waiting_tokens: prompt tokens that were routed there and wait for their first token.
        computed_tokens: prompt tokens that it was sent to compute so far.
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


class Candidate(Told, frozen=True, kw_only=True):
    """A worker rank that could have taken the request, and its cost, as in `forebay.core.routing.cost`.

    Attributes:
        seen: what was known of it.
        cost: what decided, where the mode goes by cost.
        prefill_blocks: to prefill there with this prompt, cached or not.
        overlap_credit: taken from those for what is cached.
        decode_blocks: of requests under way there, and what this prompt would add.
        active_requests: under way there.
        taint_factor: of preferred taints, by which the cost is multiplied.
        probability: of being chosen, where the choice was drawn by cost; else None.
    """

    seen: Seen
    cost: float
    prefill_blocks: float
    overlap_credit: float
    decode_blocks: float
    active_requests: int
    taint_factor: float
    probability: float | None


class LeftOut(Told, frozen=True, kw_only=True):
    """A worker rank of the pool that was no candidate, and all that kept it from being one."""

    seen: Seen
    reasons: tuple[Absence, ...]
    text: str


class Routing(Told, frozen=True, kw_only=True):
    """One choice: derived again from the events, and equal to the recorded one, its whole cost table included.

    Attributes:
        offset: of the decision in the journal.
        now_us: when it was made.
        after_us: since the submission.
        attempt: 1 for the first; 0 for a query.
        waited_us: in the router's queue.
        pool: that the model is served by.
        block_size: tokens of a KV block there.
        mode: how the pool chooses.
        config: the settings that this mode goes by, by their names in `RouterConfig`.
        overridden: which of them the request changed.
        winner: position in `candidates`.
        runner_up: the cheapest of the others, by position; None where there is no other.
        ties: how many had the lowest cost, where cost decided.
        reason: what decided, in a word.
        why: the same in a sentence.
        candidates: in order of worker and rank.
        left_out: the other ranks of the pool.
        table_digest: over every term of every candidate, equal to the recorded one.
        would_wait: of a query, whether such a request would be held.
        stage: `encode` where its images and videos alone went, `prefill` where its prompt alone did, `decode` where its
            KV was to be fetched and it was to be answered; `aggregated` where all of it went.
        prefill: who computes its prompt, and why, of a decode pool's requests.
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
    ties: int
    reason: Reason
    why: str
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]
    table_digest: str
    would_wait: bool = False
    stage: str = "aggregated"
    prefill: PrefillPlace | None = None


class FirstToken(Told, frozen=True, kw_only=True):
    """The first token of an attempt.

    Attributes:
        attempt: whose it is.
        worker_id: who said it.
        ttft_us: since the submission, by the owner's clock.
        wall_ttft_us: the same by the clocks of worker and ingress; None where one of them did not say.
        cached_tokens: prompt tokens that the engine did not compute: they were in its cache, or it fetched them.
        predicted_tokens: those that the router thought to be on its device; None where they were to be fetched.
        transferred_bytes: of KV, from a prefill worker; 0 where the engine does not say.
        transfer_us: how long that took.
        parts_us: what the time to it is made of, by part (`forebay.core.ttft_parts`); they add up to `ttft_us`, and
            those of no length are left out. Where it is None, the last one ends by the worker's clock. None where the
            log does not hold the beginning.
    """

    attempt: int
    worker_id: str
    ttft_us: int | None
    wall_ttft_us: int | None
    cached_tokens: int
    predicted_tokens: int | None
    transferred_bytes: int = 0
    transfer_us: int = 0
    parts_us: dict[Part, int] | None = None


class Ending(Told, frozen=True, kw_only=True):
    """How it ended.

    Attributes:
        state: `finished`, `failed`, `rejected`, `aborted` or `answered`.
        reason: of a finish, refusal or abort; empty for others.
        text: what its client was told, or the engine's error.
        attempt: the last.
        output_tokens: of the answer, as the engine said; None where it did not.
        duration_us: since the submission, by the owner's clock.
        wall_duration_us: the same by the clocks of worker and ingress.
        left_out: of a refusal, what kept each worker rank of the pool from taking it.
    """

    state: State
    reason: str
    text: str
    attempt: int
    output_tokens: int | None
    duration_us: int | None
    wall_duration_us: int | None
    left_out: tuple[LeftOut, ...] = ()


class Moment(Told, frozen=True, kw_only=True):
    """One line of its life.

    Attributes:
        what: in a word, such as `routed` or `worker_lost`.
        text: in a sentence.
        now_us: when the owner applied or decided it.
        after_us: since the submission.
        topic: where it is recorded.
        offset: there.
        counted: whether it had any effect.
    """

    what: str
    text: str
    now_us: int | None
    after_us: int | None
    topic: str
    offset: int
    counted: bool = True


class Explanation(Told, frozen=True, kw_only=True):
    """One request's life.

    Attributes:
        request_id: whose it is.
        kind: a `request`, or a `query` of where one would go.
        state: where it is, or how it ended.
        earlier_uses: of the same id before this one; None when nobody looked.
        derived_from: the journal offset from which on all was derived again.
        derived_to: the first one that was not.
        submitted: what was asked for; None where the log does not say.
        held: in the router's queue; None when it was not.
        routings: each choice made for it.
        first_token: of the last attempt that had one.
        output_tokens: of the answer so far, as far as anybody said.
        ending: how it ended; None while it goes on.
        timeline: everything in order.
        unverified: what the derivation passed over, counted by a name of `forebay.replay.verify.verify.UNVERIFIED`.
        divergence: the first record that the events do not lead to; nothing that came after it is told here.
    """

    request_id: str
    kind: Kind
    state: State
    earlier_uses: int | None
    derived_from: int
    derived_to: int
    submitted: Submission | None
    held: Waiting | None
    routings: tuple[Routing, ...]
    first_token: FirstToken | None
    output_tokens: int | None
    ending: Ending | None
    timeline: tuple[Moment, ...]
    unverified: dict[str, int] = {}
    divergence: Divergent | None = None
