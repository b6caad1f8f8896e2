"""Any candidate, all as likely."""

from forebay.core.routing.policies.base import RoutingRequest, RoutingWorld
from forebay.core.routing.selection import scaled


class RandomChoice:
    """Draws by the request's seed: the same request is sent to the same place again, when it is replayed."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """A draw."""
        return scaled(request.tie_seed, len(world.candidates))
