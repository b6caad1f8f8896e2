"""Detect progress events from a worker that a request was not sent to.

Only progress from the current worker and attempt of a request has an effect; all other progress is stale. Late progress
of an earlier worker is normal, because a lost worker does not know immediately that it was replaced. Progress from a
worker that never had the request is a fault: two workers read the same slot of a work topic, or a worker ran an item
that was addressed to another worker.
"""

from forebay.core.world import World
from forebay.events.progress import RequestProgress


def is_foreign(world: World, event: RequestProgress) -> bool:
    """Return whether a worker reports on a request that the owner never sent to it.

    If the owner cannot know this, the result is False. This is the case for requests that have ended, and for attempts
    from before the snapshot that the world was restored from. Progress of an unknown request is foreign only if the
    worker is in the fleet. Otherwise the owner may have forgotten the request's id since the worker left.
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
    worker = world.fleet.get(worker_id)
    return worker is not None and worker.worker_epoch == worker_epoch
