"""Find the worker ranks that have room for another request. This module only reads the world.

An engine queues every request that it cannot run yet, without a limit and in arrival order. In the router's queue it is
different: a request can still go to any rank, be aborted in time, or be rejected. So the owner sends a rank at most
`max_num_seqs` requests plus a share of that number, the run-ahead. The run-ahead keeps the engine busy until the owner
has learned that a sequence has ended, and has sent another request.

An engine that is short of KV blocks or busy with prompts runs fewer sequences, and reports how many requests wait. If
more requests wait in the engine than the run-ahead, the rank has no room.
"""

import numpy as np

from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured

# Queued requests that are always allowed per rank. A rank with a small max_num_seqs finishes its requests quickly, so
# the owner must not reject a burst.
QUEUED_PER_RANK_MIN = 64


def ranks_with_room(pool: PoolConfigured, roster: Roster) -> Roster | None:
    """Return the ranks that have room for another request, or None if none of them has room."""
    run_ahead = pool.router.queue.run_ahead
    if run_ahead is None:
        return roster
    active_max, waiting_max = roster.limits(run_ahead)
    columns, slots = roster.columns, roster.slots
    active = columns.active_requests.take(slots)
    found = ((active < active_max) & (columns.waiting.take(slots) <= waiting_max)).nonzero()[0]
    return roster.only(found) if len(found) else None


def queue_capacity(pool: PoolConfigured, roster: Roster) -> int | None:
    """Return how many requests may be queued in a pool with the ranks of `roster`. None means no limit."""
    depth = pool.router.queue.depth
    if depth is None:
        return None
    if not depth:
        return 0
    return sum(max(QUEUED_PER_RANK_MIN, int(depth * candidate.worker.spec.max_num_seqs)) for candidate in roster.ranks)


def is_room_reserved(world: World, pool: PoolConfigured) -> bool:
    """Return whether accepted requests will need all the room of a pool's ranks.

    These are requests that will return to this pool after another pool has encoded their media or computed their
    prompt, and requests that lost their worker.
    """
    reserved = world.requests.count_before_response(pool.pool)
    run_ahead = pool.router.queue.run_ahead
    if not reserved or run_ahead is None:
        return False
    roster = world.roster(pool.pool)
    active_max, _ = roster.limits(run_ahead)
    room = np.maximum(active_max - roster.columns.active_requests.take(roster.slots), 0)
    return reserved >= int(room.sum())
