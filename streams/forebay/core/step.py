"""The one loop body: live, embedded, replay and simulation all apply events by these functions.

Theory of operation. An owner opens a run by `open_run` with one reading of its clock, then applies the
run's events one by one by `step`, at that reading. Whatever they decide comes back as journal records that
carry the exact order of what was applied since the record before; applying that order again gives the same
records. A record that did not decode is applied as None: it takes its place in the order and does nothing.
"""

from typing import assert_never

from forebay.core.cost import Option
from forebay.core.fleet import Worker
from forebay.core.lifecycle import UNDER_WAY_MAX, Request, content_hash, submitted
from forebay.core.machine import IllegalTransition
from forebay.core.router import choose, options_for
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import ControlEvent, PoolConfigured
from forebay.events.decisions import (
    AbortReason,
    Advanced,
    RejectReason,
    RequestAborted,
    RequestRejected,
    RequestRouted,
)
from forebay.events.fleet import (
    AnyFleetEvent,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.metrics import LoadReported, MetricEvent
from forebay.events.progress import AnyProgressEvent, FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestEvent, RequestSubmitted

CLOCK = "clock"  # the topic of a run in which nothing but time passed
CONSUMED_RUNS_MAX = 256  # an `Advanced` keeps the consumed part of a record below some 20 kB

InputEvent = RequestEvent | AnyKvEvent | MetricEvent | AnyProgressEvent | AnyFleetEvent | ControlEvent
Decided = RequestRouted | RequestRejected | RequestAborted


def claim(world: World, offset: int) -> None:
    """An `OwnerClaimed` stands at `offset` of the journal: what follows is decided in its name."""
    world.owner_epoch = offset


def open_run(world: World, now_us: int) -> list[Decided]:
    """Let time pass up to `now_us`: requests past their deadline are given up."""
    due_us = world.requests.next_due_us()
    if due_us is None or due_us > now_us:
        return []
    world.note(CLOCK, 0, now_us)
    return [_abort(world, request, "deadline", "the deadline passed") for request in world.requests.expired(now_us)]


def step(world: World, topic: str, event: InputEvent | None, now_us: int) -> list[Decided]:
    """Apply the next record of `topic`, None for one that did not decode; what was decided."""
    offset = world.view.get(topic, 0)
    world.note(topic, 1, now_us)
    match event:
        case RequestSubmitted():
            return _submit(world, event, offset)
        case BlocksStored() | BlocksRemoved() | CacheCleared():
            world.index.apply(event)
        case FirstTokenEmitted() | RequestFinished() | RequestFailed():
            _progress(world, event)
        case LoadReported():
            _report(world, event)
        case RequestCancelled():
            request = world.requests.get(event.request_id)
            if request is not None:
                return [_abort(world, request, "cancelled", event.reason)]
        case WorkerJoined() | WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost():
            return _fleet(world, event, offset)
        case OwnershipAnnounced():
            return _fleet(world, event, offset)
        case PoolConfigured():
            world.pools[event.pool] = event
        case None:
            world.counts["undecodable"] += 1
        case _:
            assert_never(event)
    return []


def advance(world: World) -> Advanced:
    """A journal record that seals the state as it is, whatever was decided."""
    consumed = world.take_consumed()
    digest = hex_digest(world.digest())
    return Advanced(owner_epoch=world.owner_epoch, seq=world.take_seq(), consumed=consumed, digest=digest)


def _submit(world: World, event: RequestSubmitted, offset: int) -> list[Decided]:
    requests = world.requests
    known = requests.content_known(event.request_id)
    if known is not None:
        if known == content_hash(event):
            world.counts["duplicate_request"] += 1
            return []
        message = f"the request id {event.request_id} was used before, for another request"
        return [_reject(world, event, "duplicate_id", message)]
    pool = world.pool_of(event.model)
    if not world.pools:
        return [_reject(world, event, "no_workers", "no worker has joined yet")]
    if pool is None:
        return [_reject(world, event, "wrong_model", f"no pool serves the model {event.model}")]
    if len(requests) >= UNDER_WAY_MAX:
        return [_reject(world, event, "overloaded", f"{len(requests)} requests are under way")]
    request = submitted(event, pool.pool, offset, world.now_us)
    options = options_for(request, world.fleet, world.index, world.load)
    if not options:
        return [_reject(world, event, "no_workers", f"no worker of the pool {pool.pool} is ready")]
    requests.add(request)
    return [_route(world, request, options)]


def _route(world: World, request: Request, options: list[Option]) -> RequestRouted:
    pool = world.pools[request.pool]
    turn = world.turns.get(pool.pool, 0)
    choice = choose(pool, request, options, turn)
    option = choice.option
    world.turns[pool.pool] = turn + 1
    world.requests.route(request, option.worker_id, option.worker_epoch, option.rank)
    cached_tokens = min(option.overlap.device * pool.block_size, request.prompt_tokens)
    key = (option.worker_id, option.rank)
    world.load.book(request.request_id, key, request.prompt_tokens - cached_tokens, request.blocks)
    return RequestRouted(
        owner_epoch=world.owner_epoch,
        seq=world.take_seq(),
        consumed=world.take_consumed(),
        request_id=request.request_id,
        attempt=request.attempt,
        pool=request.pool,
        worker_id=option.worker_id,
        worker_epoch=option.worker_epoch,
        slot=option.slot,
        rank=option.rank,
        mode=pool.router.mode,
        candidates=choice.candidates,
        table_digest=hex_digest(choice.table_digest),
        terms=choice.terms,
        ties=choice.ties,
        runner_up=choice.runner_up,
    )


def _reject(world: World, event: RequestSubmitted, reason: RejectReason, message: str) -> RequestRejected:
    world.counts[f"rejected_{reason}"] += 1
    return RequestRejected(
        owner_epoch=world.owner_epoch,
        seq=world.take_seq(),
        consumed=world.take_consumed(),
        request_id=event.request_id,
        reply_slot=event.reply_slot,
        reason=reason,
        message=message,
    )


def _abort(world: World, request: Request, reason: AbortReason, message: str) -> RequestAborted:
    world.counts[f"aborted_{reason}"] += 1
    worker = world.fleet.get(request.worker_id) if request.on_worker else None
    if worker is not None:
        world.load.free(request.request_id)
    world.requests.end(request, world.now_us)
    return RequestAborted(
        owner_epoch=world.owner_epoch,
        seq=world.take_seq(),
        consumed=world.take_consumed(),
        request_id=request.request_id,
        reply_slot=request.reply_slot,
        reason=reason,
        message=message,
        attempt=request.attempt,
        pool=request.pool,
        worker_id=request.worker_id if worker is not None else "",
        worker_epoch=request.worker_epoch,
        slot=worker.slot if worker is not None else 0,
    )


def _progress(world: World, event: AnyProgressEvent) -> None:
    try:
        request = world.requests.progress(event, world.now_us)
    except IllegalTransition:
        world.counts["outdated_progress"] += 1
        return
    match event:
        case FirstTokenEmitted():
            world.load.prefill_done(event.request_id)
        case RequestFinished() | RequestFailed():
            # A worker that was taken for lost may have finished all the same: nothing is booked there any more.
            if request.on_worker:
                world.load.free(event.request_id)
        case _:
            assert_never(event)


def _report(world: World, event: LoadReported) -> None:
    worker = world.fleet.get(event.worker_id)
    if worker is None or worker.worker_epoch != event.worker_epoch or event.rank >= worker.spec.dp_size:
        world.counts["foreign_load_report"] += 1
        return
    world.load.report(event)


def _fleet(world: World, event: AnyFleetEvent, offset: int) -> list[Decided]:
    try:
        worker = world.fleet.apply(event, offset)
    except IllegalTransition:
        world.counts["void_fleet_fact"] += 1
        return []
    match event:
        case WorkerJoined() if worker is not None:
            world.admit(worker)
            return _route_waiting(world)
        case WorkerRecovered():
            return _route_waiting(world)
        case WorkerLost() if worker is not None:
            return _lose(world, worker)
        case _:
            return []


def _lose(world: World, worker: Worker) -> list[Decided]:
    """Free what a lost worker had, then find each request another one, in the order of submission."""
    stranded = world.requests.of_worker(worker.spec.worker_id, worker.worker_epoch)
    for request in stranded:
        world.requests.lose_worker(request)
        world.load.free(request.request_id)
    world.dismiss(worker)
    return _reroute(world, stranded)


def _route_waiting(world: World) -> list[Decided]:
    return _reroute(world, world.requests.waiting())


def _reroute(world: World, requests: list[Request]) -> list[Decided]:
    decided: list[Decided] = []
    for request in requests:
        attempts_max = world.pools[request.pool].attempts_max
        if request.attempt >= attempts_max:
            message = f"{request.attempt} workers were lost one after another"
            decided.append(_abort(world, request, "attempts_exhausted", message))
            continue
        options = options_for(request, world.fleet, world.index, world.load)
        if options:
            decided.append(_route(world, request, options))
    return decided
