"""Write the ledger: follow the journal of every control partition, and append its usage to the topic `usage`.

A writer has no state of its own. It continues after the last record of the chain, and reads the journal from the
position that this record names. Several writers may run: see `forebay.journal.ledger`.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.events.topics import DECISIONS, USAGE
from forebay.events.usage import NO_HASH, LedgerPosition, UsageRecorded
from forebay.journal.groups import partitions_of
from forebay.journal.ledger import Chain, seal
from forebay.journal.usage import HOUR_US, UsageReader, begin_of, is_readable
from forebay.transport.base import Draft, Log, LogError
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

EVERY_S = 60.0
POLL_S = 1.0
RETRY_S = 10.0  # after an error of the log
EMPTY_US = 24 * HOUR_US  # a record without usage moves the position before retention removes it
ENTRIES_MAX = 1_000  # of a record, which then has about 300 kB


class ChainWriter:
    """Appends to the chain of one control partition. Call `advance` again and again.

    Attributes:
        chain: the chain as far as it was read.
        appended: number of records that this writer has appended to the chain.
        behind: number of journal records that no record of the chain covers.
        problem: why the journal cannot be read at present; empty if it can.
    """

    def __init__(self, log: Log, partition: int, writer: str) -> None:
        self.partition = partition
        self.chain = Chain(log, partition)
        self.appended = 0
        self.behind = 0
        self.problem = ""
        self._log = log
        self._writer = writer
        self._reader: UsageReader | None = None
        self._begin = LedgerPosition(journal_offset=0, requests_offset=0, progress_offset=0)
        self._from = 0
        self._from_us = 0  # clock of the owner at `_from`
        self._appended_us = _now_us()

    async def advance(self, every_us: int) -> bool:
        """Read what is new, and append a record if one is due: after `every_us`, or as soon as an hour is over.

        Return whether a record was appended. Raises LogError.
        """
        reader = await self._follow_chain()
        end = await self._log.end(DECISIONS.name, self.partition)
        await reader.read(end, ENTRIES_MAX)
        self.behind = end - self._from
        fold, now_us = reader.fold, _now_us()
        self._from_us = self._from_us or fold.now_us
        is_hour_over = any(hour_us + HOUR_US <= fold.now_us for hour_us, *_ in fold.totals)
        is_due = is_hour_over or now_us - self._appended_us >= every_us or len(fold.totals) >= ENTRIES_MAX
        if is_due if fold.totals else fold.now_us - self._from_us >= EMPTY_US:
            await self._append(reader)
            return True
        return False

    async def _follow_chain(self) -> UsageReader:
        """Read the chain, and return a reader of the journal after its last record."""
        known = len(self.chain.faults)
        is_longer = bool(await self.chain.read())
        for fault in self.chain.faults[known:]:
            logger.error("the ledger continues from an earlier record, because the %s", fault)
        if self._reader is None or is_longer:  # another writer has appended
            self._reader = None
            self._reader = await self._reader_after(self.chain.head)
        return self._reader

    async def _reader_after(self, head: UsageRecorded | None) -> UsageReader:
        covered = 0 if head is None else head.until_offset
        begin = None if head is None else head.begin
        if begin is None or not await is_readable(self._log, self.partition, begin):
            begin = await begin_of(self._log, self.partition)
        if begin.journal_offset > covered:
            text = "the ledger lacks the journal offsets %d to %d of control partition %d, which retention removed"
            logger.error(text, covered, begin.journal_offset - 1, self.partition)
        self._begin, self._from = begin, max(covered, begin.journal_offset)
        reader = UsageReader(self._log, self.partition, begin, self._from)
        await reader.read(self._from)
        self._from_us = reader.fold.now_us
        return reader

    async def _append(self, reader: UsageReader) -> None:
        head, until = self.chain.head, reader.position
        record = UsageRecorded(
            number=0 if head is None else head.number + 1,
            begin=self._begin,
            from_offset=self._from,
            until_offset=until,
            entries=reader.fold.take(),
            writer=self._writer,
            at_us=runtime.wall_us(),
            previous="" if head is None else head.hash,
            hash=NO_HASH,
        )
        self._reader = None  # until the chain has the record
        value = seal(record)
        await self._log.append([Draft(USAGE.name, self.partition, value)])
        await self.chain.read()
        self._appended_us = _now_us()
        if self.chain.head is not None and seal(self.chain.head) == value:
            self._reader, self._begin, self._from = reader, reader.next_begin(), until
            self._from_us = reader.fold.now_us
            self.appended += 1


class Ledger:
    """Writes the chains of all control partitions."""

    def __init__(self, log: Log, writer: str, every_s: float = EVERY_S) -> None:
        self.writers: dict[int, ChainWriter] = {}
        self._log = log
        self._writer = writer
        self._every_us = int(every_s * 1e6)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Write until `stop`, and then the usage that no record has yet. Raises LogError."""
        while not self._stopping.is_set():
            for partition in await until_available(lambda: partitions_of(self._log)):
                self.writers.setdefault(partition, ChainWriter(self._log, partition, self._writer))
            await self._advance(self._every_us)
            is_stopped = any(writer.problem for writer in self.writers.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RETRY_S if is_stopped else POLL_S)
        await self._advance(0)

    def stop(self) -> None:
        """Let `run` end soon."""
        self._stopping.set()

    async def _advance(self, every_us: int) -> None:
        """Append the records that are due. A journal that cannot be read does not stop the chains of the others."""
        for writer in self.writers.values():
            try:
                while await writer.advance(every_us):
                    pass
            except LogError as error:
                if str(error) != writer.problem:
                    text = "the ledger of control partition %d stopped: %s"
                    logger.error(text, writer.partition, error)  # noqa: TRY400 - the trace says nothing about the log
                writer.problem = str(error)
            else:
                writer.problem = ""


class LedgerMetrics(Collector):
    """Metrics of a ledger, by control partition."""

    def __init__(self, ledger: Ledger, registry: CollectorRegistry) -> None:
        self._ledger = ledger
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels = ["partition"]
        records = CounterMetricFamily("forebay_ledger_records", "records that this process has appended", labels=labels)
        behind = GaugeMetricFamily(
            "forebay_ledger_behind_records", "journal records that no ledger record covers", labels=labels
        )
        faults = GaugeMetricFamily(
            "forebay_ledger_faults", "records of the ledger that do not continue the chain, at most 100", labels=labels
        )
        stopped = GaugeMetricFamily(
            "forebay_ledger_stopped", "1 if the journal cannot be read at present", labels=labels
        )
        for partition, writer in self._ledger.writers.items():
            label = [str(partition)]
            records.add_metric(label, writer.appended)
            behind.add_metric(label, writer.behind)
            faults.add_metric(label, len(writer.chain.faults))
            stopped.add_metric(label, bool(writer.problem))
        yield from (records, behind, faults, stopped)


def _now_us() -> int:
    return runtime.monotonic_ns() // 1000
