"""The less loaded of two that are drawn (Mitzenmacher, The Power of Two Choices, 2001)."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import mix64, scaled


class PowerOfTwo:
    """Load is the number of requests under way; of equal ones the first drawn."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Two different candidates are drawn, where there are two."""
        candidates = world.candidates
        first, second = drawn(request.tie_seed, len(candidates))
        return second if candidates[second].active_requests < candidates[first].active_requests else first


def drawn(tie_seed: int, count: int) -> tuple[int, int]:
    """The two positions that a request draws of `count`, different ones where there are two."""
    first = scaled(tie_seed, count)
    if count == 1:
        return first, first
    second = scaled(mix64(tie_seed), count - 1)
    return first, second + (second >= first)
