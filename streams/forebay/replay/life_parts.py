"""The parts that a life is told in: structs made from events and the world, and sentences for them."""

import msgspec

from forebay.core.lifecycle import Request, queried, submitted
from forebay.core.router import find
from forebay.core.world import World
from forebay.events.base import U64_BYTES, hex_digest
from forebay.events.decisions import RejectReason, RequestHeld
from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerRecovered, WorkerSuspect
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.replay.choices import left_out
from forebay.replay.explanation import FirstToken, LeftOut, Routing, Submission, Waiting

KEPT_OUT = frozenset({"busy", "no_workers", "no_eligible_worker", "unknown_worker"})  # refusals by who may take it

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


def of_request(request: Request, model: str) -> Submission:
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
    threshold = pool.router.queue.threshold
    assert request is not None, "who is held is under way"
    assert threshold is not None, "without a threshold nobody is held"
    seats = find(world, pool, request).seats
    least = min(seats, key=lambda seat: seat.load.prefill_tokens / seat.worker.spec.max_num_batched_tokens)
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
        least_limit_tokens=threshold * least.worker.spec.max_num_batched_tokens,
    )


def kept_out(world: World, event: Asked | None, reason: RejectReason) -> tuple[LeftOut, ...]:
    """What kept each rank of the pool from taking a request that was just refused."""
    pool = None if event is None else world.pool_of(event.model)
    if event is None or pool is None or reason not in KEPT_OUT:
        return ()
    if isinstance(event, RequestSubmitted):
        request = submitted(event, pool.pool, 0, world.now_us)
    else:
        request = queried(event, pool.pool)
    return left_out(world, pool, request, ())


def held_text(held: Waiting) -> str:
    """That it waits, and what for."""
    load = f"{held.least_prefill_tokens:,} tokens to prefill, more than {held.least_limit_tokens:,.0f}"
    text = f"held in the queue of class {held.queue_class}, behind {held.ahead}: even {held.least} has {load}"
    return f"{text}; {held.uncached_tokens:,} tokens of the prompt are cached nowhere"


def routed_text(routing: Routing) -> str:
    """Where it goes, and why."""
    seen = routing.candidates[routing.winner].seen
    where = f"{seen.worker_id}/{seen.rank}" if any(one.seen.rank for one in routing.candidates) else seen.worker_id
    if not routing.attempt:
        would = "it would be held first, and then go to" if routing.would_wait else "it would go to"
        return f"{would} {where}: {routing.why}"
    again = f"attempt {routing.attempt}, " if routing.attempt > 1 else ""
    sent = "sent to be encoded" if routing.stage == "encode" else "routed"
    waited = f" after {routing.waited_us / 1e6:.3f} s in the queue" if routing.waited_us else ""
    return f"{again}{sent} to {where}{waited}: {routing.why}"


def first_token_text(first: FirstToken, prompt_tokens: int | None) -> str:
    """What the engine had cached, against what was expected."""
    of_prompt = "" if prompt_tokens is None else f" of {prompt_tokens:,}"
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
