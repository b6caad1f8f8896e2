"""Find the ranks that may take a request, by eligibility, session, load and stage. This module only reads the world."""

from collections.abc import Iterable, Set

from msgspec.structs import replace

from forebay.core.routing.eligibility import Ineligible, all_above_threshold, filter_eligible, filter_not_busy
from forebay.core.state.roster import Roster, session_roster, suspect_roster_of
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import BusyThresholds, PoolConfigured

NO_READY_WORKER = frozenset(("no_workers", "no_eligible_worker"))


def find_candidates(
    world: World, pool: PoolConfigured, request: SubmittedRequest, busy: BusyThresholds | None = None
) -> Roster:
    """Return the ranks that may take a new request. Raises Ineligible if there are none.

    They meet the request's conditions, and their workers are not busy. If a rank serves the request's session and the
    session mode is `hard`, only that rank may take the request. If the mode is `soft`, other ranks may take the request
    while that rank is busy or has too many prompt tokens to compute. Workers that are avoided because of their
    rejections are candidates only if there are no others.
    """
    hints = request.hints
    roster = _without(world.fleet.avoided, filter_eligible(world.roster(pool.pool), world.fleet, pool, request))
    sticky = hints.session_id and pool.router.session_ttl_s
    bound = world.sessions.find(pool.pool, hints.session_id) if sticky else None
    mine = None if bound is None or hints.worker_id else session_roster(roster, bound)
    thresholds = busy or world.settings.busy_of(pool)
    if mine is None:
        return filter_not_busy(roster, thresholds, pool.pool)
    if pool.router.session_mode == "hard":
        return filter_not_busy(mine, thresholds, pool.pool)
    others = filter_not_busy(roster, thresholds, pool.pool)
    threshold = pool.router.queue.threshold
    mine = session_roster(others, bound) if bound is not None else None
    if mine is None or (threshold is not None and all_above_threshold(mine, threshold)):
        return others
    return mine


def find_suspect_candidates(
    world: World, pool: PoolConfigured, request: SubmittedRequest, refusal: Ineligible
) -> Roster:
    """Return the ranks of suspect workers that could take a request if their workers become ready again.

    Raises `refusal`, the reason why no ready worker takes it, if no such rank exists or ready workers were not missing.
    """
    if refusal.reason not in NO_READY_WORKER:
        raise refusal
    roster = suspect_roster_of(pool.pool, world.fleet, world.load)
    try:
        return filter_eligible(roster, world.fleet, pool, request)
    except Ineligible:
        raise refusal from None


def find_hosts(world: World, pool: PoolConfigured, request: SubmittedRequest, refusal: Ineligible) -> Roster | None:
    """Return the ranks that may take a request once they have its adapter; None if the owner does not place it.

    `refusal` is why no rank may take the request now. Raises Ineligible if every worker has failed to load the adapter.
    """
    adapter = world.adapters.get(request.lora_name)
    is_placed = adapter is not None and adapter.model == pool.model and pool.role == "aggregated"
    if adapter is None or not is_placed or refusal.reason != "no_eligible_worker":
        return None
    try:
        roster = filter_eligible(world.roster(pool.pool), world.fleet, pool, replace(request, lora_name=""))
    except Ineligible:
        return None
    failed = {one.worker_id: one.reason for one in adapter.failures if one.until_us > world.now_us}
    able = {at: one.worker.spec.worker_id for at, one in enumerate(roster.ranks) if one.worker.spec.max_loras}
    found = [at for at, worker_id in able.items() if worker_id not in failed]
    if able and not found:
        worker_id, reason = next(iter(failed.items()))
        message = f"no worker could load the adapter {adapter.lora_name}; {worker_id}: {reason}"
        raise Ineligible("no_eligible_worker", message)
    return roster.only(found) if found else None


def find_retry_candidates(
    world: World, pool: PoolConfigured, request: SubmittedRequest, rejected_by: Iterable[str] = ()
) -> Roster:
    """Return the ranks that may take an accepted request again. Load and session are ignored.

    Workers in `rejected_by`, and workers that are avoided, are candidates only if there are no others. Raises
    Ineligible if no worker may take the request.
    """
    roster = filter_eligible(world.roster(pool.pool), world.fleet, pool, request)
    return _without(world.fleet.avoided, _without(frozenset(rejected_by), roster))


def _without(worker_ids: Set[str], roster: Roster) -> Roster:
    """Return `roster` without the ranks of these workers, or all of it if it has no others."""
    if not worker_ids:
        return roster
    others = [at for at, candidate in enumerate(roster.ranks) if candidate.worker.spec.worker_id not in worker_ids]
    return roster.only(others) if others else roster


def must_queue(pool: PoolConfigured, roster: Roster) -> bool:
    """Return whether every rank has more prompt tokens to compute than the pool's queue threshold allows."""
    threshold = pool.router.queue.threshold
    return threshold is not None and all_above_threshold(roster, threshold)
