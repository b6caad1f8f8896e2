"""Policy `random`: select any candidate with equal probability."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import scale_draw


class RandomChoice:
    """Draws a candidate by the request's seed, so that a replay selects the same candidate."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return scale_draw(request.tie_seed, len(world.candidates))
