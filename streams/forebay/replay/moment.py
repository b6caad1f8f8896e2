"""What a world holds at one moment, as plain data: for people, programs and comparisons. Looks only."""

from typing import Any

import msgspec

from forebay.core.routing.disaggregation import has_kept_kv
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import TIERS
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import BusyThresholds, DisaggConfig, QueuePolicy, RouterConfig
from forebay.events.fleet import WorkerLost
from forebay.events.snapshots import IndexCursor


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A named part of a moment."""


class PoolFacts(Fact, frozen=True, kw_only=True):
    """A pool as it is configured; `router` names what is not at its default.

    `busy` are the thresholds in force, `disagg` by what a decode pool goes now, None for others.
    """

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
    """A member of the fleet."""

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


class ReportFacts(Fact, frozen=True, kw_only=True):
    """What a rank last said of itself."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class RankFacts(Fact, frozen=True, kw_only=True):
    """Load and cache of one rank.

    Attributes:
        prefill_tokens: prompt tokens that wait for their first token and are not cached.
        decode_blocks: blocks of the requests under way.
        computed_tokens: prompt tokens sent there that were not cached; a newcomer begins with the fewest of any.
        blocks: by tier, as its KV events say.
        last_seq: of the KV event applied last; `resync` while its worker is asked to say all anew.
        approximate_blocks: taken for cached because they were routed there, for want of KV events.
        predicted_blocks: taken for cached until KV events say so.
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


class LossFacts(Fact, frozen=True, kw_only=True):
    """A worker that is gone. What it held is known if it was lost after the state from which the moment was derived.

    Attributes:
        at_us: when the fact was written, by its writer's clock.
        lost_us: when it was applied, by the owner's clock.
        ranks: as they were right before; None where not known, as `requests`, which were under way there.
    """

    worker_id: str
    worker_epoch: int
    reason: str
    at_us: int
    lost_us: int | None = None
    ranks: list[RankFacts] | None = None
    requests: list[str] | None = None


class HeldFacts(Fact, frozen=True, kw_only=True):
    """A request that waits in the router's queue, for `waited_us` by now."""

    request_id: str
    waited_us: int
    uncached_tokens: int
    priority: int
    strict_priority: int


class ClassFacts(Fact, frozen=True, kw_only=True):
    """A queue class, from the first to the last in it. `deficit` is what it may spend, in tokens."""

    pool: str
    name: str
    uncached_tokens_min: int
    policy: QueuePolicy
    quantum: int
    deficit: int
    served_last: bool
    waiting: list[HeldFacts]


class RequestFacts(Fact, frozen=True, kw_only=True):
    """A request under way. Its worker is empty while none has it; `age_us` is None where its submission is gone.

    `kept_by` keeps the KV of its prompt for `kept_for_us` more; it is empty where nobody does.
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
    kept_for_us: int = 0


class Moment(Fact, frozen=True, kw_only=True):
    """The world right after a journal record.

    Attributes:
        offset: of that record, the last valid one at or before the offset that was asked for.
        now_us: the owner's clock.
        owner_id: empty where its claim is gone.
        digest: of the whole state, as the journal seals it.
        record: what was journalled at `offset`; None at the beginning.
        start: the journal offset of the state from which this one was derived.
        view: the next offset of every topic.
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


def pools_of(world: World) -> list[PoolFacts]:
    """Every pool by name."""
    return [
        PoolFacts(
            pool=name,
            model=pool.model,
            block_size=pool.block_size,
            attempts_max=pool.attempts_max,
            router=pool.router,
            busy=world.busy.get(name, pool.router.busy),
            routed=world.turns.get(name, 0),
            role=pool.role,
            disagg=world.disagg.get(name, pool.router.disagg) if pool.role == "decode" else None,
        )
        for name, pool in sorted(world.pools.items())
    ]


def workers_of(world: World) -> list[WorkerFacts]:
    """Every member of the fleet by worker id."""
    return [
        WorkerFacts(
            worker_id=worker.spec.worker_id,
            worker_epoch=worker.worker_epoch,
            phase=worker.phase.value,
            pool=worker.spec.pool,
            role=worker.spec.role,
            slot=worker.slot,
            ranks=list(worker.spec.ranks),
            engine=worker.spec.engine,
            kv_events=worker.spec.kv_events,
            taints=worker.spec.taints,
            loras=worker.spec.loras,
        )
        for worker in world.fleet.workers()
    ]


def ranks_of(world: World) -> list[RankFacts]:
    """Every admitted rank in order."""
    return [_rank(world, cursor) for cursor in world.index.cursors()]


def loss_of(world: World, event: WorkerLost, worker: FleetWorker) -> LossFacts:
    """A worker that is being lost, while everything is still there: for `World.on_loss`."""
    keys: set[HolderKey] = {(event.worker_id, rank) for rank in worker.spec.ranks}
    stranded = world.requests.of_worker(event.worker_id, event.worker_epoch)
    return LossFacts(
        worker_id=event.worker_id,
        worker_epoch=event.worker_epoch,
        reason=event.reason,
        at_us=event.at_us,
        lost_us=world.now_us,
        ranks=[_rank(world, cursor) for cursor in world.index.cursors() if (cursor.worker_id, cursor.rank) in keys],
        requests=[request.request_id for request in stranded],
    )


def queues_of(world: World) -> list[ClassFacts]:
    """Every queue class of every pool, and who waits in it."""
    found = []
    for turns in world.queues.snapshot():
        config = world.pools[turns.pool].router.queue
        lines = zip(world.queues.in_order(turns.pool), turns.classes, strict=True)
        for at, ((kind, waiting), share) in enumerate(lines):
            found.append(
                ClassFacts(
                    pool=turns.pool,
                    name=kind.name,
                    uncached_tokens_min=kind.uncached_tokens_min,
                    policy=kind.policy or config.policy,
                    quantum=kind.quantum,
                    deficit=share.deficit,
                    served_last=at == turns.turn,
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
    """Every request under way, oldest first; `timeouts_us` by the offset of its submission, as far as known."""
    return [_request(world, request, timeouts_us.get(request.offset)) for request in world.requests.active()]


def _rank(world: World, cursor: IndexCursor) -> RankFacts:
    worker_id, rank = cursor.worker_id, cursor.rank
    load = world.load.rank_load(worker_id, rank)
    said = load.reported
    return RankFacts(
        worker_id=worker_id,
        rank=rank,
        prefill_tokens=load.prefill_tokens,
        decode_blocks=load.decode_blocks,
        active_requests=load.active_requests,
        computed_tokens=load.computed_tokens,
        reported=None
        if said is None
        else ReportFacts(
            running=said.running,
            waiting=said.waiting,
            kv_blocks_used=said.kv_blocks_used,
            kv_blocks_total=said.kv_blocks_total,
        ),
        blocks={tier: world.index.blocks_held(worker_id, rank, tier) for tier in TIERS},
        last_seq=cursor.last_seq,
        resync=cursor.resync,
        approximate_blocks=world.routed.blocks_held(worker_id, rank),
        predicted_blocks=world.predicted.blocks_held(worker_id, rank),
    )


def _request(world: World, request: ActiveRequest, timeout_us: int | None) -> RequestFacts:
    due_in_us = request.due_us - world.now_us
    kept = request.prefilled if has_kept_kv(request, world.now_us) else None
    return RequestFacts(
        request_id=request.request_id,
        phase=request.phase.value,
        pool=request.pool,
        worker_id=request.worker_id if request.on_worker else "",
        rank=request.rank,
        attempt=request.stage_attempt,
        prompt_tokens=request.prompt_tokens,
        submitted_offset=request.offset,
        age_us=None if timeout_us is None else timeout_us - due_in_us,
        due_in_us=due_in_us,
        kept_by="" if kept is None else kept.worker_id,
        kept_for_us=0 if kept is None else request.prefilled_due_us - world.now_us,
    )


def moment_of(
    world: World,
    *,
    offset: int,
    owner_id: str,
    record: dict[str, Any] | None,
    start: int,
    lost: list[LossFacts],
    timeouts_us: dict[int, int],
    unverified: dict[str, int],
) -> Moment:
    """All that a world holds, beside what only the log knows."""
    return Moment(
        offset=offset,
        now_us=world.now_us,
        owner_epoch=world.owner_epoch,
        owner_id=owner_id,
        digest=hex_digest(world.digest()),
        record=record,
        start=start,
        view=dict(sorted(world.view.items())),
        pools=pools_of(world),
        workers=workers_of(world),
        ranks=ranks_of(world),
        lost=lost,
        queues=queues_of(world),
        requests=requests_of(world, timeouts_us),
        sessions=len(world.sessions),
        unverified=unverified,
    )
