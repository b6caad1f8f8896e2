"""Policy `direct`: use the worker that the request names, because a component before the router selected it."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class Direct:
    """Lowest cost among the ranks of the named worker; only these ranks are candidates."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the rank with the lowest cost."""
        return lowest(world.costs, request.tie_seed)
