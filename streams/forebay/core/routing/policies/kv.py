"""Policy `kv`: select the lowest cost. The cost weighs cached blocks against load."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import draw, lowest, softmax_weights


class Kv:
    """Selects the lowest cost at temperature 0, and draws a candidate at random, weighted by cost, above 0.

    A tie for the lowest cost goes to the rank that has computed the fewest tokens so far. Idle ranks have equal costs,
    so without this rule the seed alone would decide between them.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the selected candidate; see `forebay.core.routing.selection`."""
        temperature = world.config.temperature
        if temperature > 0.0:
            return draw(softmax_weights(world.costs, temperature), request.tie_seed)
        return lowest(world.costs, request.tie_seed, world.computed_tokens)
