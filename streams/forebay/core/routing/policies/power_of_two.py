"""Policy `power-of-two`: select the less loaded of two random candidates.

Source: Mitzenmacher, The Power of Two Choices, 2001.
"""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import mix64, scale_draw


class PowerOfTwo:
    """Draws two candidates at random, and selects the one with fewer requests in flight.

    A tie goes to the first one drawn.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the drawn candidate with fewer requests in flight."""
        candidates = world.candidates
        first, second = draw_two(request.tie_seed, len(candidates))
        return second if candidates[second].active_requests < candidates[first].active_requests else first


def draw_two(tie_seed: int, count: int) -> tuple[int, int]:
    """Return two positions below `count`, drawn by the seed of a request. They differ if `count` is at least 2."""
    first = scale_draw(tie_seed, count)
    if count == 1:
        return first, first
    second = scale_draw(mix64(tie_seed), count - 1)
    return first, second + (second >= first)
