"""A user's policy, for the simulator's tests."""

from forebay.core.routing.policies import RoutingRequest, RoutingWorld


class LeastUsed:
    """Goes by what engines report; the first of equal ones."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        used = [candidate.kv_blocks_used or 0 for candidate in world.candidates]
        return used.index(min(used))
