"""The worker that the request names: somebody before the router has decided."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import lowest


class Direct:
    """Only ranks of the named worker are candidates; where no rank is named the one of the lowest cost."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """A rank of the named worker."""
        return lowest(world.costs, request.tie_seed)
