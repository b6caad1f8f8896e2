"""What an owner knows when it takes over: the newest snapshot, then everything the journal says since.

The journal is followed by deriving its decisions again, so a take-over checks the rules on the way; an owner
whose rules lead elsewhere must not go on.
"""

import logging
from collections import deque
from dataclasses import dataclass

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.world import World
from forebay.events.decisions import RequestAborted, RequestRejected
from forebay.transport.base import Log, LogError
from forebay.transport.recorded import RecordedOrder, journal, load_snapshot, newest_snapshot

logger = logging.getLogger(__name__)

# Effects follow their journal records within a turn, so only the newest can be missing; a turn makes fewer.
UNSURE_MAX = 1_024


class RecoveryDiverged(LogError):
    """The recorded events do not lead to the recorded decisions under this version's rules."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(
            f"journal record {divergence.offset} cannot be derived again ({divergence.reason}): the log was changed, "
            "or written by a version with other rules; run `forebay replay verify` on it"
        )
        self.divergence = divergence


@dataclass(frozen=True, slots=True)
class Recovered:
    """A world that caught up, and what its last owner may not have got done.

    Attributes:
        followed: the world, with decisions that were made and not journalled.
        unsure: refusals and endings, oldest first, whose answers may not have been sent.
    """

    followed: Rederivation
    unsure: list[RequestRejected | RequestAborted]


async def recover(log: Log, partition: int, end: int) -> Recovered:
    """Follow the journal up to offset `end`.

    Raises:
        RecoveryDiverged: this version's rules lead to other decisions.
        LogError: a part that is needed is missing or damaged.
    """
    taken = await newest_snapshot(log, partition, end)
    world = await load_snapshot(log, partition, taken) if taken else World()
    start = taken.journal_offset if taken else 0
    followed = Rederivation(world)
    order = RecordedOrder(log, partition, world.view)
    unsure: deque[RequestRejected | RequestAborted] = deque(maxlen=UNSURE_MAX)
    async for offset, record in journal(log, partition, start, end, world.owner_epoch):
        divergence = followed.apply(offset, record, await order.events_of(record.consumed))
        if divergence is not None:
            raise RecoveryDiverged(divergence)
        if isinstance(record, RequestRejected | RequestAborted):
            unsure.append(record)
    logger.info("recovered from journal offset %d to %d, %d workers", start, end, len(world.fleet))
    return Recovered(followed, list(unsure))
