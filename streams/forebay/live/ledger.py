"""Write the ledger: follow the journal of every control partition, and append its usage to the topic `usage`.

A writer has no state of its own. It continues after the last record of the chain, and reads the journal from the
position that this record names. Several writers may run: see `forebay.journal.ledger`.
"""

import logging
from typing import ClassVar

from forebay import runtime
from forebay.events.positions import JournalPosition
from forebay.events.topics import DECISIONS, USAGE
from forebay.events.usage import NO_HASH, UsageRecorded
from forebay.journal.folds import begin_after
from forebay.journal.ledger import Chain, seal
from forebay.journal.usage import HOUR_US, UsageReader
from forebay.live.partitions import PartitionFollower
from forebay.transport.base import Draft, Log

logger = logging.getLogger(__name__)

EVERY_S = 60.0
ENTRIES_MAX = 1_000  # of a record, which then has about 300 kB


class ChainWriter(PartitionFollower):
    """Appends to the chain of one control partition. Call `advance` again and again.

    Args:
        every_s: seconds between two records, unless an hour is over.

    Attributes:
        chain: the chain as far as it was read.
    """

    GAUGES: ClassVar = {"faults": "records of the ledger that do not continue the chain, at most 100"}

    def __init__(self, log: Log, partition: int, every_s: float = EVERY_S) -> None:
        self.partition = partition
        self.chain = Chain(log, partition)
        self._log = log
        self._every_us = int(every_s * 1e6)
        self._reader: UsageReader | None = None
        self._begin = JournalPosition(journal_offset=0, requests_offset=0, progress_offset=0)
        self._from = 0
        self._from_us = 0  # clock of the owner at `_from`, 0 before its first event
        self._appended_us = _now_us()

    @property
    def faults(self) -> int:
        return len(self.chain.faults)

    async def advance(self, *, is_last: bool) -> bool:
        """Read what is new, and append a record if one is due. Return whether one was appended. Raises LogError."""
        reader, self._reader = await self._follow_chain(), None  # after an error, a new reader begins
        end = await self._log.end(DECISIONS.name, self.partition)
        self.behind = end - self._from
        await reader.read(end, lambda: len(reader.totals) >= ENTRIES_MAX)
        totals, now_us = reader.totals, reader.now_us
        # A record without usage moves the position before retention removes it.
        is_due = now_us // HOUR_US > self._from_us // HOUR_US or len(totals) >= ENTRIES_MAX
        if is_due or (totals and (is_last or _now_us() - self._appended_us >= self._every_us)):
            await self._append(reader)
            return True
        self._reader = reader
        return False

    async def _follow_chain(self) -> UsageReader:
        """Read the chain, and return a reader of the journal after its last record."""
        known = len(self.chain.faults)
        is_longer = bool(await self.chain.read())
        for fault in self.chain.faults[known:]:
            logger.error("the ledger continues from an earlier record, because the %s", fault)
        if self._reader is None or is_longer:  # another writer has appended
            return await self._reader_after(self.chain.head)
        return self._reader

    async def _reader_after(self, head: UsageRecorded | None) -> UsageReader:
        begin, covered = (None, 0) if head is None else (head.begin, head.until_offset)
        begin = await begin_after(self._log, self.partition, begin, covered, "the records of the ledger")
        self._begin, self._from = begin, max(covered, begin.journal_offset)
        reader = UsageReader(self._log, self.partition, begin, self._from)
        await reader.read(self._from)
        self._from_us = reader.now_us
        return reader

    async def _append(self, reader: UsageReader) -> None:
        head, until = self.chain.head, reader.position
        record = UsageRecorded(
            number=0 if head is None else head.number + 1,
            begin=self._begin,
            from_offset=self._from,
            until_offset=until,
            entries=reader.take(),
            previous="" if head is None else head.hash,
            hash=NO_HASH,
        )
        value = seal(record)
        await self._log.append([Draft(USAGE.name, self.partition, value)])
        await self.chain.read()
        self._appended_us = _now_us()
        if self.chain.head is not None and seal(self.chain.head) == value:
            self._reader, self._begin, self._from = reader, reader.next_begin(), until
            self._from_us = reader.now_us


def _now_us() -> int:
    return runtime.monotonic_ns() // 1000
