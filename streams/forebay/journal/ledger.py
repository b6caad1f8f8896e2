"""The chain of usage records of a control partition: append to it, follow it, and verify it.

Theory of operation. A record continues the chain if it names the number and the hash of the last record. So of two
writers that append at the same time, the first one wins, and readers ignore the record of the other one, whose number
the chain has already. No claim is needed, because both derive their records from the same journal. Every other record
that does not continue the chain is a fault, because a writer never appends such a record: it was changed or forged, or
the log lost the record before it. A writer that finds a fault continues from the last good record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from forebay.events.codec import DecodeError, encode
from forebay.events.topics import USAGE
from forebay.events.usage import HASH_DIGITS, NO_HASH, UsageEntry, UsageRecorded
from forebay.journal.usage import UsageReader, is_readable
from forebay.transport.base import Log, Record, event_of, records_of

END = b'"}'  # follows the hash
FAULTS_MAX = 100  # faults that a reader keeps; it counts the others


def seal(record: UsageRecorded) -> bytes:
    """Return the bytes of a record, with its hash."""
    content = encode(USAGE, msgspec.structs.replace(record, hash=NO_HASH))[: -HASH_DIGITS - len(END)]
    return content + sha256(content).hexdigest().encode() + END


class Chain:
    """The valid records of a chain, as far as they were read.

    Attributes:
        head: the last valid record; None before the first one.
        position: offset of the next record to read.
        repeated: number of records that another writer had already appended.
        faults: the first records that do not continue the chain, as text with their offset.
    """

    def __init__(self, log: Log, partition: int) -> None:
        self.head: UsageRecorded | None = None
        self.position = 0
        self.repeated = 0
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
            fault = self._apply(stored)
            if fault is None:
                assert self.head is not None, "a valid record becomes the head"
                valid.append(self.head)
            elif fault and len(self.faults) < FAULTS_MAX:
                self.faults.append(f"record at offset {stored.offset} of {USAGE.name}/{self._partition} {fault}")
        return valid

    def _apply(self, stored: Record) -> str | None:
        """Apply a record. Return None if it is valid, a fault if there is one, and no text if it repeats a number."""
        try:
            record: UsageRecorded = event_of(USAGE, stored)
        except DecodeError as error:
            return f"does not decode ({error})"
        content, end = stored.value[: -HASH_DIGITS - len(END)], stored.value[-len(END) :]
        if sha256(content).hexdigest() != record.hash or end != END:
            return f"was changed: its hash is {record.hash}, its content has {sha256(content).hexdigest()}"
        head = self.head
        number, previous, covered = (-1, "", 0) if head is None else (head.number, head.hash, head.until_offset)
        if record.number <= number:
            self.repeated += 1
            return ""
        if (record.number, record.previous) != (number + 1, previous):
            return (
                f"does not continue the chain: it has number {record.number} after hash {record.previous or 'none'},"
                f" expected number {number + 1} after hash {previous or 'none'}"
            )
        if record.from_offset < covered:
            return f"covers the journal from offset {record.from_offset}, but an earlier record does up to {covered}"
        self.head = record
        return None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Last record of a chain, as kept elsewhere."""

    partition: int
    number: int
    hash: str


@dataclass(slots=True)
class LedgerReport:
    """Result of a verification of one chain.

    Attributes:
        records: valid records.
        derived: the part of `records` that was derived again from the journal.
        repeated: records that another writer had already appended.
        until_offset: offset after the last journal record that the chain covers.
        differences: what is wrong, the first difference first.
        head: last record; None if there is none.
    """

    partition: int
    records: int = 0
    derived: int = 0
    repeated: int = 0
    until_offset: int = 0
    differences: list[str] = field(default_factory=list)
    head: Head | None = None


async def verify_chain(log: Log, partition: int, anchor: Head | None = None) -> LedgerReport:
    """Check a chain, derive again every record for which the log has the journal, and compare. Raises LogError."""
    chain, report = Chain(log, partition), LedgerReport(partition)
    records = await chain.read()
    report.records, report.repeated = len(records), chain.repeated
    report.differences += chain.faults
    if anchor is not None:
        report.differences += _anchor_faults(records, anchor)
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
        if (difference := _difference(record.entries, reader.fold.take())) is not None:
            report.differences.append(f"{name}: {difference}")
    if records:
        report.head = Head(partition=partition, number=records[-1].number, hash=records[-1].hash)
    return report


def _anchor_faults(records: list[UsageRecorded], anchor: Head) -> list[str]:
    if anchor.number >= len(records):
        return [f"the anchor names record {anchor.number}, but the chain has {len(records)} records"]
    found = records[anchor.number].hash
    if found == anchor.hash:
        return []
    return [f"the anchor names record {anchor.number} with the hash {anchor.hash}, but the chain has {found}"]


def _difference(recorded: tuple[UsageEntry, ...], derived: tuple[UsageEntry, ...]) -> str | None:
    """Return the first difference between the entries of a record and those that the journal leads to."""
    if recorded == derived:
        return None
    ours, theirs = ({_key(one): one for one in entries} for entries in (derived, recorded))
    for key in sorted(ours.keys() | theirs.keys()):
        name = "tenant {1!r}, key {2!r}, model {3!r}, hour {0}".format(*key)
        if key not in theirs:
            return f"{name}: the record has no entry, the journal leads to {_sums(ours[key])}"
        if key not in ours:
            return f"{name}: the record has {_sums(theirs[key])}, the journal leads to no entry"
        for column in UsageEntry.__struct_fields__:
            if (has := getattr(theirs[key], column)) != (wanted := getattr(ours[key], column)):
                return f"{name}: the record has {column} {has}, the journal leads to {wanted}"
    return "the record has an entry twice"


def _key(entry: UsageEntry) -> tuple[int, str, str, str]:
    return entry.hour_us, entry.tenant, entry.key_id, entry.model


def _sums(entry: UsageEntry) -> str:
    sums: Mapping[str, int] = {"requests": entry.requests, "output_tokens": entry.output_tokens}
    return ", ".join(f"{name} {value}" for name, value in sums.items())
