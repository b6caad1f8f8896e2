"""Built-in routing policies: how a pool selects among candidates.

A policy is a plain class without constructor arguments. An instance is created for every decision, so a policy keeps no
state. `RoutingWorld` and `RoutingRequest` contain all its input, and all of that can be derived from the log. The core
does not import custom policies; the process that creates a `World` passes their classes.
"""

from collections.abc import Mapping

from forebay.core.routing.draws import draw, lowest, mix64, scale_draw, softmax_weights
from forebay.core.routing.policy import Candidate, Policy, PolicyMissing, RoutingRequest, RoutingWorld

__all__ = [
    "BUILT_IN",
    "ONLY_BUILT_IN",
    "Candidate",
    "CustomPolicies",
    "Policy",
    "PolicyMissing",
    "RoutingRequest",
    "RoutingWorld",
    "draw_two",
]


class Kv:
    """At temperature 0, selects the lowest cost. Above 0, draws a candidate, and lower costs are more likely.

    A tie for the lowest cost goes to the rank that has computed the fewest tokens so far. Idle ranks have equal costs,
    so without this rule only the random seed would decide between them.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        temperature = world.config.temperature
        if temperature > 0.0:
            return draw(softmax_weights(world.costs, temperature), request.tie_seed)
        return lowest(world.cost_array, request.tie_seed, world.computed_array)


class RoundRobin:
    """Selects the next candidate by the number of requests that the pool has routed. Restarts do not reset it."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return world.turn % len(world.candidates)


class RandomChoice:
    """Draws a candidate by the request's seed, so that a replay selects the same candidate."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return scale_draw(request.tie_seed, len(world.candidates))


class PowerOfTwo:
    """Draws two candidates at random, and selects the one with fewer requests in flight.

    A tie goes to the first one drawn. Source: Mitzenmacher, The Power of Two Choices, 2001.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        requests = world.request_array
        first, second = draw_two(request.tie_seed, len(requests))
        return second if requests[second] < requests[first] else first


def draw_two(tie_seed: int, count: int) -> tuple[int, int]:
    """Return two positions below `count`, drawn by the seed of a request. They differ if `count` is at least 2."""
    first = scale_draw(tie_seed, count)
    if count == 1:
        return first, first
    second = scale_draw(mix64(tie_seed), count - 1)
    return first, second + (second >= first)


class LeastLoaded:
    """Selects the candidate with the fewest requests in flight. The request's seed breaks ties."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return lowest(world.request_array, request.tie_seed)


class Direct:
    """Selects the rank with the lowest cost. All candidates are ranks of the worker that the request names.

    A component in front of forebay has selected this worker.
    """

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return lowest(world.cost_array, request.tie_seed)


CustomPolicies = Mapping[str, type[Policy]]  # by router mode, which is the dotted path of the class

ONLY_BUILT_IN: CustomPolicies = {}
BUILT_IN: Mapping[str, type[Policy]] = {
    "kv": Kv,
    "round-robin": RoundRobin,
    "random": RandomChoice,
    "power-of-two": PowerOfTwo,
    "least-loaded": LeastLoaded,
    "direct": Direct,
}
