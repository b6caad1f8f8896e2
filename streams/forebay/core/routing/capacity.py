"""Find the worker ranks that have room for another request.

An engine queues every request that it cannot run yet, without a bound and in arrival order. A request in the router's
queue can still go to any rank, be aborted in time, or be rejected. So the router sends a rank at most `max_num_seqs`
requests plus a share of that number, the run-ahead. The run-ahead keeps the engine busy while the owner learns that a
sequence has ended.

An engine that is short of KV blocks or busy with prompts runs fewer sequences and reports how many requests wait. In
that case at most the run-ahead may wait in the engine.

This module only reads the world. `forebay.core.dispatch` changes it.
"""

from dataclasses import dataclass, replace

from forebay.core.routing.disaggregation import Prefill, computed_by, place_prefill
from forebay.core.routing.router import find, must_wait
from forebay.core.state.requests import Request
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured

# A rank with a small max_num_seqs finishes its requests quickly, so a burst must not be rejected.
QUEUED_PER_RANK_MIN = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Candidates for a new request at this moment.

    Attributes:
        roster: ranks that may generate the response. If the request must be queued, all eligible ranks.
        prefill: where the prompt is computed; None if the rank that generates the response always computes it.
        waits: whether the request must be queued, because no candidate has room.
    """

    roster: Roster
    prefill: Prefill | None
    waits: bool


def place(world: World, pool: PoolConfigured, request: Request) -> Placement:
    """Return the candidates for a new request, and whether the request must be queued.

    Raises:
        Ineligible: no worker may take the request.
    """
    everybody = find(world, pool, request)
    roster = with_room(pool, everybody)
    if roster is None or _all_promised(world, pool):
        return Placement(everybody, placed(world, pool, request, everybody), waits=True)
    prefill = placed(world, pool, request, roster)
    waits = must_wait(*computed_by(pool, roster, prefill))
    if prefill is not None and prefill.place.remote:
        computing = with_room(prefill.pool, prefill.roster)
        waits = waits or computing is None
        prefill = replace(prefill, roster=computing or prefill.roster)
    return Placement(roster, prefill, waits)


def placed(world: World, pool: PoolConfigured, request: Request, roster: Roster) -> Prefill | None:
    """Decide where the prompt of a request is computed that `roster` may respond to.

    Returns:
        None if the responding rank always computes the prompt. That is so for embedding requests: they have no decode
        stage.

    Raises:
        Ineligible: the prompt must be computed by a prefill worker, and none is eligible.
    """
    apart = pool.role == "decode" and request.task == "generate"
    return place_prefill(world, pool, request, roster) if apart else None


def with_room(pool: PoolConfigured, roster: Roster) -> Roster | None:
    """Return the ranks that have room for another request, or None if no rank has."""
    run_ahead = pool.router.queue.run_ahead
    if run_ahead is None:
        return roster
    limits = roster.limits(run_ahead)
    found = [
        at
        for at, (load, (most, waiting)) in enumerate(zip(roster.loads, limits, strict=True))
        if load.active_requests < most and load.waiting <= waiting
    ]
    return roster.only(found) if found else None


def queue_bound(pool: PoolConfigured, roster: Roster) -> int | None:
    """Return how many requests may be queued in a pool with these ranks; None means no limit."""
    depth = pool.router.queue.depth
    if depth is None:
        return None
    if not depth:
        return 0
    return sum(max(QUEUED_PER_RANK_MIN, int(depth * seat.worker.spec.max_num_seqs)) for seat in roster.seats)


def _all_promised(world: World, pool: PoolConfigured) -> bool:
    """Return whether requests that are now encoded or prefilled elsewhere will need all the room of a pool."""
    promised = world.requests.promised(pool.pool)
    run_ahead = pool.router.queue.run_ahead
    if not promised or run_ahead is None:
        return False
    roster = world.roster(pool.pool)
    limits = roster.limits(run_ahead)
    room = sum(max(0, most - load.active_requests) for load, (most, _) in zip(roster.loads, limits, strict=True))
    return promised >= room
