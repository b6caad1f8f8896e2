"""Follow the topic `scaling` and append to it.

A process applies its own records like those of others, when it reads them back. So all processes apply the same records
in the same order.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.core.scaling.state import Outcome, PlannerState
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.scaling import ScalingEvent
from forebay.events.topics import SCALING
from forebay.transport.base import FOLLOWED_RECORDS, Draft, Log, Record
from forebay.transport.follower import Follower

PARTITION = 0
OUTCOMES_MAX = FOLLOWED_RECORDS  # results of one read, in which the writer that waits finds its own record


class ScalingTopic(Follower):
    def __init__(self, log: Log, on_record: Callable[[int, ScalingEvent, Outcome], None] | None = None) -> None:
        """Call `on_record` after each record of the topic was applied."""
        super().__init__(log, SCALING)
        self.state = PlannerState()
        self.changed = asyncio.Event()
        self._on_record = on_record
        self._outcomes: dict[int, Outcome] = {}

    async def catch_up(self) -> None:
        """Apply all records of the topic. Raises LogError."""
        self.begin(PARTITION, self.state.end)
        try:
            await self.reach(await self._log.end(SCALING.name, PARTITION))
        finally:
            self.close()

    async def follow(self) -> None:
        """Apply new records until cancelled. Raises LogError."""
        await self.follow_from(PARTITION, self.state.end)

    async def follow_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Follow the topic until `work` ends. Raises the error of either."""
        tasks = asyncio.create_task(self.follow(), name="scaling"), asyncio.create_task(work, name="beside scaling")
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def append(self, event: ScalingEvent) -> tuple[int, Outcome]:
        """Append a record, and wait until `follow` has applied it. Raises LogError."""
        (offset,) = await self._log.append([Draft(SCALING.name, PARTITION, encode(SCALING, event))])
        await self.reach(offset + 1)
        return offset, self._outcomes[offset]

    def apply(self, record: Record) -> None:
        try:
            event: ScalingEvent = decode(SCALING, record.value)
        except DecodeError:
            self.state.skip(record.offset)
            raise
        outcome = self.state.apply(record.offset, event)
        self._outcomes[record.offset] = outcome
        if len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        if self._on_record is not None:
            self._on_record(record.offset, event, outcome)
        self.changed.set()
