"""The chain of usage records of a control partition: append to it, follow it, and verify it.

Theory of operation. A record continues the chain if it names the number and the hash of the last record. So of two
writers that append at the same time, the first one wins, and readers ignore the record of the other one, whose number
the chain has already. No claim is needed, because both derive their records from the same journal. Every other record
that does not continue the chain is a fault, because a writer never appends such a record: it was changed or forged, or
the log lost the record before it. A writer that finds a fault continues from the last good record.
"""

from collections.abc import Sequence
from hashlib import sha256

import msgspec
from msgspec.structs import astuple

from forebay.events.codec import DecodeError, encode
from forebay.events.topics import USAGE
from forebay.events.usage import HASH_DIGITS, NO_HASH, UsageEntry, UsageRecorded
from forebay.journal.folds import is_readable
from forebay.journal.usage import SUMS, UsageReader
from forebay.transport.base import Log, Record, event_of, records_of

END = b'"}'  # follows the hash
FAULTS_MAX = 100  # faults that a reader keeps
KEY = 4  # fields before the sums of an entry
NOTHING = (0,) * len(SUMS)


def seal(record: UsageRecorded) -> bytes:
    """Return the bytes of a record, with its hash."""
    content = encode(USAGE, msgspec.structs.replace(record, hash=NO_HASH))[: -HASH_DIGITS - len(END)]
    return content + sha256(content).hexdigest().encode() + END


class Chain:
    """The valid records of a chain, as far as they were read.

    Attributes:
        head: the last valid record; None before the first one.
        position: offset of the next record to read.
        faults: the first records that do not continue the chain, as text with their offset.
    """

    def __init__(self, log: Log, partition: int) -> None:
        self.head: UsageRecorded | None = None
        self.position = 0
        self.faults: list[str] = []
        self._log = log
        self._partition = partition

    async def read(self) -> list[UsageRecorded]:
        """Read all records that are new. Return the valid ones. Raises LogError."""
        end = await self._log.end(USAGE.name, self._partition)
        start = max(self.position, await self._log.begin(USAGE.name, self._partition))
        valid: list[UsageRecorded] = []
        async for stored in records_of(self._log, USAGE, self._partition, start, end):
            self.position = stored.offset + 1
            record, fault = self._checked(stored)
            if record is not None:
                self.head = record
                valid.append(record)
            elif fault and len(self.faults) < FAULTS_MAX:
                self.faults.append(f"record at offset {stored.offset} of {USAGE.name}/{self._partition} {fault}")
        return valid

    def _checked(self, stored: Record) -> tuple[UsageRecorded | None, str]:
        """Return the next valid record, or else its fault. A record that another writer appended first has none."""
        try:
            record: UsageRecorded = event_of(USAGE, stored)
        except DecodeError as error:
            return None, f"does not decode ({error})"
        content, end = stored.value[: -HASH_DIGITS - len(END)], stored.value[-len(END) :]
        if sha256(content).hexdigest() != record.hash or end != END:
            return None, f"was changed: its hash is {record.hash}, its content has {sha256(content).hexdigest()}"
        head = self.head
        number, previous, covered = (-1, "", 0) if head is None else (head.number, head.hash, head.until_offset)
        if record.number <= number:
            return None, ""
        if (record.number, record.previous) != (number + 1, previous):
            found = f"it has number {record.number} after hash {record.previous or 'none'}"
            expected = f"expected number {number + 1} after hash {previous or 'none'}"
            return None, f"does not continue the chain: {found}, {expected}"
        if record.from_offset < covered:
            text = f"covers the journal from offset {record.from_offset}, but an earlier record does up to {covered}"
            return None, text
        return record, ""


class LedgerReport(msgspec.Struct, kw_only=True):
    """Result of a verification of one chain. A later verification may use it as an anchor.

    Attributes:
        records: valid records.
        head: hash of the last valid record; empty if there is none.
        derived: the part of `records` that was derived again from the journal.
        until_offset: offset after the last journal record that the chain covers.
        differences: what is wrong, the first difference first.
    """

    partition: int
    records: int
    head: str
    derived: int = 0
    until_offset: int = 0
    differences: list[str] = []


async def verify_chain(log: Log, partition: int, anchor: LedgerReport | None = None) -> LedgerReport:
    """Check a chain, derive again every record for which the log has the journal, and compare. Raises LogError."""
    chain = Chain(log, partition)
    records = await chain.read()
    report = LedgerReport(partition=partition, records=len(records), head=records[-1].hash if records else "")
    report.differences += chain.faults
    if anchor is not None and anchor.records:
        found = records[anchor.records - 1].hash if anchor.records <= len(records) else "no such record"
        if found != anchor.head:
            text = f"the anchor has {anchor.records} records, the last one with the hash {anchor.head}"
            report.differences.append(f"{text}, but the chain of {USAGE.name}/{partition} has {found}")
    reader: UsageReader | None = None
    for record in records:
        name = f"record {record.number} of {USAGE.name}/{partition}"
        if record.from_offset > report.until_offset and record.number:
            gap = f"{report.until_offset} to {record.from_offset - 1}"
            report.differences.append(f"{name}: the journal offsets {gap} before it are part of no record")
            reader = None
        report.until_offset = record.until_offset
        if reader is None:
            if not await is_readable(log, partition, record.begin):
                continue
            reader = UsageReader(log, partition, record.begin, record.from_offset)
        await reader.read(record.until_offset)
        report.derived += 1
        derived = reader.take()
        if record.entries != derived:
            report.differences.append(f"{name}: {_difference(record.entries, derived)}")
    return report


def _difference(recorded: Sequence[UsageEntry], derived: Sequence[UsageEntry]) -> str:
    """Return the first difference between the entries of a record and those that the journal leads to."""
    theirs, ours = ({entry[:KEY]: entry[KEY:] for entry in map(astuple, entries)} for entries in (recorded, derived))
    for key in sorted(ours.keys() | theirs.keys()):
        pairs = zip(SUMS, theirs.get(key, NOTHING), ours.get(key, NOTHING), strict=True)
        if found := [(f"{name} {has}", f"{name} {wanted}") for name, has, wanted in pairs if has != wanted]:
            has, wanted = (", ".join(texts) for texts in zip(*found, strict=True))
            name = "tenant {1!r}, key {2!r}, model {3!r}, hour {0}".format(*key)
            return f"{name}: the record has {has}, the journal leads to {wanted}"
    return "the record has an empty or a repeated entry"
