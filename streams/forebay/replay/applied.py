"""Read when each recorded event was applied, and by which journal record, without building a world."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from forebay.events.topics import DECISIONS
from forebay.transport.base import Log
from forebay.transport.history.reader import Validity, journal
from forebay.transport.history.start import oldest_state


class Applied(NamedTuple):
    """When the owner applied one event.

    Attributes:
        journal_offset: offset of the journal record whose `consumed` counts the event.
        now_us: the owner's clock when the event was applied, in microseconds.
    """

    offset: int
    journal_offset: int
    now_us: int


async def applied(log: Log, partition: int, topic: str) -> AsyncIterator[Applied]:
    """Yield an entry for each record of an input topic that the owner applied according to the journal, in order.

    If retention has trimmed the log, the entries begin after the oldest usable snapshot.

    Raises:
        LogError: the log is damaged.
    """
    start, end = await oldest_state(log, partition), await log.end(DECISIONS.name, partition)
    event = start.view.get(topic, 0)
    validity = Validity.after(start, start.core_version)
    async for offset, record in journal(log, partition, start.offset, end, validity):
        for run in record.consumed:
            if run.topic == topic:
                for _ in range(run.count):
                    yield Applied(event, offset, run.now_us)
                    event += 1
