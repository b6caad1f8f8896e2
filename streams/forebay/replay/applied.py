"""When each recorded event was applied, and for which journal record: the recorded order, read without a world."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from forebay.events.topics import DECISIONS
from forebay.transport.base import Log
from forebay.transport.history.reader import Validity, journal
from forebay.transport.history.start import oldest_state


class Applied(NamedTuple):
    """The offset of an event, the journal record that consumed it, and the owner's clock at which it was applied."""

    offset: int
    journal_offset: int
    now_us: int


async def applied(log: Log, partition: int, topic: str) -> AsyncIterator[Applied]:
    """Yield one for each record of an input topic that the journal says was applied, in order.

    A log that retention has trimmed begins with its oldest usable snapshot; the records applied before it have none.
    Raises LogError.
    """
    start, end = await oldest_state(log, partition), await log.end(DECISIONS.name, partition)
    event = start.view.get(topic, 0)
    async for offset, record in journal(log, partition, start.offset, end, Validity(start.owner_epoch)):
        for run in record.consumed:
            if run.topic == topic:
                for _ in range(run.count):
                    yield Applied(event, offset, run.now_us)
                    event += 1
