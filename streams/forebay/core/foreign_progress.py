"""Detect progress events from a worker that a request was not sent to.

Progress counts only for the worker and the attempt that a request is on. All other progress is stale and has no effect.
Late progress is normal, because a lost worker does not notice at once. Progress from a worker that never had the
request is a fault: two workers read one slot of a work topic, or a worker ran an item that was addressed to another
worker.
"""

from forebay.core.world import World
from forebay.events.progress import RequestProgress


def is_foreign(world: World, event: RequestProgress) -> bool:
    """Return whether a worker reports on a request that was not sent to it.

    Unknown cases are not reported as foreign. These are attempts from before the snapshot that a request was restored
    from, and requests that ended. Progress of a request that the group does not know is foreign if the worker is in the
    fleet. A worker that left the fleet may report on a request whose id was forgotten meanwhile.
    """
    request = world.requests.get(event.request_id)
    if request is not None:
        if len(request.sent) < request.attempt + request.encodings + request.prefills:
            return False
        return (event.attempt, event.worker_id, event.worker_epoch) not in request.sent
    if world.requests.known_content(event.request_id) is not None:
        return False
    return is_member(world, event.worker_id, event.worker_epoch)


def is_member(world: World, worker_id: str, worker_epoch: int) -> bool:
    """Return whether a worker is in the fleet in this epoch."""
    worker = world.fleet.get(worker_id)
    return worker is not None and worker.worker_epoch == worker_epoch
