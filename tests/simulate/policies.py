"""User-defined routing policy for simulator tests."""

from forebay.core.routing.policies import RoutingRequest, RoutingWorld


class LeastUsed:
    """Select the worker with the fewest reported used blocks; break ties by order."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        used = [candidate.kv_blocks_used or 0 for candidate in world.candidates]
        return used.index(min(used))


CUSTOM = {f"{__name__}.LeastUsed": LeastUsed}
