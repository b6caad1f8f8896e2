"""Policy `least-loaded`: the candidate with the fewest requests in flight."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class LeastLoaded:
    """Fewest requests in flight; ties are broken by the request's seed."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the least loaded candidate."""
        return lowest([candidate.active_requests for candidate in world.candidates], request.tie_seed)
