"""Check of the user policies that a recorded log names, before a replay imports them and repeats their decisions."""

import asyncio

from forebay.cli.policies.check import require_policy
from forebay.transport.base import Log
from forebay.transport.history.groups import pools_of


async def require_policies(log: Log, partition: int) -> None:
    """Check the policies that the pools of a partition were ever configured with.

    Raises:
        Unusable: A policy cannot be imported, or is not deterministic.
        LogError: The log cannot be read.
    """
    for mode in dict.fromkeys(pool.router.mode for pool in await pools_of(log, partition)):
        await asyncio.to_thread(require_policy, mode)
