"""Policy `least-loaded`: select the candidate with the fewest requests in flight."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class LeastLoaded:
    """Selects the candidate with the fewest requests in flight. The request's seed breaks ties."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the candidate with the fewest requests in flight."""
        return lowest([candidate.active_requests for candidate in world.candidates], request.tie_seed)
