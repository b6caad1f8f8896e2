"""Apply events to a world. The live owner, the embedded owner, replays and simulations all use these functions.

An owner opens a run of events with `open_run` and one reading of its clock. It then applies the events of the run one
by one with `step`, at the same reading. Both functions return decisions as journal records. Each record contains the
exact order of the events applied since the previous record, so applying the events again in that order gives the same
records. A record that does not decode is applied as None: it keeps its place in the order and has no other effect.
"""

from typing import assert_never

from forebay.core.adapter_placement import place_adapters
from forebay.core.booking import abort, release_kv
from forebay.core.dispatch import (
    AnyDecision,
    drain_queues,
    handle_rejection,
    handle_worker_loss,
    move,
    query,
    reroute,
    submit,
)
from forebay.core.phases import BEFORE_FIRST_TOKEN, Phase
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state_machine import IllegalTransition
from forebay.core.worker_commands import apply_command_response, end_commands, submit_command
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import BusyThresholdsSet, ControlEvent, WorkerCommanded
from forebay.events.decisions import Advanced, CacheResyncRequested
from forebay.events.fleet import (
    AnyFleetEvent,
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.kv import (
    AnyKvEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    StoreBlocksAdded,
    StoreBlocksRemoved,
)
from forebay.events.metrics import LoadReported, MetricEvent, TierCostsMeasured
from forebay.events.progress import (
    AnyProgressEvent,
    AttemptMoved,
    AttemptRejected,
    CommandDone,
    CommandRefused,
    EncodeFailed,
    EncodeFinished,
    EngineFailed,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    StageEnd,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestEvent, RequestResumed, RequestSubmitted, RouteQueried
from forebay.events.versions import may_write

__all__ = [
    "CLOCK", "CONSUMED_RUNS_MAX", "AnyDecision", "InputEvent", "advance", "claim", "is_member", "open_run",
    "replan", "step",
]  # fmt: skip

CLOCK = "clock"  # pseudo topic of a run without events, in which only time passes
SERVER_ERROR = 500  # with an HTTP status from 500 on, the request is not at fault
CONSUMED_RUNS_MAX = 256  # keeps the `consumed` part of an `Advanced` below about 20 kB
InputEvent = RequestEvent | AnyKvEvent | MetricEvent | AnyProgressEvent | AnyFleetEvent | ControlEvent


def claim(world: World, offset: int, policies: tuple[str, ...] = (), events_version: int = 1, nonce: str = "") -> None:
    """Record that a router has become the owner.

    A pool for which an operator set a custom policy that this owner may not run returns to its configured policy.

    Args:
        offset: offset of the router's `OwnerClaimed` on the journal, which is the owner epoch.
        policies: custom policies that this record names.
        events_version: version of the event types that this record names.
        nonce: `owner_nonce` of this record.
    """
    world.owner_epoch, world.owner_nonce = offset, nonce
    world.owner_events = events_version
    world.owner_policies = policies
    world.counts.update(world.settings.reset_policies(policies))


def open_run(world: World, now_us: int) -> list[AnyDecision]:
    """Set the clock to `now_us` if a deadline or timeout has passed, and abort the requests and commands concerned."""
    due_us = world.next_due_us()
    if due_us is None or due_us > now_us:
        return []
    world.note(CLOCK, 0, now_us)
    world.expire()
    world.replan()  # the pause of a worker may be over
    decided: list[AnyDecision] = []
    for request in world.requests.expired(now_us):
        if request.phase is Phase.QUEUED:
            waited_s = (now_us - request.queued_at_us) / 1e6
            message = f"the deadline passed after {waited_s:.1f} s in the router's queue"
            decided.append(abort(world, request, "queue_deadline", message))
        else:
            decided.append(abort(world, request, "deadline", "the deadline passed"))
    for request in world.requests.expired_in_queue(now_us):
        limit_s = (request.queue_due_us - request.queued_at_us) / 1e6
        message = f"no worker had room for the request within the queue timeout of {limit_s:g} s"
        decided.append(abort(world, request, "queue_timeout", message))
    world.commands.time_out(now_us)
    return decided + replan(world)


def step(world: World, topic: str, event: InputEvent | None, now_us: int) -> list[AnyDecision]:
    """Apply the next record of an input topic, and return the decisions that follow from it.

    Args:
        event: the record's event; None if the record did not decode.
        now_us: clock reading of the run, in microseconds.
    """
    offset = world.view.get(topic, 0)
    world.note(topic, 1, now_us)
    world.expire()
    if event is not None and not may_write(type(event), world.owner_events):
        event = None  # this program knows the type, but the owner did not
    decided = _decide(world, event, offset)
    if world.replanning is not None:  # most events, such as a thousand load reports per second, change no plan
        decided += replan(world)
    if world.requests.unfetched:
        decided += release_kv(world)
    return decided


def replan(world: World) -> list[AnyDecision]:
    """Make the decisions that the changes since the last event allow: route requests again, and serve the queues."""
    decided = reroute(world, world.replanning) if world.replanning else []
    if world.commands.closed:
        decided += end_commands(world)
    decided += drain_queues(world)
    decided += place_adapters(world)
    world.replanning = None
    return decided


def _decide(world: World, event: InputEvent | None, offset: int) -> list[AnyDecision]:
    match event:
        case RequestSubmitted():
            return submit(world, event, offset)
        case BlocksStored() | BlocksRemoved() | CacheCleared():
            return _cache(world, event)
        case StoreBlocksAdded() | StoreBlocksRemoved():
            world.index.apply_store(event)
        case TierCostsMeasured():
            if _is_of_fleet(world, event):
                world.load.measure(event.worker_id, event.rank, event.costs)
        case ProgressEvent():
            return _progress(world, event)
        case CommandDone() | CommandRefused():
            return [*apply_command_response(world, event)]
        case EngineFailed():
            world.counts["engine_failed"] += 1
        case LoadReported():
            _report(world, event)
        case RequestCancelled():
            return _cancel(world, event)
        case RequestResumed():
            request, ingress = world.requests.get(event.request_id), event.ingress_incarnation
            if ingress and request is not None and request.submitted.ingress:
                world.requests.resume(request, ingress)
            else:
                world.counts["resumed_without_effect"] += 1
        case RouteQueried():
            return [query(world, event, world.stamp())]
        case WorkerJoined() | WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost():
            return _fleet(world, event, offset)
        case OwnershipAnnounced() | IngressJoined() | IngressLost():
            return _fleet(world, event, offset)
        case WorkerCommanded():
            return [*submit_command(world, event, offset)]
        case None:
            world.counts["undecodable"] += 1
        case _:
            world.set_pools(event)
            # Busy thresholds do not apply to accepted requests.
            world.replan(() if isinstance(event, BusyThresholdsSet) else world.requests.waiting())
    return []


def _cancel(world: World, event: RequestCancelled) -> list[AnyDecision]:
    request = world.requests.get(event.request_id)
    if request is None:
        return []
    by = event.ingress_incarnation
    if by and may_write(RequestResumed, world.owner_events) and not world.requests.abandon(request, by):
        world.counts["foreign_cancellation"] += 1  # a client reads the response at another ingress
        return []
    return [abort(world, request, "cancelled", event.reason, is_complete=event.is_complete)]


def advance(world: World) -> Advanced:
    """Return a journal record without a decision, with the digest of the current state."""
    return Advanced(**world.stamp(), digest=hex_digest(world.digest()))


def _cache(world: World, event: CacheEvent) -> list[AnyDecision]:
    if isinstance(event, CacheCleared) and world.index.is_new(event):
        world.forget_routed(event.worker_id, event.rank)
    gap = world.index.apply(event)
    key = event.worker_id, event.rank
    if (cached := world.index.cached(key)) is not None:
        world.load.set_cached(key, *cached)
    if gap is None:
        return []
    worker = world.fleet.get(gap.worker_id)
    assert worker is not None, "the index has ranks of fleet members only"
    return [
        CacheResyncRequested(
            **world.stamp(),
            pool=worker.spec.pool,
            worker_id=gap.worker_id,
            worker_epoch=gap.worker_epoch,
            slot=worker.slot,
            rank=gap.rank,
            expected_seq=gap.expected_seq,
            found_seq=gap.found_seq,
        )
    ]


def _progress(world: World, event: RequestProgress) -> list[AnyDecision]:
    try:
        request = world.requests.progress(event, world.now_us)
    except IllegalTransition:
        world.counts["stale_progress"] += 1
        if is_foreign(world, event):
            world.counts["foreign_progress"] += 1
        return []
    if isinstance(event, StageEnd):
        return _end_stage(world, request, event)
    world.replan()
    match event:
        case FirstTokenEmitted():
            world.note_computed(request)
            world.load.prefill_done(event.request_id)
            pool = world.pools[request.submitted.pool]
            if pool.role == "decode" or world.settings.retries(pool.model):
                world.requests.begin(request)
        case OutputGrown():
            if world.pools[request.submitted.pool].router.track_output_blocks:
                world.load.grow(event.request_id, event.output_tokens)
        case RequestFinished() | RequestFailed():
            # A worker that was declared lost may still have finished the request. Its booking is already gone then.
            if request.on_worker:
                world.load.free(event.request_id)
            if request.phase in BEFORE_FIRST_TOKEN:  # a finished response may have no token
                note = world.note_computed if isinstance(event, RequestFinished) else world.withdraw_routing
                note(request)
        case _:
            assert_never(event)
    return []


def _end_stage(world: World, request: ActiveRequest, event: StageEnd) -> list[AnyDecision]:
    """Replan a request that has left its worker, or abort it."""
    world.load.free(event.request_id)
    match event:
        case AttemptRejected() | PrefillFailed() | TransferFailed():
            world.withdraw_routing(request)
            request.failure = event.error
        case AttemptMoved():
            world.withdraw_routing(request)
            return move(world, request, event.endpoint)
        case EncodeFailed():
            request.failure = event.error
        case PrefillFinished():
            world.note_computed(request)
            request.failure = _descriptor_fault(world, request, event)
        case EncodeFinished():
            pass
        case _:
            assert_never(event)
    if isinstance(event, AttemptRejected):
        return handle_rejection(world, request, event)
    if isinstance(event, PrefillFailed) and event.status < SERVER_ERROR:
        return [abort(world, request, "prefill_refused", event.error, event.status, event.code)]
    world.replan([request])
    return []


def is_foreign(world: World, event: RequestProgress) -> bool:
    """Return whether a worker reports on a request that the owner never sent to it.

    Late progress of an earlier worker is normal, because a lost worker does not know immediately that it was replaced.
    Foreign progress is a fault: two workers read the same slot of a work topic, or a worker ran an item that was
    addressed to another worker.

    If the owner cannot know this, the result is False. This is the case for requests that have ended, and for attempts
    from before the snapshot that the world was restored from. Progress of an unknown request is foreign only if the
    worker is in the fleet. Otherwise the owner may have forgotten the request's id since the worker left.
    """
    request = world.requests.get(event.request_id)
    if request is not None:
        if len(request.sent) < request.attempt + request.encodings + request.prefills:
            return False
        return (event.attempt, event.worker_id, event.worker_epoch) not in request.sent
    if world.requests.known_content(event.request_id) is not None:
        return False
    return is_member(world, event.worker_id, event.worker_epoch)


def is_member(world: World, worker_id: str, worker_epoch: int) -> bool:
    """Return whether a worker is in the fleet in this epoch."""
    worker = world.fleet.get(worker_id)
    return worker is not None and worker.worker_epoch == worker_epoch


def _descriptor_fault(world: World, request: ActiveRequest, event: PrefillFinished) -> str | None:
    """Return why the KV descriptor of a prefill worker is unusable, and drop it; None if it is usable."""
    prefilled, model = event.prefilled, world.pools[request.submitted.pool].model
    if (prefilled.worker_id, prefilled.worker_epoch, prefilled.model) == (event.worker_id, event.worker_epoch, model):
        return None
    world.requests.drop_unusable_prefilled(request)
    world.counts["foreign_descriptor"] += 1
    named = f"worker {prefilled.worker_id} in epoch {prefilled.worker_epoch} and model {prefilled.model}"
    reported = f"worker {event.worker_id} in epoch {event.worker_epoch} and model {model}"
    return f"the KV descriptor of {reported} names {named}"


def _report(world: World, event: LoadReported) -> None:
    if not _is_of_fleet(world, event):
        return
    before = world.load.rank_load(event.worker_id, event.rank).reported
    world.load.report(event)
    # Only freed blocks or a shorter engine queue can make room for a queued request.
    if before is not None and (event.kv_blocks_used < before.kv_blocks_used or event.waiting < before.waiting):
        world.replan()


def _is_of_fleet(world: World, event: MetricEvent) -> bool:
    """Return whether a report is from a rank of the fleet, in the current epoch of its worker. Count it if not."""
    worker = world.fleet.get(event.worker_id)
    found = worker is not None and worker.worker_epoch == event.worker_epoch and event.rank in worker.spec.ranks
    if not found:
        world.counts["foreign_load_report"] += 1
    return found


def _fleet(world: World, event: AnyFleetEvent, offset: int) -> list[AnyDecision]:
    try:
        worker = world.fleet.apply(event, offset)
    except IllegalTransition:
        world.counts["stale_fleet_event"] += 1
        return []
    world.forget_rosters()
    world.replan()  # queued requests whose session was bound to a lost worker, for example, can go to other workers
    match event:
        case WorkerJoined() if worker is not None:
            world.admit(worker)
            world.replan(world.requests.waiting())
        case WorkerRecovered():
            world.replan(world.requests.waiting())
        case WorkerLost() if worker is not None:
            if world.on_loss is not None:
                world.on_loss(event, worker)
            world.commands.drop_worker(worker.spec.worker_id, worker.worker_epoch)
            return handle_worker_loss(world, worker)
        case IngressLost():
            return abort_orphans(world, event)
        case _:
            pass
    return []


def abort_orphans(world: World, lost: IngressLost) -> list[AnyDecision]:
    """Abort the HTTP requests of a lost ingress that no client reads elsewhere, in order of submission."""
    message = f"the ingress {lost.ingress_id} of the request was lost: {lost.reason}"
    requests = world.requests.of_ingress(lost.incarnation)
    orphans = [request for request in requests if world.requests.abandon(request, lost.incarnation)]
    return [abort(world, request, "ingress_lost", message) for request in orphans]
