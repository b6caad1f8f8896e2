"""Create the parts of a timeline from events and the world, and describe them in sentences."""

import msgspec

from forebay.core.routing.candidates import find_candidates, find_suspect_candidates, must_queue
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.planner import find_options
from forebay.core.routing.stages import as_prefill_request
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.submitted_request import request_from_event, request_from_query
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import U64_BYTES, hex_digest
from forebay.events.decisions import KvReleased, OwnerClaimed, RequestHeld, RequestRejected, RouteAnswered
from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerRecovered, WorkerSuspect
from forebay.events.pools import PoolChoice, SkipReason
from forebay.events.prefill import PrefillPlace
from forebay.events.progress import FirstTokenEmitted, PrefillFinished
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.events.transfer import Prefilled
from forebay.replay.explain.choices import left_out
from forebay.replay.explain.explanation import ExcludedRank, FirstTokenTiming, QueueWait, Routing, Submission
from forebay.replay.explain.token_sources import onboarded_text, saved_us, tokens_by_source
from forebay.transport.history.release import rules_text

ELIGIBILITY_REJECTIONS = frozenset(
    {"busy", "no_workers", "no_eligible_worker", "unknown_worker"}
)  # rejections because no worker rank is eligible

SENT = {"encode": "encode sent", "prefill": "prefill sent", "decode": "decode sent"}

SKIPPED: dict[SkipReason, str] = {
    "unknown": "is no pool of the model",
    "drained": "is drained",
    "block_size": "has blocks of another size",
    "no_workers": "has no ready worker",
    "no_eligible_worker": "has no eligible worker",
    "busy": "has only busy workers",
    "full": "is full",
    "failed": "had the failed attempt",
}

SubmissionEvent = RequestSubmitted | RouteQueried


def submission_of_event(event: SubmissionEvent, offset: int, now_us: int | None) -> Submission:
    """Return the submission that an event describes; `now_us` is None if no owner has applied the event yet."""
    timeout_us = event.timeout_us if isinstance(event, RequestSubmitted) else None
    return Submission(
        offset=offset,
        now_us=now_us,
        wall_us=event.at_us,
        model=event.model,
        lora_name=event.lora_name,
        prompt_tokens=event.prompt_tokens,
        full_blocks=len(event.sequence_hashes) // U64_BYTES,
        max_tokens=event.sampling.max_tokens if isinstance(event, RequestSubmitted) else None,
        timeout_us=timeout_us,
        due_us=None if timeout_us is None or now_us is None else now_us + timeout_us,
        tie_seed=hex_digest(event.tie_seed),
        hints=msgspec.to_builtins(event.routing),
        anonymised=isinstance(event, RequestSubmitted) and event.withheld_tokens > 0,
    )


def submission_of_state(request: ActiveRequest, model: str) -> Submission:
    """Return the submission of an active request. Facts that the request's state does not hold are None, 0 or False."""
    return Submission(
        offset=request.submitted.offset,
        now_us=None,
        wall_us=0,
        model=model,
        lora_name=request.submitted.lora_name,
        prompt_tokens=request.submitted.prompt_tokens,
        full_blocks=len(request.submitted.blocks),
        max_tokens=None,
        timeout_us=None,
        due_us=request.submitted.due_us,
        tie_seed=hex_digest(request.submitted.tie_seed),
        hints=msgspec.to_builtins(request.submitted.hints),
        anonymised=False,
    )


def queue_wait_of(world: World, offset: int, now_us: int, record: RequestHeld) -> QueueWait:
    """Return why a request was held in the queue, from the state right after that decision."""
    request = world.requests.get(record.request_id)
    pool = world.pools[record.pool]
    assert request is not None, "a held request is active"
    wait = QueueWait(
        offset=offset,
        now_us=now_us,
        pool=record.pool,
        queue_class=record.queue_class,
        ahead=record.ahead,
        uncached_tokens=record.uncached_tokens,
    )
    try:
        among = find_options(world, pool, request).computing
    except Ineligible as ineligible:
        ranks = find_suspect_candidates(world, pool, request.submitted, ineligible).ranks
        suspects = tuple(dict.fromkeys(candidate.worker.spec.worker_id for candidate in ranks))
        return msgspec.structs.replace(wait, suspects=suspects)
    ranks, threshold = among.roster.ranks, among.pool.router.queue.threshold
    if threshold is not None and must_queue(among.pool, among.roster):
        least = min(
            ranks,
            key=lambda candidate: candidate.load.prefill_tokens / candidate.worker.spec.max_num_batched_tokens,
        )
    else:
        threshold = None
        least = min(ranks, key=lambda candidate: candidate.load.active_requests)
    return msgspec.structs.replace(
        wait,
        threshold=threshold,
        least=f"{least.worker.spec.worker_id}/{least.rank}",
        least_prefill_tokens=least.load.prefill_tokens,
        least_limit_tokens=(threshold or 0.0) * least.worker.spec.max_num_batched_tokens,
        least_requests=least.load.active_requests,
    )


def excluded_ranks(
    world: World, event: SubmissionEvent | None, record: RequestRejected | RouteAnswered
) -> tuple[ExcludedRank, ...]:
    """Return the ranks that could not take a request that was just rejected, with the reasons.

    Returns nothing if eligibility was not the reason of the rejection.
    """
    pool = None if event is None else world.pool_of(event.model)
    if event is None or pool is None or record.reason not in ELIGIBILITY_REJECTIONS:
        return ()
    if record.pools:
        pool = world.pools[record.pools[0].pool]
    if isinstance(event, RequestSubmitted):
        request = request_from_event(event, pool.pool, 0, world.now_us)
    else:
        request = request_from_query(event, pool.pool)
    try:
        find_candidates(world, pool, request)
    except Ineligible:
        return left_out(world, pool, request, ())
    # A decode worker is eligible, so the prefill pools caused the rejection.
    others = (one for _, one in sorted(world.pools.items()) if one.model == pool.model and one.role == "prefill")
    return tuple(rank for one in others for rank in left_out(world, one, as_prefill_request(request, one.pool), ()))


def choice_text(choice: PoolChoice, prompt_tokens: int | None) -> str:
    """Return a sentence that names the pool that was chosen, and says why."""
    wanted = choice.wanted
    why = {
        "first": f"{wanted} is the first pool by name",
        "grid": f"the grid names {wanted}",
        "override": f"the priority of the request selects {wanted}",
        "canary": f"{wanted} is a canary of {choice.base}, and the request belongs to its share",
        "worker": f"{wanted} has the worker that the request names",
        "session": f"{wanted} has the rank that serves the session",
        "retry": f"{wanted} is faster than the pool of the failed attempt",
        "moved": f"the request leaves {wanted}",
    }[choice.reason]
    if choice.row is not None and choice.target_ms is not None:
        tokens = "" if prompt_tokens is None else f"{prompt_tokens:,} prompt tokens and "
        why += f" (row {choice.row}, column {choice.column}: {tokens}a latency target of {choice.target_ms:,.6g} ms)"
    skipped = "; ".join(f"{one.pool} {SKIPPED[one.reason]}" for one in choice.skipped)
    what = "prefill pool" if choice.role == "prefill" else "pool"
    return f"{what} {choice.pool}: {why}" + (f"; {skipped}" if skipped else "")


def held_text(held: QueueWait) -> str:
    """Return a sentence that says where the request waits, and why."""
    if held.suspects:
        text = f"held in queue class {held.queue_class}, {held.ahead} requests ahead: only suspect workers are eligible"
        return f"{text}: {', '.join(held.suspects)}"
    if held.threshold is None:
        load = f"is full with {held.least_requests:,} active requests"
    else:
        load = f"has {held.least_prefill_tokens:,} tokens to prefill, limit {held.least_limit_tokens:,.0f}"
    text = f"held in queue class {held.queue_class}, {held.ahead} requests ahead"
    text = f"{text}: {held.least}, the least loaded rank, {load}"
    return f"{text}; {held.uncached_tokens:,} prompt tokens are not cached on any rank"


def routed_text(routing: Routing) -> str:
    """Return a sentence that names the selected rank and the reason."""
    seen = routing.candidates[routing.winner].seen
    where = f"{seen.worker_id}/{seen.rank}" if any(one.seen.rank for one in routing.candidates) else seen.worker_id
    place = "" if routing.prefill is None else f"; {place_text(routing.prefill)}"
    if not routing.attempt:
        would = "would be held, then routed to" if routing.would_wait else "would be routed to"
        return f"{would} {where}: {routing.why}{place}"
    again = f"attempt {routing.attempt}, " if routing.attempt > 1 else ""
    sent = SENT.get(routing.stage, "routed")
    waited = f" after {routing.waited_us / 1e6:.3f} s in the queue" if routing.waited_us else ""
    return f"{again}{sent} to {where}{waited}: {routing.why}{place}"


def place_text(place: PrefillPlace) -> str:
    """Return a sentence that says where the prompt is computed, and why."""
    tokens, requests = place.uncached_tokens or 0, place.prefill_waiting
    uncached = "1 token is not cached" if tokens == 1 else f"{tokens:,} tokens are not cached"
    wait = "1 request waits" if requests == 1 else f"{requests or 0:,} requests wait"
    waiting = "" if requests is None else f"; {wait} at prefill workers"
    why = {
        "always": "the pool computes every prompt remotely",
        "never": "the pool computes no prompt remotely",
        "long_prompt": f"{uncached} on the decode worker, which is above the limit{waiting}",
        "short_prompt": f"only {uncached}" if tokens else "the whole prompt is cached",
        "uncached_prompt": f"{uncached} on the decode worker, a share above the limit",
        "prefill_idle": "the selected prefill worker is not busy",
        "prefill_busy": f"prefill workers are busy{waiting}",
        "decode_busy": "the selected decode worker is busy",
        "no_prefill_worker": "no prefill worker is eligible",
        "failed": "the previous attempt failed, so this one does not depend on another worker",
        "begun": "the response has already begun and only continues",
    }[place.reason]
    return f"prompt computed {'by a prefill worker' if place.remote else 'on the decode worker'}: {why}"


def prefilled_text(world: World, event: PrefillFinished) -> str:
    """Return a sentence about the KV that a prefill worker computed and keeps."""
    kept = event.prefilled
    size = f", {kept.bytes:,} bytes" if kept.bytes else ""
    cached = f", {kept.cached_tokens:,} of them from its cache" if kept.cached_tokens else ""
    lease = f"it keeps their KV{size} for {kept.lease_us / 1e6:g} s"
    loaded = onboarded_text(event.onboarded, saved_us(world, event.worker_id, kept.rank, event.onboarded))
    return f"{event.worker_id} computed its prompt: {kept.tokens:,} tokens{cached}{loaded}; {lease}"


def released_text(record: KvReleased) -> str:
    """Return a sentence that says which worker releases the KV of a prompt, and why."""
    why = {
        "worker_lost": "the worker that should fetch it is lost",
        "not_fetched": "it could not be fetched",
        "not_needed": "the response had begun and continued without it",
        "request_ended": "the request ended without it",
        "lease_over": "no worker could fetch it before the lease expired",
        "foreign_descriptor": "its descriptor names another worker, epoch or model",
    }[record.reason]
    return f"{record.holder.worker_id} releases the KV of attempt {record.attempt}: {why}"


def takeover_text(claim: OwnerClaimed) -> str:
    """Return a sentence about a claim, with the rules of the owner if this program has other ones."""
    is_own = claim.core_version == CORE_VERSION
    rules = "" if is_own else f", with {rules_text(claim.core_version, claim.release)}"
    return f"router {claim.owner_id} takes over the group{rules}"


def first_token_of(
    world: World,
    event: FirstTokenEmitted,
    routing: Routing | None,
    prompt_tokens: int | None,
    kept: Prefilled | None,
) -> FirstTokenTiming:
    """Return what is known about the tokens of a prompt at its first output token. The caller fills in the times.

    Args:
        world: state when the owner applied the event.
        routing: routing decision of the attempt; None if it is unknown.
        prompt_tokens: length of the prompt; None if it is unknown.
        kept: the KV that a prefill worker kept for the request; None if there was none.
    """
    predicted, saved = None, None
    if routing is not None:
        seen = routing.candidates[routing.winner].seen
        saved = saved_us(world, event.worker_id, seen.rank, event.onboarded)
        if routing.stage != "decode" and prompt_tokens is not None:
            predicted = min(seen.device_overlap * routing.block_size, prompt_tokens)
    return FirstTokenTiming(
        attempt=event.attempt,
        worker_id=event.worker_id,
        ttft_us=None,
        wall_ttft_us=None,
        cached_tokens=event.cached_tokens,
        predicted_tokens=predicted,
        transferred_bytes=event.transferred_bytes,
        transfer_us=event.transfer_us,
        sources=tokens_by_source(event, prompt_tokens, kept),
        loads_us={one.tier: one.us for one in event.onboarded},
        saved_us=saved,
    )


def first_token_text(first: FirstTokenTiming, event: FirstTokenEmitted, prompt_tokens: int | None) -> str:
    """Return a sentence that compares the cached or fetched tokens with the router's expectation."""
    of_prompt = "" if prompt_tokens is None else f" of {prompt_tokens:,}"
    loaded = onboarded_text(event.onboarded, first.saved_us)
    if first.transferred_bytes:
        fetched = f"{first.transferred_bytes:,} bytes of KV fetched in {first.transfer_us / 1e3:,.1f} ms"
        tokens = f"{first.cached_tokens:,}{of_prompt} prompt tokens not computed here"
        return f"first token from {first.worker_id}: {tokens}, {fetched}{loaded}"
    expected = "" if first.predicted_tokens is None else f", the router expected {first.predicted_tokens:,}"
    cached = f"{first.cached_tokens:,}{of_prompt} prompt tokens were cached"
    return f"first token from {first.worker_id}: {cached}{expected}{loaded}"


def worker_text(event: WorkerFact) -> tuple[str, str]:
    """Return what happened to the request's worker, as an identifier and as a sentence."""
    because = f" ({event.reason})" if event.reason else ""
    match event:
        case WorkerSuspect():
            return "worker_suspect", f"its worker {event.worker_id} is suspect{because}: it gets no new requests"
        case WorkerRecovered():
            return "worker_recovered", f"its worker {event.worker_id} has recovered{because}"
        case WorkerDraining():
            return "worker_draining", f"its worker {event.worker_id} is draining{because}: it gets no new requests"
        case _:
            return "worker_lost", f"its worker {event.worker_id} is lost{because}"
