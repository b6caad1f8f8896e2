"""Policy `round-robin`: select the candidates in turn."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld


class RoundRobin:
    """Selects the next candidate by the number of requests that the pool has routed.

    Restarts do not reset this number.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the candidate whose turn it is."""
        return world.turn % len(world.candidates)
