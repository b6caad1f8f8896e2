"""The parts that a life is told in: structs made from events and the world, and sentences for them."""

import msgspec

from forebay.core.routing.capacity import find_options
from forebay.core.routing.disaggregation import as_prefill_request, prefill_candidates
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.router import find_candidates, find_suspect_candidates, must_queue
from forebay.core.state.active_request import ActiveRequest, request_from_event, request_from_query
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.base import U64_BYTES, hex_digest
from forebay.events.decisions import KvReleased, PrefillPlace, RejectReason, RequestHeld
from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerRecovered, WorkerSuspect
from forebay.events.progress import PrefillFinished
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.replay.explain.choices import left_out
from forebay.replay.explain.explanation import FirstToken, LeftOut, Routing, Submission, Waiting

KEPT_OUT = frozenset({"busy", "no_workers", "no_eligible_worker", "unknown_worker"})  # refusals by who may take it

SENT = {"encode": "sent to be encoded", "prefill": "sent to be prefilled", "decode": "sent to be decoded"}

Asked = RequestSubmitted | RouteQueried


def as_submission(event: Asked, offset: int, now_us: int | None) -> Submission:
    """What was asked for, by its event; `now_us` is None while no owner applied it."""
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


def of_request(request: ActiveRequest, model: str) -> Submission:
    """What was asked for, as far as a state remembers it."""
    return Submission(
        offset=request.offset,
        now_us=None,
        wall_us=0,
        model=model,
        lora_name=request.lora_name,
        prompt_tokens=request.prompt_tokens,
        full_blocks=len(request.blocks),
        max_tokens=None,
        timeout_us=None,
        due_us=request.due_us,
        tie_seed=hex_digest(request.tie_seed),
        hints=msgspec.to_builtins(request.hints),
        anonymised=False,
    )


def waiting_of(world: World, offset: int, now_us: int, record: RequestHeld) -> Waiting:
    """Why a request waits; call it while it does."""
    request = world.requests.get(record.request_id)
    pool = world.pools[record.pool]
    assert request is not None, "who is held is under way"
    try:
        placement = find_options(world, pool, request)
    except Ineligible as ineligible:
        suspects = find_suspect_candidates(world, pool, request, ineligible)
        return _waiting_for_suspects(suspects, offset, now_us, record)
    computing, among = prefill_candidates(pool, placement.roster, placement.prefill)
    threshold = computing.router.queue.threshold
    if threshold is not None and must_queue(computing, among):
        least = min(
            among.ranks,
            key=lambda candidate: candidate.load.prefill_tokens / candidate.worker.spec.max_num_batched_tokens,
        )
    else:
        threshold = None
        least = min(among.ranks, key=lambda candidate: candidate.load.active_requests)
    return Waiting(
        offset=offset,
        now_us=now_us,
        pool=record.pool,
        queue_class=record.queue_class,
        ahead=record.ahead,
        uncached_tokens=record.uncached_tokens,
        threshold=threshold,
        least=f"{least.worker.spec.worker_id}/{least.rank}",
        least_prefill_tokens=least.load.prefill_tokens,
        least_limit_tokens=(threshold or 0.0) * least.worker.spec.max_num_batched_tokens,
        least_requests=least.load.active_requests,
    )


def _waiting_for_suspects(suspects: Roster, offset: int, now_us: int, record: RequestHeld) -> Waiting:
    """Explain a request that only suspect workers may take."""
    return Waiting(
        offset=offset,
        now_us=now_us,
        pool=record.pool,
        queue_class=record.queue_class,
        ahead=record.ahead,
        uncached_tokens=record.uncached_tokens,
        threshold=None,
        least="",
        least_prefill_tokens=0,
        least_limit_tokens=0.0,
        suspects=tuple(dict.fromkeys(candidate.worker.spec.worker_id for candidate in suspects.ranks)),
    )


def kept_out(world: World, event: Asked | None, reason: RejectReason) -> tuple[LeftOut, ...]:
    """What kept each rank of the pool from taking a request that was just refused."""
    pool = None if event is None else world.pool_of(event.model)
    if event is None or pool is None or reason not in KEPT_OUT:
        return ()
    if isinstance(event, RequestSubmitted):
        request = request_from_event(event, pool.pool, 0, world.now_us)
    else:
        request = request_from_query(event, pool.pool)
    try:
        find_candidates(world, pool, request)
    except Ineligible:
        return left_out(world, pool, request, ())
    # Somebody could answer it, and nobody compute its prompt.
    others = (one for _, one in sorted(world.pools.items()) if one.model == pool.model and one.role == "prefill")
    return tuple(rank for one in others for rank in left_out(world, one, as_prefill_request(request, one.pool), ()))


def held_text(held: Waiting) -> str:
    """That it waits, and what for."""
    if held.suspects:
        text = f"held in the queue of class {held.queue_class}, behind {held.ahead}: only suspect workers may take it"
        return f"{text}: {', '.join(held.suspects)}"
    if held.threshold is None:
        load = f"is full, with {held.least_requests:,} requests"
    else:
        load = f"has {held.least_prefill_tokens:,} tokens to prefill, more than {held.least_limit_tokens:,.0f}"
    text = f"held in the queue of class {held.queue_class}, behind {held.ahead}: even {held.least} {load}"
    return f"{text}; {held.uncached_tokens:,} tokens of the prompt are cached nowhere"


def routed_text(routing: Routing) -> str:
    """Where it goes, and why."""
    seen = routing.candidates[routing.winner].seen
    where = f"{seen.worker_id}/{seen.rank}" if any(one.seen.rank for one in routing.candidates) else seen.worker_id
    place = "" if routing.prefill is None else f"; {place_text(routing.prefill)}"
    if not routing.attempt:
        would = "it would be held first, and then go to" if routing.would_wait else "it would go to"
        return f"{would} {where}: {routing.why}{place}"
    again = f"attempt {routing.attempt}, " if routing.attempt > 1 else ""
    sent = SENT.get(routing.stage, "routed")
    waited = f" after {routing.waited_us / 1e6:.3f} s in the queue" if routing.waited_us else ""
    return f"{again}{sent} to {where}{waited}: {routing.why}{place}"


def place_text(place: PrefillPlace) -> str:
    """Who computes the prompt, and why."""
    tokens, requests = place.uncached_tokens or 0, place.prefill_waiting
    uncached = "1 token of it is not cached" if tokens == 1 else f"{tokens:,} tokens of it are not cached"
    wait = "1 request waits" if requests == 1 else f"{requests or 0:,} requests wait"
    waiting = "" if requests is None else f", {wait} at prefill workers"
    why = {
        "always": "as every prompt is",
        "never": "as no prompt is computed remotely",
        "long_prompt": f"{uncached} where it would be answered, which is too many{waiting}",
        "short_prompt": f"only {uncached}" if tokens else "all of it is cached",
        "uncached_prompt": f"{uncached} where it would be answered, which is too large a share of it",
        "prefill_idle": "the prefill worker that gets it is not busy",
        "prefill_busy": f"prefill workers are busy{waiting}",
        "decode_busy": "the decode worker that would get it is busy",
        "no_prefill_worker": "no prefill worker may take it",
        "failed": "what was tried before failed, and this attempt depends on nobody else",
        "begun": "its answer has begun, and only goes on",
    }[place.reason]
    return f"its prompt is computed {'remotely' if place.remote else 'where it is answered'}: {why}"


def prefilled_text(event: PrefillFinished) -> str:
    """What a prefill worker computed and keeps."""
    kept = event.prefilled
    lies = f", {kept.bytes:,} bytes" if kept.bytes else ""
    cached = f", {kept.cached_tokens:,} of them from its cache" if kept.cached_tokens else ""
    held = f"it keeps their KV{lies} for {kept.lease_us / 1e6:g} s"
    return f"its prompt is computed by {event.worker_id}: {kept.tokens:,} tokens{cached}; {held}"


def released_text(record: KvReleased) -> str:
    """Who gives back what it kept of the prompt, and why."""
    why = {
        "worker_lost": "the worker that was to fetch it is lost",
        "not_fetched": "it could not be fetched",
        "not_needed": "its answer had begun, and went on without it",
        "request_ended": "the request ended without it",
        "lease_over": "nobody could be sent for it in time",
        "foreign_descriptor": "what was told of it is of another worker, epoch or model",
    }[record.reason]
    return f"{record.holder.worker_id} gives back the KV of attempt {record.attempt}: {why}"


def first_token_text(first: FirstToken, prompt_tokens: int | None) -> str:
    """What the engine had cached or fetched, against what was expected."""
    of_prompt = "" if prompt_tokens is None else f" of {prompt_tokens:,}"
    if first.transferred_bytes:
        fetched = f"{first.transferred_bytes:,} bytes of KV fetched in {first.transfer_us / 1e3:,.1f} ms"
        return f"first token from {first.worker_id}: {first.cached_tokens:,}{of_prompt} not computed here, {fetched}"
    expected = "" if first.predicted_tokens is None else f", the router expected {first.predicted_tokens:,}"
    return f"first token from {first.worker_id}: {first.cached_tokens:,}{of_prompt} prompt tokens were cached{expected}"


def worker_text(event: WorkerFact) -> tuple[str, str]:
    """What happened to its worker, in a word and in a sentence."""
    because = f" ({event.reason})" if event.reason else ""
    match event:
        case WorkerSuspect():
            return "worker_suspect", f"its worker {event.worker_id} is suspect{because}: it gets nothing new"
        case WorkerRecovered():
            return "worker_recovered", f"its worker {event.worker_id} is back{because}"
        case WorkerDraining():
            return "worker_draining", f"its worker {event.worker_id} is draining{because}: it gets nothing new"
        case _:
            return "worker_lost", f"its worker {event.worker_id} is lost{because}"
