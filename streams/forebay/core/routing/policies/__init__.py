"""Routing policies: how a pool selects among candidates. One module per built-in policy, and a loader for custom ones.

A policy is a plain class without constructor arguments. An instance is created for every decision, so a policy keeps no
state. `RoutingWorld` and `RoutingRequest` hold all its input, and all of that is on the log.
"""

from functools import lru_cache
from importlib import import_module

from forebay.core.routing.policies.base import Candidate, Policy, PolicyUnusable, RoutingRequest, RoutingWorld

__all__ = [
    "BUILT_IN",
    "ERROR_CHARS_MAX",
    "Candidate",
    "Policy",
    "PolicyUnusable",
    "RoutingRequest",
    "RoutingWorld",
    "policy_class",
]

ERROR_CHARS_MAX = 500  # of an import error's text, which is not under forebay's control

BUILT_IN = {
    "kv": "forebay.core.routing.policies.kv.Kv",
    "round-robin": "forebay.core.routing.policies.round_robin.RoundRobin",
    "random": "forebay.core.routing.policies.random_choice.RandomChoice",
    "power-of-two": "forebay.core.routing.policies.power_of_two.PowerOfTwo",
    "least-loaded": "forebay.core.routing.policies.least_loaded.LeastLoaded",
    "direct": "forebay.core.routing.policies.direct.Direct",
}


@lru_cache(maxsize=64)
def policy_class(mode: str) -> type[Policy]:
    """Return the policy class of a mode.

    Args:
        mode: built-in name, or a dotted path `package.module.Class`.

    Raises:
        PolicyUnusable: the class cannot be imported, or has no method `decide`.
    """
    path = BUILT_IN.get(mode, mode)
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        names = ", ".join(BUILT_IN)
        raise PolicyUnusable(f"{mode} is no router mode ({names}) and no dotted path of a class")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a custom module may fail in any way
        raise PolicyUnusable(f"the policy {path} cannot be imported: {error!r}"[:ERROR_CHARS_MAX]) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "decide", None)):
        raise PolicyUnusable(f"{path} is no class with a method `decide(world, request)`")
    return found
