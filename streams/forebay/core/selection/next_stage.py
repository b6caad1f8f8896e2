"""Plan the next stage of a request: select a worker rank, or a place in the router's queue if no rank has room.

Every function only reads the world. `forebay.core.booking` books the returned plans. A plan has the cost table of the
pool whose rank is selected. Conditional disaggregation may compute the tables of a decode pool and its prefill pool,
and the plan keeps one of them.
"""

import msgspec

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, QueuePlan, StageCandidates
from forebay.core.selection.candidates import (
    find_candidates,
    find_hosts,
    find_retry_candidates,
    find_suspect_candidates,
    must_queue,
)
from forebay.core.selection.capacity import is_room_reserved, queue_capacity, ranks_with_room
from forebay.core.selection.disaggregation import locate_prompt, must_compute_locally, requires_remote_prefill
from forebay.core.selection.evaluation import count_uncached_tokens, evaluate
from forebay.core.selection.stages import as_decode_request, find_decode_candidates, find_encode_candidates
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.queue import class_of
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.decisions import AbortReason

CAUSE_CHARS_MAX = 500  # maximum length of a worker's error text in a journal record


class Options(msgspec.Struct, frozen=True, eq=False):
    """Candidates for a new request at this moment.

    Attributes:
        roster: ranks that may generate the response and have room; all eligible ranks if none has room.
        computing: ranks that may compute the prompt.
        should_queue: whether the request must be queued, because no candidate has room.
    """

    roster: Roster
    computing: StageCandidates | Plan
    should_queue: bool


def plan_new(world: World, pool: PoolConfigured, request: ActiveRequest) -> Plan | QueuePlan:
    """Select a rank for the first stage, or a place in the queue. Raises Ineligible if the request must be rejected."""
    try:
        options = find_options(world, pool, request)
    except Ineligible as ineligible:
        hosts = find_hosts(world, pool, request.submitted, ineligible)
        if hosts is None:
            hosts = find_suspect_candidates(world, pool, request.submitted, ineligible)
        return _plan_queueing(world, pool, request, hosts)
    if options.should_queue:
        return _plan_queueing(world, pool, request, options.roster)
    return plan_first_stage(world, pool, request, options)


def find_options(world: World, pool: PoolConfigured, request: ActiveRequest) -> Options:
    """Return the candidates for a new request. Raises Ineligible if no worker may take it."""
    eligible = find_candidates(world, pool, request.submitted)
    roster = ranks_with_room(pool, eligible)
    if roster is None or is_room_reserved(world, pool):
        return Options(eligible, locate_prompt(world, pool, request, eligible), should_queue=True)
    computing = locate_prompt(world, pool, request, roster)
    should_queue = must_queue(computing.pool, computing.roster)
    if computing.stage == "prefill":
        room = ranks_with_room(computing.pool, computing.roster)
        should_queue = should_queue or room is None
        if room is not None and room is not computing.roster:
            computing = StageCandidates(
                "prefill", computing.pool, room, computing.request, computing.attempt, computing.place, computing.pools
            )
    return Options(roster, computing, should_queue)


def plan_first_stage(world: World, pool: PoolConfigured, request: ActiveRequest, options: Options) -> Plan:
    """Select a rank for the first stage from `options`. Raises Ineligible if the policy failed or is not allowed.

    This is an encode worker if the request has images or videos and encode workers are ready.
    """
    return _plan_encode_or(options.computing, world, pool, request)


def plan_retry(world: World, pool: PoolConfigured, request: ActiveRequest) -> Plan:
    """Select a rank for an accepted request's next stage. Raises Ineligible if there is none or the policy failed."""
    if request.has_kept_kv(world.now_us):
        roster = find_decode_candidates(world, pool, request)
        roster = ranks_with_room(pool, roster) or roster
        return evaluate(
            world, StageCandidates("decode", pool, roster, as_decode_request(request.submitted), request.attempt)
        )
    roster = find_retry_candidates(world, pool, request.submitted, request.rejected_by)
    computing = locate_prompt(world, pool, request, ranks_with_room(pool, roster) or roster)
    return _plan_encode_or(computing, world, pool, request)


def find_exhausted_attempts(
    world: World, pool: PoolConfigured, request: ActiveRequest
) -> tuple[AbortReason, str] | None:
    """Return reason and message if a request must be aborted, because it has used up its attempts; otherwise None."""
    most, cause = pool.attempts_max, request.failure
    if request.attempt >= most and cause is None:
        return "attempts_exhausted", f"{request.attempt} workers of the request were lost, the maximum"
    no_remote_prefill = request.prefills >= most and requires_remote_prefill(world, pool, request)
    if request.attempt < most:
        if request.has_kept_kv(world.now_us) or must_compute_locally(world, pool, request):
            return None
        if not no_remote_prefill and (request.encodings < most or find_encode_candidates(world, pool, request) is None):
            return None
    if no_remote_prefill or request.stage in ("prefill", "decode"):
        attempts = max(request.attempt, request.prefills)
        why = (
            "prefill workers were lost, or no decode worker fetched the KV in time"
            if cause is None
            else _shorten(cause)
        )
        return "prefill_failed", f"remote prefill or its KV transfer failed in {attempts} attempts: {why}"
    attempts = max(request.attempt, request.encodings)
    why = "encode workers were lost" if cause is None else _shorten(cause)
    return "encode_failed", f"images or videos could not be encoded and fetched in {attempts} attempts: {why}"


def _plan_encode_or(
    computing: StageCandidates | Plan, world: World, pool: PoolConfigured, request: ActiveRequest
) -> Plan:
    """Select an encode worker if the request has media to encode, otherwise a worker that computes the prompt."""
    encode = None if must_compute_locally(world, pool, request) else find_encode_candidates(world, pool, request)
    candidates = encode or computing
    return candidates if isinstance(candidates, Plan) else evaluate(world, candidates)


def _plan_queueing(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> QueuePlan:
    """Return the place of a request in the queue, or why the queue does not take it."""
    tokens = count_uncached_tokens(world, pool, request.submitted, roster)
    kind = class_of(pool.router.queue, request.submitted.hints.policy_class, tokens)
    ahead = world.queues.length(pool.pool, kind)
    ready = world.roster(pool.pool)
    serving = ready if ready.ranks else roster  # without a ready rank, suspect ranks may serve the request later
    workers = len({candidate.worker.spec.worker_id: None for candidate in serving.ranks})
    bound, waiting = queue_capacity(pool, serving), world.queues.waiting(pool.pool)
    full = None
    most, tenant = kind.requests_per_worker_max * workers, request.submitted.tenant
    # A tenant that fills the queue does not keep others out: each tenant may queue its equal part of the limit.
    if ahead >= most and not world.queues.has_share(pool.pool, tenant, most, kind):
        full = Ineligible("queue_full", f"the queue class {kind.name} is full: {ahead} requests are queued")
    elif (
        bound is not None
        and waiting >= bound
        and not (request.submitted.patient or world.queues.has_share(pool.pool, tenant, bound))
    ):
        text = f"every worker is full, and so is the queue: {waiting} requests are queued"
        full = Ineligible("pool_full", text if bound else "every worker is full, and the pool queues no requests")
    timeout_s = pool.router.queue.timeout_s if kind.timeout_s is None else kind.timeout_s
    return QueuePlan(kind.name, tokens, ahead, timeout_s, full)


def _shorten(cause: str) -> str:
    return cause[:CAUSE_CHARS_MAX] or "the worker reported no reason"
