"""Which ranks have room for another request, so that what engines cannot run yet waits in the router's queue.

Theory of operation. An engine queues what it cannot run, without bound and in the order in which it came. A request in
the router's queue can still go to any rank, be given up in time, or be refused. So a rank is sent its `max_num_seqs`
and a share of that beyond, the run-ahead: what its engine takes up while the owner learns that a sequence has ended.
Where KV blocks or prompts are what an engine is short of, it runs fewer sequences, and reports how many wait; then no
more than the run-ahead may wait there.

Only looks at the world; `forebay.core.dispatch` changes it.
"""

from dataclasses import dataclass, replace

from forebay.core.routing.disaggregation import Prefill, computed_by, place_prefill
from forebay.core.routing.router import find, must_wait
from forebay.core.state.requests import Request
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured

QUEUED_PER_RANK_MIN = 64  # a rank that runs few requests at once ends them quickly: a burst must not be refused


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new request may go now.

    Attributes:
        roster: ranks that may answer it; all of those where it has to wait.
        prefill: who computes its prompt; None where whoever answers always does.
        waits: whether none of them has room.
    """

    roster: Roster
    prefill: Prefill | None
    waits: bool


def place(world: World, pool: PoolConfigured, request: Request) -> Placement:
    """Find who may take a new request, and whether it has to wait for them. Raises Ineligible."""
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
    """Who computes the prompt of a request that `roster` may answer; None where they always do. Raises Ineligible.

    To embed a prompt is to compute it: there is nothing to be decoded elsewhere.
    """
    apart = pool.role == "decode" and request.task == "generate"
    return place_prefill(world, pool, request, roster) if apart else None


def with_room(pool: PoolConfigured, roster: Roster) -> Roster | None:
    """The ranks that have room for another request; None if none has."""
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
    """How many requests may wait in a pool with these ranks; None for any number."""
    depth = pool.router.queue.depth
    if depth is None:
        return None
    if not depth:
        return 0
    return sum(max(QUEUED_PER_RANK_MIN, int(depth * seat.worker.spec.max_num_seqs)) for seat in roster.seats)


def _all_promised(world: World, pool: PoolConfigured) -> bool:
    """Whether requests that are encoded or prefilled elsewhere will take all the room that a pool has."""
    promised = world.requests.promised(pool.pool)
    run_ahead = pool.router.queue.run_ahead
    if not promised or run_ahead is None:
        return False
    roster = world.roster(pool.pool)
    limits = roster.limits(run_ahead)
    room = sum(max(0, most - load.active_requests) for load, (most, _) in zip(roster.loads, limits, strict=True))
    return promised >= room
