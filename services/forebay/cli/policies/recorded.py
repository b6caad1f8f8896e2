"""The policies of users that a recorded log names: they are code here, and must be fit to derive decisions again."""

import asyncio

from forebay.cli.policies.check import require_policy
from forebay.transport.base import Log
from forebay.transport.history.groups import pools_of


async def require_policies(log: Log, partition: int) -> None:
    """Refuse policies that cannot derive anything again. Raises Unusable, LogError."""
    for mode in dict.fromkeys(pool.router.mode for pool in await pools_of(log, partition)):
        await asyncio.to_thread(require_policy, mode)
