"""Policy `direct`: use the worker that the request names. A component in front of forebay has selected it."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class Direct:
    """Selects the rank with the lowest cost. All candidates are ranks of the worker that the request names."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the rank with the lowest cost."""
        return lowest(world.costs, request.tie_seed)
