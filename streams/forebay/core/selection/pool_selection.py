"""Choose the pool that generates a response, and the pool that computes its prompt. Only reads the world.

Without rules for the pools of a model, the first pool by name with a ready worker is used, and no choice is recorded.
"""

from collections.abc import Collection, Sequence

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.pool_choice import Availability, PoolPreference, choose, prefer, prefer_current, prefer_faster
from forebay.core.selection.candidates import find_candidates, find_retry_candidates, must_queue
from forebay.core.selection.capacity import is_room_reserved, ranks_with_room
from forebay.core.selection.stages import as_prefill_request
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import WorkerPhase
from forebay.core.state.roster import session_roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.pools import GridRole, PoolChoice, SkipReason

Chosen = tuple[PoolConfigured, PoolChoice | None]


def choose_pool(world: World, first: PoolConfigured, request: SubmittedRequest) -> Chosen:
    """Return the pool that generates the response to a new request, and how it was chosen.

    The choice is None if the model has no rules for pools, or only one pool. Raises Ineligible if all pools that may
    take the request are drained.
    """
    if not world.settings.has_rules(first.model):
        if request.task == "call":  # a component of the model may have a pool of its own
            pools = world.responding_pools(first.model)
            return next((pool for pool in pools if has_candidates(world, pool, request)), first), None
        if world.roster(first.pool).ranks:
            return first, None
        pools = world.responding_pools(first.model)
        return next((pool for pool in pools if world.roster(pool.pool).ranks), first), None
    pools = world.responding_pools(first.model)
    preference = _of_worker(world, pools, request) or _prefer(world, pools, request)
    size = next((pool.block_size for pool in pools if world.roster(pool.pool).ranks), first.block_size)
    availability = _availability(world, pools, request, size, again=False)
    choice = choose(preference, _role_of(first), availability, allow_refusal=True)
    if choice is None:
        names = (*preference.names, *preference.others)
        drained = ", ".join(name for name in names if world.settings.is_drained(first.model, name))
        raise Ineligible("no_workers", f"no pool of {first.model} takes new requests; drained pools: {drained}")
    return world.pools[choice.pool], choice if len(pools) > 1 else None


def choose_prefill_pool(world: World, decoders: PoolConfigured, request: ActiveRequest) -> Chosen | None:
    """Return the pool that computes the prompt for `decoders`, if any, and the choice, None as in `choose_pool`."""
    first = world.prefillers_of(decoders)
    if not world.settings.has_rules(decoders.model):
        return None if first is None else (first, None)
    pools = world.prefill_pools(decoders)
    if not pools:
        return None
    view = as_prefill_request(request.submitted, "")
    preference = _prefer(world, pools, view)
    if request.prefiller_id and world.settings.retries(decoders.model):
        grid = world.settings.grid(decoders.model, "prefill")
        preference = prefer_faster(request.prefill_pool, grid, _names(pools)) or preference
    availability = _availability(world, pools, view, decoders.block_size, again=request.was_dispatched)
    choice = choose(preference, "prefill", availability, allow_refusal=True)
    return None if choice is None else (world.pools[choice.pool], choice if len(pools) > 1 else None)


def choose_other_pool(world: World, request: ActiveRequest) -> PoolChoice | None:
    """Return the pool to which an accepted request without a worker moves, or None if it stays in its pool.

    A request whose attempt failed before its first output token moves to a faster pool, if the rules say so. A request
    whose pool has no worker for it any more, or only workers that have rejected it, moves to any pool that has one.
    """
    submitted, rejected_by = request.submitted, request.rejected_by
    current = world.pools[submitted.pool]
    has_reason = world.settings.has_rules(current.model) or bool(rejected_by)
    if not has_reason or submitted.hints.worker_id:
        return None
    pools, role = world.responding_pools(current.model), _role_of(current)
    grid = world.settings.grid(current.model, role)
    preference = None
    if request.attempt and not request.begun and request.stage in ("aggregated", "decode"):
        preference = prefer_faster(current.pool, grid, _names(pools)) if world.settings.retries(current.model) else None
    if preference is None:
        if has_candidates(world, current, submitted, rejected_by):
            return None
        preference = prefer_current(current.pool, grid, _names(pools))
    availability = _availability(world, pools, submitted, current.block_size, rejected_by, again=True)
    choice = choose(preference, role, availability)
    return None if choice is None or choice.pool == current.pool else choice


def choose_pool_of_queued(world: World, request: ActiveRequest) -> PoolChoice | None:
    """Return the pool to which a queued request moves, because its pool is drained or has no worker any more.

    None if the request stays in its pool: no other pool can take it, it names a worker, or a suspect worker of its pool
    may recover.
    """
    submitted = request.submitted
    current, settings = world.pools[submitted.pool], world.settings
    if not settings.has_rules(current.model) or submitted.hints.worker_id:
        return None
    if not settings.is_drained(current.model, current.pool) and _has_workers(world, current.pool):
        return None
    pools, role = world.responding_pools(current.model), _role_of(current)
    preference = prefer_current(current.pool, settings.grid(current.model, role), _names(pools))
    return choose(preference, role, _availability(world, pools, submitted, current.block_size, again=False))


def _of_worker(world: World, pools: Sequence[PoolConfigured], request: SubmittedRequest) -> PoolPreference | None:
    """Return the pool of the worker that a request names; None if it names none, or one of no pool of its model."""
    worker = world.fleet.get(request.hints.worker_id)
    return PoolPreference("worker", (worker.spec.pool,)) if worker and worker.spec.pool in _names(pools) else None


def _prefer(world: World, pools: Sequence[PoolConfigured], request: SubmittedRequest) -> PoolPreference:
    settings, first = world.settings, pools[0]
    grid = settings.grid(first.model, _role_of(first))
    hints, canaries = request.hints, settings.canaries(first.model)
    found = prefer(grid, _names(pools), canaries, request.prompt_tokens, request.tie_seed, hints)
    for pool in pools if hints.session_id else ():
        bound = world.sessions.find(pool.pool, hints.session_id) if pool.router.session_ttl_s else None
        if bound is None or session_roster(world.roster(pool.pool), bound) is None:
            continue
        if pool.router.session_mode == "hard" and not settings.is_drained(pool.model, pool.pool):
            return PoolPreference("session", (pool.pool,))
        others = tuple(name for name in (*found.names, *found.others) if name != pool.pool)
        return PoolPreference("session", (pool.pool, *others))
    return found


def _availability(
    world: World,
    pools: Sequence[PoolConfigured],
    request: SubmittedRequest,
    block_size: int,
    rejected_by: Collection[str] = (),
    *,
    again: bool,
) -> Availability:
    """Return a function that returns why a pool cannot take a request now.

    The prompt was hashed for blocks of `block_size` tokens. If the request was accepted before (`again`), busy workers
    may take it.
    """
    known = {pool.pool: pool for pool in pools}

    def availability(name: str) -> SkipReason | None:
        pool = known.get(name)
        if pool is None:
            return "unknown"
        if world.settings.is_drained(pool.model, name):
            return "drained"
        if pool.block_size != block_size:
            return "block_size"
        if not world.roster(name).ranks:
            return "no_workers"
        try:
            found = (find_retry_candidates if again else find_candidates)(world, pool, request)
        except Ineligible as ineligible:
            return "busy" if ineligible.reason == "busy" else "no_eligible_worker"
        if rejected_by and not has_candidates(world, pool, request, rejected_by):
            return "no_eligible_worker"
        has_room = ranks_with_room(pool, found) is not None and not is_room_reserved(world, pool)
        return None if has_room and not must_queue(pool, found) else "full"

    return availability


def has_candidates(
    world: World, pool: PoolConfigured, request: SubmittedRequest, rejected_by: Collection[str] = ()
) -> bool:
    """Return whether a worker of a pool may take an accepted request, other than those that have rejected it."""
    try:
        found = find_retry_candidates(world, pool, request, rejected_by)
    except Ineligible:
        return False
    return any(one.worker.spec.worker_id not in rejected_by for one in found.ranks)


def _has_workers(world: World, pool: str) -> bool:
    """Return whether a pool has a worker that is ready, or suspect and may recover."""
    if world.roster(pool).ranks:
        return True
    return any(one.spec.pool == pool and one.phase is WorkerPhase.SUSPECT for one in world.fleet.workers())


def _names(pools: Sequence[PoolConfigured]) -> list[str]:
    return [pool.pool for pool in pools]


def _role_of(pool: PoolConfigured) -> GridRole:
    assert pool.role != "encode", "grids have no encode pools"
    return pool.role
