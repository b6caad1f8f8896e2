"""Dispatch requests: plan with the current state (`selection.next_stage`), then book the plan (`booking`)."""

from msgspec.structs import replace

from forebay.core.booking import abort, answer_query, book, enqueue, reject, release_kv
from forebay.core.routing.eligibility import Ineligible, filter_eligible
from forebay.core.routing.plan import Plan, StageCandidates, with_choices
from forebay.core.selection.evaluation import evaluate
from forebay.core.selection.next_stage import (
    Options,
    find_exhausted_attempts,
    find_options,
    plan_first_stage,
    plan_new,
    plan_retry,
)
from forebay.core.selection.pool_selection import choose_other_pool, choose_pool, choose_pool_of_queued, has_candidates
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.queue import QueuedRequest
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.state.submitted_request import content_hash, in_pool, request_from_event, request_from_query
from forebay.core.world import Stamp, World
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    AdapterPlaced,
    CacheResyncRequested,
    CommandEnded,
    CommandSent,
    KvReleased,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.pools import PoolChoice
from forebay.events.progress import AttemptMoved, AttemptRejected
from forebay.events.requests import RequestResumed, RequestSubmitted, RouteQueried
from forebay.events.versions import CALLS_SINCE, TENANTS_SINCE, may_write

# Queued requests routed per pool and event, which takes about ten milliseconds. The owner routes more of them when it
# applies the progress events of these requests.
DRAIN_MAX = 64

AnyDecision = (
    RequestRouted
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
)


def submit(world: World, event: RequestSubmitted, offset: int) -> list[AnyDecision]:
    """Route, queue or reject a new request, or locate the earlier request with its idempotency key.

    Return one journal record, or none if the request was already submitted.
    """
    if event.task == "call" and world.owner_events < CALLS_SINCE:
        return []  # this program can decode the event, but the owner could not
    requests = world.requests
    known = requests.known_content(event.request_id)
    if known is not None:
        if known == content_hash(event):
            world.counts["duplicate_request"] += 1
            return []
        message = f"the request id {event.request_id} was already used for a different request"
        return [reject(world, event, Ineligible("duplicate_id", message))]
    if event.idempotency_key and not may_write(RequestResumed, world.owner_events):
        event = replace(event, idempotency_key=0)  # the owner did not know the field
    if event.delivery == "external" and not may_write(AttemptMoved, world.owner_events):
        event = replace(event, delivery="worker", routing=replace(event.routing, endpoints=()))  # likewise
    if event.tenant and world.owner_events < TENANTS_SINCE:
        event = replace(event, tenant="", weight=1)  # likewise
    earlier = requests.known_offset(event.idempotency_key)
    if earlier is not None:
        world.counts["repeated_request"] += 1
        return [
            RequestRepeated(
                **world.stamp(),
                request_id=event.request_id,
                reply_slot=event.reply_slot,
                reply_key=event.reply_key,
                offset=earlier,
            )
        ]
    pools: tuple[PoolChoice, ...] = ()
    try:
        first = _pool_of(world, event.model)
        if len(requests) >= ACTIVE_REQUESTS_MAX:
            raise Ineligible("overloaded", f"{len(requests)} requests are in flight, the maximum of a group")
        submitted = request_from_event(event, first.pool, offset, world.now_us)
        pool, choice = choose_pool(world, first, submitted)
        pools = () if choice is None else (choice,)
        request = ActiveRequest(in_pool(submitted, pool.pool))
        plan = with_choices(plan_new(world, pool, request), pools)
    except Ineligible as ineligible:
        return [reject(world, event, ineligible, pools)]
    if isinstance(plan, Plan):
        return [book(world, request, plan)]
    if event.lora_name:
        world.replan()  # the owner may have to load the adapter
    return [enqueue(world, pool, request, plan)]


def query(world: World, event: RouteQueried, stamp: Stamp) -> RouteAnswered:
    """Return where a request would be routed now, as a journal record with this stamp. Only reads the world."""
    pools: tuple[PoolChoice, ...] = ()
    try:
        first = _pool_of(world, event.model)
        submitted = request_from_query(event, first.pool)
        pool, choice = choose_pool(world, first, submitted)
        pools = () if choice is None else (choice,)
        request = ActiveRequest(in_pool(submitted, pool.pool))
        options = find_options(world, pool, request)
        plan = with_choices(plan_first_stage(world, pool, request, options), pools)
    except Ineligible as ineligible:
        return RouteAnswered(
            **stamp,
            request_id=event.request_id,
            reply_slot=event.reply_slot,
            reply_key=event.reply_key,
            reason=ineligible.reason,
            message=str(ineligible),
            pools=pools,
        )
    return answer_query(world, event, stamp, plan, would_wait=options.should_queue)


def drain_queues(world: World) -> list[AnyDecision]:
    """Route the queued requests of all pools that can be dispatched now, in queue order. Return the decisions.

    A request whose pool is drained or has no ready worker moves to another pool once that pool has room.
    """
    decided: list[AnyDecision] = []
    if not len(world.queues):  # the usual case, checked for most events
        return decided
    options: dict[str, tuple[Options, PoolChoice | None]] = {}

    def is_dispatchable(queued: QueuedRequest) -> bool:
        request = _queued_request(world, queued)
        other = choose_pool_of_queued(world, request)
        for choice in (None,) if other is None else (other, None):
            view = request if choice is None else ActiveRequest(in_pool(request.submitted, choice.pool))
            try:
                found = find_options(world, world.pools[view.submitted.pool], view)
            except Ineligible:
                continue  # the request waits until the fleet changes or its deadline passes
            if not found.should_queue:
                options[queued.request_id] = found, choice
                return True
        return False

    for name in sorted(world.pools):
        for _ in range(min(DRAIN_MAX, world.queues.waiting(name))):
            queued = world.queues.serve(name, is_dispatchable)
            if queued is None:
                break
            decided.append(_serve(world, _queued_request(world, queued), *options[queued.request_id]))
            options.clear()
    return decided


def reroute(world: World, requests: list[ActiveRequest]) -> list[AnyDecision]:
    """Route accepted requests in the phase `waiting` to their next stage. Return the decisions.

    A request without an eligible worker continues to wait. A request that has used up its attempts is aborted. Limits
    of the queue do not apply again.
    """
    for request in requests:
        if request.prefilled is not None and not request.has_kept_kv(world.now_us):
            world.requests.expire_prefilled(request)
    decided: list[AnyDecision] = [*release_kv(world)]
    for request in requests:
        exhausted = find_exhausted_attempts(world, world.pools[request.submitted.pool], request)
        request.failure = None
        if exhausted is not None:
            decided.append(abort(world, request, *exhausted))
            continue
        choice = choose_other_pool(world, request)
        if choice is not None:
            world.requests.move(request, choice.pool)
        try:
            plan = plan_retry(world, world.pools[request.submitted.pool], request)
        except Ineligible:
            world.adapters.strand(request)
            continue  # an eligible worker may still join before the deadline
        decided.append(book(world, request, with_choices(plan, () if choice is None else (choice,))))
    return decided


def move(world: World, request: ActiveRequest, endpoint: str) -> list[AnyDecision]:
    """Book an external request at the worker whose server has it, or abort it if no ready worker has this server."""
    pool = world.pools[request.submitted.pool]
    chosen = {"worker_id": "", "rank": None, "allowed_workers": (), "required_taints": (), "endpoints": (endpoint,)}
    view = replace(request.submitted, hints=replace(request.submitted.hints, **chosen))
    try:
        roster = filter_eligible(world.roster(pool.pool), world.fleet, pool, view)
        plan = evaluate(world, StageCandidates("aggregated", pool, roster, view, request.attempt))
    except Ineligible as ineligible:
        return [abort(world, request, "worker_refused", f"the gateway used the server {endpoint}: {ineligible}")]
    return [book(world, request, plan)]


def handle_rejection(world: World, request: ActiveRequest, event: AttemptRejected) -> list[AnyDecision]:
    """Replan or abort a request, because its worker has rejected it. Return the decisions.

    If no other worker may take the request, or it has used up its attempts, its client gets the error of the worker.
    The client of an external request has this error already.
    """
    world.counts["attempts_rejected"] += 1
    world.fleet.reject(event.worker_id, world.now_us, event.retry_after_s)
    pool = world.pools[request.submitted.pool]
    is_exhausted = find_exhausted_attempts(world, pool, request) is not None
    # A prompt that no prefill worker takes can be computed by the decode worker.
    have_others = request.stage == "prefill" or has_candidates(world, pool, request.submitted, request.rejected_by)
    may_retry = not is_exhausted and not request.submitted.is_external
    if may_retry and (have_others or choose_other_pool(world, request) is not None):
        world.replan([request])
        return []
    answer = event.error, event.status, event.code, event.retry_after_s
    return [abort(world, request, "worker_refused", *answer)]


def handle_worker_loss(world: World, worker: FleetWorker) -> list[AnyDecision]:
    """Remove a lost worker from the state, and replan its requests, in order of submission. Return the decisions.

    Requests that may only run on this worker are aborted: those whose hint names it, and external ones, which a gateway
    has sent to its server. The hint does not matter once the gateway used the server of another worker.
    """
    stranded = world.requests.of_worker(worker.spec.worker_id, worker.worker_epoch)
    for request in stranded:
        world.requests.lose_worker(request)
        world.load.free(request.submitted.request_id)
    for request in world.requests.waiting_with_kv_of(worker.spec.worker_id, worker.worker_epoch):
        world.requests.forget_prefilled(request)
    world.dismiss(worker)
    aborted: list[AnyDecision] = []
    for request in world.requests.pinned_to(worker.spec.worker_id):
        if request.submitted.is_external and request.on_worker:
            continue
        message = f"worker {worker.spec.worker_id} was lost, and the request is pinned to it"
        aborted.append(abort(world, request, "pinned_worker_lost", message))
    movable = [one for one in stranded if one.submitted.hints.worker_id != worker.spec.worker_id]
    for request in movable:
        if request.submitted.is_external:
            message = f"worker {worker.spec.worker_id} was lost, and the gateway had sent the request to its server"
            aborted.append(abort(world, request, "pinned_worker_lost", message))
    world.replan(one for one in movable if not one.submitted.is_external)
    return [*aborted, *release_kv(world)]


def _pool_of(world: World, model: str) -> PoolConfigured:
    if not world.pools:
        raise Ineligible("no_workers", "no worker has joined yet")
    pool = world.pool_of(model)
    if pool is None:
        raise Ineligible("wrong_model", f"no pool serves the model {model}")
    return pool


def _serve(
    world: World, request: ActiveRequest, options: Options, choice: PoolChoice | None
) -> RequestRouted | RequestRejected:
    """Route a request that has left its queue. `choice` is the pool to which it moves; None if it stays in its pool."""
    pools = () if choice is None else (choice,)
    if choice is not None:
        world.requests.move(request, choice.pool)
    try:
        plan = plan_first_stage(world, world.pools[request.submitted.pool], request, options)
    except Ineligible as ineligible:
        world.requests.end(request, world.now_us)
        return reject(world, request.submitted, ineligible, pools)
    return book(world, request, with_choices(plan, pools))


def _queued_request(world: World, queued: QueuedRequest) -> ActiveRequest:
    request = world.requests.get(queued.request_id)
    assert request is not None, "a queued request is active"
    return request
