"""Recover the state of a group for a new owner, from its standby if possible, otherwise from snapshot and journal.

A replica follows the journal by deriving each decision again. A takeover therefore verifies that this version's rules
lead to the recorded decisions, and stops if they do not.
"""

import logging

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.live.router.standby import Standby
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)


async def recover(
    log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN, standby: Standby | None = None
) -> Standby:
    """Return a replica that has followed the journal up to `end`: `standby` if it can follow, otherwise a new replica.

    Raises:
        OtherRules: The owner has other decision rules and has not stopped as planned.
        RecoveryDiverged: The recorded events lead to other decisions in this version.
        PolicyNotAllowed: A recorded decision was made by a custom policy that this process may not run.
        LogError: A required part of the log is missing or damaged.
    """
    if standby is not None:
        start = standby.position
        try:
            await standby.catch_up(end)
        except LogError as error:
            logger.warning("the standby cannot follow the journal, recovering from the newest snapshot: %s", error)
        else:
            await standby.prepare_claim()
            logger.info("the standby followed the last %d journal records", end - start)
            return standby
    cold = Standby(log, partition, custom=custom, waits_for_seal=True)
    await cold.catch_up(end)
    await cold.prepare_claim()
    logger.info("recovered up to journal offset %d, %d workers", end, len(cold.world.fleet))
    return cold
