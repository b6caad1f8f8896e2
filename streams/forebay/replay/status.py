"""Current status of a group: its owner, workers, requests and topics.

`GET /v1/status` and `forebay status --json` return a `GroupStatus` as JSON. The classes of this module define it, and
docs/status.md describes it. A later version may add fields. It changes the meaning of a field only together with
`VERSION`.

A process with the owner reads the owner's world. Every other process derives the world from the log, with the events
after the newest decision that lead to no other one: see `forebay.replay.at`.
"""

from collections import Counter
from typing import Literal

import msgspec

from forebay.core.phases import Phase
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.topics import DECISIONS, INPUTS
from forebay.journal.snapshots import claim_at
from forebay.replay.at import NoSuchRecord, last_time, seek_time
from forebay.replay.moment import Fact, RankFacts, ranks_of
from forebay.replay.states import States
from forebay.transport.base import Log
from forebay.transport.heartbeats import OwnerPresence

VERSION = 1
NO_OWNER = "no router owns the group now, so requests wait"
NEVER_OWNED = "no router has owned the group yet"
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready, and decode workers must not compute prompts"

Missing = Literal["worker", "prefill worker"]


class OwnerStatus(Fact, frozen=True, kw_only=True):
    """The owner of a group, the time without an owner before its claim, and the routers that stand by."""

    owner_id: str
    epoch: int
    since_us: int | None
    outage_us: int | None = None
    alive: bool | None
    heartbeat_age_s: float | None
    standbys: list[str] | None


class PoolStatus(Fact, frozen=True, kw_only=True):
    pool: str
    model: str
    role: str
    policy: str
    routed: int
    queued: int
    drained: bool = False
    canary_of: str | None = None
    canary_share: float = 0.0


class RankStatus(Fact, frozen=True, kw_only=True):
    rank: int
    active_requests: int
    prefill_tokens: int
    decode_blocks: float
    running: int | None
    waiting: int | None
    kv_blocks_used: int | None
    kv_blocks_total: int
    cached_blocks: int


class WorkerStatus(Fact, frozen=True, kw_only=True):
    worker_id: str
    epoch: int
    state: str
    pool: str
    role: str
    engine: str
    loras: list[str]
    ranks: list[RankStatus]


class TenantStatus(Fact, frozen=True, kw_only=True):
    tenant: str
    in_flight: int
    queued: int


class RequestsStatus(Fact, frozen=True, kw_only=True):
    """Requests that have not ended, and their tenants, the one with the most requests first."""

    in_flight: int
    queued: int
    by_phase: dict[str, int]
    tenants: tuple[TenantStatus, ...] = ()


class TopicStatus(Fact, frozen=True, kw_only=True):
    """An input topic of the owner."""

    topic: str
    partition: int
    applied: int
    end: int
    lag: int


class GroupStatus(Fact, frozen=True, kw_only=True):
    version: int
    group: str
    source: Literal["owner", "log"]
    at_us: int
    ready: bool
    problems: list[str]
    owner: OwnerStatus
    pools: list[PoolStatus]
    workers: list[WorkerStatus]
    requests: RequestsStatus
    topics: list[TopicStatus]
    others: tuple[str, ...] = ()


def missing_worker(world: World, model: str) -> Missing | None:
    """Return which kind of worker is missing to serve requests for a model; None if none is missing."""
    pools, settings = world.responding_pools(model), world.settings
    if not settings.has_rules(model):
        pools = pools[:1]
    able = [pool for pool in pools if world.roster(pool.pool).ranks and not settings.is_drained(model, pool.pool)]
    if not able:
        return "worker"
    return "prefill worker" if all(_lacks_prefill(world, pool) for pool in able) else None


def _lacks_prefill(world: World, pool: PoolConfigured) -> bool:
    """Return whether only a prefill pool may compute the prompts of a pool, and none has a ready worker."""
    disagg = world.settings.disagg_of(pool)
    needs_prefill = pool.role == "decode" and disagg.enforce and disagg.policy == "always"
    return needs_prefill and world.prefillers_of(pool) is None


async def read_status(log: Log, partition: int, group: str, custom: CustomPolicies = ONLY_BUILT_IN) -> GroupStatus:
    """Derive the status of a group from the log. Whether its owner runs is unknown.

    Raises JournalDiverged if a journal record does not follow from the events, and LogError if the log is damaged.
    """
    if not await log.end(DECISIONS.name, partition):
        return await build_status(log, partition, group, World(custom), "log")
    states = States(log, partition, custom)
    try:
        position = await seek_time(states, await last_time(log, partition))
    except NoSuchRecord:  # the owner wrote its first decision after `last_time` had read the journal
        position = await seek_time(states, await last_time(log, partition))
    return await build_status(log, partition, group, position.world, "log")


async def owner_status(log: Log, partition: int, group: str, world: World) -> GroupStatus:
    """Return the status of a group whose owner runs in this process and has this world. Raises LogError."""
    status = await build_status(log, partition, group, world, "owner")
    owner = msgspec.structs.replace(status.owner, alive=True, standbys=[])
    return msgspec.structs.replace(status, owner=owner)


def with_heartbeats(status: GroupStatus, heartbeats: OwnerPresence) -> GroupStatus:
    """Add to a status what the heartbeats of routers show: whether the owner runs, and which routers stand by."""
    alive = heartbeats.has_owner
    owner = msgspec.structs.replace(
        status.owner,
        alive=alive,
        heartbeat_age_s=heartbeats.owner_age_s,
        standbys=[beat.router_id for beat in heartbeats.standbys()],
    )
    problems = status.problems if alive or status.owner.epoch < 0 else [NO_OWNER, *status.problems]
    return msgspec.structs.replace(status, owner=owner, problems=problems, ready=status.ready and alive)


async def build_status(
    log: Log, partition: int, group: str, world: World, source: Literal["owner", "log"]
) -> GroupStatus:
    epoch = world.owner_epoch
    claim = await claim_at(log, partition, epoch)
    seen_us = claim.previous_seen_us if claim else 0
    ends = {topic.name: await log.end(topic.name, partition) for topic in INPUTS}
    # The world of a running owner changes at each `await`, so there is none from here on.
    missing = missing_worker(world, group)
    problems = [NEVER_OWNED] if epoch < 0 else []
    if missing is not None:
        problems.append(NO_WORKER if missing == "worker" else NO_PREFILL_WORKER)
    problems += [
        f"worker {worker.spec.worker_id} is suspect, because its lease was not renewed"
        for worker in world.fleet.workers()
        if worker.phase is WorkerPhase.SUSPECT
    ]
    phases = Counter(str(request.phase) for request in world.requests.active())
    return GroupStatus(
        version=VERSION,
        group=group,
        source=source,
        at_us=world.now_us,
        ready=missing is None and epoch >= 0,
        problems=problems,
        owner=OwnerStatus(
            owner_id="" if claim is None else claim.owner_id,
            epoch=epoch,
            since_us=None if claim is None else claim.at_us,
            outage_us=claim.at_us - seen_us if claim and claim.at_us >= seen_us > 0 else None,
            alive=None,
            heartbeat_age_s=None,
            standbys=None,
        ),
        pools=_pools(world),
        workers=_workers(world),
        requests=RequestsStatus(
            in_flight=phases.total(),
            queued=phases[Phase.QUEUED],
            by_phase=dict(sorted(phases.items())),
            tenants=_tenants(world),
        ),
        topics=[_topic(name, partition, world.view.get(name, 0), end) for name, end in ends.items()],
    )


def _topic(name: str, partition: int, applied: int, end: int) -> TopicStatus:
    # The owner may apply records that were appended after `end` was read.
    end = max(end, applied)
    return TopicStatus(topic=name, partition=partition, applied=applied, end=end, lag=end - applied)


def _pools(world: World) -> list[PoolStatus]:
    active = world.requests.active()
    queued = Counter(request.submitted.pool for request in active if request.phase is Phase.QUEUED)
    return [
        PoolStatus(
            pool=name,
            model=pool.model,
            role=pool.role,
            policy=pool.router.mode,
            routed=world.turns.get(name, 0),
            queued=queued[name],
            drained=world.settings.is_drained(pool.model, name),
            canary_of=None if (canary := world.settings.canary(pool.model, name)) is None else canary.base,
            canary_share=0.0 if canary is None else canary.share,
        )
        for name, pool in sorted(world.pools.items())
    ]


def _tenants(world: World) -> tuple[TenantStatus, ...]:
    requests = [request for request in world.requests.active() if request.submitted.tenant]
    active = Counter(request.submitted.tenant for request in requests)
    queued = Counter(request.submitted.tenant for request in requests if request.phase is Phase.QUEUED)
    largest = sorted(active.items(), key=lambda one: (-one[1], one[0]))
    return tuple(TenantStatus(tenant=name, in_flight=count, queued=queued[name]) for name, count in largest)


def _workers(world: World) -> list[WorkerStatus]:
    ranks: dict[str, list[RankFacts]] = {}
    for facts in ranks_of(world):
        ranks.setdefault(facts.worker_id, []).append(facts)
    return [_worker(worker, ranks.get(worker.spec.worker_id, [])) for worker in world.fleet.workers()]


def _worker(worker: FleetWorker, ranks: list[RankFacts]) -> WorkerStatus:
    spec = worker.spec
    return WorkerStatus(
        worker_id=spec.worker_id,
        epoch=worker.worker_epoch,
        state=worker.phase.value,
        pool=spec.pool,
        role=spec.role,
        engine=spec.engine,
        loras=list(spec.loras),
        ranks=[
            RankStatus(
                rank=facts.rank,
                active_requests=facts.active_requests,
                prefill_tokens=facts.prefill_tokens,
                decode_blocks=facts.decode_blocks,
                running=None if facts.reported is None else facts.reported.running,
                waiting=None if facts.reported is None else facts.reported.waiting,
                kv_blocks_used=None if facts.reported is None else facts.reported.kv_blocks_used,
                kv_blocks_total=spec.kv_blocks_total,
                cached_blocks=facts.blocks["device"],
            )
            for facts in ranks
        ],
    )
