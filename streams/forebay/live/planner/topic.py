"""Follow the topic `scaling` and append to it.

A process applies its own records like those of others, when it reads them back. So all processes apply the same records
in the same order.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.core.scaling.state import Outcome, PlannerState
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.scaling import ScalingEvent
from forebay.events.topics import SCALING
from forebay.transport.base import FOLLOWED_RECORDS, Draft, Log, Record, follow

logger = logging.getLogger(__name__)

PARTITION = 0
OUTCOMES_MAX = FOLLOWED_RECORDS  # results of one read, in which the writer that waits finds its own record


class ScalingTopic:
    def __init__(self, log: Log, on_record: Callable[[int, ScalingEvent, Outcome], None] | None = None) -> None:
        """Call `on_record` after each record of the topic was applied."""
        self.state = PlannerState()
        self.changed = asyncio.Event()
        self._log = log
        self._on_record = on_record
        self._outcomes: dict[int, Outcome] = {}

    async def catch_up(self) -> None:
        """Apply all records of the topic. Raises LogError."""
        end = await self._log.end(SCALING.name, PARTITION)
        while self.state.end < end:
            self._apply_all(await self._log.read(SCALING.name, PARTITION, self.state.end, FOLLOWED_RECORDS))

    async def follow(self) -> None:
        """Apply new records until cancelled. Raises LogError."""
        await follow(self._log, SCALING, PARTITION, self.state.end, self._apply_all)

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
        while self.state.end <= offset:
            self.changed.clear()
            await self.changed.wait()
        return offset, self._outcomes[offset]

    def _apply_all(self, records: list[Record]) -> None:
        for record in records:
            self._apply(record.offset, record.value)

    def _apply(self, offset: int, value: bytes) -> None:
        try:
            event: ScalingEvent = decode(SCALING, value)
        except DecodeError as error:
            logger.warning("ignored record %d of %s: %s", offset, SCALING.name, error)
            self.state.skip(offset)
        else:
            outcome = self.state.apply(offset, event)
            self._outcomes[offset] = outcome
            if len(self._outcomes) > OUTCOMES_MAX:
                del self._outcomes[next(iter(self._outcomes))]
            if self._on_record is not None:
                self._on_record(offset, event, outcome)
        self.changed.set()
