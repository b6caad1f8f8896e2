"""Policy `power-of-two`: the less loaded of two random candidates (Mitzenmacher, The Power of Two Choices, 2001)."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import mix64, scale_draw


class PowerOfTwo:
    """Fewer requests in flight of two random candidates; a tie goes to the first one drawn."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Draw two different candidates, if there are two, and return the position of the less loaded one."""
        candidates = world.candidates
        first, second = draw_two(request.tie_seed, len(candidates))
        return second if candidates[second].active_requests < candidates[first].active_requests else first


def draw_two(tie_seed: int, count: int) -> tuple[int, int]:
    """Draw two positions below `count` for a request; they differ if `count` is at least 2."""
    first = scale_draw(tie_seed, count)
    if count == 1:
        return first, first
    second = scale_draw(mix64(tie_seed), count - 1)
    return first, second + (second >= first)
