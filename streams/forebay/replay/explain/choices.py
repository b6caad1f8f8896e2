"""Explain one routing decision: every candidate with its cost terms, and why the other ranks of the pool were excluded.

These functions read the world right before the decision is booked. They do not change the world.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from forebay.core.routing.cost import CostTable
from forebay.core.routing.eligibility import is_busy
from forebay.core.routing.evaluation import find_overlaps
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import BUILT_IN
from forebay.core.routing.selection import softmax_weights
from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.state.sessions import Binding
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import BusyThresholds, PoolConfigured
from forebay.replay.explain.explanation import CandidateCost, ExcludedRank, ExclusionReason, RankState, Routing
from forebay.replay.explain.reasons import limiting_session, number, why

COST_SETTINGS = (
    "selection_policy",
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "shared_cache_hit_weight",
    "tier_credit",
    "decode_active_request_weight",
    "eviction_weight",
    "track_prefill_tokens",
    "track_active_blocks",
    "track_output_blocks",
    "assume_kv_reuse",
    "use_kv_events",
    "temperature",
)
BY_LOAD_OR_TURN = frozenset({"round-robin", "random", "power-of-two", "least-loaded"})  # modes that ignore the cost


def routing_of(world: World, plan: Plan) -> Routing:
    """Return the explanation of a routing decision.

    The caller fills in the journal offset, the stage and the time since the submission.
    """
    pool, request, table, at = plan.pool, plan.request, plan.table, plan.at
    costs = table.costs
    rank_states = _RankStates(world, pool, request.blocks)
    chances = _chances(plan)
    # The stage `decode` changes hints; these are not overrides.
    own = world.requests.get(request.request_id) if plan.stage == "decode" else None
    override = (request if own is None else own.submitted).hints.override
    changed = () if override is None else override.__struct_fields__
    reason, text = why(world, plan)
    others = [other for other in range(len(costs)) if other != at]
    return Routing(
        offset=-1,
        now_us=world.now_us,
        after_us=0,
        attempt=plan.attempt + 1,
        waited_us=0,
        pool=pool.pool,
        block_size=pool.block_size,
        mode=plan.config.mode,
        config=_settings(world, plan),
        overridden=tuple(name for name in changed if getattr(override, name) is not None),
        winner=at,
        runner_up=min(others, key=lambda other: (costs[other], other), default=None),
        ties=plan.ties,
        reason=reason,
        why=text,
        candidates=tuple(_candidate(rank_states, table, position, chances) for position in range(len(costs))),
        left_out=left_out(world, pool, request, table.roster.positions),
        table_digest=hex_digest(table.digest()),
    )


def left_out(
    world: World, pool: PoolConfigured, request: SubmittedRequest, candidates: Collection[HolderKey]
) -> tuple[ExcludedRank, ...]:
    """Return every rank of the pool that is not a candidate, with the reasons, in worker and rank order."""
    rank_states = _RankStates(world, pool, request.blocks)
    ready = {candidate.key: candidate for candidate in world.roster(pool.pool).ranks}
    session = limiting_session(world, pool, request, candidates)
    busy = world.busy.get(pool.pool, pool.router.busy)
    hard = pool.router.session_mode == "hard"
    found = []
    for worker in world.fleet.workers():
        if worker.spec.pool != pool.pool:
            continue
        for rank in worker.spec.ranks:
            key = worker.spec.worker_id, rank
            if key not in candidates:
                reasons = dict(_unmet(worker, rank, request))
                reasons |= dict(_rejections(world, worker, request))
                last = _last_worker_id(world, pool, request)
                if not reasons and (pool.role == "encode" or worker.spec.worker_id == last):
                    reasons = {"had_it_last": "it ran the previous attempt, and another worker is available"}
                elif not reasons:
                    reasons = _exclusion_by_policy(ready[key], busy, session, hard=hard) or _exclusion_by_capacity(
                        pool, ready[key]
                    )
                text = "; ".join(reasons.values())
                found.append(ExcludedRank(seen=rank_states.seen(worker, rank), reasons=tuple(reasons), text=text))
    return tuple(found)


def _last_worker_id(world: World, pool: PoolConfigured, request: SubmittedRequest) -> str | None:
    """Return the worker of the pool that ran the previous attempt at its stage."""
    active = world.requests.get(request.request_id)
    return None if active is None else {"prefill": active.prefiller_id, "decode": active.decoder_id}.get(pool.role)


class _RankStates:
    """Cache and load of each rank with respect to one prompt."""

    def __init__(self, world: World, pool: PoolConfigured, blocks: Sequence[int]) -> None:
        self._world = world
        self._known_overlaps = find_overlaps(world, pool, blocks)
        self._reported_overlaps = world.index.overlaps(blocks) if pool.router.use_kv_events else {}

    def seen(self, worker: FleetWorker, rank: int) -> RankState:
        worker_id = worker.spec.worker_id
        overlap = self._known_overlaps.get((worker_id, rank), NO_OVERLAP)
        load = self._world.load.rank_load(worker_id, rank)
        index = self._world.index
        return RankState(
            worker_id=worker_id,
            rank=rank,
            device_overlap=overlap.device,
            host_overlap=overlap.host,
            disk_overlap=overlap.disk,
            store_overlap=overlap.store,
            assumed_overlap=overlap.device - self._reported_overlaps.get((worker_id, rank), NO_OVERLAP).device,
            device_blocks=index.blocks_held(worker_id, rank, "device"),
            host_blocks=index.blocks_held(worker_id, rank, "host"),
            disk_blocks=index.blocks_held(worker_id, rank, "disk"),
            kv_blocks_total=worker.spec.kv_blocks_total,
            waiting_tokens=load.prefill_tokens,
            computed_tokens=load.computed_tokens,
        )


def _candidate(rank_states: _RankStates, table: CostTable, at: int, chances: Sequence[float] | None) -> CandidateCost:
    candidate, terms = table.roster.ranks[at], table.terms(at)
    return CandidateCost(
        seen=rank_states.seen(candidate.worker, candidate.rank),
        cost=terms.cost,
        prefill_blocks=terms.prefill_blocks,
        overlap_credit=terms.overlap_credit,
        decode_blocks=terms.decode_blocks,
        active_requests=terms.active_requests,
        taint_factor=terms.taint_factor,
        eviction_cost=terms.eviction_cost,
        probability=None if chances is None else chances[at],
    )


def _chances(plan: Plan) -> list[float] | None:
    """Return the selection probability of each candidate if the decision was sampled by cost, else None."""
    if plan.config.mode != "kv" or not plan.config.temperature:
        return None
    weights = softmax_weights(plan.table.costs, plan.config.temperature)
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _settings(world: World, plan: Plan) -> dict[str, Any]:
    config = plan.config
    found: dict[str, Any] = {}
    if config.mode not in BY_LOAD_OR_TURN:
        drawn = config.mode != "direct"
        found = {name: getattr(config, name) for name in COST_SETTINGS if drawn or name != "temperature"}
    if not config.use_kv_events:
        found["ttl_s"] = config.ttl_s
    elif config.predicted_ttl_s:
        found["predicted_ttl_s"] = config.predicted_ttl_s
    if plan.request.hints.session_id:
        found |= {"session_ttl_s": config.session_ttl_s, "session_mode": config.session_mode}
    busy = world.busy.get(plan.pool.pool, config.busy)
    if busy != BusyThresholds():
        found["busy"] = msgspec.to_builtins(busy)
    if config.queue.threshold is not None:
        found["queue_threshold"] = config.queue.threshold
    if config.queue.run_ahead is not None:
        found["queue_run_ahead"] = config.queue.run_ahead
    if config.mode not in BUILT_IN:
        found["policy"] = config.mode
    return found


def _unmet(worker: FleetWorker, rank: int, request: SubmittedRequest) -> Iterator[tuple[ExclusionReason, str]]:
    """Yield the requirements that a rank does not meet, as `core.routing.eligibility.filter_eligible` checks them."""
    spec, hints = worker.spec, request.hints
    if worker.phase is WorkerPhase.SUSPECT:
        yield "suspect", "its worker did not renew its lease in time"
    elif worker.phase is WorkerPhase.DRAINING:
        yield "draining", "its worker is draining: it accepts no new requests"
    if hints.worker_id and (spec.worker_id != hints.worker_id or hints.rank not in (None, rank)):
        wanted = hints.worker_id if hints.rank is None else f"rank {hints.rank} of {hints.worker_id}"
        yield "not_pinned", f"the request is pinned to {wanted}"
    if hints.allowed_workers and spec.worker_id not in hints.allowed_workers:
        yield "not_allowed", "it is not in the request's allowed workers"
    missing = [taint for taint in hints.required_taints if taint not in spec.taints]
    if missing:
        yield "missing_taint", f"it lacks the required taints {', '.join(missing)}"
    if request.lora_name and request.lora_name not in spec.loras:
        yield "missing_adapter", f"it has not loaded the LoRA adapter {request.lora_name}"
    if request.is_salted and not spec.salts_cache:
        yield "shared_cache", "it cannot separate the cache of the request's namespace"


def _rejections(world: World, worker: FleetWorker, request: SubmittedRequest) -> Iterator[tuple[ExclusionReason, str]]:
    """Yield why a worker is a candidate only if there is no other, because of what it has rejected."""
    active = world.requests.get(request.request_id)
    if active is not None and worker.spec.worker_id in active.rejected_by:
        yield "rejected_it", "it has rejected the request, and another worker is available"
    elif worker.spec.worker_id in world.fleet.avoided:
        yield "rejects", "it rejected requests, so it is avoided for some seconds, and another worker is available"


def _exclusion_by_policy(
    candidate: CandidateRank, busy: BusyThresholds, session: Binding | None, *, hard: bool
) -> dict[ExclusionReason, str]:
    """Return why an eligible rank was excluded, as `forebay.core.routing.candidates.find_candidates` decides."""
    elsewhere = session is not None and candidate.key != (session.worker_id, session.rank)
    if is_busy(candidate, busy) and not (elsewhere and hard):
        return {"busy": f"it is busy: {', '.join(_exceeded(candidate, busy))}"}
    if session is not None and elsewhere:
        return {"other_session": f"the session is bound to {session.worker_id}, rank {session.rank}"}
    return {}


def _exclusion_by_capacity(pool: PoolConfigured, candidate: CandidateRank) -> dict[ExclusionReason, str]:
    """Return why a rank is full, as `forebay.core.routing.capacity.ranks_with_room` checks it."""
    run_ahead = pool.router.queue.run_ahead
    if run_ahead is None:
        return {}
    ((most, waiting),) = Roster([candidate]).limits(run_ahead)
    load = candidate.load
    if load.active_requests >= most:
        return {"full": f"it is full: {load.active_requests} active requests, maximum {most}"}
    if load.waiting > waiting:
        return {"full": f"it is full: {load.waiting} requests wait in its engine, maximum {waiting}"}
    return {}


def _exceeded(candidate: CandidateRank, busy: BusyThresholds) -> Iterator[str]:
    """Yield each threshold that a rank exceeds, with the values, as `is_busy` checks them."""
    spec, load = candidate.worker.spec, candidate.load
    share = busy.active_decode_blocks_threshold
    if share is not None:
        used = max(load.decode_blocks, 0 if load.reported is None else load.reported.kv_blocks_used)
        limit = share * spec.kv_blocks_total
        if used > limit:
            yield f"{number(used)} decode blocks, limit {number(limit)}"
    tokens, multiple = busy.active_prefill_tokens_threshold, busy.active_prefill_tokens_threshold_frac
    limits = (tokens, None if multiple is None else multiple * spec.max_num_batched_tokens)
    for most in limits:
        if most is not None and load.prefill_tokens > most:
            yield f"{number(load.prefill_tokens)} tokens to prefill, limit {number(most)}"
