"""What an owner knows when it takes over: its standby's world if it has one, else snapshot and journal.

The journal is followed by deriving its decisions again, so a take-over checks the rules on the way; an owner
whose rules lead elsewhere must not go on.
"""

import logging

from forebay.live.router.standby import Standby
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)


async def recover(log: Log, partition: int, end: int, standby: Standby | None = None) -> Standby:
    """A replica that followed the journal up to offset `end`: `standby` if it can, else a new one.

    Raises:
        RecoveryDiverged: this version's rules lead to other decisions.
        LogError: a part that is needed is missing or damaged.
    """
    if standby is not None:
        start = standby.position
        try:
            await standby.catch_up(end)
        except LogError as error:
            logger.warning("the standby is of no use, recovering without it: %s", error)
        else:
            logger.info("the standby followed the last %d journal records", end - start)
            return standby
    cold = Standby(log, partition)
    await cold.catch_up(end)
    logger.info("recovered up to journal offset %d, %d workers", end, len(cold.world.fleet))
    return cold
