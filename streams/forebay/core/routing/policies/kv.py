"""The candidate of the lowest cost: what is cached there, against what waits there."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import draw, lowest, softmax_weights


class Kv:
    """At temperature 0 the lowest cost, of equal ones who computed least so far; above it a draw by cost.

    Costs know what ranks have to do now, and idle ones are all alike: only what they did before tells them apart.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """As in `forebay.core.routing.selection`."""
        temperature = world.config.temperature
        if temperature > 0.0:
            return draw(softmax_weights(world.costs, temperature), request.tie_seed)
        return lowest(world.costs, request.tie_seed, world.computed_tokens)
