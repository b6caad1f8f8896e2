"""Routing policies: how a pool selects among candidates. One module per built-in policy.

A policy is a plain class without constructor arguments. An instance is created for every decision, so a policy keeps no
state. `RoutingWorld` and `RoutingRequest` contain all its input, and all of that can be derived from the log. The core
does not import custom policies; the process that creates a `World` passes their classes.
"""

from collections.abc import Mapping

from forebay.core.routing.policies.base import Candidate, Policy, PolicyMissing, RoutingRequest, RoutingWorld
from forebay.core.routing.policies.direct import Direct
from forebay.core.routing.policies.kv import Kv
from forebay.core.routing.policies.least_loaded import LeastLoaded
from forebay.core.routing.policies.power_of_two import PowerOfTwo
from forebay.core.routing.policies.random_choice import RandomChoice
from forebay.core.routing.policies.round_robin import RoundRobin

__all__ = [
    "BUILT_IN",
    "ONLY_BUILT_IN",
    "Candidate",
    "CustomPolicies",
    "Policy",
    "PolicyMissing",
    "RoutingRequest",
    "RoutingWorld",
]

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
