"""Apply decisions to the world at once, and return them as journal records, which the owner writes afterwards.

They book, hold, reject or abort a request, answer a routing query, or release the KV of a prefill.
"""

from forebay.core.phases import BEFORE_FIRST_TOKEN, Phase
from forebay.core.queue_entry import queued_request
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, QueuePlan
from forebay.core.selection.evaluation import NO_BLOCKS
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import Stamp, World
from forebay.events.base import hex_digest
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    AbortReason,
    CommandTarget,
    KvReleased,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.pools import PoolChoice
from forebay.events.requests import RequestSubmitted, RouteQueried


def book(world: World, request: ActiveRequest, plan: Plan) -> RequestRouted:
    """Count a request in the load of the rank that its plan selects, and return the journal record."""
    _report(world, plan)
    decided = _routed(world, request, plan)
    if request.phase is Phase.SUBMITTED:
        world.requests.add(request)
    stage, view, config, candidate = plan.stage, plan.request, plan.config, plan.selected
    responds = stage in ("aggregated", "decode")
    cached_tokens = _count_reused(world, plan) if stage in ("aggregated", "prefill") else 0
    prefill_pool = next((one.pool for one in plan.pools if one.role == "prefill"), "")
    world.requests.route(
        request,
        stage,
        candidate.worker.spec.worker_id,
        candidate.worker.worker_epoch,
        candidate.rank,
        prefill_pool,
    )
    world.load.book(
        request.submitted.request_id,
        candidate.key,
        # An encode worker always computes its media. A decode worker that fetches KV has nothing to prefill:
        # `track_prefill_tokens` is false in its configuration.
        prefill_tokens=view.prompt_tokens - cached_tokens if config.track_prefill_tokens or stage == "encode" else 0,
        blocks=view.blocks if config.track_active_blocks else NO_BLOCKS,
        prompt_tokens=view.prompt_tokens,
        reuse=responds and config.assume_kv_reuse,
        expected_output_tokens=view.hints.expected_output_tokens if responds else 0,
        now_us=world.now_us,
    )
    if stage != "encode":
        world.book_routing(plan.pool.router, candidate, view)
    return decided


def answer_query(world: World, event: RouteQueried, stamp: Stamp, plan: Plan, *, would_wait: bool) -> RouteAnswered:
    """Return the journal record that answers a route query with a plan. Nothing is booked."""
    _report(world, plan)
    table = plan.table
    return RouteAnswered(
        **stamp,
        request_id=event.request_id,
        reply_slot=event.reply_slot,
        reply_key=event.reply_key,
        pool=plan.pool.pool,
        mode=plan.config.mode,
        choice=table.candidate(plan.at),
        candidates=tuple(table.candidate(at) for at in range(len(table))),
        table_digest=hex_digest(table.digest()),
        ties=plan.ties,
        would_wait=would_wait,
        stage=plan.stage,
        prefill=plan.place,
        pools=plan.pools,
    )


def enqueue(
    world: World, pool: PoolConfigured, request: ActiveRequest, plan: QueuePlan
) -> RequestHeld | RequestRejected:
    """Put a new request into the queue of its pool, or reject it if the queue is full. Return the journal record."""
    wanted = request.submitted.hints.policy_class
    world.counts["unknown_queue_class"] += wanted not in ("", plan.queue_class)
    if plan.full is not None:
        return reject(world, request.submitted, plan.full, plan.pools)
    timeout_us = 0 if request.submitted.patient else round(plan.timeout_s * 1e6)
    world.requests.add(request)
    world.requests.enqueue(request, plan.queue_class, plan.uncached_tokens, world.now_us, timeout_us)
    world.queues.push(pool.pool, queued_request(request, pool))
    return RequestHeld(
        **world.stamp(),
        request_id=request.submitted.request_id,
        pool=pool.pool,
        queue_class=plan.queue_class,
        uncached_tokens=plan.uncached_tokens,
        ahead=plan.ahead,
        pools=plan.pools,
    )


def reject(
    world: World,
    submitted: RequestSubmitted | SubmittedRequest,
    ineligible: Ineligible,
    pools: tuple[PoolChoice, ...] = (),
) -> RequestRejected:
    """Return the journal record that rejects a request for which `pools` were chosen."""
    world.counts[f"rejected_{ineligible.reason}"] += 1
    return RequestRejected(
        **world.stamp(),
        request_id=submitted.request_id,
        reply_slot=submitted.reply_slot,
        reason=ineligible.reason,
        message=str(ineligible),
        pools=pools,
        reply_key=submitted.reply_key,
    )


def abort(
    world: World,
    request: ActiveRequest,
    reason: AbortReason,
    message: str,
    status: int = 0,
    code: str = "",
    retry_after_s: int = 0,
    *,
    is_complete: bool = False,
) -> RequestAborted:
    """End an accepted request, free its load and its place in the queue for others, and return the journal record.

    `status` (HTTP) and `code` come from a worker that rejected the request; otherwise they are 0 and empty. That worker
    takes requests again after `retry_after_s`; 0 if unknown. `is_complete` means that the client has its response.
    """
    world.counts[f"aborted_{reason}"] += 1
    worker = world.fleet.get(request.worker_id) if request.on_worker else None
    if worker is not None:
        world.load.free(request.submitted.request_id)
        if request.phase in BEFORE_FIRST_TOKEN:
            world.withdraw_routing(request)
    kept = request.prefilled
    holder = None if kept is None else _holder_of(world, kept.worker_id, kept.worker_epoch)
    if kept is not None:
        world.requests.forget_prefilled(request)  # the record itself names the worker that releases the KV
    if request.submitted.is_external:
        worker = None  # it has no work for the request; the gateway ends what its server does
    world.queues.remove(request.submitted.request_id)
    world.requests.end(request, world.now_us, is_complete=is_complete)
    world.replan()
    return RequestAborted(
        **world.stamp(),
        request_id=request.submitted.request_id,
        reply_slot=request.submitted.reply_slot,
        reply_key=request.submitted.reply_key,
        reason=reason,
        message=message,
        # The highest attempt of any stage: no output of an earlier attempt may follow this record, and both the
        # worker that has the request and the one that keeps its KV must stop.
        attempt=max(request.attempt, request.stage_attempt, 0 if holder is None else request.prefills),
        pool=request.submitted.pool if worker is None else worker.spec.pool,
        worker_id=request.worker_id if worker is not None else "",
        worker_epoch=request.worker_epoch,
        slot=worker.slot if worker is not None else 0,
        status=status,
        code=code,
        holder=holder,
        retry_after_s=retry_after_s,
    )


def release_kv(world: World) -> list[KvReleased]:
    """Return orders to prefill workers to free KV that no worker will fetch. Workers that left the fleet get none."""
    unfetched = world.requests.unfetched
    released: list[KvReleased] = []
    for kept in unfetched:
        holder = _holder_of(world, kept.worker_id, kept.worker_epoch)
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


def _report(world: World, plan: Plan) -> None:
    if world.on_plan is not None:
        world.on_plan(plan)


def _routed(world: World, request: ActiveRequest, plan: Plan) -> RequestRouted:
    stage, table, candidate, pool = plan.stage, plan.table, plan.selected, plan.pool.pool
    sent = request.attempt + request.encodings + request.prefills
    world.turns[pool] = world.turns.get(pool, 0) + 1
    return RequestRouted(
        **world.stamp(),
        request_id=request.submitted.request_id,
        attempt=request.next_encoding if stage == "encode" else request.attempts(stage) + 1,
        pool=pool,
        worker_id=candidate.worker.spec.worker_id,
        worker_epoch=candidate.worker.worker_epoch,
        slot=candidate.worker.slot,
        rank=candidate.rank,
        mode=plan.config.mode,
        candidates=len(table),
        table_digest=hex_digest(table.digest()),
        terms=table.terms(plan.at),
        ties=plan.ties,
        runner_up=plan.runner_up(),
        stage=stage,
        waited_us=world.now_us - request.queued_at_us if request.queue_class and not sent else 0,
        earlier_attempts=sent - request.attempts(stage),
        prefill=plan.place,
        pools=plan.pools,
    )


def _count_reused(world: World, plan: Plan) -> int:
    """Return the prompt tokens cached on the selected rank's device. Count selections below the largest overlap."""
    device = plan.table.overlap(plan.at).device
    cached = plan.table.cached[0]
    most = cached.item(cached.argmax())
    if device < most:
        world.counts["non_max_overlap_selections"] += 1
        world.counts["overlap_blocks_lost"] += most - device
    return min(device * plan.pool.block_size, plan.request.prompt_tokens)


def _holder_of(world: World, worker_id: str, worker_epoch: int) -> CommandTarget | None:
    worker = world.fleet.get(worker_id)
    return None if worker is None or worker.worker_epoch != worker_epoch else worker.target
