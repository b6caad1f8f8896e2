"""When each recorded event was applied, and for which journal record: the recorded order, read without a world."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from forebay.events.topics import DECISIONS
from forebay.transport.base import Log
from forebay.transport.recorded import journal, validity_from


class Applied(NamedTuple):
    """The journal record that consumed an event, and the owner's clock at which it was applied."""

    journal_offset: int
    now_us: int


async def applied(log: Log, partition: int, topic: str) -> AsyncIterator[Applied]:
    """One for each record of an input topic, from its first in a log that holds all of it, or a recording, on.

    Events that no valid journal record consumed, at the end of the topic, have none. Raises LogError.
    """
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    async for offset, record in journal(log, partition, begin, end, await validity_from(log, partition)):
        for run in record.consumed:
            if run.topic == topic:
                for _ in range(run.count):
                    yield Applied(offset, run.now_us)
