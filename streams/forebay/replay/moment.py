"""Describe the state of a group at one moment as plain data, for display, programs and comparisons.

No function here changes the world that it reads.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import TIERS
from forebay.core.world import World
from forebay.events.control import BusyThresholds, DisaggConfig, QueuePolicy, RouterConfig
from forebay.events.fleet import WorkerLost, WorkerSpec
from forebay.events.metrics import TierCosts
from forebay.events.snapshots import IndexCursor


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of `Moment` and its parts."""


class PoolFacts(Fact, frozen=True, kw_only=True):
    pool: str
    model: str
    block_size: int
    attempts_max: int
    router: RouterConfig
    busy: BusyThresholds
    routed: int
    role: str = "aggregated"
    disagg: DisaggConfig | None = None


class WorkerFacts(Fact, frozen=True, kw_only=True):
    """One worker of the fleet. `kv_store` is the shared store that it reads; empty if it reads none."""

    worker_id: str
    worker_epoch: int
    phase: str
    pool: str
    role: str
    slot: int
    ranks: list[int]
    engine: str
    kv_events: bool
    taints: tuple[str, ...]
    loras: tuple[str, ...]
    kv_store: str = ""


class ReportFacts(Fact, frozen=True, kw_only=True):
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class RankFacts(Fact, frozen=True, kw_only=True):
    """Load and cache of one worker rank.

    Attributes:
        prefill_tokens: uncached prompt tokens of requests that wait for their first token.
        computed_tokens: uncached prompt tokens sent to the rank so far. A new rank starts with the minimum of all
            ranks.
        resync: whether the worker was asked to re-announce its cache.
        approximate_blocks: blocks assumed cached from routing, for ranks without KV events.
        predicted_blocks: blocks assumed cached until KV events confirm them.
    """

    worker_id: str
    rank: int
    prefill_tokens: int
    decode_blocks: float
    active_requests: int
    computed_tokens: int
    reported: ReportFacts | None
    blocks: dict[str, int]
    last_seq: int
    resync: bool
    approximate_blocks: int
    predicted_blocks: int
    costs: TierCosts | None = None


class LossFacts(Fact, frozen=True, kw_only=True):
    """A lost worker. Its load and cache are known only if it was lost after the state at which the derivation began.

    Attributes:
        at_us: when the owner wrote `WorkerLost`, on its wall clock.
        lost_us: when the owner applied `WorkerLost`, on the owner's clock; None if unknown.
        ranks: state of the worker's ranks right before the loss; None if unknown.
    """

    worker_id: str
    worker_epoch: int
    reason: str
    at_us: int
    lost_us: int | None = None
    ranks: list[RankFacts] | None = None
    requests: list[str] | None = None


class HeldFacts(Fact, frozen=True, kw_only=True):
    """A request held in the router's queue.

    `priority` moves it ahead by that many seconds. Requests with a higher `strict_priority` go first, whatever the
    cost.
    """

    request_id: str
    waited_us: int
    uncached_tokens: int
    priority: int
    strict_priority: int


class ClassFacts(Fact, frozen=True, kw_only=True):
    """A queue class of a pool: one of several queues that take turns."""

    pool: str
    name: str
    uncached_tokens_min: int
    policy: QueuePolicy
    waiting: list[HeldFacts]


class RequestFacts(Fact, frozen=True, kw_only=True):
    """An active request.

    `age_us` counts from the submission; None if the log no longer holds it. `kept_by` is the prefill worker that keeps
    the KV of the prompt until it is fetched; empty if there is none.
    """

    request_id: str
    phase: str
    pool: str
    worker_id: str
    rank: int
    attempt: int
    prompt_tokens: int
    submitted_offset: int
    age_us: int | None
    due_in_us: int
    kept_by: str = ""


class LaterFacts(Fact, frozen=True, kw_only=True):
    """Numbers of events, by topic, between the journal record of a `Moment` and the time that the user requested.

    Attributes:
        requested_us: requested time in microseconds since 1970; None if the user requested a journal record.
        applied: events that the state of the moment contains. The next journal record proves that the owner had applied
            these events by the requested time.
        unrecorded: events that the state of the moment contains without such proof, because the journal has no next
            record. The owner may have applied them later than the requested time.
        not_applied: events on the log by the requested time that the state of the moment does not contain.
    """

    requested_us: int | None = None
    applied: dict[str, int] = {}
    unrecorded: dict[str, int] = {}
    not_applied: dict[str, int] = {}


class Moment(Fact, frozen=True, kw_only=True):
    """The state of a group after a journal record.

    Attributes:
        offset: offset of that record, the last valid record at or before the requested offset.
        owner_id: empty if the log no longer holds the owner's claim.
        digest: digest of the whole state, in the form of the digests in the journal.
        record: the journal record at `offset`; None if the state is the beginning of the derivation.
        start: journal offset at which the derivation of the state began.
        unverified: number of records and events that the derivation skipped, by the kind of problem.
    """

    offset: int
    now_us: int
    owner_epoch: int
    owner_id: str
    digest: str
    record: dict[str, Any] | None
    start: int
    view: dict[str, int]
    pools: list[PoolFacts]
    workers: list[WorkerFacts]
    ranks: list[RankFacts]
    lost: list[LossFacts]
    queues: list[ClassFacts]
    requests: list[RequestFacts]
    sessions: int
    unverified: dict[str, int]
    later: LaterFacts = LaterFacts()
    stores: dict[str, int] = {}


def flat(part: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of settings, with dotted names for parts of a part."""
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def pools_of(world: World) -> list[PoolFacts]:
    return [
        PoolFacts(
            pool=name,
            model=pool.model,
            block_size=pool.block_size,
            attempts_max=pool.attempts_max,
            router=pool.router,
            busy=world.settings.busy_of(pool),
            routed=world.turns.get(name, 0),
            role=pool.role,
            disagg=world.settings.disagg_of(pool) if pool.role == "decode" else None,
        )
        for name, pool in sorted(world.pools.items())
    ]


def workers_of(world: World) -> list[WorkerFacts]:
    return [
        WorkerFacts(
            worker_epoch=worker.worker_epoch,
            phase=worker.phase.value,
            slot=worker.slot,
            ranks=list(worker.spec.ranks),
            **{name: getattr(worker.spec, name) for name in _SHOWN_SPEC},
        )
        for worker in world.fleet.workers()
    ]


def ranks_of(world: World) -> list[RankFacts]:
    """Return the facts of every rank, ordered by worker and rank."""
    return [_rank(world, cursor) for cursor in world.index.cursors()]


_SHOWN_SPEC = tuple(name for name in WorkerFacts.__struct_fields__ if name in WorkerSpec.__struct_fields__)


def loss_of(world: World, event: WorkerLost, worker: FleetWorker) -> LossFacts:
    """Return the facts of a lost worker. Call this before `world` removes the worker, in its callback `on_loss`."""
    keys: set[HolderKey] = {(event.worker_id, rank) for rank in worker.spec.ranks}
    stranded = world.requests.of_worker(event.worker_id, event.worker_epoch)
    return LossFacts(
        worker_id=event.worker_id,
        worker_epoch=event.worker_epoch,
        reason=event.reason,
        at_us=event.at_us,
        lost_us=world.now_us,
        ranks=[_rank(world, cursor) for cursor in world.index.cursors() if (cursor.worker_id, cursor.rank) in keys],
        requests=[request.submitted.request_id for request in stranded],
    )


def queues_of(world: World) -> list[ClassFacts]:
    found = []
    for pool in sorted(world.pools):
        config = world.pools[pool].router.queue
        for kind, waiting in world.queues.in_order(pool):
            found.append(
                ClassFacts(
                    pool=pool,
                    name=kind.name,
                    uncached_tokens_min=kind.uncached_tokens_min,
                    policy=kind.policy or config.policy,
                    waiting=[
                        HeldFacts(
                            request_id=held.request_id,
                            waited_us=world.now_us - held.arrival_us,
                            uncached_tokens=held.uncached_tokens,
                            priority=held.priority,
                            strict_priority=held.strict_priority,
                        )
                        for held in waiting
                    ],
                )
            )
    return found


def requests_of(world: World, timeouts_us: dict[int, int]) -> list[RequestFacts]:
    """Return the active requests, oldest first. `timeouts_us` has their time limits by offset of the submission."""
    return [_request(world, request, timeouts_us.get(request.submitted.offset)) for request in world.requests.active()]


def _rank(world: World, cursor: IndexCursor) -> RankFacts:
    worker_id, rank = cursor.worker_id, cursor.rank
    load = world.load.rank_load(worker_id, rank)
    report = load.reported
    return RankFacts(
        worker_id=worker_id,
        rank=rank,
        prefill_tokens=load.prefill_tokens,
        decode_blocks=load.decode_blocks,
        active_requests=load.active_requests,
        computed_tokens=load.computed_tokens,
        reported=None if report is None else msgspec.convert(report, ReportFacts, from_attributes=True),
        blocks={tier: world.index.blocks_held(worker_id, rank, tier) for tier in TIERS},
        last_seq=cursor.last_seq,
        resync=cursor.resync,
        approximate_blocks=world.routed.blocks_held(worker_id, rank),
        predicted_blocks=world.predicted.blocks_held(worker_id, rank),
        costs=load.costs,
    )


def _request(world: World, request: ActiveRequest, timeout_us: int | None) -> RequestFacts:
    due_in_us = request.submitted.due_us - world.now_us
    kept = request.prefilled if request.has_kept_kv(world.now_us) else None
    return RequestFacts(
        request_id=request.submitted.request_id,
        phase=request.phase.value,
        pool=request.submitted.pool,
        worker_id=request.worker_id if request.on_worker else "",
        rank=request.rank,
        attempt=request.stage_attempt,
        prompt_tokens=request.submitted.prompt_tokens,
        submitted_offset=request.submitted.offset,
        age_us=None if timeout_us is None else timeout_us - due_in_us,
        due_in_us=due_in_us,
        kept_by="" if kept is None else kept.worker_id,
    )
