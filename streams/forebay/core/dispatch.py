"""Decide about requests: route, queue, reject, abort, or move them to another worker.

A decision is booked in the world at once. The owner writes it as a journal record and reads that record back.
"""

from collections.abc import Callable
from functools import partial

from forebay.core.phases import Phase
from forebay.core.routing.capacity import find_options, plan_prefill, queue_capacity, ranks_with_room
from forebay.core.routing.disaggregation import (
    PrefillPlan,
    as_decode_request,
    find_decode_candidates,
    has_kept_kv,
    must_compute_locally,
    prefill_candidates,
    prefill_failure_message,
    requires_remote_prefill,
)
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.encoding import encode_failure_message, find_encode_candidates, select_encoder
from forebay.core.routing.plan import Selection
from forebay.core.routing.router import (
    NO_BLOCKS,
    count_uncached_tokens,
    find_retry_candidates,
    find_suspect_candidates,
    select,
)
from forebay.core.state.active_request import ActiveRequest, content_hash, request_from_event, request_from_query
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.queue import QueuedRequest, class_of
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.world import World, queued_request
from forebay.events.base import hex_digest
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    AbortReason,
    CacheResyncRequested,
    CommandEnded,
    CommandSent,
    CommandTarget,
    KvReleased,
    PrefillPlace,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    Stage,
)
from forebay.events.requests import RequestSubmitted, RouteQueried

# Per pool and event: about ten milliseconds. Progress of the requests sent lets the next ones go.
DRAIN_MAX = 64

AnyDecision = (
    RequestRouted
    | RequestHeld
    | RequestRejected
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded
)


def submit(world: World, event: RequestSubmitted, offset: int) -> list[AnyDecision]:
    """Route, queue or reject a new request whose event is at `offset`."""
    requests = world.requests
    known = requests.known_content(event.request_id)
    if known is not None:
        if known == content_hash(event):
            world.counts["duplicate_request"] += 1
            return []
        message = f"the request id {event.request_id} was used before, for another request"
        return [_reject(world, event.request_id, event.reply_slot, Ineligible("duplicate_id", message))]
    try:
        pool = _pool_of(world, event.model)
        if len(requests) >= ACTIVE_REQUESTS_MAX:
            raise Ineligible("overloaded", f"{len(requests)} requests are under way")
        request = request_from_event(event, pool.pool, offset, world.now_us)
        try:
            placement = find_options(world, pool, request)
        except Ineligible as ineligible:
            return [_enqueue(world, pool, request, find_suspect_candidates(world, pool, request, ineligible))]
        if placement.should_queue:
            return [_enqueue(world, pool, request, placement.roster)]
        send = _next_stage(world, pool, request, placement.roster, placement.prefill)
    except Ineligible as ineligible:
        return [_reject(world, event.request_id, event.reply_slot, ineligible)]
    requests.add(request)
    return [send()]


def query(world: World, event: RouteQueried) -> RouteAnswered:
    """Return where a request would be routed now. Nothing is booked; only the journal records the query."""
    try:
        pool = _pool_of(world, event.model)
        request = request_from_query(event, pool.pool)
        placement = find_options(world, pool, request)
        prefill = placement.prefill
        computing, among = prefill_candidates(pool, placement.roster, prefill)
        selection = select(world, computing, request if prefill is None else prefill.request, among)
    except Ineligible as ineligible:
        return RouteAnswered(
            **world.stamp(),
            request_id=event.request_id,
            reply_slot=event.reply_slot,
            reason=ineligible.reason,
            message=str(ineligible),
        )
    table = selection.table
    return RouteAnswered(
        **world.stamp(),
        request_id=event.request_id,
        reply_slot=event.reply_slot,
        pool=computing.pool,
        mode=selection.config.mode,
        choice=table.candidate(selection.at),
        candidates=tuple(table.candidate(at) for at in range(len(table.costs))),
        table_digest=hex_digest(table.digest()),
        ties=selection.ties,
        would_wait=placement.should_queue,
        stage="prefill" if prefill is not None and prefill.place.remote else "aggregated",
        prefill=None if prefill is None else prefill.place,
    )


def drain_queues(world: World) -> list[AnyDecision]:
    """Route queued requests that no longer have to wait, in queue order."""
    decided: list[AnyDecision] = []
    if not len(world.queues):  # the usual case, checked for most events
        return decided
    for name in sorted(world.pools):
        for _ in range(min(DRAIN_MAX, world.queues.waiting(name))):
            queued = world.queues.serve(name, lambda queued: _is_dispatchable(world, queued))
            if queued is None:
                break
            decided.append(_serve(world, queued))
    return decided


def reroute(world: World, requests: list[ActiveRequest], cause: str | None = None) -> list[AnyDecision]:
    """Route requests without a worker to their next stage if a worker is available; queue limits do not apply again.

    `cause` is the error of the worker that failed to encode, compute or fetch; None if no worker failed.
    """
    for request in requests:
        if request.prefilled is not None and not has_kept_kv(request, world.now_us):
            world.requests.expire_prefilled(request)
    decided: list[AnyDecision] = [*release_kv(world)]
    for request in requests:
        pool = world.pools[request.pool]
        if (given_up := _abort_if_exhausted(world, pool, request, cause)) is not None:
            decided.append(given_up)
            continue
        try:
            fetches = has_kept_kv(request, world.now_us)
            roster = (
                find_decode_candidates(world, pool, request) if fetches else find_retry_candidates(world, pool, request)
            )
            send = _next_stage(world, pool, request, ranks_with_room(pool, roster) or roster)
        except Ineligible:
            continue  # an eligible worker may still join before the deadline
        decided.append(send())
    return decided


def _abort_if_exhausted(
    world: World, pool: PoolConfigured, request: ActiveRequest, cause: str | None
) -> RequestAborted | None:
    most = pool.attempts_max
    if request.attempt >= most and cause is None:
        message = f"{request.attempt} workers were lost one after another"
        return abort(world, request, "attempts_exhausted", message)
    not_elsewhere = request.prefills >= most and requires_remote_prefill(world, pool, request)
    if request.attempt < most:
        if has_kept_kv(request, world.now_us) or must_compute_locally(world, pool, request):
            return None
        if not not_elsewhere and (request.encodings < most or find_encode_candidates(world, pool, request) is None):
            return None
    if not_elsewhere or request.stage in ("prefill", "decode"):
        return abort(world, request, "prefill_failed", prefill_failure_message(request, cause))
    return abort(world, request, "encode_failed", encode_failure_message(request, cause))


def release_kv(world: World) -> list[KvReleased]:
    """Tell each worker that is still alive to release KV that no worker will fetch."""
    unfetched = world.requests.unfetched
    released: list[KvReleased] = []
    for kept in unfetched:
        holder = _keeper(world, kept.worker_id, kept.worker_epoch)
        if holder is not None:
            world.counts[f"kv_released_{kept.reason}"] += 1
            released.append(
                KvReleased(
                    **world.stamp(),
                    request_id=kept.request_id,
                    attempt=kept.attempt,
                    holder=holder,
                    reason=kept.reason,
                )
            )
    unfetched.clear()
    return released


def handle_worker_loss(world: World, worker: FleetWorker) -> list[AnyDecision]:
    """Free the requests of a lost worker, then find another worker for each, in order of submission.

    Requests that are pinned to this worker are aborted, because no other worker may take them.
    """
    stranded = world.requests.of_worker(worker.spec.worker_id, worker.worker_epoch)
    for request in stranded:
        world.requests.lose_worker(request)
        world.load.free(request.request_id)
    for request in world.requests.waiting_with_kv_of(worker.spec.worker_id, worker.worker_epoch):
        world.requests.forget_prefilled(request)
    world.dismiss(worker)
    given_up: list[AnyDecision] = []
    for request in world.requests.pinned_to(worker.spec.worker_id):
        message = f"worker {worker.spec.worker_id} is lost, and the request is for it alone"
        given_up.append(abort(world, request, "pinned_worker_lost", message))
    return given_up + reroute(world, [request for request in stranded if request.phase is Phase.WAITING])


def abort(
    world: World, request: ActiveRequest, reason: AbortReason, message: str, status: int = 0, code: str = ""
) -> RequestAborted:
    """Abort an accepted request; `status` and `code` are those of a worker that rejected it."""
    world.counts[f"aborted_{reason}"] += 1
    worker = world.fleet.get(request.worker_id) if request.on_worker else None
    if worker is not None:
        world.load.free(request.request_id)
    kept = request.prefilled
    holder = None if kept is None else _keeper(world, kept.worker_id, kept.worker_epoch)
    if kept is not None:
        world.requests.forget_prefilled(request)  # the record itself names the worker that releases the KV
    world.queues.remove(request.request_id)
    world.requests.end(request, world.now_us)
    return RequestAborted(
        **world.stamp(),
        request_id=request.request_id,
        reply_slot=request.reply_slot,
        reason=reason,
        message=message,
        # The highest attempt of any stage: no output of an earlier attempt may follow this record, and both the
        # worker that has the request and the one that keeps its KV must stop.
        attempt=max(request.attempt, request.stage_attempt, 0 if holder is None else request.prefills),
        pool=request.pool if worker is None else worker.spec.pool,
        worker_id=request.worker_id if worker is not None else "",
        worker_epoch=request.worker_epoch,
        slot=worker.slot if worker is not None else 0,
        status=status,
        code=code,
        holder=holder,
    )


def _keeper(world: World, worker_id: str, worker_epoch: int) -> CommandTarget | None:
    """Return an epoch of a worker that keeps KV, or None if that epoch is no longer in the fleet."""
    worker = world.fleet.get(worker_id)
    if worker is None or worker.worker_epoch != worker_epoch:
        return None
    spec = worker.spec
    return CommandTarget(worker_id=spec.worker_id, worker_epoch=worker.worker_epoch, pool=spec.pool, slot=worker.slot)


def _pool_of(world: World, model: str) -> PoolConfigured:
    if not world.pools:
        raise Ineligible("no_workers", "no worker has joined yet")
    pool = world.pool_of(model)
    if pool is None:
        raise Ineligible("wrong_model", f"no pool serves the model {model}")
    return pool


def _next_stage(
    world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster, prefill: PrefillPlan | None = None
) -> Callable[[], RequestRouted]:
    """Select the worker for the next stage of a request, and return a function that sends the request to it.

    `roster` has the candidates of `pool`. `prefill` is where the prompt is computed, if that is decided. Only the
    returned function changes the world. Raises Ineligible if no worker may take the request.
    """
    if has_kept_kv(request, world.now_us):
        return partial(_decode, world, pool, request, select(world, pool, as_decode_request(request), roster))
    prefill = prefill or plan_prefill(world, pool, request, roster)
    encode = None if must_compute_locally(world, pool, request) else find_encode_candidates(world, pool, request)
    if encode is not None:
        encode_pool, encode_roster = encode
        return partial(_encode, world, encode_pool, request, select_encoder(world, encode_pool, request, encode_roster))
    if prefill is None or not prefill.place.remote:
        place = None if prefill is None else prefill.place
        return partial(_route, world, pool, request, select(world, pool, request, roster), place)
    return partial(_prefill, world, prefill, request, select(world, prefill.pool, prefill.request, prefill.roster))


def _prefill(world: World, prefill: PrefillPlan, request: ActiveRequest, selection: Selection) -> RequestRouted:
    """Send a request's prompt to a prefill worker."""
    pool = prefill.pool
    decided = _routed(world, pool, request, selection, "prefill", prefill.place)
    candidate = selection.table.roster.ranks[selection.at]
    cached_tokens = _count_reused(world, pool, request, selection)
    _send(world, request, "prefill", candidate)
    world.load.book(
        request.request_id,
        candidate.key,
        prefill_tokens=request.prompt_tokens - cached_tokens if selection.config.track_prefill_tokens else 0,
        blocks=NO_BLOCKS,
        prompt_tokens=request.prompt_tokens,
        reuse=False,
    )
    world.book_routing(pool.router, candidate, prefill.request)
    return decided


def _decode(world: World, pool: PoolConfigured, request: ActiveRequest, selection: Selection) -> RequestRouted:
    """Send a request to a decode worker that fetches its KV; all its blocks count there, and nothing is computed."""
    decided = _routed(world, pool, request, selection, "decode")
    candidate = selection.table.roster.ranks[selection.at]
    _send(world, request, "decode", candidate)
    world.load.book(
        request.request_id,
        candidate.key,
        prefill_tokens=0,
        blocks=request.blocks if selection.config.track_active_blocks else NO_BLOCKS,
        prompt_tokens=request.prompt_tokens,
        reuse=selection.config.assume_kv_reuse,
        expected_output_tokens=request.hints.expected_output_tokens,
    )
    world.book_routing(pool.router, candidate, request)
    return decided


def _send(world: World, request: ActiveRequest, stage: Stage, candidate: CandidateRank) -> None:
    world.requests.route(request, stage, candidate.worker.spec.worker_id, candidate.worker.worker_epoch, candidate.rank)


def _encode(world: World, pool: PoolConfigured, request: ActiveRequest, selection: Selection) -> RequestRouted:
    """Send a request's media to an encode worker."""
    decided = _routed(world, pool, request, selection, "encode")
    candidate = selection.table.roster.ranks[selection.at]
    _send(world, request, "encode", candidate)
    world.load.book(
        request.request_id,
        candidate.key,
        prefill_tokens=request.media_tokens,
        blocks=NO_BLOCKS,
        prompt_tokens=request.media_tokens,
        reuse=False,
    )
    return decided


def _routed(
    world: World,
    pool: PoolConfigured,
    request: ActiveRequest,
    selection: Selection,
    stage: Stage,
    place: PrefillPlace | None = None,
) -> RequestRouted:
    config, table, at = selection.config, selection.table, selection.at
    candidate = table.roster.ranks[at]
    spec = candidate.worker.spec
    sent = request.attempt + request.encodings + request.prefills
    waited_us = world.now_us - request.queued_at_us if request.queue_class and not sent else 0
    world.turns[pool.pool] = world.turns.get(pool.pool, 0) + 1
    return RequestRouted(
        **world.stamp(),
        request_id=request.request_id,
        attempt=request.next_encoding if stage == "encode" else request.attempts(stage) + 1,
        pool=pool.pool,
        worker_id=spec.worker_id,
        worker_epoch=candidate.worker.worker_epoch,
        slot=candidate.worker.slot,
        rank=candidate.rank,
        mode=config.mode,
        candidates=len(table.costs),
        table_digest=hex_digest(table.digest()),
        terms=table.terms(at),
        ties=selection.ties,
        runner_up=selection.runner_up(),
        stage=stage,
        waited_us=waited_us,
        earlier_attempts=sent - request.attempts(stage),
        prefill=place,
    )


def _route(
    world: World, pool: PoolConfigured, request: ActiveRequest, selection: Selection, place: PrefillPlace | None
) -> RequestRouted:
    decided = _routed(world, pool, request, selection, "aggregated", place)
    config = selection.config
    candidate = selection.table.roster.ranks[selection.at]
    cached_tokens = _count_reused(world, pool, request, selection)
    _send(world, request, "aggregated", candidate)
    world.load.book(
        request.request_id,
        candidate.key,
        prefill_tokens=request.prompt_tokens - cached_tokens if config.track_prefill_tokens else 0,
        blocks=request.blocks if config.track_active_blocks else NO_BLOCKS,
        prompt_tokens=request.prompt_tokens,
        reuse=config.assume_kv_reuse,
        expected_output_tokens=request.hints.expected_output_tokens,
    )
    world.book_routing(pool.router, candidate, request)
    return decided


def _count_reused(world: World, pool: PoolConfigured, request: ActiveRequest, selection: Selection) -> int:
    """Return the prompt tokens on the selected rank's device, and count selections below the best overlap."""
    device = selection.table.overlap(selection.at).device
    most = max((overlap.device for overlap in selection.table.overlaps.values()), default=0)
    if device < most:
        world.counts["non_max_overlap_selections"] += 1
        world.counts["overlap_blocks_lost"] += most - device
    return min(device * pool.block_size, request.prompt_tokens)


def _enqueue(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> RequestHeld:
    queue = pool.router.queue
    tokens = count_uncached_tokens(world, pool, request, roster)
    wanted = request.hints.policy_class
    chosen = class_of(queue, wanted, tokens)
    if wanted and chosen.name != wanted:
        world.counts["unknown_queue_class"] += 1
    ahead = world.queues.length(pool.pool, chosen)
    ready = world.roster(pool.pool)
    serving = ready if ready.ranks else roster  # without a ready rank, suspect ranks may serve the request later
    workers = len({candidate.worker.spec.worker_id: None for candidate in serving.ranks})
    if ahead >= chosen.requests_per_worker_max * workers:
        raise Ineligible("queue_full", f"{ahead} requests of the class {chosen.name} wait already")
    bound, waiting = queue_capacity(pool, serving), world.queues.waiting(pool.pool)
    if bound is not None and waiting >= bound and not request.patient:
        text = f"every worker is full, and {waiting} requests wait already, as many as may"
        raise Ineligible("pool_full", text if bound else "every worker is full, and requests may not wait")
    world.requests.add(request)
    world.requests.enqueue(
        request, chosen.name, tokens, world.now_us, 0 if request.patient else round(queue.timeout_s * 1e6)
    )
    world.queues.push(pool.pool, queued_request(request, pool))
    return RequestHeld(
        **world.stamp(),
        request_id=request.request_id,
        pool=pool.pool,
        queue_class=chosen.name,
        uncached_tokens=tokens,
        ahead=ahead,
    )


def _is_dispatchable(world: World, queued: QueuedRequest) -> bool:
    """Return whether a rank may take a queued request now. If not, it waits for a change, or for its deadline."""
    request = _queued_request(world, queued)
    pool = world.pools[request.pool]
    try:
        return not find_options(world, pool, request).should_queue
    except Ineligible:
        return False


def _serve(world: World, queued: QueuedRequest) -> RequestRouted | RequestRejected:
    request = _queued_request(world, queued)
    pool = world.pools[request.pool]
    try:
        placement = find_options(world, pool, request)
        send = _next_stage(world, pool, request, placement.roster, placement.prefill)
    except Ineligible as ineligible:
        world.requests.end(request, world.now_us)
        return _reject(world, request.request_id, request.reply_slot, ineligible)
    return send()


def _queued_request(world: World, queued: QueuedRequest) -> ActiveRequest:
    request = world.requests.get(queued.request_id)
    assert request is not None, "a queued request is active"
    return request


def _reject(world: World, request_id: str, reply_slot: int, ineligible: Ineligible) -> RequestRejected:
    reason: RejectReason = ineligible.reason
    world.counts[f"rejected_{reason}"] += 1
    return RequestRejected(
        **world.stamp(),
        request_id=request_id,
        reply_slot=reply_slot,
        reason=reason,
        message=str(ineligible),
    )
