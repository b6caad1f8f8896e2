"""Progress from a worker that a request was not sent to.

Progress counts only for the worker and the attempt that a request is on; everything else is outdated and has no effect.
Late progress is usual: a worker that was lost does not know it at once. Progress from a worker that never had the
request is a fault: two workers read one slot of a work topic, or a worker ran what was addressed to another.
"""

from forebay.core.world import World
from forebay.events.progress import RequestProgress


def is_foreign(world: World, event: RequestProgress) -> bool:
    """Return whether a worker reports on a request that was not sent to it.

    What cannot be known is not called foreign: attempts from before the snapshot that a request was restored from, and
    requests that ended. A request that the group does not know is foreign if its reporter is a member of the fleet;
    who is no member any more may report on a request whose id was forgotten meanwhile.
    """
    request = world.requests.get(event.request_id)
    if request is not None:
        if len(request.sent) < request.attempt + request.encodings + request.prefills:
            return False
        return (event.attempt, event.worker_id, event.worker_epoch) not in request.sent
    if world.requests.content_known(event.request_id) is not None:
        return False
    return is_member(world, event.worker_id, event.worker_epoch)


def is_member(world: World, worker_id: str, worker_epoch: int) -> bool:
    """Return whether a worker is in the fleet in this epoch."""
    worker = world.fleet.get(worker_id)
    return worker is not None and worker.worker_epoch == worker_epoch
