"""Read one control partition from the records that Faust delivered, and from the log where Faust has delivered none.

Faust decides where its consumer begins, and skips or repeats records in a rebalance. So its records only save reads of
the log: a reader that asks for an offset gets the record at this offset, whatever Faust delivered before.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from forebay.events.topics import DECISIONS, INPUTS
from forebay.transport.base import Log, Record

TOPICS = (*INPUTS, DECISIONS)
RECORDS_MAX = 20_000  # per topic, like the size of the bytes; a reader that is further behind reads the log
BYTES_MAX = 16 << 20
QUIET_S = 1.0  # after this time without a new journal record from Faust, ask the log for the end of the journal


class DeliveredRun:
    """Newest delivered records of a topic that have consecutive offsets. `end` is the offset after the last one."""

    def __init__(self) -> None:
        self.end = 0
        self._records: deque[Record] = deque()
        self._bytes = 0

    def add(self, record: Record) -> None:
        if record.offset < self.end:
            return
        if record.offset > self.end:
            self._records.clear()
            self._bytes = 0
        self._records.append(record)
        self._bytes += len(record.value)
        self.end = record.offset + 1
        while len(self._records) > RECORDS_MAX or self._bytes > BYTES_MAX:
            self._drop_oldest()

    def read(self, offset: int, limit: int) -> list[Record]:
        """Return the records from `offset` on, none if the run lacks this offset. Drop all earlier records."""
        while self._records and self._records[0].offset < offset:
            self._drop_oldest()
        is_next = self._records and self._records[0].offset == offset
        return list(islice(self._records, limit)) if is_next else []

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._records.popleft().value)


class DeliveredLog:
    """Log of one control partition. Its one reader reads each topic in order; an earlier offset is read from `log`."""

    def __init__(self, log: Log, partition: int) -> None:
        self.append, self.append_soon, self.flush = log.append, log.append_soon, log.flush
        self.tail, self.begin, self.end = log.tail, log.begin, log.end
        self._log = log
        self._partition = partition
        self._runs = {topic.name: DeliveredRun() for topic in TOPICS}
        self._arrived = asyncio.Event()

    def deliver(self, records: Iterable[Record]) -> None:
        for record in records:
            self._runs[record.topic].add(record)
        self._arrived.set()

    def delivered_end(self, topic: str) -> int:
        """Return the offset after the newest delivered record; 0 before the first one."""
        return self._runs[topic].end

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        run = self._runs.get(topic) if partition == self._partition else None
        delivered = [] if run is None else run.read(offset, limit)
        return delivered or await self._log.read(topic, partition, offset, limit)

    async def journal_end(self, known: int) -> int:
        """Return an end of the journal after `known` once Faust delivers one, otherwise that of the log.

        Raises LogError.
        """
        journal = self._runs[DECISIONS.name]
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while journal.end <= known:
                    self._arrived.clear()
                    await self._arrived.wait()
                return journal.end
        return max(known, await self._log.end(DECISIONS.name, self._partition))
