"""The less loaded of two that are drawn (Mitzenmacher, The Power of Two Choices, 2001)."""

from forebay.core.policies.base import RoutingRequest, RoutingWorld
from forebay.core.selection import mix64, scaled


class PowerOfTwo:
    """Load is the number of requests under way; of equal ones the first drawn."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Two different candidates are drawn, where there are two."""
        candidates = world.candidates
        first = scaled(request.tie_seed, len(candidates))
        if len(candidates) == 1:
            return first
        second = scaled(mix64(request.tie_seed), len(candidates) - 1)
        second += second >= first
        return second if candidates[second].active_requests < candidates[first].active_requests else first
