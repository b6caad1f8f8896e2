"""Find the worker ranks that have room for another request.

An engine queues every request that it cannot run yet, without a bound and in arrival order. A request in the router's
queue can still go to any rank, be aborted in time, or be rejected. So the router sends a rank at most
`max_num_seqs` requests plus a share of that number, the run-ahead. The run-ahead keeps the engine busy while the owner
learns that a sequence has ended.

An engine that is short of KV blocks or busy with prompts runs fewer sequences and reports how many requests wait. In
that case at most the run-ahead may wait in the engine.

This module only reads the world. `forebay.core.dispatch` changes it.
"""

from dataclasses import dataclass, replace

from forebay.core.routing.disaggregation import PrefillPlan, decide_prefill, prefill_candidates
from forebay.core.routing.router import find_candidates, must_queue
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured

# A rank with a small max_num_seqs finishes its requests quickly, so a burst must not be rejected.
QUEUED_PER_RANK_MIN = 64


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Candidates for a new request at this moment.

    Attributes:
        roster: ranks that may generate the response. If the request must be queued, all eligible ranks.
        prefill: where the prompt is computed; None if the rank that generates the response always computes it.
        should_queue: whether the request must be queued, because no candidate has room.
    """

    roster: Roster
    prefill: PrefillPlan | None
    should_queue: bool


def find_options(world: World, pool: PoolConfigured, request: ActiveRequest) -> RoutingOptions:
    """Return the candidates for a new request, and whether the request must be queued.

    Raises:
        Ineligible: no worker may take the request.
    """
    eligible = find_candidates(world, pool, request)
    roster = ranks_with_room(pool, eligible)
    if roster is None or _is_room_reserved(world, pool):
        return RoutingOptions(eligible, plan_prefill(world, pool, request, eligible), should_queue=True)
    prefill = plan_prefill(world, pool, request, roster)
    should_queue = must_queue(*prefill_candidates(pool, roster, prefill))
    if prefill is not None and prefill.place.remote:
        computing = ranks_with_room(prefill.pool, prefill.roster)
        should_queue = should_queue or computing is None
        prefill = replace(prefill, roster=computing or prefill.roster)
    return RoutingOptions(roster, prefill, should_queue)


def plan_prefill(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> PrefillPlan | None:
    """Decide where the prompt of a request is computed that `roster` may respond to.

    Returns:
        None if the responding rank always computes the prompt. That is so for embedding requests: they have no decode
        stage.

    Raises:
        Ineligible: the prompt must be computed by a prefill worker, and none is eligible.
    """
    is_disaggregated = pool.role == "decode" and request.task == "generate"
    return decide_prefill(world, pool, request, roster) if is_disaggregated else None


def ranks_with_room(pool: PoolConfigured, roster: Roster) -> Roster | None:
    """Return the ranks that have room for another request, or None if no rank has."""
    run_ahead = pool.router.queue.run_ahead
    if run_ahead is None:
        return roster
    limits = roster.limits(run_ahead)
    found = [
        at
        for at, (load, (active_max, waiting_max)) in enumerate(zip(roster.loads, limits, strict=True))
        if load.active_requests < active_max and load.waiting <= waiting_max
    ]
    return roster.only(found) if found else None


def queue_capacity(pool: PoolConfigured, roster: Roster) -> int | None:
    """Return how many requests may be queued in a pool with these ranks; None means no limit."""
    depth = pool.router.queue.depth
    if depth is None:
        return None
    if not depth:
        return 0
    return sum(max(QUEUED_PER_RANK_MIN, int(depth * candidate.worker.spec.max_num_seqs)) for candidate in roster.ranks)


def _is_room_reserved(world: World, pool: PoolConfigured) -> bool:
    """Return whether requests that are now encoded or prefilled elsewhere will need all the room of a pool."""
    reserved = world.requests.count_before_response(pool.pool)
    run_ahead = pool.router.queue.run_ahead
    if not reserved or run_ahead is None:
        return False
    roster = world.roster(pool.pool)
    limits = roster.limits(run_ahead)
    room = sum(
        max(0, active_max - load.active_requests) for load, (active_max, _) in zip(roster.loads, limits, strict=True)
    )
    return reserved >= room
