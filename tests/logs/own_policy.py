"""User-defined policy for the recording `own-policy`."""

from forebay.core.routing.policies import RoutingRequest, RoutingWorld


class CheapestTwo:
    """Select one of the two cheapest candidates by the seed of the request."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        order = sorted(range(len(world.candidates)), key=lambda at: world.costs[at])
        return order[request.tie_seed % min(2, len(order))]


CUSTOM = {f"{__name__}.CheapestTwo": CheapestTwo}
