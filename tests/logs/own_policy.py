"""A policy as a user would write one, for the recording `own-policy`."""

from forebay.core.routing.policies import RoutingRequest, RoutingWorld


class CheapestTwo:
    """One of the two cheapest candidates, by the request's seed."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        order = sorted(range(len(world.candidates)), key=lambda at: world.costs[at])
        return order[request.tie_seed % min(2, len(order))]


CUSTOM = {f"{__name__}.CheapestTwo": CheapestTwo}
