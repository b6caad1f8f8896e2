"""Import the custom policies that a user allowed, and refuse logs that need other ones."""

from collections.abc import Iterable
from importlib import import_module

from forebay.core.routing.policies import BUILT_IN, CustomPolicies, Policy
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Log, PolicyNotAllowed

ERROR_CHARS_MAX = 500  # of an import error's text, which is not under forebay's control


async def require_allowed(log: Log, partition: int, custom: CustomPolicies) -> None:
    """Check that the recorded owners of a group ran only built-in policies and the policies in `custom`."""
    from forebay.journal.groups import policies_run, pools_of  # noqa: PLC0415 - simulations have no log

    named = {pool.router.mode: pool.pool for pool in await pools_of(log, partition)}
    refused = {mode: pool for mode, pool in named.items() if mode not in BUILT_IN and mode not in custom}
    if not refused:  # the journal need not be read
        return
    for mode in sorted(refused.keys() & await policies_run(log, partition)):
        raise PolicyNotAllowed(
            f"pool {refused[mode]} was routed by the policy {mode}, which is not built in; "
            f"to import and run this class, pass --allow-policy {mode}"
        )


def load_policy(path: str) -> type[Policy]:
    """Import a policy class. Its dotted path `package.module.Class` must come from the user, never from a log.

    Raises ConfigError if the class cannot be imported, or has no method `decide`.
    """
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        names = ", ".join(BUILT_IN)
        raise ConfigError(f"{path} is neither a router mode ({names}) nor the dotted path of a class")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a custom module may fail in any way
        raise ConfigError(f"the policy {path} cannot be imported: {error!r}"[:ERROR_CHARS_MAX]) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "decide", None)):
        raise ConfigError(f"{path} is not a class with a method `decide(world, request)`")
    return found


def load_policies(modes: Iterable[str]) -> CustomPolicies:
    """Import the custom policies among these router modes. Raises ConfigError."""
    return {mode: load_policy(mode) for mode in sorted(set(modes) - set(BUILT_IN))}
