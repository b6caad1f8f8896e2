"""Abort requests whose ingress is lost, because no process reads their responses any more."""

from forebay.core.dispatch import AnyDecision
from forebay.core.execute import abort
from forebay.core.world import World
from forebay.events.fleet import IngressLost


def abort_orphans(world: World, lost: IngressLost) -> list[AnyDecision]:
    """Abort the HTTP requests of a lost ingress, in order of submission. Return the journal records."""
    message = f"the ingress {lost.ingress_id} of the request was lost: {lost.reason}"
    orphans = [request for request in world.requests.active() if request.submitted.ingress == lost.incarnation]
    return [abort(world, request, "ingress_lost", message) for request in orphans]
