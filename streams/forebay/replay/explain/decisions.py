"""Explain one routing decision: the cost of each candidate, why one was selected, and why other ranks were excluded.

These functions read the world right before the decision is booked, or right after it for a request that was held or
rejected. They do not change the world.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from forebay.core.routing.cost import CostTable
from forebay.core.routing.draws import softmax_weights
from forebay.core.routing.eligibility import Ineligible, filter_eligible, is_busy
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import draw_two
from forebay.core.selection.candidates import find_candidates, find_hosts, find_suspect_candidates, must_queue
from forebay.core.selection.evaluation import find_overlaps
from forebay.core.selection.next_stage import find_options
from forebay.core.selection.stages import as_prefill_request
from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP
from forebay.core.state.queue import class_of
from forebay.core.state.roster import CandidateRank, Roster, session_roster
from forebay.core.state.sessions import Binding
from forebay.core.state.submitted_request import SubmittedRequest, request_from_event, request_from_query
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import BusyThresholds, PoolConfigured, RouterConfig
from forebay.events.decisions import CostTerms, RequestHeld, RequestRejected, RouteAnswered
from forebay.events.requests import RequestSubmitted
from forebay.replay.explain.explanation import (
    CandidateCost,
    ExcludedRank,
    ExclusionReason,
    RankState,
    Routing,
    SelectionReason,
    SubmissionEvent,
)
from forebay.replay.moment import flat

ELIGIBILITY_REJECTIONS = frozenset(
    {"busy", "no_workers", "no_eligible_worker", "unknown_worker"}
)  # rejections because no worker rank is eligible
SHOWN_TERMS = tuple(name for name in CandidateCost.__struct_fields__ if name in CostTerms.__struct_fields__)


def routing_of(world: World, plan: Plan) -> Routing:
    """Return the explanation of a routing decision without journal offset, stage and time since the submission."""
    pool, request, table, at = plan.pool, plan.request, plan.table, plan.at
    costs = table.costs
    rank_states = _RankStates(world, pool, request.blocks)
    chances = _chances(plan) if plan.config.mode == "kv" and plan.config.temperature else None
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
        reason=reason,
        why=text,
        candidates=tuple(
            CandidateCost(
                seen=rank_states.seen(candidate.worker, candidate.rank),
                **{name: getattr(table.terms(position), name) for name in SHOWN_TERMS},
                probability=None if chances is None else chances[position],
            )
            for position, candidate in enumerate(table.roster.ranks)
        ),
        left_out=left_out(world, pool, request, table.roster.positions),
        table_digest=hex_digest(table.digest()),
    )


def left_out(
    world: World, pool: PoolConfigured, request: SubmittedRequest, candidates: Collection[HolderKey]
) -> tuple[ExcludedRank, ...]:
    """Return every rank of the pool that is not a candidate, with the reasons, in worker and rank order."""
    rank_states = _RankStates(world, pool, request.blocks)
    session = limiting_session(world, pool, request, candidates)
    found = []
    for worker in world.fleet.workers():
        for rank in worker.spec.ranks if worker.spec.pool == pool.pool else ():
            key = worker.spec.worker_id, rank
            if key not in candidates:
                reasons = dict(_unmet(worker, rank, request)) | dict(_rejections(world, worker, request))
                reasons = reasons or dict(_exclusions(world, pool, request, key, session))
                seen, text = rank_states.seen(worker, rank), "; ".join(reasons.values())
                found.append(ExcludedRank(seen=seen, reasons=tuple(reasons), text=text))
    return tuple(found)


class _RankStates:
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


def _chances(plan: Plan) -> list[float]:
    """Return the selection probability of each candidate of a decision that was sampled by cost."""
    weights = softmax_weights(plan.table.costs, plan.config.temperature)
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _settings(world: World, plan: Plan) -> dict[str, Any]:
    """Return the settings in force, by their dotted names in a router configuration."""
    busy, disagg = world.settings.busy_of(plan.pool), world.settings.disagg_of(plan.pool)
    settings = flat(msgspec.structs.replace(plan.config, busy=busy, disagg=disagg))
    return {name: value for name, value in settings if name not in ("mode", "queue.classes")}


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


def _exclusions(
    world: World, pool: PoolConfigured, request: SubmittedRequest, key: HolderKey, session: Binding | None
) -> Iterator[tuple[ExclusionReason, str]]:
    """Yield why an eligible rank was excluded: by its last attempt, its load, a session, or its capacity."""
    active, roster = world.requests.get(request.request_id), world.roster(pool.pool)
    last = None if active is None else {"prefill": active.prefiller_id, "decode": active.decoder_id}.get(pool.role)
    if pool.role == "encode" or key[0] == last:
        yield "had_it_last", "it ran the previous attempt, and another worker is available"
        return
    candidate = roster.ranks[roster.positions[key]]
    busy, run_ahead, load = world.settings.busy_of(pool), pool.router.queue.run_ahead, candidate.load
    elsewhere = session is not None and key != (session.worker_id, session.rank)
    if is_busy(candidate, busy) and not (elsewhere and pool.router.session_mode == "hard"):
        yield "busy", f"it is busy: {', '.join(_exceeded(candidate, busy))}"
    elif session is not None and elsewhere:
        yield "other_session", f"the session is bound to {session.worker_id}, rank {session.rank}"
    elif run_ahead is not None:
        most, waiting = Roster([candidate]).limits(run_ahead)[:, 0].tolist()
        if load.active_requests >= most:
            yield "full", f"it is full: {load.active_requests} active requests, maximum {most}"
        elif load.waiting > waiting:
            yield "full", f"it is full: {load.waiting} requests wait in its engine, maximum {waiting}"


def _exceeded(candidate: CandidateRank, busy: BusyThresholds) -> Iterator[str]:
    """Yield each threshold that a rank exceeds, as `is_busy` checks them."""
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


def why_held(world: World, record: RequestHeld) -> str:
    """Return why a request was held in the queue, from the state right after that decision."""
    request, pool = world.requests.get(record.request_id), world.pools[record.pool]
    assert request is not None, "a held request is active"
    try:
        among = find_options(world, pool, request).computing
    except Ineligible as ineligible:
        if find_hosts(world, pool, request.submitted, ineligible) is not None:
            return f"no ready worker has the adapter {request.submitted.lora_name}; the owner has it loaded"
        ranks = find_suspect_candidates(world, pool, request.submitted, ineligible).ranks
        suspects = dict.fromkeys(candidate.worker.spec.worker_id for candidate in ranks)
        return f"only suspect workers are eligible: {', '.join(suspects)}"
    threshold = among.pool.router.queue.threshold
    if threshold is not None and must_queue(among.pool, among.roster):
        ranks = among.roster.ranks
        least = min(ranks, key=lambda one: one.load.prefill_tokens / one.worker.spec.max_num_batched_tokens)
        limit = threshold * least.worker.spec.max_num_batched_tokens
        load = f"has {least.load.prefill_tokens:,} tokens to prefill, limit {limit:,.0f}"
    else:
        least = min(among.roster.ranks, key=lambda one: one.load.active_requests)
        load = f"is full with {least.load.active_requests:,} active requests"
    own = ""
    if tenant := request.submitted.tenant:
        kind = class_of(pool.router.queue, request.submitted.hints.policy_class, record.uncached_tokens)
        own = f"; {world.queues.count_of(pool.pool, tenant, kind) - 1:,} of the requests ahead are of its tenant"
    return (
        f"{least.worker.spec.worker_id}/{least.rank}, the least loaded rank, {load};"
        f" {record.uncached_tokens:,} prompt tokens are not cached on any rank{own}"
    )


def excluded_ranks(
    world: World, event: SubmissionEvent | None, record: RequestRejected | RouteAnswered
) -> tuple[ExcludedRank, ...]:
    """Return the ranks that could not take a request that was just rejected, with the reasons.

    Returns nothing if eligibility was not the reason of the rejection.
    """
    pool = None if event is None else world.pool_of(event.model)
    if event is None or pool is None or record.reason not in ELIGIBILITY_REJECTIONS:
        return ()
    if record.pools:
        pool = world.pools[record.pools[0].pool]
    if isinstance(event, RequestSubmitted):
        request = request_from_event(event, pool.pool, 0, world.now_us)
    else:
        request = request_from_query(event, pool.pool)
    try:
        find_candidates(world, pool, request)
    except Ineligible:
        return left_out(world, pool, request, ())
    # A decode worker is eligible, so the prefill pools caused the rejection.
    others = (one for _, one in sorted(world.pools.items()) if one.model == pool.model and one.role == "prefill")
    return tuple(rank for one in others for rank in left_out(world, one, as_prefill_request(request, one.pool), ()))


def why(world: World, plan: Plan) -> tuple[SelectionReason, str]:
    """Return why the candidate was selected, as an identifier and as a sentence, before the decision is booked."""
    table, at = plan.table, plan.at
    count = len(table.costs)
    hints = plan.request.hints
    if count == 1:
        return _only(world, plan)
    among = f"among the {count} ranks of {hints.worker_id}, to which the request is pinned: " if hints.worker_id else ""
    match plan.config.mode:
        case "kv" if plan.config.temperature:
            reason, text = _drawn(plan)
        case "kv" if plan.ties > 1:
            reason, text = _tie(plan)
        case "direct" if table.costs.count(table.costs[at]) > 1:
            tied = table.costs.count(table.costs[at])
            reason, text = (
                "tie_seed",
                f"{tied} candidates have the lowest cost; the request's tie seed selected this one",
            )
        case "kv" | "direct":
            reason, text = "lowest_cost", _lowest(plan)
        case "round-robin":
            turn = world.turns.get(plan.pool.pool, 0)
            reason, text = "round_robin", f"its turn: request number {turn + 1:,} of the pool, over {count} candidates"
        case "random":
            reason, text = "random", f"drawn by the request's tie seed from {count} equally likely candidates"
        case "power-of-two":
            reason, text = "power_of_two", _of_two(plan)
        case "least-loaded":
            reason, text = "least_loaded", _least_loaded(plan)
        case mode:
            reason, text = "policy", _policy(mode, plan)
    return reason, among + text


def limiting_session(
    world: World, pool: PoolConfigured, request: SubmittedRequest, candidates: Collection[HolderKey]
) -> Binding | None:
    """Return the session binding because of which `find_candidates` left only one rank; None if there was none."""
    hints = request.hints
    if not hints.session_id or not pool.router.session_ttl_s or hints.worker_id:
        return None
    bound = world.sessions.find(pool.pool, hints.session_id)
    if bound is None or any(key != (bound.worker_id, bound.rank) for key in candidates):
        return None
    try:
        roster = filter_eligible(world.roster(pool.pool), world.fleet, pool, request)
    except Ineligible:
        return None
    return bound if len(roster.ranks) > 1 and session_roster(roster, bound) is not None else None


def name_of(table: CostTable, at: int) -> str:
    """Return a candidate's name: its worker, followed by its rank if any worker in the table has several ranks."""
    candidate = table.roster.ranks[at]
    worker_id = candidate.worker.spec.worker_id
    return f"{worker_id}/{candidate.rank}" if any(other.rank for other in table.roster.ranks) else worker_id


def number(value: float) -> str:
    """Format a count or a number of blocks with up to two decimals, or two significant digits if it is below 0.01."""
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _only(world: World, plan: Plan) -> tuple[SelectionReason, str]:
    pool, request, hints = plan.pool, plan.request, plan.request.hints
    if hints.worker_id:
        return "pinned", "the request is pinned to it"
    session = limiting_session(world, pool, request, plan.roster.positions)
    if session is not None:
        return "session", f"the session {hints.session_id} is bound to it ({pool.router.session_mode} affinity)"
    return "only_candidate", "it was the only candidate"


def _lowest(plan: Plan) -> str:
    table, at = plan.table, plan.at
    costs = table.costs
    other = min((one for one in range(len(costs)) if one != at), key=lambda one: (costs[one], one))
    theirs = name_of(table, other)
    less = costs[other] - costs[at]
    text = f"lowest cost of {len(costs)} candidates: {number(costs[at])}, {number(less)} less than {theirs}"
    details = "; ".join(_differences(plan.config, table, at, other))
    return f"{text} ({details})" if details else text


def _differences(config: RouterConfig, table: CostTable, at: int, other: int) -> Iterator[str]:
    """Yield the cost terms in which two candidates differ, the largest difference first."""
    both = table.terms(at), table.terms(other)
    if config.selection_policy == "lmetric":
        left = [max(one.prefill_blocks - one.overlap_credit, 0.0) + one.eviction_cost for one in both]
        yield (
            f"{number(left[0])} blocks to prefill times {number(both[0].decode_blocks + 1)}, "
            f"against {number(left[1])} times {number(both[1].decode_blocks + 1)}"
        )
        if table.evictions is not None:
            costs = [number(one.eviction_cost) for one in both]
            yield f"of these {costs[0]} for evicted blocks, against {costs[1]}"
    else:
        mine, theirs = (_parts(config, one, evicts=table.evictions is not None) for one in both)
        parts = sorted(mine, key=lambda part: (-abs(theirs[part] - mine[part]), part))
        for part in parts:
            if difference := theirs[part] - mine[part]:
                yield f"{number(abs(difference))} {'less' if difference > 0 else 'more'} {part}"
    if table.overlap(at) != table.overlap(other):
        yield f"{_cached(table, at, 'blocks of the prompt are cached ')}, {_cached(table, other)}"
    if both[0].taint_factor != both[1].taint_factor:
        yield f"taint factor {both[0].taint_factor:.3f}, against {both[1].taint_factor:.3f}"


def _cached(table: CostTable, at: int, what: str = "") -> str:
    overlap = table.overlap(at)
    lower = (
        (overlap.host, "in its host memory"),
        (overlap.disk, "on its disk"),
        (overlap.store, "in its shared store"),
    )
    more = "".join(f" and {count} {where}" for count, where in lower if count)
    return f"{overlap.device} {what}on {name_of(table, at)}{more}"


def _parts(config: RouterConfig, terms: CostTerms, *, evicts: bool) -> dict[str, float]:
    """Return the summands of a cost, as `forebay.core.routing.cost` adds them."""
    factor, credit, decode = terms.taint_factor, terms.overlap_credit, terms.decode_blocks
    if config.track_prefill_tokens or not config.overlap_score_credit:
        prefill = config.prefill_load_scale * max(terms.prefill_blocks - credit, 0.0)
        parts = {"to prefill": factor * prefill, "of decode blocks": factor * decode}
    else:
        parts = {"of decode blocks that are not cached": factor * max(decode - credit, 0.0)}
    if evicts:
        scale = config.prefill_load_scale if "to prefill" in parts else 1.0
        parts["for evicted blocks"] = factor * scale * terms.eviction_cost
    if config.decode_active_request_weight:
        parts["for active requests"] = factor * config.decode_active_request_weight * terms.active_requests
    return parts


def _tie(plan: Plan) -> tuple[SelectionReason, str]:
    table, at = plan.table, plan.at
    costs = table.costs
    tied = [one for one, cost in enumerate(costs) if cost == costs[at]]
    computed = [table.roster.loads[one].computed_tokens for one in tied]
    mine = table.roster.loads[at].computed_tokens
    text = f"{len(tied)} of {len(costs)} candidates have the lowest cost, {number(costs[at])}"
    equal = computed.count(mine)
    if equal == 1:
        others = min(one for one in computed if one != mine)
        least = "this one was sent the fewest tokens to compute so far"
        return "tie_computed_tokens", f"{text}; {least}: {number(mine)}, the next {number(others)}"
    seed = "the request's tie seed selected this one"
    if equal == len(tied):
        so_far = ", and were sent the same number of tokens to compute" if mine else ""  # 0 for most decode workers
        return "tie_seed", f"{text}{so_far}; {seed}"
    return "tie_seed", f"{text}; {equal} of them were sent the fewest tokens to compute, and {seed}"


def _drawn(plan: Plan) -> tuple[SelectionReason, str]:
    table, at, temperature = plan.table, plan.at, plan.config.temperature
    cheaper = sum(cost < table.costs[at] for cost in table.costs)
    rank = "has the lowest cost" if not cheaper else f"costs more than {cheaper} of {len(table.costs)} candidates"
    chance = 100.0 * _chances(plan)[at]
    return "drawn", f"drawn at temperature {temperature:g} with probability {chance:.1f} %; it {rank}"


def _of_two(plan: Plan) -> str:
    table = plan.table
    first, second = draw_two(plan.request.tie_seed, len(table.costs))
    counts = table.requests.tolist()
    drew = f"the request's tie seed drew {name_of(table, first)} and {name_of(table, second)}"
    active = f"{counts[first]} and {counts[second]} active requests"
    if counts[first] == counts[second]:
        return f"{drew}, with {active}: equal, so the first"
    return f"{drew}, with {active}: the smaller number"


def _least_loaded(plan: Plan) -> str:
    counts = plan.table.requests.tolist()
    least = counts[plan.at]
    tied = counts.count(least)
    if tied == 1:
        return f"fewest active requests: {least}"
    return f"{tied} candidates have the fewest active requests, {least}; the request's tie seed selected this one"


def _policy(mode: str, plan: Plan) -> str:
    table, at = plan.table, plan.at
    costs = table.costs
    best = costs.index(min(costs))
    cheaper = sum(cost < costs[at] for cost in costs)
    text = f"the policy {mode} selected it"
    if not cheaper:
        return f"{text}, which also has the lowest cost, {number(costs[at])}"
    lowest = f"{number(costs[best])} of {name_of(table, best)}"
    return f"{text}, although {cheaper} of {len(costs)} candidates cost less: {number(costs[at])} against {lowest}"
