"""The candidate with the fewest requests under way."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class LeastLoaded:
    """Equal ones are decided by the request's seed."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """The least loaded."""
        return lowest([candidate.active_requests for candidate in world.candidates], request.tie_seed)
