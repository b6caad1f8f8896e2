"""Policy `round-robin`: each candidate in turn."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld


class RoundRobin:
    """Next candidate by the pool's decision count, which survives restarts."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position whose turn it is."""
        return world.turn % len(world.candidates)
