"""Each candidate in turn."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld


class RoundRobin:
    """Counts the decisions of the pool, so turns go on after a restart."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """The next in turn."""
        return world.turn % len(world.candidates)
