"""Refuse logs that need custom policies which the user did not allow."""

from forebay.core.routing.policies import BUILT_IN, CustomPolicies
from forebay.transport.base import Log, PolicyNotAllowed
from forebay.transport.history.groups import policies_run, pools_of


async def require_allowed(log: Log, partition: int, custom: CustomPolicies) -> None:
    """Check that the recorded owners of a group ran only built-in policies and the policies in `custom`.

    Raises:
        PolicyNotAllowed: an owner may have run another policy. This function did not import it.
        LogError: the log cannot be read.
    """
    named = {pool.router.mode: pool.pool for pool in await pools_of(log, partition)}
    refused = {mode: pool for mode, pool in named.items() if mode not in BUILT_IN and mode not in custom}
    if not refused:  # the journal need not be read
        return
    for mode in sorted(refused.keys() & await policies_run(log, partition)):
        raise PolicyNotAllowed(
            f"pool {refused[mode]} was routed by the policy {mode}, which is not built in; "
            f"to import and run this class, pass --allow-policy {mode}"
        )
